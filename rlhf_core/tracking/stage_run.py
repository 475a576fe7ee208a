"""The MLflow run of one stage, written into a journal that is delivered while the stage goes on.

It also samples the use of the machine, under the names that MLflow's page "System metrics" shows.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from rlhf_core.errors import ConfigError, Preempted, RlhfError, first_line, is_full_disk
from rlhf_core.redaction import redacted
from rlhf_core.runtime.preemption import StopNow
from rlhf_core.storage.files import LockFile, flatten
from rlhf_core.storage.garbage_collection import paused_collector
from rlhf_core.tracking.delivery import (
    ACCESS_DENIED,
    DEFERRED_VARIABLE,
    FORBIDDEN,
    Courier,
    ServerAway,
    address,
)
from rlhf_core.tracking.journal import RECORDED, Journal, JournalRecord, RunHeader
from rlhf_core.tracking.origin import origin_tags, record_folder, workspace_tags
from rlhf_core.tracking.pipeline_run import (
    ERROR_TAG,
    PARENT_TAG,
    PROCESS_TAG,
    RESULTS,
    current_experiment,
    experiment_process,
    legal_name,
    result_name,
)

logger = logging.getLogger(__name__)
DELIVERY_SECONDS = 1.0


class Tracker:
    """Where a stage sends its metrics, parameters and files; this one discards everything.

    So it is for library use, and for runs with tracking switched off.
    """

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty before there is one."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite numbers, optionally at a step; non-finite ones are left out."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings of the run."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts."""

    def log_datasets(self, datasets: Mapping[str, Mapping[str, str]]) -> None:
        """Name the data that the run reads: ``digest``, ``uri``, ``context`` and ``rows`` by name."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Label the run."""


