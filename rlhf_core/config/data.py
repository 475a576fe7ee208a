"""Where data come from, what a row must satisfy to enter training, and how rows are split."""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlhf_core.config.base import SCRATCH
from rlhf_core.config.formats import FormatName
from rlhf_core.config.model import StageConfig, Strict
from rlhf_core.config.problems import SECRET, nearest
from rlhf_core.errors import DataError
from rlhf_core.plugins import READERS, PluginError, load_plugin, plugins_of
from rlhf_core.storage.data_files import is_url, require_no_credentials

Severity = Literal["refuse", "warn", "fail"]

# Rules of a row, in the order in which reasons are listed.
ROW_RULES = (
    "complete",
    "prompt_not_empty",
    "roles",
    "turns",
    "prompt_chars",
    "chosen_not_empty",
    "chosen_chars",
    "rejected_not_empty",
    "rejected_chars",
    "reply_not_empty",
    "reply_chars",
    "text_not_empty",
    "replies_differ",
    "not_contradicted",
    "prompt_not_repeated",
    "margin_finite",
    "not_duplicate",
    "no_control_characters",
    "no_mojibake",
    "no_secrets",
    "no_template_tokens",
)
# Rules about the whole set.
SET_RULES = (
    "no_prefix_leakage",
    "no_shared_first_turn",
    "no_near_duplicates",
    "no_similar_held_out_prompts",
    "no_contamination",
    "expected_language",
)
RULES = ROW_RULES + SET_RULES
# No stage can train on a row that breaks one of these, so a warning is not enough.
NEEDED_FOR_TRAINING = frozenset({"complete", "prompt_not_empty", "roles", "margin_finite"})


class WorldConfig(Strict):
    """Sizes of the synthetic world, and parameters of its simulated annotators.

    Attributes:
        demonstrations: Demonstrations, of mixed quality.
        preferences: Preference pairs.
        pretrain: Plain texts.
        contrast_share: Share of pairs that differ in one fact, needlessly refuse, or answer another
            prompt.
        label_sharpness: How surely annotators prefer the better reply (Bradley–Terry).
        length_bias: What each word adds to a reply's worth in their eyes, whatever it says.
    """

    demonstrations: PositiveInt = 8000
    preferences: PositiveInt = 24000
    pretrain: PositiveInt = 4000
    contrast_share: float = Field(default=0.35, ge=0, le=1)
    label_sharpness: float = Field(default=2.5, gt=0)
    length_bias: float = 0.02


def _of_plugin(name: Any, is_known: ValidatorFunctionWrapHandler) -> Any:
    """Accept the name of an installed plugin's reader beside the formats that are known."""
    if name in get_args(FormatName) or name not in plugins_of(READERS):
        return is_known(name)
    try:
        load_plugin(READERS, name)
    except PluginError as error:
        raise ValueError(str(error)) from error
    return name


ReaderName = Annotated[FormatName, WrapValidator(_of_plugin), PlainSerializer(str)]
Dimension = Literal["helpful", "safe", "agreed"]
PairChoice = Literal["all", "adjacent", "best_worst"]
DerivedKind = Literal["demonstrations", "prompts", "pretrain"]
# By kind of a source, what its rows may be derived into.
DERIVABLE: dict[str, tuple[str, ...]] = {
    "preferences": ("demonstrations", "prompts", "pretrain"),
    "demonstrations": ("prompts", "pretrain"),
    "prompts": (),
    "pretrain": (),
}
# What ``columns`` may name: the fields of the general formats.
FIELDS = (
    *("prompt", "chosen", "rejected", "reply", "messages", "text", "responses", "scores", "ranks"),
    *("system", "margin", "label", "category", "source"),
)


