"""The commands ``rlhf data …``: inspect and validate data files, outside any pipeline.

Heavy imports wait until a command runs, and until its arguments are known to be right. No control
character of the data reaches a terminal, be it printed as text or as JSON.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_core.commands.plugged import PluggedGroup
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_OK, ConfigError, RlhfError
from rlhf_core.runtime.progress import busy
from rlhf_core.storage.files import scratch_folder

if TYPE_CHECKING:
    from rlhf_core.config.data import ReadOptions
    from rlhf_core.config.params import Params
    from rlhf_core.data.inspection.describe import TokenLimits


SHORT_FORM = "inspect"
OWN_DATA = "own-data"  # the profile that `rlhf init --data` takes
HELP_OPTIONS = ("-h", "--help")
Kind = Literal["preferences", "demonstrations", "prompts", "pretrain"]


class DataGroup(PluggedGroup):
    """The group ``rlhf data``; without a command, its arguments are those of ``inspect``."""

    prefix = "data."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``rlhf data FILES`` as ``rlhf data inspect FILES``.

        A file named like a command needs ``./``.
        """
        if args and args[0] not in self.list_commands(ctx) and args[0] not in HELP_OPTIONS:
            args = [SHORT_FORM, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DataGroup, no_args_is_help=True, rich_markup_mode="rich")

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
ProbeOption = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe", help="Try passes for seconds, to forecast how long a run takes."
    ),
]
WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        "-w",
        help="The workspace; default: the nearest at or above the current folder.",
    ),
]
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
        from rlhf_core.data.inspection.describe import as_json_value, as_text, describe_sources

        described = describe_sources(
            files, tokens=_token_limits(workspace, tokenizer), options=options, show=show
        )
    if as_json:
        print_json(as_json_value(described))
    else:
        print_text(as_text(described, terminal_width()))


@app.command(no_args_is_help=True)
def validate(
    files: Files,
    kind: KindOption = None,
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
            help="Whose settings hold; default: the nearest that reads files, or profile own-data.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="validate.key=value over it; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for all that the stages write; new or empty."),
    ] = None,
    tokenizer: TokenizerOption = None,
    probe: ProbeOption = True,
    as_json: JsonOption = False,
) -> None:
    """Check data files as the pipeline would: what is kept, what is refused why and in which line,
    the data gate.

    The rows go through the stages collect and validate, kinds that are missing are derived from
    preferences, and the data gate is decided; of pairs, what so many can show is forecast, and how
    long a run takes on this machine. Nothing is trained, and no workspace is needed. With --output
    the clean rows, the quarantine, the data docs and the gate's evidence are kept.

    Exit codes: 0 the data gate would open, 3 it would not, 2 a file cannot be read at all.

    Examples:
    $ rlhf data validate pairs.jsonl
    $ rlhf data validate 'exports/*.csv' --set validate.min_rows=10 --json
    """
    options = read_options(format_name, columns, template, dimension, pairs, system_prompts)
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RlhfError(f"{output} exists already; name a new or empty folder")
    remedy = "--output" if output else "--output, or the environment variable TMPDIR"
    with busy("checking the files"), scratch_folder("rlhf-data-") as scratch:
        root = _checking_root(workspace)
        params = _checking_params(root, sets or [], tokenizer)
        from rlhf_core import forecast
        from rlhf_core.data.collection.sources import sources_by_kind
        from rlhf_core.stages.checked_files import as_text, check_files, collected_from
        from rlhf_core.stages.pair_supply import forecast_of_workspace

        sources = sources_by_kind(files, Path.cwd(), options, kind)
        folder = output or scratch
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "data").mkdir()  # so that no other command writes there at the same time
            checked = check_files(sources, Path.cwd(), params.validate_, folder, root)
        except FileExistsError as error:
            raise RlhfError(
                f"another command writes to {folder} already; name a new or empty folder"
            ) from error
        except OSError as error:
            raise RlhfError(
                f"cannot write to {folder}: {error}; make room, or name another folder: {remedy}"
            ) from error
        collect = collected_from(sources, params.seed)
        found = forecast_of_workspace(
            folder, params.model_copy(update={"collect": collect}), Path.cwd(), root
        )
        hours = None
        if probe and found is not None:
            from rlhf_core.probe import forecast_time, time_text

            hours = forecast_time(folder, params, found, root)
    if as_json:
        document = checked.as_dict()
        if found is not None:
            document |= {"forecast": found.as_dict()}
        if hours is not None:
            document |= {"hours": hours.as_dict()}
        print_json(document)
    else:
        print_text(as_text(checked, terminal_width()))
        if found is not None:
            print_text("\n" + forecast.as_text(found))
        if hours is not None:
            print_text(time_text(hours))
    raise typer.Exit(EXIT_OK if checked.passed else EXIT_GATE_FAILED)