class JournalTracker(Tracker):
    """Writes records into a journal; with a courier of its own it delivers them once a second.

    Without one the process that runs the stages delivers them, and MLflow is not even loaded here.
    """

    def __init__(
        self,
        journal: Journal,
        courier: Courier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal, self.courier, self.machine_use = journal, courier, MachineUse(clock)

    @property
    def run_id(self) -> str:
        return self.journal.header.run_id or ""

    def begin(self) -> bool:
        """Make the run on the server; False if that is away, so that records wait.

        Raises:
            RlhfError: The server does not accept the login or lets it write nothing, or the file
                cannot be opened as a database.
        """
        assert self.courier is not None
        with self.courier.attempt():
            try:
                self.courier.make_run(self.journal)
            except ServerAway as error:
                if error.status not in ACCESS_DENIED:
                    raise
                header = self.journal.header
                if error.status == FORBIDDEN:
                    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or "this login"
                    problem = (
                        f"does not let {user} write to the experiment {header.experiment} ({error}); "
                        "have its owner give the permission EDIT, name another in tracking.experiment"
                    )
                else:
                    problem = (
                        f"does not accept the login ({error}); set MLFLOW_TRACKING_USERNAME and "
                        "MLFLOW_TRACKING_PASSWORD"
                    )
                raise ConfigError(
                    f"MLflow at {header.server} {problem}, or set RLHF_TRACKING=off"
                ) from error
        return not self.courier.away

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        finite = {
            grouped(name): float(value)
            for name, value in metrics.items()
            if math.isfinite(float(value))
        }
        finite |= self.machine_use.sample()
        if finite:
            self._take(JournalRecord("metrics", finite, step or 0))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._take(
            JournalRecord("params", {name: redacted(str(value)) for name, value in params.items()})
        )

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._take(JournalRecord("artifact", {str(path): folder}))

    def log_datasets(self, datasets: Mapping[str, Mapping[str, str]]) -> None:
        shown = {}
        for name, facts in datasets.items():
            shown[name] = {key: redacted(value) for key, value in facts.items()}
        self._take(JournalRecord("datasets", shown))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._take(JournalRecord("tags", {key: redacted(value) for key, value in tags.items()}))

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """End the run.

        What waits is tried once more, and else left for the next command to deliver.
        """
        self.journal.append(JournalRecord("end", {"status": status}))
        if self.courier is not None:
            with self.courier.attempt():
                self.courier.send(self.journal)
                self.courier.finish(self.journal)
                return
            logger.warning(
                "MLflow at %s is still away: %d records wait in %s; the next stage or `rlhf run` of this workspace "
                "delivers them",
                self.journal.header.server, len(self.journal.undelivered()[0]), self.journal.folder,
            )  # fmt: skip
        self.journal.release()

    def _take(self, record: JournalRecord) -> None:
        self.journal.append(record)
        if self.courier is not None and self.courier.is_due:
            with self.courier.attempt(pause=DELIVERY_SECONDS):
                self.courier.send(self.journal)


# What MLflow's page shows together, by the first word of a curve's name.
GROUPS = (
    "reward",
    "kl",
    "policy",
    "value",
    "critic",
    "ptx",
    "selection",
    "validation",
    "sampling",
    "ratio",
    "seconds",
)
# Curves of these groups that begin with another word.
MEMBERS = {
    "replies": (
        "length",
        "length_p95",
        "repetition",
        "distinct_2",
        "missing_eos",
        "special_tokens",
        "short_replies",
        "distinct_first_sentences",
        "commonest_first_sentence",
        "commonest_reply",
        "refusals",
        "perplexity",
        "perplexity_reference",
        "entropy",
    ),
    "reward": (
        "referee_gap",
        "referee_mean",
        "moments_mean",
        "moments_std",
        "unscored",
        "group_reward_std",
        "equal_reward_groups",
    ),
    "kl": ("old_policy_kl",),
    "policy": ("clip_fraction", "early_stopped"),
    "value": ("explained_variance",),
    "sampling": (
        "sampler_gap",
        "importance_sampling_ratio_mean",
        "importance_sampling_ratio_capped",
    ),
    "ratio": ("first_ratio",),
}
GROUP_OF = {name: group for group, names in MEMBERS.items() for name in names}
OTHERS = "train"  # where every other curve stands, such as `loss`


def grouped(name: str) -> str:
    """Return the name of a metric in MLflow: ``reward_mean`` is ``reward/mean``, ``loss`` ``train/loss``.

    MLflow groups by what stands before the last slash. Results keep the names of :func:`results`.

    A win rate is named by who judges: the ones of a training are the referee's, on the prompts of
    the selection.
    """
    if name.startswith(RESULTS):
        return legal_name(name)
    if name == "kl":
        return "kl/k1"  # the estimate, beside kl_k2 and kl_k3
    if name.startswith("win_rate"):
        return f"selection/referee.{name}"
    first, _, rest = name.partition("_")
    if first == "source":  # of several sources of rewards
        return legal_name(f"reward/{name}")
    if name in GROUP_OF:
        return f"{GROUP_OF[name]}/{name}"
    return legal_name(f"{first}/{rest}" if rest and first in GROUPS else f"{OTHERS}/{name}")


# Results that only the stage's file has, which is among the run's artifacts: MLflow's pages offer
# every name of an experiment for columns and charts, and hundreds of them hide those that runs are
# compared by.
BREAKDOWN = re.compile(
    r"(?:^|\.)(?:(?:test_)?category|property|languages|group|losses|last|regression(?:_sft)?)\."
    r"|^\w+_judge\."
    r"|^best_of_n\.(?!(?:policy_)?comparison\.(?:judge|gold)\.win_rate$)"
    r"|(?<!\.judge)(?<!\.gold)\.win_rate_high95$"
    r"|multiple_choice\.accuracy_(?:low|high)95$|^agreement\.judge_pairs$"
    r"|probes\..*_(?:low95|high95|pairs)$"
    r"|\.(?:failed|warned)_"
    r"|\.(?:raw|clean|quarantined|near_duplicates_compared|longer_preferred_(?:low|high)95)$"
    r"|^(?:dropped|over_long)_\w+$"
    r"|(?:^|[._])(?:clusters\w*|groups|prompts|win|tie|lose|tie_margin|lc_share|length_balanced_pairs|(?<!checker\.)mean_difference\w*|p\d\d)$"
    r"|(?:^|\.)lc_win_rate_(?:low|high)95$"
    r"|^(?:test_)?(?:(?:margin|reward)_(?:mean|std)|ece_\w+)$"
    r"|(?:^|[._])(?:mean_\w+_chars|\w+_leaks|\w+_tokens_\d+)$"
)


# Figures that are the last value of a curve, which MLflow shows beside its name: one name is enough.
# So are the steps that PPO has skipped in each iteration.
ENDS_OF_CURVES = re.compile(
    r"^(?:explained_variance|perplexity|selected_iteration|skipped_steps|tokens_per_second"
    r"|train_(?:loss|seconds|tokens)|validation_(?:accuracy|loss|margin|implicit_reward_\w+))$"
)


def results(metrics: Mapping[str, Any], file: str = "") -> dict[str, float]:
    """Return the results of a stage by which runs are compared, as ``final/NAME``.

    Breakdowns by category, property, language or rule, what a judge says of itself, counts of rows
    before the split, bounds of probes and of length-controlled win rates, most of the best of n, and
    the ends of curves stay in the stage's file of metrics: so no name depends on the data.

    Args:
        file: The stem of that file's name, by which figures of the headline are known.
    """
    shown = {}
    for name, value in flatten(metrics).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not BREAKDOWN.search(name) and not ENDS_OF_CURVES.search(name):
            shown[result_name(file, name)] = float(value)
    return shown


CLIENT_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # it tells of each table that it makes
    # MLflow's client itself would hold a training up for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


@contextmanager
def default_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the block."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


PARENT_RUN_VARIABLE = "RLHF_PARENT_RUN_ID"
METRICS_TAG = "rlhf.metrics_sha256"  # by which the run that made a workspace's result is found


# The UI otherwise guesses from the first runs whether an experiment trains models or traces agents.
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": "Runs of the RLHF pipeline: one for each `rlhf run`, and below it one for each stage.",
}


