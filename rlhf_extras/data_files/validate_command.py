"""``rlhf data validate``: data files checked as the pipeline would. Heavy imports wait until it runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.commands.data import JsonOption, ProbeOption, print_json, print_text
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_OK, ConfigError, RlhfError
from rlhf_core.runtime.progress import busy
from rlhf_core.storage.files import scratch_folder
from rlhf_extras.data_files.options import (
    ColumnOption,
    DimensionOption,
    Files,
    FormatOption,
    KindOption,
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
    from rlhf_core.config.params import Params
    from rlhf_core.forecast import Forecast
    from rlhf_core.stages.run_forecasts import ForecastLine
    from rlhf_extras.data_files.checked_files import CheckedFiles

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
OWN_DATA = "own-data"  # the profile that `rlhf init --data` takes


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

    Exit codes: 0 a run would take them, 3 the data gate would not open, 2 the pairs do not suffice
    or a file cannot be read at all.

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
        from rlhf_core.data.collection.sources import sources_by_kind
        from rlhf_core.stages.pair_supply import DataSupply, supply_of_workspace
        from rlhf_core.stages.run_forecasts import run_forecasts
        from rlhf_extras.data_files.checked_files import check_files, collected_from

        sources = sources_by_kind(files, Path.cwd(), options, kind)
        folder = output or scratch
        try:
            with _taken(folder):
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
        supply, lines = DataSupply(), {}
        refusal = None
        try:
            of_files = params.model_copy(update={"collect": collect})
            supply = supply_of_workspace(folder, of_files, Path.cwd(), root)
        except RlhfError as error:  # of the model: the files can be read, as was seen
            refusal = error
        found = supply.pairs
        if found is not None:
            lines = run_forecasts(root or Path.cwd(), of_files, supply, probe=probe)
    _print_found(checked, found, lines, as_json=as_json)
    if not checked.passed:
        raise typer.Exit(EXIT_GATE_FAILED)
    if refusal is not None:
        raise refusal
    raise typer.Exit(EXIT_OK if found is None else found.exit_code)


def _print_found(
    checked: CheckedFiles,
    found: Forecast | None,
    lines: Mapping[str, ForecastLine],
    *,
    as_json: bool,
) -> None:
    """Print what the files hold, what their pairs can show, and what installed forecasts say of a
    run.
    """
    if as_json:
        document = checked.as_dict()
        if found is not None:
            document |= {"forecast": found.as_dict()}
        document |= {name: line.as_dict() for name, line in lines.items()}
        print_json(document)
        return
    from rlhf_core import forecast
    from rlhf_core.stages.run_forecasts import lines_text
    from rlhf_extras.data_files.checked_files import as_text

    print_text(as_text(checked, terminal_width()))
    if found is not None:
        print_text("\n" + forecast.as_text(found))
    if lines:
        print_text(lines_text(lines))


@contextmanager
def _taken(folder: Path) -> Iterator[None]:
    """Take an empty or new folder for the block; what a block that fails has written there goes.

    The same command can then be run again.

    Raises:
        FileExistsError: Another command has taken it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir()  # so that no other command writes there at the same time
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if is_new:
            folder.rmdir()
        raise


def _checking_root(workspace: Path | None) -> Path | None:
    """Return the workspace whose settings check files: the named one, or the nearest.

    The nearest counts only if it reads files.
    """
    from rlhf_core.config.loading import load_params

    root = root_of(workspace)
    if root is None or workspace is not None:
        return root
    with only_named(workspace):
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
    folder = root or recipe_folder()
    if tokenizer is not None:
        if not tokenizer.strip():
            raise ConfigError(
                "--tokenizer is empty; give a model's folder, a .gguf file or a hub id"
            )
        path = Path(os.path.expanduser(tokenizer))
        named = json.dumps(str(path.absolute()) if path.exists() else tokenizer)
        sets = [*sets, f"validate.tokenizer={named}"]
        if root is None:  # as `rlhf init --model` has it
            sets.append(f"base.source={named}")
    text = (folder / PARAMS_FILE).read_text(encoding="utf-8")
    if root is None:
        text = overlaid(text, overlays_of(text, profiles_of(folder), OWN_DATA, sets))
    text = rebase_sources(text, folder, Path.cwd())
    params = check_params(yaml_text.parse(overlaid(text, sets=sets), PARAMS_FILE))
    checks = params.validate_.model_copy(update={"seed": params.seed}).with_absolute_paths(
        Path.cwd()
    )
    return params.model_copy(update={"validate_": checks})