@contextmanager
def _only_named(workspace: Path | None) -> Iterator[None]:
    """Ignore an invalid workspace that nobody named: the current folder may be in none."""
    try:
        yield
    except RlhfError:
        if workspace is not None:
            raise


def _root_of(workspace: Path | None) -> Path | None:
    """Return the workspace that is named, else that of the current folder; None without one."""
    from rlhf_core.stages.runtime.runner import workspace_root

    with _only_named(workspace):
        return workspace_root(workspace)
    return None


def _token_limits(workspace: Path | None, tokenizer: str | None) -> TokenLimits | None:
    """Return what to measure tokens with; None without ``tokenizer`` or a model for it.

    Outside a workspace, the limits are those of the default parameters.
    """
    from rlhf_core.config.loading import check_params, load_params
    from rlhf_core.stages.token_lengths import local_token_limits, token_limits

    root = _root_of(workspace)
    if tokenizer is not None:
        return token_limits(
            check_params({}) if root is None else load_params(root), tokenizer, Path.cwd()
        )
    with _only_named(workspace):
        return None if root is None else local_token_limits(root)
    return None


def _checking_root(workspace: Path | None) -> Path | None:
    """Return the workspace whose settings check files: the named one, or the nearest.

    The nearest counts only if it reads files.
    """
    from rlhf_core.config.loading import load_params

    root = _root_of(workspace)
    if root is None or workspace is not None:
        return root
    with _only_named(workspace):
        return root if load_params(root).collect.source == "files" else None
    return None


def _checking_params(root: Path | None, sets: Sequence[str], tokenizer: str | None) -> Params:
    """Return the settings that check files, with ``sets`` and ``tokenizer``.

    They are those of a workspace, else those that ``rlhf init --data`` gives.

    Paths of section ``validate`` are absolute, since the stages run in a folder of their own: those
    of a workspace start there, those of ``sets`` at the current folder.
    """
    import json

    from rlhf_core.config import yaml_text
    from rlhf_core.config.loading import PARAMS_FILE, check_params
    from rlhf_core.config.paths import rebase_sources
    from rlhf_core.config.profiles import overlaid, overlays_of
    from rlhf_core.config.recipe import profiles_of, recipe_folder

    other = [given for given in sets if not given.startswith(("validate.", "seed="))]
    if other:
        raise ConfigError(
            f"--set {other[0]} has no effect on data files; only validate.… and seed have"
        )
    if tokenizer is not None:
        if not tokenizer.strip():
            raise ConfigError(
                "--tokenizer is empty; give a model's folder, a .gguf file or a hub id"
            )
        path = Path(os.path.expanduser(tokenizer))
        sets = [
            *sets,
            f"validate.tokenizer={json.dumps(str(path.absolute()) if path.exists() else tokenizer)}",
        ]
    folder = root or recipe_folder()
    text = (folder / PARAMS_FILE).read_text(encoding="utf-8")
    if root is None:
        text = overlaid(text, overlays_of(text, profiles_of(folder), OWN_DATA))
    text = rebase_sources(text, folder, Path.cwd())
    params = check_params(yaml_text.parse(overlaid(text, sets=sets), PARAMS_FILE))
    checks = params.validate_.model_copy(update={"seed": params.seed}).with_absolute_paths(
        Path.cwd()
    )
    return params.model_copy(update={"validate_": checks})


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


def print_text(text: str) -> None:
    """Print lines that quote data, with control characters of the data as their escapes."""
    from rlhf_core.data.text import for_terminal

    typer.echo(for_terminal(text))


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON, control characters in texts escaped."""
    import json
    import re

    text = json.dumps(value, ensure_ascii=False, indent=2)
    typer.echo(re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text))