def tracking_uri(workspace: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the workspace, see :func:`record_folder`."""
    return (
        os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{record_folder(workspace) / 'mlflow.db'}"
    )


# How to tell the drivers of databases how long to wait for an answer, and where those listen.
DRIVER_TIMEOUTS = {"postgresql": "connect_timeout", "mysql": "connect_timeout", "mssql": "timeout"}
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
DATABASE_SECONDS = 5


def database_file(uri: str) -> Path | None:
    """Return the file of a SQLite record; None for any other."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").partition("?")[0])


def require_database(uri: str) -> None:
    """Try once whether a record in a database can be opened.

    MLflow itself tries for minutes, SQLite for an hour.

    Raises:
        RlhfError: The folder of a SQLite file cannot be written to, the file is no database, or the
            database of a server does not answer or refuses the login.
    """
    dialect = uri.partition("://")[0].partition("+")[0]
    if dialect in DRIVER_TIMEOUTS:
        _require_answer(uri, dialect)
    database = database_file(uri)
    if database is None:
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master")
    except (sqlite3.Error, OSError) as error:
        if is_full_disk(error):
            raise
        raise RlhfError(
            f"the record {database} cannot be opened ({first_line(error)}); give yourself the right to it, restore it "
            "from a backup, or name another in MLFLOW_TRACKING_URI"
        ) from error


