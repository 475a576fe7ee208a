"""What the options of ``rlhf data`` and of commands like it have in common.

No control character of the data reaches a terminal, be it printed as text or as JSON.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_core.errors import ConfigError, RlhfError

if TYPE_CHECKING:
    from rlhf_core.config.data import ReadOptions

Kind = Literal["preferences", "demonstrations", "prompts", "pretrain"]

Files = Annotated[
    list[str],
    typer.Argument(help="Files, globs, URLs or hub ids (hub:owner/name).", show_default=False),
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Format of the rows, where it is not recognised.")
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option("--column", help="FIELD=COLUMN, such as prompt=question; may be repeated."),
]
TemplateOption = Annotated[
    str | None, typer.Option("--template", help="Text of the prompt, with columns in braces.")
]
DimensionOption = Annotated[
    str | None,
    typer.Option("--dimension", help="Which of several preferences: helpful, safe, agreed."),
]
PairsOption = Annotated[
    str, typer.Option("--pairs", help="Pairs of a ranking: all, adjacent, best_worst.")
]
KindOption = Annotated[
    Kind | None, typer.Option("--kind", help="Kind of rows; default: what a file serves as best.")
]
SystemPromptsOption = Annotated[
    bool,
    typer.Option(
        "--system-prompts",
        help="UltraFeedback: a reply's own system prompt is a turn of its prompt.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Folder, .gguf file or hub id of a model to count tokens with."
    ),
]


@contextmanager
def only_named(workspace: Path | None) -> Iterator[None]:
    """Ignore an invalid workspace that nobody named: the current folder may be in none."""
    try:
        yield
    except RlhfError:
        if workspace is not None:
            raise


def root_of(workspace: Path | None) -> Path | None:
    """Return the workspace that is named, else that of the current folder; None without one."""
    from rlhf_core.stages.runtime.runner import workspace_root

    with only_named(workspace):
        return workspace_root(workspace)
    return None


def read_options(
    format_name: str | None,
    columns: Sequence[str] | None,
    template: str | None,
    dimension: str | None,
    pairs: str,
    system_prompts: bool,
) -> ReadOptions:
    """Return how rows are read, by the options of a command; ``ConfigError`` for a wrong one."""
    from pydantic import ValidationError

    from rlhf_core.config.data import ReadOptions
    from rlhf_core.config.problems import describe

    fields: dict[str, str] = {}
    for given in columns or ():
        field, separator, column = given.partition("=")
        if not separator:
            raise ConfigError(
                f"--column {given}: write it as FIELD=COLUMN, such as --column prompt=question"
            )
        if fields.get(field, column) != column:
            raise ConfigError(
                f"--column names {field} twice, as {fields[field]} and as {column}; take one of them out"
            )
        fields[field] = column
    values = {
        "format": format_name,
        "columns": fields,
        "template": template,
        "dimension": dimension,
        "pairs": pairs,
    }
    try:
        return ReadOptions.model_validate(values | {"system_prompts": system_prompts})
    except ValidationError as error:
        raise ConfigError(describe("options", error, ReadOptions, "")) from error


PIPE_WIDTH = 120


def terminal_width() -> int:
    """Return the columns of the terminal, or ``PIPE_WIDTH`` where output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
