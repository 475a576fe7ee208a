"""The commands ``rlhf data …``: inspect, validate and convert data files, outside any pipeline.

Heavy imports wait until a command runs, and until its arguments are known to be right.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf_core.errors import ConfigError, RlhfError

if TYPE_CHECKING:
    from rlhf_core.config.collect import ReadOptions
    from rlhf_core.data.inspect import TokenLimits

PIPE_WIDTH = 120
SHORT_FORM = "inspect"
HELP_OPTIONS = ("-h", "--help")


class DataGroup(TyperGroup):
    """The group ``rlhf data``: without the name of a command, its arguments are those of ``inspect``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``rlhf data FILES`` as ``rlhf data inspect FILES``; a file named like a command needs ``./``."""
        if args and args[0] not in self.commands and args[0] not in HELP_OPTIONS:
            args = [SHORT_FORM, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DataGroup, no_args_is_help=True, rich_markup_mode="rich")

Files = Annotated[list[str], typer.Argument(help="Files, globs, URLs or hub ids (hub:owner/name).", show_default=False)]
FormatOption = Annotated[str | None, typer.Option("--format", help="Format of the rows, where it is not recognised.")]
ColumnOption = Annotated[
    list[str] | None, typer.Option("--column", help="FIELD=COLUMN, such as prompt=question; may be repeated.")
]
TemplateOption = Annotated[str | None, typer.Option("--template", help="Text of the prompt, with columns in braces.")]
DimensionOption = Annotated[
    str | None, typer.Option("--dimension", help="Which of several preferences: helpful, safe, agreed.")
]
PairsOption = Annotated[str, typer.Option("--pairs", help="Pairs of a ranking: all, adjacent, best_worst.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def data() -> None:
    """Look at data files, check and convert them, without a pipeline.

    `rlhf data FILES` is short for `rlhf data inspect FILES`.
    """


@app.command(no_args_is_help=True)
def inspect(
    files: Files,
    show: Annotated[int, typer.Option(help="Rows to print of each file.")] = 1,
    format_name: FormatOption = None,
    columns: ColumnOption = None,
    template: TemplateOption = None,
    dimension: DimensionOption = None,
    pairs: PairsOption = "all",
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", "-w", help="Whose tokenizer and max_tokens to measure with; default: the current."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe data files: format, rows, which would be refused and why, lengths, and the command to use them.

    In a workspace whose base model is at hand, lengths are given in tokens too and compared with max_tokens.

    Example: rlhf data inspect 'exports/*.jsonl.gz'
    """
    options = _read_options(format_name, columns or [], template, dimension, pairs)
    _require_sources(files)
    from rich.console import Console

    with Console(stderr=True).status("reading the files…"):
        from rlhf_core.data.inspect import as_json_value, as_text, describe_sources

        described = describe_sources(files, tokens=_token_limits(workspace), options=options)
    if as_json:
        _print_json(as_json_value(described, show))
    else:
        typer.echo(as_text(described, show, terminal_width()))


def terminal_width() -> int:
    """Return the columns that output may take: those of the terminal, or ``PIPE_WIDTH`` where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def _token_limits(workspace: Path | None) -> TokenLimits | None:
    """Return what to measure tokens with; None outside a workspace, or where it has no model yet."""
    from rlhf_core.stages.runtime.runner import workspace_root
    from rlhf_core.stages.token_limits import local_token_limits

    try:
        return local_token_limits(workspace_root(workspace))
    except RlhfError:
        if workspace is not None:
            raise
        return None


def _require_sources(files: Sequence[str]) -> None:
    """Refuse a wrong path or hub id before the libraries that read files are imported."""
    from rlhf_core.data.hub import PREFIX, parse_hub_id
    from rlhf_core.file_patterns import expand, is_url

    for spec in files:
        if spec.startswith(PREFIX):
            parse_hub_id(spec)
        elif not is_url(spec):
            expand(spec, Path.cwd())


def _read_options(
    format_name: str | None, columns: Sequence[str], template: str | None, dimension: str | None, pairs: str
) -> ReadOptions:
    """Return how rows are read, as the options of a command say; ``ConfigError`` names what is wrong with them."""
    from typing import get_args

    from pydantic import ValidationError

    from rlhf_core.config.collect import FormatName, ReadOptions
    from rlhf_core.config.loading.problems import describe

    if format_name is not None and format_name not in get_args(FormatName):
        raise ConfigError(f"--format {format_name} is unknown; known are {', '.join(get_args(FormatName))}")
    fields = {}
    for given in columns:
        field, separator, column = given.partition("=")
        if not separator:
            raise ConfigError(f"--column {given}: write it as FIELD=COLUMN, such as --column prompt=question")
        fields[field] = column
    values = {"format": format_name, "columns": fields, "template": template, "dimension": dimension, "pairs": pairs}
    try:
        return ReadOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe("options", error, ReadOptions, "")) from error


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))