class ReadOptions(Strict):
    """How the rows of a source are read, where that is not recognised.

    Attributes:
        format: The format of the rows, or the name of a plugin's reader (docs/plugins.md).
        columns: By field, the column that holds it; a dot goes into an object. All other columns
            are ignored.
        template: The text of the prompt, with columns in braces: ``"{title}\\n\\n{question}"``.
        dimension: Which of several preferences of a pair is read (PKU-SafeRLHF).
        pairs: Which pairs a ranking gives: all, each reply with the next worse, or the best with
            the worst.
        system_prompts: Whether a reply's own system prompt (UltraFeedback) is a turn of its prompt;
            replies to different system prompts are not paired then.
        category: The category of all rows; null: each row's own.
    """

    format: ReaderName | None = None
    columns: dict[str, str] = {}
    template: str | None = None
    dimension: Dimension | None = None
    pairs: PairChoice = "all"
    system_prompts: bool = False
    category: str | None = Field(default=None, min_length=1)

    @field_validator("columns")
    @classmethod
    def _known_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = [field for field in columns if field not in FIELDS]
        if unknown:
            raise ValueError(f"there is no field '{unknown[0]}'; {nearest(unknown[0], FIELDS)}")
        return columns

    @field_validator("template")
    @classmethod
    def _only_columns(cls, template: str | None) -> str | None:
        if template is not None:
            template_columns(template)
        return template

    @model_validator(mode="after")
    def _told_once(self) -> ReadOptions:
        if self.category is not None and "category" in self.columns:
            raise ValueError("category is that of all rows; take category out of columns")
        if self.template is not None and self.columns.keys() & {"prompt", "messages", "text"}:
            raise ValueError(
                "template writes the prompt; take prompt, messages and text out of columns"
            )
        return self


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names.

    Raises:
        ValueError: It names none, or has braces that are not doubled or more than a name in them.
    """
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"{error}; write a column as {{name}} and a brace that is text twice"
        ) from error
    if any(not name or form or conversion for _, name, form, conversion in parts):
        raise ValueError(
            "braces hold the name of a column and nothing else; write a brace that is text twice"
        )
    if not parts:
        raise ValueError("the template names no column; write it as {name}")
    return [str(name) for _, name, _, _ in parts]


class SourceOptions(ReadOptions):
    """How a source is read, and how many of its rows are taken.

    Attributes:
        weight: The share of ``collect.limit`` that each file of the source gives, relative to other
            files.
        cap: At most so many rows of each file of the source are taken.
        licence: The licence of the source, for manifest and data card; by default
            ``collect.licence``.
        derive: Which of the derived kinds the source gives; null: all of them.
    """

    weight: float = Field(default=1.0, ge=1e-9, le=1e9)
    cap: PositiveInt | None = None
    licence: str | None = None
    derive: tuple[DerivedKind, ...] | None = Field(default=None, strict=False)


class DataSource(SourceOptions):
    """A path, glob, URL or hub id, and how it is read.

    Attributes:
        path: A path, glob, URL (``s3://…``) or hub id
            (``hub:owner/name[/config][@revision][:split]``).
    """

    path: str

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, source: Any) -> Any:
        return {"path": source} if isinstance(source, str) else source

    @field_validator("path")
    @classmethod
    def _without_credentials(cls, path: str) -> str:
        if is_url(path):
            try:
                require_no_credentials(path)
            except DataError as error:
                raise PydanticCustomError(SECRET, "{reason}", {"reason": str(error)}) from None
        return path

    def options(self) -> SourceOptions:
        """Return how the source is read, without its path."""
        return SourceOptions(**{name: getattr(self, name) for name in SourceOptions.model_fields})


class FileSources(Strict):
    """Paths, globs, URLs or hub ids, each alone or with options, by kind.

    Empty kinds are derived where possible: demonstrations from preferred replies, prompts from
    both, pretraining text from demonstrations.

    Attributes:
        preferences: Preference pairs.
        demonstrations: Demonstrations; derived from preferred replies where there are none.
        prompts: Prompts; derived from preferences and demonstrations where there are none.
        pretrain: Plain texts; derived from demonstrations where there are none.
    """

    preferences: tuple[DataSource, ...] = Field(default=(), strict=False)
    demonstrations: tuple[DataSource, ...] = Field(default=(), strict=False)
    prompts: tuple[DataSource, ...] = Field(default=(), strict=False)
    pretrain: tuple[DataSource, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _derivable(self) -> FileSources:
        for kind, possible in DERIVABLE.items():
            for source in self.of(kind):
                for name in source.derive or ():
                    if name not in possible:
                        raise ValueError(
                            f"derive of {source.path} names {name}, which is not derived from {kind}"
                        )
                if kind == "preferences" and source.derive and set(source.derive) == {"pretrain"}:
                    raise ValueError(
                        f"derive of {source.path} names pretrain alone, which is derived from demonstrations; name "
                        "these too"
                    )
        return self

    def of(self, kind: str) -> tuple[DataSource, ...]:
        """Return the sources of a kind."""
        sources: tuple[DataSource, ...] = getattr(self, kind)
        return sources

    def paths(self) -> list[str]:
        """Return the paths, globs, URLs and hub ids of all kinds."""
        paths = []
        for kind in type(self).model_fields:
            paths += [source.path for source in self.of(kind)]
        return paths


class CollectConfig(StageConfig):
    """Where the raw data come from.

    Attributes:
        source: The synthetic `world`, or `files`.
        pairs: Whether there are preference pairs. Without them reward functions alone reward and
            judge replies, and the workspace has neither reward model nor referee nor judge
            (docs/rewards.md).
        world: Sizes and annotators of the synthetic world.
        files: By kind the files, globs, URLs or hub ids.
        also_derive: Kinds that are derived although files of them are given; of equal rows the
            file's stays.
        annotations: Path or glob of preference pairs that people made of the workspace's own
            replies (`rlhf annotate import`). They join the preferences of either source; no file
            need match.
        limit: At most so many rows of each kind.
        licence: Licence of the data, for manifest and data card.
    """

    source: Literal["world", "files"] = "world"
    pairs: bool = True
    world: WorldConfig = WorldConfig()
    files: FileSources = FileSources()
    also_derive: tuple[DerivedKind, ...] = Field(default=(), strict=False)
    annotations: str | None = "data/annotations/*.jsonl"
    limit: PositiveInt | None = None
    licence: str | None = None

    @field_validator("annotations")
    @classmethod
    def _on_this_machine(cls, annotations: str | None) -> str | None:
        if annotations is not None and (annotations.startswith("hub:") or is_url(annotations)):
            raise ValueError(
                "give a path or glob; rows at URLs and on the hub go into collect.files.preferences"
            )
        return annotations

    @model_validator(mode="after")
    def _consistent(self) -> CollectConfig:
        if self.also_derive and self.source == "world":
            raise ValueError(
                "also_derive adds to the rows of files, but collect.source is world; take it out"
            )
        if not self.pairs:
            self._prompts_stand_alone()
        if self.limit is None:
            self._take_no_shares()
        return self

    def _take_no_shares(self) -> None:
        for kind in FileSources.model_fields:
            for source in self.files.of(kind):
                if source.weight != 1:
                    raise ValueError(
                        f"the weight of {source.path} is a share of collect.limit, which is not "
                        "set; set it, or use cap"
                    )

    def _prompts_stand_alone(self) -> None:
        if self.source == "world":
            raise ValueError(
                "pairs is false, but the synthetic world makes pairs: set source to files, or pairs to true"
            )
        if self.files.preferences:
            raise ValueError(
                f"pairs is false, but files.preferences names {self.files.preferences[0].path}: take it out, or set "
                "pairs to true, which trains reward models on it"
            )


AUTOMATIC_ROWS = 10_000


class SplitConfig(Strict):
    """Shares of prompt groups; a group never spans two splits, in any dataset.

    Attributes:
        validation: Share of groups that validate.
        test: Share of groups that test.
        judge: Share of training and validation groups whose pairs only the judge sees.
        referee: Share of the others whose pairs only the referee sees; what remains is the reward
            model's.
        fewest_balanced: Where `test` leaves fewer pairs than this when lengths are balanced, in
            characters or in words, it grows until it does not, or stays as it is where `most_test`
            is too little for that.
        most_test: The largest share that `test` grows to.
    """

    validation: float = Field(default=0.1, gt=0, lt=0.5)
    test: float = Field(default=0.2, gt=0, lt=0.5)
    judge: float = Field(default=0.2, gt=0, lt=1)
    referee: float = Field(default=0.5, gt=0, lt=1)
    fewest_balanced: NonNegativeInt = 0
    most_test: float = Field(default=0.4, gt=0, lt=0.5)


class NearDuplicatesConfig(Strict):
    """The search for texts that are nearly the same, by MinHash over runs of words.

    Attributes:
        search: Whether rows are compared at all, which takes longer than all other checks together;
            ``auto``: where no kind has more than 10,000 clean rows, or where a rule about it
            refuses rows or fails the set.
        similarity: Jaccard similarity of their runs of words at which two texts count as nearly the
            same.
        shingle_words: Words of a run.
        permutations: Length of a signature; the standard error of the estimated similarity is at
            most ``0.5 / sqrt`` of it.
        max_rows: At most so many rows of a kind, and distinct prompts, are compared, the first
            ones: the index takes about 4 kB for each.
    """

    search: bool | Literal["auto"] = "auto"
    similarity: float = Field(default=0.8, gt=0.1, lt=1)
    shingle_words: PositiveInt = 3
    permutations: int = Field(default=128, ge=16, le=1024)
    max_rows: PositiveInt = 100_000

    def searches(self, rows: int, decides: bool) -> bool:
        """Return whether rows are compared.

        Args:
            rows: Clean rows of the kind that has most.
            decides: Whether what is found does more than warn.
        """
        if isinstance(self.search, bool):
            return self.search
        return decides or rows <= AUTOMATIC_ROWS


class ValidateConfig(StageConfig):
    """What a row must satisfy, and how rows are split.

    Attributes:
        split: Shares of the splits.
        min_rows: Fewest clean rows of a kind; of pretraining text one will do.
        max_prompt_chars: Longest prompt, in characters.
        max_reply_chars: Longest reply, in characters.
        max_turns: Most turns of a prompt.
        max_quarantined: Share of faulty rows of a kind above which the stage stops.
        secrets: Whether rows are searched for access keys and private keys.
        rules: By rule of the project's suites, what becomes of rows that break it, in place of what
            the suite says: ``refuse`` puts them into the quarantine, ``warn`` keeps and counts
            them, ``fail`` refuses them and stops the stage at the data gate.
        near_duplicates: The search for texts that are nearly the same.
        evaluation_files: Prompts of evaluations that no row should overlap with, given and read as
            ``collect.files`` are.
        languages: The languages (``en``, ``zh``) that rows are expected in; none: languages are not
            identified.
        tokenizer: The folder, GGUF file or hub id whose tokenizer the data card counts tokens with,
            usually that of ``base.source``; null: lengths are in characters only.
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
                raise ValueError(
                    f"{rule} cannot be warn: nothing can be trained on such rows; choose refuse or fail"
                )
        return rules

    def with_absolute_paths(self, base: Path) -> ValidateConfig:
        """Return these settings with the relative paths, which start at ``base``, made absolute.

        URLs and hub ids stay.
        """
        files = []
        for source in self.evaluation_files:
            if not source.path.startswith("hub:") and not is_url(source.path):
                path = base / os.path.expanduser(source.path)
                source = source.model_copy(update={"path": str(path)})
            files.append(source)
        tokenizer = self.tokenizer
        if tokenizer is not None:
            model = base / os.path.expanduser(tokenizer)
            tokenizer = str(model) if model.exists() else tokenizer
        return self.model_copy(update={"evaluation_files": tuple(files), "tokenizer": tokenizer})
