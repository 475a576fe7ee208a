"""One stage run in a workspace: its parameters and inputs checked, its outcome recorded."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rlhf_core.config import yaml_text
from rlhf_core.config.base import is_pretrained
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.model import StageConfig
from rlhf_core.config.operations import LaunchConfig, Trained
from rlhf_core.config.params import Params
from rlhf_core.config.policy import Method
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.problems import nearest
from rlhf_core.config.rates import with_chosen_rates
from rlhf_core.config.recipe import recipe_folder, require_merged_lock
from rlhf_core.data.tables import parquet_footer, reads_noted
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.errors import (
    MORE_FILES,
    ConfigError,
    DataError,
    GateFailed,
    RlhfError,
    first_line,
    is_full_disk,
    is_out_of_device_memory,
    is_out_of_files,
    is_out_of_memory,
)
from rlhf_core.fingerprint.stages import remembered_fingerprints, stage_definition
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE, write_tracked_files
from rlhf_core.gates import read_gate
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.runtime.user_function import describe_failure
from rlhf_core.stages.runtime import launcher, slurm
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.stages.runtime.kept_result import KeptResult
from rlhf_core.stages.runtime.launcher import OUTCOMES, StageExit, outcome_path
from rlhf_core.stages.runtime.threads import limit_threads, return_freed_memory
from rlhf_core.storage.files import (
    LockFile,
    atomic_write_json,
    flatten,
    full_disks,
    md5_file,
    read_json,
    remove_tree,
    removed_name,
    scratch_folder,
    sha256_file,
    sha256_tree,
    temporary_root,
)
from rlhf_core.storage.garbage_collection import paused_collector
from rlhf_core.tracking.run_loggers import with_loggers
from rlhf_core.tracking.stage_run import METRICS_TAG, Tracker, results, stage_tracker
from rlhf_core.training.checkpoints.store import CheckpointStore
from rlhf_core.training.run_context import RunContext

STAGES = (
    "collect", "validate", "base", "sft", "gate-sft", "reward", "referee", "judge", "gate-reward", "critic", "ppo",
    "evaluate", "gate-policy", "report",
)  # fmt: skip


def load_stage(name: str, method: Method = "ppo") -> Stage[Any]:
    """Return the stage called ``name``; an unknown name is a ``ConfigError``.

    Args:
        name: One of :data:`STAGES`.
        method: How the policy is trained. The stage ``ppo`` has a module for each method, so that a
            change of one does not train by another again.
    """
    if name not in STAGES:
        raise ConfigError(f"no stage '{name}'; {nearest(name, STAGES)}")
    with paused_collector():
        module, definition = stage_definition(name, method)
        stage: Stage[Any] = getattr(importlib.import_module(module), definition)
    return stage


logger = logging.getLogger(__name__)

COMPUTING = (*get_args(Trained), "evaluate")  # the stages that run models for long
AFTER_FULL_DISK = "make room and run the stage again: a training goes on from its last checkpoint"
AFTER_NO_FILES = (
    f"{MORE_FILES} and run the stage again: a training goes on from its last checkpoint"
)
AFTER_NO_MEMORY = (
    "main memory is used up; end what else uses it, raise the limit (`ulimit -v`, the container's), or lower batch "
    "sizes, and run the stage again: a training goes on from its last checkpoint"
)
AFTER_NO_DEVICE_MEMORY = (
    "`rlhf plan` says what fits and which settings save memory; run the stage again with them: a training goes on from "
    "its last checkpoint"
)


def run_stage(name: str, workspace: Path) -> dict[str, Any]:
    """Run stage ``name`` in ``workspace`` and return its metrics.

    The outcome is left in ``.rlhf/outcomes/NAME.json``. A stage that ``compute.launch`` gives
    several processes is run by them; its metrics are then in its files alone, and none are
    returned.
    """
    started, clock = time.time(), time.monotonic()
    preemption = PreemptionSignal()
    failure: BaseException | None = None
    try:
        with _interruptible(), preemption.handled(name):
            return _run(name, workspace, preemption)
    except BaseException as error:
        failure = error
        if is_full_disk(error):
            full = full_disks(workspace, temporary_root())
            failure = RlhfError(f"{name}: {first_line(error)}{full}; {AFTER_FULL_DISK}")
            raise failure from error
        if isinstance(error, SystemExit):  # with 0 the stage would seem to be done
            what = describe_failure(error)
            failure = RlhfError(f"{name}: code that it calls {what}; take that out of it")
            raise failure from error
        if is_out_of_files(error):
            failure = RlhfError(f"{name}: {first_line(error)}; {AFTER_NO_FILES}")
            raise failure from error
        if is_out_of_memory(error):
            failure = RlhfError(f"{name}: {AFTER_NO_MEMORY}")
            raise failure from error
        if is_out_of_device_memory(error):
            failure = RlhfError(f"{name}: {first_line(error)}; {AFTER_NO_DEVICE_MEMORY}")
            raise failure from error
        raise
    finally:
        seconds = time.monotonic() - clock
        outcome, folder = StageExit.now(name, started, seconds, failure), workspace / OUTCOMES
        try:
            if launcher.is_rank():
                outcome.save(outcome_path(folder, name, launcher.rank()))
            elif slurm.is_node():
                outcome.save(slurm.node_outcome(folder, name))
            if launcher.rank() == 0 and not slurm.is_node():
                outcome.save(outcome_path(folder, name))
        except (OSError, RlhfError) as error:
            # The stage's own end must still be reported where the disk is too full to note it.
            logger.warning("the outcome of %s could not be written: %s", name, error)


@dataclass(frozen=True)
class _StageRun:
    """A stage with its checked parameters and inputs, ready to run."""

    stage: Stage[Any]
    config: StageConfig
    inputs: Paths
    workspace: Path
    params: Params
    launch: LaunchConfig
    preemption: PreemptionSignal


def _run(name: str, workspace: Path, preemption: PreemptionSignal) -> dict[str, Any]:
    params = load_params(workspace)
    require_merged_lock(workspace)
    if name in params.left_out:
        has = [stage for stage in STAGES if stage not in params.left_out]
        raise ConfigError(
            f"{workspace} trains without pairs and has no stage '{name}'; it has {', '.join(has)}"
        )
    limit_threads(params.compute, params.flow.parallel)
    stage = load_stage(name, params.policy.method)
    config = load_section(workspace, stage.section, stage.config, stage.beside)
    is_new = not is_pretrained(params.base.source)
    critic_of_adapters = isinstance(config, PpoConfig) and params.critic.lora is not None
    config = with_chosen_rates(config, is_new, adapters=critic_of_adapters)
    if REWARD_SOURCES_FILE in stage.inputs.values() and launcher.rank() == 0:
        # After an edit that DVC has not seen yet, training must not resume from older partial
        # state.
        write_tracked_files(workspace, params.ppo)
    inputs = _inputs(stage, workspace, outputs_of(params.left_out))
    launches = {str(key): value for key, value in params.compute.launch.items()}
    launch = launches.get(name, LaunchConfig())
    run = _StageRun(stage, config, inputs, workspace, params, launch, preemption)
    kept = KeptResult(workspace, name)
    if kept.exists() and not launcher.is_rank() and kept.is_of(work_key(run)):
        return _run_on_rank_zero(run)  # which takes it: nothing is computed, on whatever machines
    place = params.pools.get(name)
    if slurm.is_node():
        # The nodes of a job meet where the job says.
        meeting = os.environ[slurm.RENDEZVOUS_VARIABLE]
        launch = launch.model_copy(update={"rendezvous": meeting})
        run = replace(run, launch=launch)
    elif place is not None and place.nodes is not None and not launcher.is_rank():
        slurm.run_as_job(name, workspace, place, params.flow.stop_grace_seconds, preemption)
        return {}
    if launch.ranks > 1 and not launcher.is_rank():
        launcher.launch(name, workspace, launch, params.flow.stop_grace_seconds, preemption)
        return {}
    if name in COMPUTING:
        from rlhf_core.models.precision import allow_tf32

        allow_tf32(params.compute.tf32)
        if params.compute.return_freed_memory:
            return_freed_memory()
    if name not in launches and not launcher.is_rank():
        return _run_on_rank_zero(run)
    from rlhf_core.runtime import distributed

    with distributed.process_group(launch.rank_timeout):
        return _run_on_rank_zero(run) if distributed.is_rank_zero() else _run_on_other_rank(run)


def _run_on_rank_zero(run: _StageRun) -> dict[str, Any]:
    """Run the stage with its real outputs, unless another process does."""
    name = run.stage.name
    with LockFile(run.workspace / ".rlhf" / "stages" / f"{name}.running") as lock:
        if not lock.try_acquire():
            raise RlhfError(
                f"another process runs the stage {name} in {run.workspace}, and both would write the same files; wait "
                "for it, or stop it"
            )
        return _run_alone(run)


def _run_alone(run: _StageRun) -> dict[str, Any]:
    """Run the stage and remove its partial state afterwards."""
    stage, workspace = run.stage, run.workspace
    key, kept = work_key(run), KeptResult(workspace, stage.name)
    work = workspace / "work" / stage.name / key
    # A process that was killed while it removed its partial state left that here.
    shutil.rmtree(removed_name(work.parent), ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    outputs = _outputs(stage, workspace)
    store = _checkpoint_store(run, work)
    tracking = run.params.tracking
    with (
        stage_tracker(stage.name, workspace, tracking.experiment) as mlflow_run,
        with_loggers(mlflow_run, tracking.loggers, stage.name, workspace) as tracker,
    ):
        context = RunContext(
            work,
            tracker,
            run.preemption,
            store,
            run.launch,
            workspace,
            workspace / TOKENS,
            named_by_content=True,
        )
        tracker.log_params(named_parameters(stage, run.config))
        data = DataInputs(stage, workspace, tracker)
        if not launcher.is_rank() and kept.is_of(key):
            if read := kept.datasets():
                tracker.log_datasets(read)
            metrics = kept.restore(outputs)
        else:
            try:
                with reads_noted(data.note):
                    metrics = dict(stage.run(run.config, run.inputs, outputs, context))
            except GateFailed:
                if stage.name == "gate-policy":  # no report follows that would tell the verdict
                    tracker.set_tags(_refused_policy(run.inputs, workspace))
                raise
        _record(metrics, outputs, tracker)
    # Not of `evaluate`: its key does not tell of the questions and checks that settings name.
    if stage.name in get_args(Trained):
        kept.keep(key, outputs, data.named)
    if store is not None:
        store.clear()
    try:
        remove_tree(work.parent)
    except OSError as error:
        logger.warning(
            "the partial state of %s is left in %s: %s", stage.name, work.parent, error.strerror
        )
    return metrics


def _refused_policy(inputs: Paths, workspace: Path) -> dict[str, str]:
    """Return the verdict on a policy that its gate refuses, as tags of the run in MLflow."""
    from rlhf_core.evaluation.report.note import verdict_tags

    return verdict_tags(workspace, read_json(inputs.metrics), read_gate(workspace, "policy"))


def named_parameters(stage: Stage[Any], config: StageConfig) -> dict[str, Any]:
    """Return the settings of a stage by their paths in params.yaml, such as ``ppo.lr``."""
    outside = {"seed", *stage.beside}
    named = {}
    for name, value in flatten(config.model_dump(mode="json")).items():
        path = name if name.partition(".")[0] in outside else f"{stage.section}.{name}"
        named[path] = value
    return named


# MLflow's context of a dataset, by the name of its file.
CONTEXTS = {"train": "training", "validation": "validation", "test": "test", "data": "raw"}


class DataInputs:
    """Names each file of rows that a stage reads as a dataset of its MLflow run.

    The digest is the hash of the content by which DVC names the file, too. Files are named when
    they are first read, since which of them a stage reads depends on its settings.

    Attributes:
        named: What the tracker was told, by the file's path in the workspace without its ending.
    """

    def __init__(self, stage: Stage[Any], workspace: Path, tracker: Tracker) -> None:
        self.folders = [f"{path}/" for path in stage.inputs.values()]
        self.workspace, self.tracker = Path(os.path.abspath(workspace)), tracker
        self.named: dict[str, dict[str, str]] = {}

    def note(self, path: Path) -> None:
        """Name the file, unless it was or is none of the stage's rows."""
        file = Path(os.path.abspath(path))  # DVC may have linked it to its cache
        if not file.is_relative_to(self.workspace) or file.stem not in CONTEXTS:
            return
        name = file.relative_to(self.workspace).with_suffix("").as_posix()
        if name in self.named or not name.startswith(tuple(self.folders)):
            return
        self.named[name] = {}  # counting its rows reads it
        self.named[name] = {
            "digest": md5_file(file),
            "uri": file.as_uri(),
            "context": CONTEXTS[file.stem],
            "rows": str(parquet_footer(file)[1]),
        }
        self.tracker.log_datasets({name: self.named[name]})


