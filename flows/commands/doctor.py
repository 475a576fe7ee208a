"""``rlhf doctor``: check machine, services and workspace, and say how to repair what fails."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flows.commands.machine_checks import (
    FAIL,
    GIB,
    OK,
    WARN,
    DoctorCheck,
    machine_checks,
    service_checks,
)
from flows.commands.text import Row
from flows.dvc_repo.recipe import check_recipe
from flows.registry.client import connect, has_record
from flows.registry.orphans import find_orphans
from flows.registry.policies import active_policies
from flows.workspace import is_elsewhere, lock_holder
from rlhf_core.config.data import DataSource
from rlhf_core.config.gates import GatesConfig
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    FunctionSource,
    refuse_own_model,
)
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.fingerprint.tracked_files import (
    missing_function,
    model_folders,
    verifiable_functions,
)
from rlhf_core.plugins import (
    RUN_LOGGERS,
    PluginError,
    load_plugin,
    model_plugins,
)
from rlhf_core.storage.data_files import expand, is_url
from rlhf_core.storage.files import scratch_folder


def _orphans(workspace: Path) -> Iterator[DoctorCheck]:
    """Name what killed registrations have left in the record, if there is one and it answers."""
    if not has_record(workspace):
        return
    try:
        orphans = find_orphans(connect(workspace), workspace)
    except RlhfError as error:
        yield DoctorCheck(WARN, "registry", str(error))
        return
    if orphans:
        yield DoctorCheck(
            WARN, "registry", orphans.describe(), "`rlhf registry gc --delete` removes them"
        )


def require_ready(workspace: Path) -> None:
    """Refuse a run that cannot succeed, by what `rlhf doctor` finds in the workspace.

    Data and the starting model are not opened: a run opens them where their stages would.

    Raises:
        RlhfError: a line for each check that failed, and what to do.
    """
    problems = []
    for check in workspace_checks(workspace, opens_files=False):
        if check.level == FAIL:
            remedy = f" ({check.remedy})" if check.remedy else ""
            problems.append(f"{check.name}: {check.finding}{remedy}")
    if problems:
        raise RlhfError("\n".join(problems))


def workspace_checks(
    workspace: Path | None, opens_files: bool = True, *, probe: bool = False
) -> Iterator[DoctorCheck]:
    """Check the workspace; outside one, only warn.

    Args:
        opens_files: Open data and the starting model.
        probe: Then try passes on this machine, too, to say how long a run takes.
    """
    if workspace is None or not (workspace / "params.yaml").is_file():
        folder = workspace or Path.cwd()
        finding = f"{folder} is not one (no params.yaml)"
        yield DoctorCheck(WARN, "workspace", finding, "make one with `rlhf init DIR`")
        return
    yield DoctorCheck(OK, "workspace", str(workspace))
    yield _writable(workspace)
    yield _room(workspace)
    yield from _dvc(workspace)
    if opens_files:
        yield from _orphans(workspace)
    holder = lock_holder(workspace)
    yield DoctorCheck(OK, "lock", f"held by {holder}" if holder else "free")
    try:
        params = load_params(workspace)
        if (workspace / "dvc.yaml").is_file():
            check_recipe(workspace)
    except RlhfError as error:
        remedy = "correct it; `rlhf run` would refuse it too"
        yield DoctorCheck(FAIL, "params.yaml", str(error), remedy)
        return
    finding = "every parameter is known and in range, and DVC finds those it tracks"
    yield DoctorCheck(OK, "params.yaml", finding)
    opened = [*_sources(workspace, params, opens_files)]
    if opens_files:
        opened.append(base_model_check(workspace, params.base.source, params.base.revision))
    yield from opened
    if opens_files and all(check.level != FAIL for check in opened):
        yield from forecast_checks(workspace, params, probe)
    yield from _reward_sources(workspace, params)
    yield from gate_checks(params.gates)
    yield from _judges(workspace, params)
    yield from _launches(workspace, params)
    yield from _named_plugins(params)
    try:
        for policy in active_policies(params.registry):
            policy.check_settings(workspace, params.registry)
    except ConfigError as error:
        remedy = "without it nothing is promoted, served or exported"
        yield DoctorCheck(FAIL, "registry", str(error), remedy)


def _launches(workspace: Path, params: Params) -> Iterator[DoctorCheck]:
    """Check the programs and files by which samplers and stages are started."""
    samplers = {"ppo.sampler": params.ppo.sampler, "evaluate.sampler": params.evaluate.sampler}
    for setting, sampler in samplers.items():
        if problem := sampler.problem(workspace):
            level = WARN if params.pools else FAIL
            yield DoctorCheck(level, sampler.kind, f"{setting}.{problem}")
    for stage, launch in params.compute.launch.items():
        if launch.deepspeed and not (workspace / launch.deepspeed).is_file():
            missing = workspace / launch.deepspeed
            finding = f"compute.launch.{stage}.deepspeed: there is no file {missing}"
            yield DoctorCheck(FAIL, "deepspeed", finding)


def _named_plugins(params: Params) -> Iterator[DoctorCheck]:
    """Check that the plugins which settings name can be loaded."""
    named = [("tracking.loggers", RUN_LOGGERS, name) for name in params.tracking.loggers]
    named += [("evaluate", group, name) for group, name in params.evaluate.plugins]
    named += [("base.source", group, name) for group, name in model_plugins(params.base.source)]
    for setting, group, name in named:
        try:
            load_plugin(group, name)
        except PluginError as error:
            yield DoctorCheck(FAIL, "plugins", f"{setting}: {error}")


def _room(workspace: Path) -> DoctorCheck:
    free = shutil.disk_usage(workspace).free / GIB
    if free >= 2:
        return DoctorCheck(OK, "disk", f"{free:.1f} GiB free")
    level = FAIL if free < 0.5 else WARN
    return DoctorCheck(level, "disk", f"{free:.1f} GiB free", "`rlhf gc` shows what it would free")


def _dvc(workspace: Path) -> Iterator[DoctorCheck]:
    """Check that the workspace has a pipeline, and lies in a DVC repository."""
    if not (workspace / "dvc.yaml").is_file():
        remedy = "restore it, or make a workspace with `rlhf init DIR`"
        yield DoctorCheck(FAIL, "dvc.yaml", "missing", remedy)
    for folder in (workspace, *workspace.parents):
        if (folder / ".dvc").is_dir():
            yield DoctorCheck(OK, "dvc", f"repository at {folder}")
            return
    remedy = "`dvc init` there, or `rlhf init DIR`"
    yield DoctorCheck(FAIL, "dvc", "the workspace is in no DVC repository", remedy)


def _writable(workspace: Path) -> DoctorCheck:
    try:
        with scratch_folder(".rlhf-", workspace):
            return DoctorCheck(OK, "writable", "yes")
    except OSError as error:
        remedy = "make the folder writable, or use another workspace"
        return DoctorCheck(
            FAIL, "writable", f"cannot write to {workspace} ({error.strerror})", remedy
        )


def _sources(workspace: Path, params: Params, opens_files: bool) -> Iterator[DoctorCheck]:
    """Check the data files and the starting model that params.yaml names."""
    if params.collect.source == "world":
        yield DoctorCheck(OK, "data", "the synthetic world; nothing is read")
    else:
        patterns = params.collect.files.paths()
        for pattern in patterns:
            yield _source(workspace, "data", pattern)
        if opens_files:
            yield from unread_sources(workspace, params.collect.files.preferences)
        if not patterns:
            needed = "preferences" if params.collect.pairs else "prompts"
            yield DoctorCheck(
                FAIL,
                "data",
                "collect.source is files, but collect.files names none",
                f"name at least {needed}",
            )
    for evaluation in params.validate_.evaluation_files:
        yield _source(workspace, "data", evaluation.path)


def unread_sources(workspace: Path, sources: Sequence[DataSource]) -> Iterator[DoctorCheck]:
    """Return a failed check for each source whose first local file has no pairs of replies."""
    from rlhf_core.data.collection.sources import best_kind, source_files

    remedy = "`rlhf data FILE` shows how it is read"
    for source in sources:
        if is_elsewhere(source.path):
            continue
        with suppress(DataError):
            first_file = source_files([source], workspace)[0]
            try:
                rows_are = best_kind(first_file)
            except DataError as error:
                yield DoctorCheck(FAIL, "data", str(error), remedy)
            else:
                if rows_are != "preferences":
                    finding = f"{first_file.name} has {rows_are}, but pairs of replies are needed"
                    yield DoctorCheck(FAIL, "data", finding, remedy)


def forecast_checks(workspace: Path, params: Params, probe: bool) -> Iterator[DoctorCheck]:
    """Check whether the pairs are enough for the reward models and their gate, or without pairs
    whether prompts leave room for replies, and give the lines of installed forecasts.
    """
    from rlhf_core.stages.pair_supply import supply_of_workspace
    from rlhf_core.stages.run_forecasts import run_forecasts

    try:
        supply = supply_of_workspace(workspace, params)
    except RlhfError as error:
        yield DoctorCheck(FAIL, "data", str(error))
        return
    if supply.refusal:
        yield DoctorCheck(FAIL, "prompts", supply.refusal)
        return
    found = supply.pairs
    if found is not None:
        remedy = "`rlhf plan` prints the whole forecast"
        if found.refusal:
            yield DoctorCheck(FAIL, "pairs", found.conclusion, remedy)
            return
        if found.short or found.weak:
            yield DoctorCheck(WARN, "pairs", found.conclusion, remedy)
        else:
            yield DoctorCheck(OK, "pairs", found.conclusion)
    for name, line in run_forecasts(workspace, params, supply, probe=probe).items():
        level = WARN if line.remedy else OK
        yield DoctorCheck(level, name, line.conclusion, line.remedy)


def _reward_sources(workspace: Path, params: Params) -> Iterator[DoctorCheck]:
    """Check the functions and model folders that rewards and checks need. No module is imported."""
    level = WARN if params.pools_away() else FAIL  # what another host has cannot be seen from here
    sources = params.ppo.reward.sources
    targets = {}
    for source in sources:
        if isinstance(source, FunctionSource):
            targets[source.target] = "ppo.reward.sources"
    for function in verifiable_functions(params.evaluate.verifiable):
        targets[function.target] = "evaluate.verifiable"
    for target, setting in targets.items():
        if problem := missing_function(target, workspace):
            yield DoctorCheck(level, "function", f"{setting} names {target}, but {problem}")
    for source in sources:
        for named in model_folders(source):
            folder = workspace / Path(os.path.expanduser(named))
            if folder.resolve() == (workspace / OWN_MODEL).resolve():
                continue
            try:
                refuse_own_model(folder, f"reward source '{source.name or source.kind}'", workspace)
            except RlhfError as error:
                yield DoctorCheck(FAIL, "reward model", str(error))
                continue
            is_hub_id = isinstance(source, ClassifierSource) and not named.startswith(
                (".", "/", "~")
            )
            if not folder.is_dir() and not is_hub_id:
                remedy = "correct it in params.yaml; relative paths start at the workspace"
                yield DoctorCheck(
                    level,
                    "reward model",
                    f"ppo.reward.sources: there is no folder {folder}",
                    remedy,
                )


def gate_checks(gates: GatesConfig) -> Iterator[DoctorCheck]:
    """Warn of conditions whose metric looks misspelt: such a condition shuts its gate."""
    from rlhf_core.evaluation.report.metrics import page

    known: set[str] = set()
    for code in re.findall(r"`([^`\n]+)`", page()):
        known.update(re.findall(r"[a-z]\w+", code))
    typed: dict[str, str] = {}
    for condition in (*gates.sft, *(gates.reward or ()), *gates.policy):
        for metric in condition.metrics:
            # Losses against SFT have a prefix that nobody types.
            typed[metric] = condition.metric if metric.endswith(condition.metric) else metric
    remedy = "correct it in section gates; a metric that is missing fails its condition"
    for metric in typed.values():
        for part in metric.split("."):
            plain = re.sub(r"^(test|validation)_|_(low|high)95$", "", part)
            if part in known or plain in known:
                continue
            for close in difflib.get_close_matches(plain, known, n=1, cutoff=0.88):
                meant = metric.replace(part, part.replace(plain, close))
                finding = f"{metric} has {part}: did you mean '{meant}'?"
                yield DoctorCheck(WARN, "gates", finding, remedy)


def _judges(workspace: Path, params: Params) -> Iterator[DoctorCheck]:
    """Check what the evaluation needs besides models: the LLM judge's key, files of prompts."""
    llm_judge = params.evaluate.llm_judge
    if llm_judge is not None and llm_judge.token_env is not None:
        name = llm_judge.token_env
        if os.environ.get(name, "").strip():
            yield DoctorCheck(
                OK,
                "llm judge",
                f"{name} is set; {llm_judge.base_url} is asked when the evaluation runs",
            )
        else:
            remedy = f"export {name}=… wherever evaluate runs; without it the stage stops before it samples"
            yield DoctorCheck(
                WARN, "llm judge", f"the environment variable {name} is not set", remedy
            )
    for content, patterns in params.evaluate.untracked_files.items():
        for pattern in patterns:
            yield _source(workspace, content, pattern)


