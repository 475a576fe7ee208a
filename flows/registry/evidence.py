"""What a version is registered with: gates, data card, lineage, and what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.dvc_repo.graph import (
    StageNode,
    all_before,
    describe_changes,
    recorded_hash,
    recorded_stages,
)
from flows.registry.client import connect, has_record, registry_errors
from rlhf_core.config.loading import PARAMS_FILE, load_section
from rlhf_core.config.operations import RegistryConfig, TrackingConfig
from rlhf_core.errors import GateFailed, RlhfError
from rlhf_core.gates import (
    JUDGED_TAG,
    REPORT_MODE,
    GateDecision,
    read_gate,
)
from rlhf_core.git import NO_REVISION
from rlhf_core.storage.files import flatten, read_json, sha256_file
from rlhf_core.tracking.origin import (
    COMMIT_TAG,
    PACKAGE_COMMIT_TAG,
    PACKAGE_VERSION_TAG,
    REPOSITORY_TAG,
    origin_tags,
)
from rlhf_core.tracking.pipeline_run import PARENT_TAG, RESULTS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


ALWAYS_CHANGED = "always changed"


def read_gate_evidence(workspace: Path, gate: str) -> GateDecision:
    """The report of ``gate``; a gate that only reports (``mode: report``) may have failed.

    Raises :class:`GateFailed` when there is no evidence, when an enforced gate failed, or when a
    judged file has changed since.
    """
    report = read_gate(workspace, gate)
    if report is None:
        raise GateFailed(
            f"gates/{gate}.json does not exist: the {gate} gate has not judged this workspace; run `rlhf run`"
        )
    if not report.evidence:
        raise GateFailed(
            f"gates/{gate}.json names no evidence, so it cannot vouch for a model; run `rlhf run` again"
        )
    if changed := report.changed_evidence(workspace):
        raise GateFailed(
            f"{changed[0]} is not the file that the {gate} gate judged; run `rlhf run` to judge it anew"
        )
    if (objection := report.objection()) and report.mode != REPORT_MODE:
        raise GateFailed(objection)
    return report


def require_recorded(graph: Mapping[str, StageNode], stale: Mapping[str, Any], stage: str) -> None:
    """``GateFailed`` unless ``stage`` and all before it have left what dvc.lock records.

    Args:
        stale: What ``dvc status`` says of the workspace.
    """
    relevant = {stage} | all_before(graph, stage)
    changed = []
    for name, said in stale.items():
        if name in relevant and said != [ALWAYS_CHANGED]:
            changed.append(f"{name}: {describe_changes(said)}")
    if changed:
        raise GateFailed(
            f"the files are not what dvc.lock records ({'; '.join(changed)}); run `rlhf run` to bring them up to date"
        )


def count_policy_decisions(workspace: Path) -> tuple[int, str]:
    """Return how many evaluations of this policy its gate has judged, and in which experiment.

    Trials under ``workspaces/`` are recorded with their base, so they count together, unless they
    register their policy under another name. An evaluation that was judged again, by other bounds,
    is the same try.

    Raises:
        RlhfError: MLflow does not answer.
    """
    name = load_section(workspace, "tracking", TrackingConfig).experiment
    if not has_record(workspace):
        return 0, name
    client = connect(workspace)
    with registry_errors(client, f"count the decisions of experiment {name}"):
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return 0, name
        ids = [experiment.experiment_id]
        policy = load_section(workspace, "registry", RegistryConfig).policy
        others = client.search_runs(
            ids, f"params.`registry.policy` != '{policy}'", max_results=MOST_RUNS
        )
        runs = client.search_runs(ids, f"tags.`{JUDGED_TAG}` != ''", max_results=MOST_RUNS)
    of_others = {run.info.run_id for run in others}
    own = [run.data.tags for run in runs if run.data.tags.get(PARENT_TAG) not in of_others]
    return len({tags[JUDGED_TAG] for tags in own}), name


MOST_RUNS = 10_000  # that are counted
# Without texts of the data. In MLflow it lies in a folder of the same name.
DATA_CARD = Path("data/card/release.md")


def read_data_card(client: MlflowClient, run_id: str, temporary: Path) -> str:
    """Return the data card of a run, whose file goes to ``temporary``; empty if it has none."""
    if all(artifact.path != DATA_CARD.parent.name for artifact in client.list_artifacts(run_id)):
        return ""
    name = f"{DATA_CARD.parent.name}/{DATA_CARD.name}"
    return Path(client.download_artifacts(run_id, name, str(temporary))).read_text(encoding="utf-8")


def lineage_tags(workspace: Path) -> dict[str, str]:
    """Where the models of a workspace come from, as tags of a version.

    The git revision is the workspace's, in ``git_repository`` where that has a remote. It is "none"
    outside a repository and ends in "-dirty" where tracked files but dvc.lock differ. The package,
    which may come from another repository, has a version and a commit of its own. The data have
    DVC's hash of the clean data.

    Raises:
        RlhfError: There was no complete run yet (no dvc.lock).
    """
    lock = workspace / "dvc.lock"
    if not lock.is_file():
        raise RlhfError(
            f"{lock} does not exist, so nothing says what made the models; run `rlhf run` first"
        )
    origin = origin_tags(workspace, "rlhf run")
    tags = {
        "lineage.workspace": workspace.resolve().name,
        "lineage.git_revision": origin.get(COMMIT_TAG, NO_REVISION),
        "lineage.dvc_lock_sha256": sha256_file(lock),
        "lineage.data": recorded_hash(workspace, "data/clean") or "unknown",
        "lineage.params_sha256": sha256_file(workspace / PARAMS_FILE),
    }
    for name, tag in LINEAGE_OF_ORIGIN.items():
        if tag in origin:
            tags[name] = origin[tag]
    return tags


LINEAGE_OF_ORIGIN = {
    "lineage.git_repository": REPOSITORY_TAG,
    "lineage.package_version": PACKAGE_VERSION_TAG,
    "lineage.package_commit": PACKAGE_COMMIT_TAG,
}
SOURCE, BASE, HAS_PAIRS = "collect.source", "base.source", "collect.pairs"
PAIRS = "preferences.train"  # of the reward model; the referee has others
PROMPTS = "prompts.train"
# The names by which the run of a registration has those counts of metrics/data.json.
ROW_COUNTS = {name: f"{RESULTS}data.{name}" for name in (PAIRS, PROMPTS)}
WORLD, SCRATCH = "world", "scratch"


@dataclass(frozen=True)
class TrainingSource:
    """The data and the starting model behind a policy.

    Attributes:
        collect: ``world`` for the synthetic world, ``files`` for the user's own.
        base: ``scratch``, a folder or a hub id.
        files: The files of preference pairs, or of prompts where there are none, as params.yaml
            names them.
        rows: How many preference pairs the reward model could train on, or prompts; None if
            unknown.
        of_pairs: Whether there were preference pairs.
    """

    collect: str
    base: str
    files: str
    rows: int | None
    of_pairs: bool = True

    @property
    def is_synthetic(self) -> bool:
        """Whether the data are those of the synthetic world."""
        return self.collect == WORLD

    @property
    def hub_id(self) -> str:
        """The starting model where everybody can load it; empty for files and random weights."""
        is_path = self.base.startswith((".", "/", "~")) or self.base.endswith(".gguf")
        return self.base if self.base.count("/") == 1 and not is_path else ""

    def __str__(self) -> str:
        """``5,998 preference pairs of the synthetic world; base: random weights``."""
        rows = "preference pairs" if self.of_pairs else "prompts with a reward function"
        if self.rows is not None:
            rows = f"{self.rows:,} {rows}"
        data = "of the synthetic world" if self.is_synthetic else f"from {self.files or 'files'}"
        base = "random weights" if self.base == SCRATCH else self.base
        return f"{rows} {data}; base: {base}"


def source_of_version(client: MlflowClient, version: ModelVersion) -> TrainingSource | None:
    """Read what ``version`` was trained on from its pipeline run; None if MLflow has no such run."""
    from mlflow.exceptions import MlflowException

    if not version.run_id:
        return None
    try:
        own = client.get_run(version.run_id).data
        parent = client.get_run(own.tags[PARENT_TAG]).data
    except (MlflowException, KeyError):
        return None
    rows = {name: own.metrics.get(logged) for name, logged in ROW_COUNTS.items()}
    return _source(parent.params, rows)


def source_of_workspace(workspace: Path) -> TrainingSource | None:
    """Read what the models were trained on from dvc.lock; None before the first run."""
    stages = recorded_stages(workspace)
    params: dict[str, Any] = {}
    for name in ("collect", "base"):
        if name in stages:
            params |= flatten(stages[name].params)
    try:
        rows = flatten(read_json(workspace / "metrics" / "data.json"))
    except RlhfError:
        rows = {}
    return _source(params, rows)


def _source(params: Mapping[str, Any], rows: Mapping[str, float | None]) -> TrainingSource | None:
    if not {SOURCE, BASE} <= set(params):
        return None
    of_pairs = str(params.get(HAS_PAIRS, True)) != "False"  # MLflow has parameters as texts
    kind, rows_of_kind = ("preferences", PAIRS) if of_pairs else ("prompts", PROMPTS)
    files = str(params.get(f"collect.files.{kind}") or "").strip("[]").replace("'", "")
    count = rows.get(rows_of_kind)
    known = None if count is None else int(count)
    return TrainingSource(str(params[SOURCE]), str(params[BASE]), files, known, of_pairs)
