"""Multiple-choice questions that SFT and policy answer by log-likelihood."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from rlhf_core.config.model import Strict
from rlhf_core.storage.file_patterns import is_url


class MultipleChoiceConfig(Strict):
    """``files`` are paths or globs of questions in C-Eval's format, relative to the workspace: columns question, A, B,
    C, D and answer, and maybe id and explanation. The name of a file without ``_dev``, ``_val`` or ``_test`` is its
    subject.

    With ``score: letter`` the choices stand below the question, and the likeliest letter is the answer; with ``text``
    the question stands alone, and the answer is the choice whose text is likeliest per character.

    ``few_shot`` answered questions come before each question: the first of the file in ``few_shot_files`` that has the
    same subject, or of the only one there is.
    """

    files: tuple[str, ...] = Field(strict=False, min_length=1)
    score: Literal["letter", "text"] = "letter"
    few_shot: NonNegativeInt = 0
    few_shot_files: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("files", "few_shot_files")
    @classmethod
    def _on_this_machine(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        remote = [path for path in paths if is_url(path) or path.startswith("hub:")]
        if remote:
            raise ValueError(f"{remote[0]!r} is not on this machine; download the files and name their paths")
        return paths

    @model_validator(mode="after")
    def _examples_have_a_source(self) -> MultipleChoiceConfig:
        if self.few_shot and not self.few_shot_files:
            raise ValueError(f"few_shot {self.few_shot} needs few_shot_files, such as [ceval/dev/*.csv]")
        return self

    @property
    def patterns(self) -> tuple[str, ...]:
        """All paths and globs that the evaluation reads."""
        return self.files + (self.few_shot_files if self.few_shot else ())
