"""``rlhf data inspect``: how readers understand data files. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.commands.data import JsonOption, print_json, print_text
from rlhf_core.runtime.progress import busy
from rlhf_extras.data_files.options import (
    ColumnOption,
    DimensionOption,
    Files,
    FormatOption,
    PairsOption,
    SystemPromptsOption,
    TemplateOption,
    TokenizerOption,
    only_named,
    read_options,
    root_of,
    terminal_width,
)

if TYPE_CHECKING:
    from rlhf_extras.data_files.describe import TokenLimits

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(no_args_is_help=True)
def inspect(
    files: Files,
    show: Annotated[int, typer.Option(help="Rows to print of each file.")] = 1,
    format_name: FormatOption = None,
    columns: ColumnOption = None,
    template: TemplateOption = None,
    dimension: DimensionOption = None,
    pairs: PairsOption = "all",
    system_prompts: SystemPromptsOption = False,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            help="Whose tokenizer and max_tokens to measure with; default: the nearest.",
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe data files: format, rows, which would be refused and why, lengths, and the command
    to use them.

    With --tokenizer, and in a workspace whose base model is at hand, lengths are given in tokens
    too and compared with max_tokens.

    Example: rlhf data inspect 'exports/*.jsonl.gz'
    """
    options = read_options(format_name, columns, template, dimension, pairs, system_prompts)
    with busy("reading the files"):
        from rlhf_extras.data_files.describe import as_json_value, as_text, describe_sources

        described = describe_sources(
            files, tokens=_token_limits(workspace, tokenizer), options=options, show=show
        )
    if as_json:
        print_json(as_json_value(described))
    else:
        print_text(as_text(described, terminal_width()))


def _token_limits(workspace: Path | None, tokenizer: str | None) -> TokenLimits | None:
    """Return what to measure tokens with; None without ``tokenizer`` or a model for it.

    Outside a workspace, the limits are those of the default parameters.
    """
    from rlhf_core.config.loading import check_params, load_params
    from rlhf_extras.data_files.describe import local_token_limits, token_limits

    root = root_of(workspace)
    if tokenizer is not None:
        return token_limits(
            check_params({}) if root is None else load_params(root), tokenizer, Path.cwd()
        )
    with only_named(workspace):
        return None if root is None else local_token_limits(root)
    return None
