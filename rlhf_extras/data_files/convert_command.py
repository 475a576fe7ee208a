"""``rlhf data convert``: the rows of data files in the conversational format. Heavy imports wait
until it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, get_args

import typer

from rlhf_core.commands.data import JsonOption, print_json, print_text
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.progress import busy
from rlhf_extras.data_files.options import (
    ColumnOption,
    DimensionOption,
    Files,
    FormatOption,
    Kind,
    KindOption,
    PairsOption,
    SystemPromptsOption,
    TemplateOption,
    read_options,
    terminal_width,
)

OUTPUT_SUFFIXES = (".jsonl", ".parquet")
app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(no_args_is_help=True)
def convert(
    files: Files,
    output: Annotated[
        Path,
        typer.Option(
            "--to", help="The file to write: OUT.jsonl or OUT.parquet.", show_default=False
        ),
    ],
    kind: KindOption = None,
    format_name: FormatOption = None,
    columns: ColumnOption = None,
    template: TemplateOption = None,
    dimension: DimensionOption = None,
    pairs: PairsOption = "all",
    system_prompts: SystemPromptsOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of data files in the conversational format, and those that are refused to
    OUT.refused.jsonl.

    Reading the file gives the same rows: texts, labels and ids. A row that would be read
    differently is refused. What records of prompts say beside them, for reward functions, is left
    out.

    Examples:
    $ rlhf data convert 'exports/*.csv' --to pairs.jsonl --column prompt=question
    $ rlhf data convert pairs.jsonl --kind prompts --to prompts.parquet
    """
    options = read_options(format_name, columns, template, dimension, pairs, system_prompts)
    if output.suffix not in OUTPUT_SUFFIXES:
        raise RlhfError(f"--to {output}: name a file that ends with {' or '.join(OUTPUT_SUFFIXES)}")
    from rlhf_extras.data_files.convert import refused_file_of

    existing = [str(path) for path in (output, refused_file_of(output)) if os.path.lexists(path)]
    if existing and not force:
        raise RlhfError(
            f"{existing[0]} exists already; choose another name than {output}, or add --force"
        )
    with busy("converting"):
        from rlhf_core.data.collection.sources import sources_by_kind
        from rlhf_extras.data_files.convert import as_text
        from rlhf_extras.data_files.convert import convert as write

        by_kind = sources_by_kind(files, Path.cwd(), options, kind)
        given = [name for name in get_args(Kind) if by_kind.of(name)]
        if len(given) > 1:
            raise RlhfError(
                f"the files serve as {' and '.join(given)}; convert each apart, or choose one with --kind"
            )
        conversion = write(by_kind.of(given[0]), Path.cwd(), given[0], output)
    if as_json:
        print_json(conversion.as_dict())
    else:
        print_text(as_text(conversion, terminal_width()))
