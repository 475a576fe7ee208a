"""Where data comes from: the synthetic world, or files and hub ids in any known format."""

from __future__ import annotations

import string
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlhf_core.config.model import StageConfig, Strict
from rlhf_core.config.problems import SECRET, nearest
from rlhf_core.errors import DataError
from rlhf_core.storage.file_patterns import is_url
from rlhf_core.storage.url_credentials import require_no_credentials


class WorldConfig(Strict):
    """Sizes of the synthetic world, and parameters of its simulated annotators."""

    demonstrations: PositiveInt = 8000
    preferences: PositiveInt = 24000
    pretrain: PositiveInt = 4000
    contrast_share: float = Field(default=0.35, ge=0, le=1)
    label_sharpness: float = Field(default=2.5, gt=0)
    length_bias: float = 0.02


FormatName = Literal[
    "hh-rlhf",
    "sharegpt-ranking",
    "turn-list-pair",
    "conversational-implicit",
    "conversational",
    "standard",
    "standard-implicit",
    "alpaca-ranking",
    "alpaca",
    "messages",
    "turn-list",
    "prompt-reply",
    "prompt",
    "text",
    "pku-saferlhf",
    "pku-saferlhf-single",
    "helpsteer2-preference",
    "helpsteer3-preference",
    "helpsteer-ratings",
    "shp",
    "orca-dpo",
    "open-orca",
    "ultrafeedback-ratings",
    "ultrafeedback",
    "nectar",
    "ranking",
    "stepwise",
    "oasst-trees",
    "oasst-messages",
]
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
        format: The format of the rows.
        columns: By field, the column that holds it; a dot goes into an object. All other columns are ignored.
        template: The text of the prompt, with columns in braces: ``"{title}\\n\\n{question}"``.
        dimension: Which of several preferences of a pair is read (PKU-SafeRLHF).
        pairs: Which pairs a ranking gives: all, each reply with the next worse, or the best with the worst.
        system_prompts: Whether a reply's own system prompt (UltraFeedback) is a turn of its prompt; replies to
            different system prompts are not paired then.
        category: The category of all rows; null: each row's own.
    """

    format: FormatName | None = None
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
    def _one_category(self) -> ReadOptions:
        if self.category is not None and "category" in self.columns:
            raise ValueError("category is that of all rows; take category out of columns")
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> ReadOptions:
        if self.template is not None and self.columns.keys() & {"prompt", "messages", "text"}:
            raise ValueError("template writes the prompt; take prompt, messages and text out of columns")
        return self


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names.

    Raises:
        ValueError: It names none, or has braces that are not doubled or more than a name in them.
    """
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{error}; write a column as {{name}} and a brace that is text twice") from error
    if any(not name or form or conversion for _, name, form, conversion in parts):
        raise ValueError("braces hold the name of a column and nothing else; write a brace that is text twice")
    if not parts:
        raise ValueError("the template names no column; write it as {name}")
    return [str(name) for _, name, _, _ in parts]


class SourceOptions(ReadOptions):
    """How a source is read, and how much of it is taken.

    Attributes:
        weight: The share of ``collect.limit`` that each file of the source gives, relative to the others'.
        cap: At most so many rows of each file of the source are taken.
        licence: The licence of the source, for manifest and data card; by default ``collect.licence``.
        derive: The kinds that are derived from the source, of those that are derived at all; null: all of them.
    """

    weight: float = Field(default=1.0, ge=1e-9, le=1e9)
    cap: PositiveInt | None = None
    licence: str | None = None
    derive: tuple[DerivedKind, ...] | None = Field(default=None, strict=False)


class DataSource(SourceOptions):
    """A path, glob, URL (``s3://…``) or hub id (``hub:owner/name[/config][@revision][:split]``), and how it is read."""

    path: str

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


def with_options(sources: Any) -> Any:
    """Return the entries of a list of sources that are a path alone as sources without options."""
    if not isinstance(sources, list | tuple):
        return sources
    return tuple({"path": source} if isinstance(source, str) else source for source in sources)


class FileSources(Strict):
    """Paths, globs, URLs or hub ids, each alone or with options, by kind. Empty kinds are derived where possible:
    demonstrations from preferred replies, prompts from preferences, pretraining text from demonstrations."""

    preferences: tuple[DataSource, ...] = Field(default=(), strict=False)
    demonstrations: tuple[DataSource, ...] = Field(default=(), strict=False)
    prompts: tuple[DataSource, ...] = Field(default=(), strict=False)
    pretrain: tuple[DataSource, ...] = Field(default=(), strict=False)

    @field_validator("*", mode="before")
    @classmethod
    def _with_options(cls, sources: Any) -> Any:
        return with_options(sources)

    @model_validator(mode="after")
    def _derivable(self) -> FileSources:
        for kind, possible in DERIVABLE.items():
            for source in self.of(kind):
                wrong = next((name for name in source.derive or () if name not in possible), None)
                if wrong is not None:
                    raise ValueError(f"derive of {source.path} names {wrong}, which is not derived from {kind}")
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
        return [source.path for kind in type(self).model_fields for source in self.of(kind)]


class CollectConfig(StageConfig):
    """``annotations`` is a path or glob of preference pairs that people made of the workspace's own replies
    (``rlhf annotate import``). They join the preferences of either source; no file need match.

    ``also_derive`` names kinds that are derived although files of them are given: those rows are added, and of equal
    ones the file's stays.
    """

    source: Literal["world", "files"] = "world"
    world: WorldConfig = WorldConfig()
    files: FileSources = FileSources()
    also_derive: tuple[DerivedKind, ...] = Field(default=(), strict=False)
    annotations: str | None = "data/annotations/*.jsonl"
    limit: PositiveInt | None = None
    licence: str | None = None

    @model_validator(mode="after")
    def _derived_from_files(self) -> CollectConfig:
        if self.also_derive and self.source == "world":
            raise ValueError("also_derive adds to the rows of files, but collect.source is world; take it out")
        return self

    @model_validator(mode="after")
    def _weights_share_a_limit(self) -> CollectConfig:
        weighted = [
            source.path for kind in FileSources.model_fields for source in self.files.of(kind) if source.weight != 1
        ]
        if weighted and self.limit is None:
            raise ValueError(
                f"the weight of {weighted[0]} is a share of collect.limit, which is not set; set it, or use cap"
            )
        return self
