"""The workspace: its parameters, its data sources, what its judges need, its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flows.commands.checks import FAIL, OK, WARN, DoctorCheck
from flows.dvc_repo.recipe import check_tracked_params
from flows.workspace.lock import lock_holder
from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.storage.file_patterns import expand, is_url

GIB = 2**30
HUB = "hub:"


def require_ready(workspace: Path) -> None:
    """Refuse a run that cannot succeed, before anything is started: what `rlhf doctor` finds in the workspace.

    The starting model is left out, which a run opens where its stage would.

    Raises:
        RlhfError: a line for each check that failed, and what to do.
    """
    failed = [check for check in workspace_checks(workspace, starting_model=False) if check.level == FAIL]
    if failed:
        remedies = [f" ({check.remedy})" if check.remedy else "" for check in failed]
        raise RlhfError("\n".join(f"{c.name}: {c.finding}{remedy}" for c, remedy in zip(failed, remedies, strict=True)))


def workspace_checks(workspace: Path | None, starting_model: bool = True) -> Iterator[DoctorCheck]:
    """Check the workspace; where there is none, return a warning only."""
    if workspace is None or not (workspace / "params.yaml").is_file():
        folder = workspace or Path.cwd()
        finding = f"{folder} is not one (no params.yaml)"
        yield DoctorCheck(WARN, "workspace", finding, "make one with `rlhf init DIR`")
        return
    yield DoctorCheck(OK, "workspace", str(workspace))
    yield _writable(workspace)
    yield _disk(workspace)
    yield from _dvc(workspace)
    holder = lock_holder(workspace)
    yield DoctorCheck(OK, "lock", f"held by {holder}" if holder else "free")
    try:
        params = load_params(workspace)
        if (workspace / "dvc.yaml").is_file():
            check_tracked_params(workspace)
    except RlhfError as error:
        yield DoctorCheck(FAIL, "params.yaml", str(error), "correct it; `rlhf run` would refuse it too")
        return
    yield DoctorCheck(OK, "params.yaml", "every parameter is known and in range, and DVC finds those it tracks")
    yield from _sources(workspace, params)
    if starting_model:
        yield base_model_check(workspace, params.base.source, params.base.revision)
    yield from _judges(workspace, params)


def _writable(workspace: Path) -> DoctorCheck:
    try:
        with tempfile.TemporaryFile(dir=workspace):
            return DoctorCheck(OK, "writable", "yes")
    except OSError as error:
        remedy = "make the folder writable, or use another workspace"
        return DoctorCheck(FAIL, "writable", f"cannot write to {workspace} ({error.strerror})", remedy)


def _disk(workspace: Path) -> DoctorCheck:
    free = shutil.disk_usage(workspace).free / GIB
    text = f"{free:.1f} GiB free"
    if free < 0.5:
        return DoctorCheck(FAIL, "disk", text, "free some space: `dvc gc --workspace` drops old results from the cache")
    if free < 2:
        return DoctorCheck(WARN, "disk", text, "`dvc gc --workspace` drops old results from the cache")
    return DoctorCheck(OK, "disk", text)


def _dvc(workspace: Path) -> Iterator[DoctorCheck]:
    if not (workspace / "dvc.yaml").is_file():
        yield DoctorCheck(FAIL, "dvc.yaml", "missing", "restore it, or make a workspace with `rlhf init DIR`")
    root = next((folder for folder in (workspace, *workspace.parents) if (folder / ".dvc").is_dir()), None)
    if root is None:
        yield DoctorCheck(FAIL, "dvc", "the workspace is in no DVC repository", "`dvc init` there, or `rlhf init DIR`")
    else:
        yield DoctorCheck(OK, "dvc", f"repository at {root}")


def _sources(workspace: Path, params: Params) -> Iterator[DoctorCheck]:
    """Check the data files and the starting model that params.yaml names."""
    if params.collect.source == "world":
        yield DoctorCheck(OK, "data", "the synthetic world; nothing is read")
    else:
        patterns = params.collect.files.paths()
        for pattern in patterns:
            yield _source(workspace, pattern)
        if not patterns:
            yield DoctorCheck(
                FAIL, "data", "collect.source is files, but collect.files names none", "name at least preferences"
            )
    for evaluation in params.validate_.evaluation_files:
        yield _source(workspace, evaluation.path)


def _judges(workspace: Path, params: Params) -> Iterator[DoctorCheck]:
    """Check what the evaluation needs besides models: the LLM judge's key, files of prompts and questions."""
    llm_judge = params.evaluate.llm_judge
    if llm_judge is not None and llm_judge.token_env is not None:
        name = llm_judge.token_env
        if os.environ.get(name, "").strip():
            yield DoctorCheck(OK, "llm judge", f"{name} is set; {llm_judge.base_url} is asked when the evaluation runs")
        else:
            remedy = f"export {name}=… wherever evaluate runs; without it the stage stops before it samples"
            yield DoctorCheck(WARN, "llm judge", f"the environment variable {name} is not set", remedy)
    for content, patterns in params.evaluate.untracked_files.items():
        for pattern in patterns:
            try:
                files = expand(pattern, workspace)
            except DataError as error:
                remedy = "correct its path in the section evaluate; relative ones start at the workspace"
                yield DoctorCheck(FAIL, content, str(error), remedy)
            else:
                yield DoctorCheck(OK, content, pattern if len(files) == 1 else f"{pattern}: {len(files)} files")


def base_model_check(workspace: Path, source: str, revision: str | None) -> DoctorCheck:
    """Check that the starting model can be opened; its weights are not loaded."""
    if source == "scratch":
        return DoctorCheck(OK, "base model", "made from nothing")
    from rlhf_core.models.starting.starting_model import open_starting_model

    try:
        opened = open_starting_model(workspace, source, revision)
    except RlhfError as error:
        return DoctorCheck(FAIL, "base model", str(error))
    if opened.has_template:
        return DoctorCheck(OK, "base model", f"{source}: {opened.finding}")
    remedy = "none is needed: it gets a plain one (User: … Assistant: …)"
    return DoctorCheck(WARN, "base model", f"{source} has no chat template", remedy)


def _source(workspace: Path, pattern: str) -> DoctorCheck:
    if pattern.startswith(HUB):
        return DoctorCheck(OK, "data", f"{pattern} (a hub id; looked up when collected)")
    if is_url(pattern):
        return DoctorCheck(OK, "data", f"{pattern} (a URL; looked up when collected)")
    try:
        files = expand(pattern, workspace)
    except DataError:
        remedy = "correct the path; relative ones start at the workspace"
        return DoctorCheck(FAIL, "data", f"{pattern} matches no file in {workspace}", remedy)
    return DoctorCheck(OK, "data", f"{pattern}: {len(files)} file{'s' if len(files) > 1 else ''}")
