"""``rlhf data diff``: what differs between two data files, or between the data of two revisions of
a workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import AnyFolder
from flows.workspace import is_elsewhere, matching_files
from rlhf_core.commands.data import JsonOption, print_json, print_text
from rlhf_core.errors import RlhfError
from rlhf_core.runtime.progress import busy
from rlhf_core.storage.files import scratch_folder
from rlhf_extras.data_files.options import (
    ColumnOption,
    DimensionOption,
    FormatOption,
    KindOption,
    PairsOption,
    SystemPromptsOption,
    TemplateOption,
    read_options,
    terminal_width,
)

if TYPE_CHECKING:
    from rlhf_core.config.data import ReadOptions
    from rlhf_extras.data_files.changes import DataState

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
COLLECTED = "data/raw"
WORKING_TREE = "workspace"  # as DVC calls it


@app.command(no_args_is_help=True)
def diff(
    before: Annotated[
        str, typer.Argument(help="A file, or a revision of git.", show_default=False)
    ],
    after: Annotated[
        str,
        typer.Argument(
            help=f"Another; '{WORKING_TREE}': the files as they are now.", show_default=False
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Of revisions: files to compare; default: {COLLECTED}.", show_default=False
        ),
    ] = None,
    show: Annotated[int, typer.Option(help="Examples to print of each change.")] = 1,
    kind: KindOption = None,
    format_name: FormatOption = None,
    columns: ColumnOption = None,
    template: TemplateOption = None,
    dimension: DimensionOption = None,
    pairs: PairsOption = "all",
    system_prompts: SystemPromptsOption = False,
    workspace: AnyFolder = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two data files, or two revisions of a workspace's data: rows added, removed and
    changed, by kind.

    Rows are told apart by the hash of their content. A row is changed if its prompt stays and a
    reply differs; relabelled if only its margin or category does. Records that a reader refuses or
    drops are counted. Data that DVC tracks come from its cache or a remote.

    Examples:
    $ rlhf data diff old.jsonl new.jsonl
    $ rlhf data diff v1.0 HEAD
    $ rlhf data diff HEAD workspace data/pairs.jsonl
    """
    options = read_options(format_name, columns, template, dimension, pairs, system_prompts)
    states = ((before, "before"), (after, "after"))
    # Rows lie in files there while they are compared, so that they need not fit the memory.
    with busy("comparing the data"), scratch_folder("rlhf-diff-") as scratch:
        from rlhf_extras.data_files.changes import as_text, compare_kinds, file_state

        if _names_files(before) and _names_files(after):
            if files:
                raise RlhfError(f"two files are compared, so {files[0]} is one too many")
            compared = [
                file_state([spec], Path.cwd(), options, Path(scratch, state), kind)
                for spec, state in states
            ]
        else:
            _require_no_file(before, after)
            from flows.workspace import find_workspace

            folder = find_workspace(workspace)
            compared = [
                _revision_state(folder, revision, files or [], options, kind, Path(scratch, state))
                for revision, state in states
            ]
        old, new = compared
        changes = compare_kinds(old, new, show)
    if as_json:
        print_json(changes)
    else:
        print_text(as_text(changes, terminal_width()))


def _names_files(spec: str) -> bool:
    """Whether an argument is a path that exists, a URL or a hub id, and not a revision."""
    if spec == WORKING_TREE:  # also where a folder is called so
        return False
    return is_elsewhere(spec) or bool(matching_files(spec, Path.cwd()))


def _require_no_file(before: str, after: str) -> None:
    """Refuse a file beside what is none: a misspelt name is no revision. A folder may be called as
    a revision is.
    """
    for spec, other in ((before, after), (after, before)):
        if _names_files(spec) and not Path(spec).is_dir():
            raise RlhfError(
                f"{spec} is a file, but no file matches {other!r}; give two files, or two revisions of git"
            )


def _revision_state(
    workspace: Path,
    revision: str,
    files: Sequence[str],
    options: ReadOptions,
    kind: str | None,
    scratch: Path,
) -> DataState:
    """Return the rows of ``files``, or of the collected data, at a revision; they are kept in
    ``scratch``.
    """
    from rlhf_extras.data_files.changes import collected_state, file_state
    from rlhf_extras.data_files.revisions import check_out, commit_of, repository_of

    with scratch_folder("rlhf-revision-") as checkout:
        folder = workspace
        if revision != WORKING_TREE:
            commit_of(workspace, revision)  # which says what is wrong where there is none
            # As deep as the workspace lies in its repository, whose files may be given as
            # ../pairs.jsonl.
            folder = Path(checkout) / workspace.resolve().relative_to(
                repository_of(workspace).resolve()
            )
            folder.mkdir(parents=True, exist_ok=True)
            check_out(workspace, revision, files or [COLLECTED], folder)
        if files:
            return file_state(files, folder, options, scratch, kind)
        return collected_state(folder / COLLECTED, scratch, kind)