def _require_answer(uri: str, dialect: str) -> None:
    """Connect once to the database of a server; ``RlhfError`` if it does not answer in seconds."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        url = make_url(uri)
        if url.host:  # the timeouts of some drivers begin after that
            socket.create_connection(
                (url.host, url.port or DATABASE_PORTS[dialect]), DATABASE_SECONDS
            ).close()
        engine = create_engine(url, connect_args={DRIVER_TIMEOUTS[dialect]: DATABASE_SECONDS})
        with engine.connect():
            pass
        engine.dispose()
    except ImportError as error:
        raise RlhfError(
            f"MLFLOW_TRACKING_URI names a database of {dialect}, and {error.name} is missing"
        ) from error
    except (SQLAlchemyError, OSError, ValueError) as error:
        raise RlhfError(
            f"the record {address(uri)} does not answer ({first_line(error)}); start the database, or mend or unset "
            "MLFLOW_TRACKING_URI"
        ) from error


def experiment_id(client: Any, workspace: Path, name: str) -> str:
    """Return the id of the experiment ``name``, made on first use.

    Artifacts go to ``mlartifacts/`` unless a server decides.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = tracking_uri(workspace).startswith("sqlite:")
    try:
        location = (record_folder(workspace) / "mlartifacts").as_uri() if local else None
        return str(client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
    except MlflowException:  # another process may have made it meanwhile
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


@contextmanager
def stage_tracker(stage: str, workspace: Path, experiment: str) -> Iterator[Tracker]:
    """Open a run for one stage, a child of the run of the pipeline or the DVC experiment.

    Without either it stands alone.

    ``RLHF_TRACKING=off`` switches it off. The run ends as FINISHED, as KILLED when it is preempted,
    or as FAILED when the block raises anything else. While its server is away, what is recorded
    waits in ``.rlhf/tracking`` of the workspace, and the stage goes on. So does everything where
    ``RLHF_TRACKING_DEFERRED`` says that another process delivers it: the stage then never loads
    MLflow.

    Raises:
        RlhfError: The server does not accept the login, or the file cannot be opened as a database.
    """
    if os.environ.get("RLHF_TRACKING") == "off":
        yield Tracker()
        return
    uri, of_workspace = tracking_uri(workspace), {"workspace": workspace.resolve().name}
    tags = {"stage": stage, "rlhf.stage": stage}
    if os.environ.get(PARENT_RUN_VARIABLE):
        tags[PARENT_TAG] = os.environ[PARENT_RUN_VARIABLE]
    elif below := current_experiment():
        of_workspace = workspace_tags(workspace)
        tags |= below | {PROCESS_TAG: experiment_process()}
    name = f"{stage} · {of_workspace['workspace']} · {datetime.now():%Y-%m-%d %H:%M:%S}"
    tags |= {"mlflow.runName": name, **of_workspace}
    tags |= origin_tags(workspace, f"rlhf stage {stage}")
    tags = {key: redacted(value) for key, value in tags.items()}
    deferred = bool(os.environ.get(DEFERRED_VARIABLE))
    journal = Journal.new(
        workspace,
        RunHeader(address(uri), None, experiment, tags, RECORDED.now(), deferred),
    )
    with nullcontext() if deferred else default_environment(CLIENT_SETTINGS):
        tracker = JournalTracker(journal) if deferred else _begun(journal, workspace, uri)
        try:
            yield tracker
        except (Preempted, StopNow):
            tracker.end("KILLED")
            raise
        except BaseException as error:
            tracker.set_tags({ERROR_TAG: first_line(error)})
            tracker.end("FAILED")
            raise
        tracker.end("FINISHED")


def _begun(journal: Journal, workspace: Path, uri: str) -> JournalTracker:
    """A tracker with a client; what earlier runs left is delivered first."""
    with paused_collector(), LockFile(workspace / ".rlhf" / "mlflow.lock") as lock:
        from mlflow import MlflowClient  # and more libraries when the client is made

        require_database(uri)
        # Two processes that create the schema at once fail with "duplicate column name".
        lock.acquire()
        client = MlflowClient(uri)

        def own_experiment() -> str:
            return experiment_id(client, workspace, journal.header.experiment)

        courier = Courier(client, own_experiment, workspace, uri)
        tracker = JournalTracker(journal, courier)
        if tracker.begin():
            courier.deliver_waiting()
    return tracker


VARIABLE = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"  # MLflow's own, for runs that it samples itself
INTERVAL_VARIABLE = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
SECONDS = 10.0
MEGABYTE = 1e6


class MachineUse:
    """Samples processors, memory and GPUs at the steps of a stage's own metrics.

    Nothing is sampled unless :data:`VARIABLE` is ``true``. MLflow's own sampler needs the run's
    server, which a stage does not talk to while another process delivers its records.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.enabled = os.environ.get(VARIABLE, "").lower() in ("true", "1")
        self.interval = float(os.environ.get(INTERVAL_VARIABLE) or SECONDS)
        self._next = clock()
        if self.enabled:
            psutil.cpu_percent()  # the next call says how much since this one

    def sample(self) -> dict[str, float]:
        """The metrics, empty until the interval since the last sample is over."""
        if not self.enabled or self.clock() < self._next:
            return {}
        self._next = self.clock() + self.interval
        memory = psutil.virtual_memory()
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": memory.percent,
            **_gpu_use(),
        }


def _gpu_use() -> dict[str, float]:
    """Return memory and load of the GPUs of this process; load needs ``nvidia-ml-py``."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    use: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        use[f"system/gpu_{number}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        use[f"system/gpu_{number}_memory_usage_percentage"] = 100 * (total - free) / total
        try:
            use[f"system/gpu_{number}_utilization_percentage"] = float(
                torch.cuda.utilization(number)
            )
        except (ImportError, RuntimeError):
            continue
    return use