def _checkpoint_store(run: _StageRun, work: Path) -> CheckpointStore | None:
    """Open the store for a training stage's checkpoints, if any, and fetch newer ones from it."""
    url = run.params.checkpoints.store
    if url is None or run.stage.name not in get_args(Trained):
        return None
    from rlhf_core.training.checkpoints.checkpoint import sound_step
    from rlhf_core.training.checkpoints.store import open_store

    store = open_store(url, run.workspace, run.stage.name, work.name)
    store.fetch(work, beyond=sound_step(work / "checkpoints"))
    return store


def _run_on_other_rank(run: _StageRun) -> dict[str, Any]:
    """Run the stage on a non-zero rank; its outputs are discarded."""
    from rlhf_core.runtime.distributed import NonzeroRankReleased

    stage = run.stage
    with scratch_folder(f"rlhf-{stage.name}-") as scratch:
        outputs, work = _outputs(stage, scratch), scratch / "work"
        context = RunContext(
            work,
            preemption=run.preemption,
            launch=run.launch,
            folder=run.workspace,
            tokens=run.workspace / TOKENS,
            named_by_content=True,
        )
        try:
            return dict(stage.run(run.config, run.inputs, outputs, context))
        except NonzeroRankReleased:
            return {}


def _outputs(stage: Stage[Any], root: Path) -> Paths:
    outputs = Paths({name: root / path for name, path in stage.outputs.items()})
    for path in outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    return outputs


