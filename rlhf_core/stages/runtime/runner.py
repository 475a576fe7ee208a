"""Runs one stage in a workspace: checks parameters and inputs, gives it paths and a tracker, records the outcome."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rlhf_core import preemption
from rlhf_core.config.launch import LaunchConfig
from rlhf_core.config.loading.load import Params, load_params, load_section
from rlhf_core.config.model import StageConfig
from rlhf_core.config.operations import Trained
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, DataError, RlhfError
from rlhf_core.files import atomic_write_json, sha256_tree
from rlhf_core.fingerprint import fingerprint
from rlhf_core.ppo.reward_sources import tracked_files
from rlhf_core.stages.runtime import launcher
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.stages.runtime.names import stage_module
from rlhf_core.tracking import NullTracker, Tracker, stage_tracker

logger = logging.getLogger(__name__)

AFTER_FULL_DISK = "make room and run the stage again: a training goes on from its last checkpoint"
OUTCOMES = Path(".rlhf") / "outcomes"


def run_stage(name: str, workspace: Path) -> dict[str, Any]:
    """Run stage ``name`` in ``workspace`` and return its metrics.

    The outcome (exit code, message, seconds) is left in ``.rlhf/outcomes/NAME.json`` for whoever started the stage
    through DVC, which keeps neither. A stage that ``compute.launch`` gives several processes is run by them; there are
    no metrics to return then, only those in its files.
    """
    started = time.time()
    outcome: dict[str, Any] = {"exit_code": 1, "message": "the stage ended without a word"}
    try:
        with _interruptible(), preemption.heeded(name):
            metrics = _run(name, workspace)
        outcome = {"exit_code": EXIT_OK, "message": "done"}
        return metrics
    except RlhfError as error:
        outcome = {"exit_code": error.exit_code, "message": str(error)}
        raise
    except KeyboardInterrupt:
        outcome = {"exit_code": EXIT_INTERRUPTED, "message": "interrupted"}
        raise
    except Exception as error:
        if _is_full_disk(error):
            full = RlhfError(f"{name}: {error}; {AFTER_FULL_DISK}")
            outcome = {"exit_code": full.exit_code, "message": str(full)}
            raise full from error
        outcome = {"exit_code": 1, "message": f"{type(error).__name__}: {error}"}
        raise
    finally:
        ended = time.time()
        outcome |= {"stage": name, "seconds": round(ended - started, 3), "started": started, "ended": ended}
        _leave_outcome(workspace / OUTCOMES, name, outcome)


def _is_full_disk(error: Exception) -> bool:
    """Libraries written in other languages only say so in words."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in str(error)


def _leave_outcome(folder: Path, name: str, outcome: Mapping[str, Any]) -> None:
    try:
        if launcher.is_rank():
            atomic_write_json(launcher.rank_outcome(folder, name, launcher.rank()), outcome)
        if launcher.rank() == 0:
            atomic_write_json(folder / f"{name}.json", outcome)
    except (OSError, RlhfError) as error:
        # The end of the stage itself must be heard, also where the disk is too full to note it.
        logger.warning("the outcome of %s could not be written: %s", name, error)


def _run(name: str, workspace: Path) -> dict[str, Any]:
    params = load_params(workspace)
    _limit_threads(params.compute.threads)
    stage_file = stage_module(name)
    stage: Stage = stage_file.STAGE
    config = load_section(workspace, stage.section, stage.config)
    if tracked_files.FILE in stage.inputs.values() and launcher.rank() == 0:
        # What was edited since DVC last looked must not go on from partial state of before.
        tracked_files.write_tracked_files(workspace, params.ppo.reward.sources)
    inputs = _inputs(stage, workspace)
    launches: dict[str, LaunchConfig] = {str(key): value for key, value in params.compute.launch.items()}
    launch = launches.get(name, LaunchConfig())
    if launch.ranks > 1 and not launcher.is_rank():
        launcher.launch(name, workspace, launch, workspace / OUTCOMES)
        return {}
    if name not in launches and not launcher.is_rank():
        return _run_here(stage_file, config, inputs, workspace, params)
    from rlhf_core import distributed
    from rlhf_core.training.engine.choice import placed

    with distributed.process_group(), placed(launch, workspace):
        if distributed.is_rank_zero():
            return _run_here(stage_file, config, inputs, workspace, params)
        return _run_beside(stage_file, config, inputs)