def base_model_check(workspace: Path, source: str, revision: str | None) -> DoctorCheck:
    """Check that the starting model can be opened; its weights are not loaded."""
    if source == "scratch":
        return DoctorCheck(OK, "base model", "made from nothing")
    from rlhf_core.models.foreign import open_starting_model

    try:
        opened = open_starting_model(workspace, source, revision)
    except RlhfError as error:
        return DoctorCheck(FAIL, "base model", str(error))
    if opened.has_template:
        return DoctorCheck(OK, "base model", f"{source}: {opened.finding}")
    remedy = "none is needed: it gets a plain one (User: … Assistant: …)"
    return DoctorCheck(WARN, "base model", f"{source} has no chat template", remedy)


def _source(workspace: Path, name: str, pattern: str) -> DoctorCheck:
    """Check that files which params.yaml names are there."""
    if is_elsewhere(pattern):
        kind = "URL" if is_url(pattern) else "hub id"
        return DoctorCheck(OK, name, f"{pattern} (a {kind}; looked up when it is read)")
    try:
        files = expand(
            pattern, workspace, "correct it in params.yaml; relative paths start at the workspace"
        )
    except DataError as error:
        return DoctorCheck(FAIL, name, str(error))
    return DoctorCheck(OK, name, f"{pattern}: {len(files)} file{'s' if len(files) > 1 else ''}")


MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}


def doctor(workspace: Path | None = None, *, probe: bool = False) -> list[DoctorCheck]:
    """Check the machine, the services and, if there is one, the workspace.

    Nothing is changed, but for a temporary file that tests whether the workspace can be written to.

    Args:
        probe: Try passes on this machine, to say how long a run takes.
    """
    own = workspace_checks(workspace, probe=probe)
    return [*machine_checks(), *service_checks(), *own]


def failures(checks: Sequence[DoctorCheck]) -> int:
    """Return how many checks failed; warnings do not count."""
    return sum(check.level == FAIL for check in checks)


def doctor_rows(checks: Sequence[DoctorCheck]) -> list[Row]:
    """Return a row per check, and how many failed."""
    width = max(len(check.name) for check in checks)
    rows: list[Row] = []
    for check in checks:
        text = check.finding
        if check.remedy:
            text += f" → {check.remedy}"
        rows.append((f"{MARKS[check.level]}  {check.name.ljust(width)}", text))
    warned = sum(check.level == WARN for check in checks)
    warnings = "1 warning" if warned == 1 else f"{warned} warnings"
    rows.append((None, f"{len(checks)} checks: {failures(checks)} failed, {warnings}"))
    return rows