def outputs_of(stages: Collection[str]) -> frozenset[str]:
    """Return the paths that these stages write, by the recipe: importing them takes seconds."""
    if not stages:
        return frozenset()
    recipe = yaml_text.plain(yaml_text.read(recipe_folder() / "dvc.yaml"))["stages"]
    paths: set[str] = set()
    for name in stages:
        paths.update(recipe[name].get("outs", ()), recipe[name].get("plots", ()))
    return frozenset(paths)


def _inputs(stage: Stage[Any], workspace: Path, absent: Collection[str] = ()) -> Paths:
    """Return the paths of a stage's inputs by name, without those that the settings rule out."""
    present = {key: path for key, path in stage.inputs.items() if path not in absent}
    for key, path in present.items():
        if key not in stage.optional_inputs and not (workspace / path).exists():
            raise DataError(
                f"stage {stage.name} needs {path}, which does not exist in {workspace}; "
                "run the stage that makes it (`rlhf run`, or `dvc repro` up to it)"
            )
    return Paths({key: workspace / path for key, path in present.items()})


def work_key(run: _StageRun) -> str:
    """Return the key of a partial state: a hash of parameters, contents of inputs, and code."""
    name, inputs = run.stage.name, sorted(run.inputs.items())
    fingerprints = remembered_fingerprints(run.workspace, [name], run.params.policy.method)
    parts = {
        "config": run.config.model_dump(mode="json"),
        "inputs": {key: sha256_tree(path) for key, path in inputs if path.exists()},
        "code": fingerprints[name],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _record(metrics: Mapping[str, Any], outputs: Paths, tracker: Tracker) -> None:
    """Log the stage's metrics and files, and write the metrics file if the stage has not."""
    if "metrics" in outputs and not outputs["metrics"].exists():
        atomic_write_json(outputs["metrics"], metrics)
    file = outputs["metrics"].stem if "metrics" in outputs else ""
    tracker.log_metrics(results(metrics, file))
    if "metrics" in outputs and outputs["metrics"].is_file():
        tracker.set_tags({METRICS_TAG: sha256_file(outputs["metrics"])})
    for key in ("metrics", "evidence", "gate", "history", "report"):
        if key in outputs and outputs[key].is_file():
            tracker.log_artifact(outputs[key])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C raise ``KeyboardInterrupt``, also where a shell's ``&`` had it ignored.

    So temporary files are removed and the tracked run is closed.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def workspace_root(given: Path | None = None) -> Path:
    """Return the workspace that is named, else the nearest one at or above the current folder.

    Args:
        given: The folder; by default the one in the variable ``RLHF_WORKSPACE``.

    Raises:
        RlhfError: The folder that was named has no params.yaml, or there is none at or above the
            current folder.
    """
    named = given or os.environ.get("RLHF_WORKSPACE")
    start = Path(named or Path.cwd()).resolve()
    for folder in (start,) if named else (start, *start.parents):
        if (folder / "params.yaml").is_file():
            return folder
    if named:
        raise RlhfError(
            f"{start} is no workspace (it has no params.yaml); make one with: rlhf init {shlex.quote(str(named))}"
        )
    raise RlhfError(
        f"{start} is not in a workspace (no params.yaml); make one with `rlhf init DIR`, or use --workspace"
    )