def _run_here(stage_file: Any, config: StageConfig, inputs: Paths, workspace: Path, params: Params) -> dict[str, Any]:
    """The stage with its real outputs. Partial state that the store has and this machine lacks is fetched first."""
    stage: Stage = stage_file.STAGE
    key = work_key(stage, config, inputs)
    work = workspace / "work" / stage.name / key
    outputs = Paths({name: workspace / path for name, path in stage.outputs.items()} | {"work": work})
    for path in outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        _stored(params.checkpoints.store, workspace, work),
        stage_tracker(stage.name, workspace, params.tracking.experiment) as tracker,
    ):
        tracker.log_params(flatten(config.model_dump(mode="json")))
        metrics: dict[str, Any] = stage_file.run(config, inputs, outputs, tracker)
        _record(metrics, outputs, tracker)
    shutil.rmtree(work.parent, ignore_errors=True)
    return metrics


@contextmanager
def _stored(url: str | None, workspace: Path, work: Path) -> Iterator[None]:
    """The checkpoints of a training stage go to the store at ``url``, from which they go when the block succeeds."""
    stage, key = work.parts[-2:]
    if url is None or stage not in get_args(Trained):
        yield
        return
    from rlhf_core.training.checkpoints import checkpoint
    from rlhf_core.training.checkpoints import store as checkpoint_store

    store = checkpoint_store.open_store(url, workspace, stage, key)
    store.fetch(work, beyond=checkpoint.sound_step(work / "checkpoints"))
    with checkpoint_store.used(store):
        yield
    store.clear()


def _run_beside(stage_file: Any, config: StageConfig, inputs: Paths) -> dict[str, Any]:
    """The stage on a rank other than the first: it computes its share, and what it writes is thrown away."""
    from rlhf_core.distributed import NonzeroRankReleased

    stage: Stage = stage_file.STAGE
    with tempfile.TemporaryDirectory(prefix=f"rlhf-{stage.name}-") as scratch:
        paths = {key: Path(scratch, path) for key, path in stage.outputs.items()}
        outputs = Paths(paths | {"work": Path(scratch, "work")})
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return dict(stage_file.run(config, inputs, outputs, NullTracker()))
        except NonzeroRankReleased:
            return {}


def _limit_threads(threads: int | None) -> None:
    """Tell OpenMP before torch is loaded. An explicit setting of the environment wins."""
    # Two stages side by side on the same cores stall each other by orders of magnitude when idle threads spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _inputs(stage: Stage, workspace: Path) -> Paths:
    for key, path in stage.inputs.items():
        if key not in stage.optional_inputs and not (workspace / path).exists():
            raise DataError(
                f"stage {stage.name} needs {path}, which does not exist in {workspace}; "
                "run the stage that makes it (`rlhf run`, or `dvc repro` up to it)"
            )
    return Paths({key: workspace / path for key, path in stage.inputs.items()})


def work_key(stage: Stage, config: StageConfig, inputs: Mapping[str, Path]) -> str:
    """Key of a stage's partial state: a hash of its parameters, its inputs' contents and its code."""
    parts = {
        "config": config.model_dump(mode="json"),
        "inputs": {key: sha256_tree(path) for key, path in sorted(inputs.items()) if path.exists()},
        "code": fingerprint(stage.name),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _record(metrics: Mapping[str, Any], outputs: Paths, tracker: Tracker) -> None:
    """The stage's summary in the run; a metrics file that the stage left to us is written here."""
    if "metrics" in outputs and not outputs["metrics"].exists():
        atomic_write_json(outputs["metrics"], metrics)
    numbers = {k: v for k, v in flatten(metrics).items() if isinstance(v, int | float) and not isinstance(v, bool)}
    tracker.log_metrics({f"final.{key}": float(value) for key, value in numbers.items()})
    for key in ("metrics", "evidence", "gate", "history", "report"):
        if key in outputs and outputs[key].is_file():
            tracker.log_artifact(outputs[key])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C unwinds, so that temporary files go and the tracked run is closed; also where a shell's ``&`` had it
    ignored."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def workspace_root(given: Path | None = None) -> Path:
    """The workspace that ``given`` or the current folder lies in: the nearest folder upwards with a params.yaml."""
    start = Path(given or os.environ.get("RLHF_WORKSPACE") or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise RlhfError(
        f"{start} is not in a workspace (no params.yaml); make one with `rlhf init DIR`, or use --workspace"
    )
