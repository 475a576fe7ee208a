"""What a row must satisfy to enter training, and how rows are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from rlhf_core.config.model import StageConfig, Strict
from rlhf_core.config.problems import nearest
from rlhf_core.config.stages.base import SCRATCH
from rlhf_core.config.stages.collect import DataSource, with_options
from rlhf_core.config.validation_rules import NEEDED_FOR_TRAINING, RULES, Severity
from rlhf_core.storage.file_patterns import is_url

AUTOMATIC_ROWS = 10_000


class SplitConfig(Strict):
    """Shares of prompt groups; a group never spans two splits, in any dataset.

    ``judge`` is the share of training and validation groups whose pairs only the judge sees, ``referee`` the share of
    the others whose pairs only the referee sees; what remains is the reward model's.
    """

    validation: float = Field(default=0.1, gt=0, lt=0.5)
    test: float = Field(default=0.2, gt=0, lt=0.5)
    judge: float = Field(default=0.2, gt=0, lt=1)
    referee: float = Field(default=0.5, gt=0, lt=1)


class NearDuplicatesConfig(Strict):
    """The search for texts that are nearly the same, by MinHash over runs of ``shingle_words`` words.

    Attributes:
        search: Whether rows are compared at all, which takes longer than all other checks together; ``auto``: where no
            kind has more than 10,000 clean rows, or where a rule about it refuses rows or fails the set.
        similarity: From which Jaccard similarity of their runs of words on two texts count as nearly the same.
        permutations: Length of a signature; the estimate of the similarity is off by up to ``0.5 / sqrt`` of it.
        max_rows: At most so many rows of a kind are compared, the first ones: the index takes about 4 kB for each.
    """

    search: bool | Literal["auto"] = "auto"
    similarity: float = Field(default=0.8, gt=0.1, lt=1)
    shingle_words: PositiveInt = 3
    permutations: int = Field(default=128, ge=16, le=1024)
    max_rows: PositiveInt = 100_000

    def searches(self, rows: int, decides: bool) -> bool:
        """Return whether rows are compared, given the number of clean rows of the kind that has most.

        ``decides`` says that what is found does more than warn.
        """
        return self.search if isinstance(self.search, bool) else decides or rows <= AUTOMATIC_ROWS


class ValidateConfig(StageConfig):
    """Limits are in characters. ``max_quarantined`` is the share of refused rows above which the stage stops.

    Attributes:
        rules: By rule of the project's suites, what becomes of rows that break it, in place of what the suite says:
            ``refuse`` puts them into the quarantine, ``warn`` keeps and counts them, ``fail`` refuses them and stops
            the stage at the data gate.
        evaluation_files: Files with prompts of evaluations that no row of training may overlap with, given and read as
            those of ``collect.files``.
        languages: The languages (``en``, ``zh``) that rows are expected in; none: they are not looked at.
        tokenizer: The folder, GGUF file or hub id whose tokenizer the data card counts tokens with, that of
            ``base.source`` as a rule; None: lengths are in characters only.
    """

    split: SplitConfig = SplitConfig()
    min_rows: PositiveInt = 50
    max_prompt_chars: PositiveInt = 16_000
    max_reply_chars: PositiveInt = 8000
    max_turns: PositiveInt = 32
    max_quarantined: float = Field(default=0.2, ge=0, le=1)
    secrets: bool = True
    rules: dict[str, Severity] = {}
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    evaluation_files: tuple[DataSource, ...] = Field(default=(), strict=False)
    languages: tuple[str, ...] = Field(default=(), strict=False)
    tokenizer: str | None = None

    @field_validator("evaluation_files", mode="before")
    @classmethod
    def _with_options(cls, sources: Any) -> Any:
        return with_options(sources)

    @field_validator("tokenizer")
    @classmethod
    def _exists_before_training(cls, tokenizer: str | None) -> str | None:
        if tokenizer == SCRATCH:
            raise ValueError(
                "a tokenizer that is made from nothing is trained on the clean data, so it cannot count them; leave it "
                "out, or name one that exists"
            )
        return tokenizer

    @field_validator("rules")
    @classmethod
    def _known_rules(cls, rules: dict[str, Severity]) -> dict[str, Severity]:
        for rule, severity in rules.items():
            if rule not in RULES:
                raise ValueError(f"there is no rule '{rule}'; {nearest(rule, RULES)}")
            if severity == "warn" and rule in NEEDED_FOR_TRAINING:
                raise ValueError(f"{rule} cannot be warn: nothing can be trained on such rows; choose refuse or fail")
        return rules

    def with_absolute_paths(self, base: Path) -> ValidateConfig:
        """Return these settings with the relative paths of files and of the tokenizer, which start at ``base``, made
        absolute; URLs and hub ids stay."""
        evaluation = [
            source
            if source.path.startswith("hub:") or is_url(source.path)
            else source.model_copy(update={"path": str(base / Path(source.path).expanduser())})
            for source in self.evaluation_files
        ]
        model = None if self.tokenizer is None else base / Path(self.tokenizer).expanduser()
        tokenizer = str(model) if model is not None and model.exists() else self.tokenizer
        return self.model_copy(update={"evaluation_files": tuple(evaluation), "tokenizer": tokenizer})
