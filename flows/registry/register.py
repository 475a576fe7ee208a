"""Registration: a version is made only of files that every gate upstream has judged."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.dvc_repo.graph import dvc_status, read_graph, recorded_hash
from flows.registry.client import (
    CHALLENGER,
    CONDITIONS_TAG,
    CONTENT_TAG,
    GATE_REPORT_TAG,
    GATES_FAILED,
    GATES_PASSED,
    GATES_TAG,
    REWARD_VERSION_TAG,
    SIGNED_TAGS,
    UNGATED_TAG,
    experiment_id,
    fluent,
    registry_errors,
    registry_of_record,
    versions,
)
from flows.registry.decisions import TAG_LIMIT, commit, new_entry, registry_session
from flows.registry.evidence import (
    DATA_CARD,
    ROW_COUNTS,
    lineage_tags,
    read_gate_evidence,
    require_recorded,
)
from flows.registry.history import ReleaseState
from flows.registry.policies import RegistryPolicy, active_policies
from flows.registry.promote import gate_conditions, short_conditions
from flows.registry.stored_models import COMPLETE_TAG, known_version, log_model, own_package
from flows.workspace import PRIVATE, SEPARATOR, private_path, run_label
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import DataError, GateFailed, ModelError, RlhfError
from rlhf_core.gates import GATES, GateDecision
from rlhf_core.storage.files import (
    atomic_write_json,
    flatten,
    read_json,
    sha256_file,
    sha256_tree,
)
from rlhf_core.tracking.origin import origin_tags
from rlhf_core.tracking.pipeline_run import (
    PARENT_TAG,
    headline_results,
    log_data_input,
    log_numbers,
    recorded_params,
)
from rlhf_core.tracking.stage_run import METRICS_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegistrableModel:
    """A model folder of the workspace that may be registered.

    ``stage`` trains it. ``gates`` are all gates upstream of it, its own last; ``gate_stage`` is the
    stage that runs its own gate, which all stages that made the model come before.
    """

    kind: str
    name: str
    stage: str
    gates: tuple[str, ...]
    gate_stage: str

    @property
    def folder(self) -> str:
        """Where the workspace has it."""
        return f"models/{self.kind}"


REGISTERED = "registered.json"


@dataclass(frozen=True)
class RegisteredHere:
    """The version that holds a model folder of the workspace.

    ``ungated`` says why no gate vouches for it. ``reused``: the same content had a version already.
    """

    model: str
    version: str
    ungated: str = ""
    reused: bool = False


def write_registered(workspace: Path, versions: Mapping[str, RegisteredHere]) -> None:
    """Record the version of each model folder, with the hash that dvc.lock has for the folder.

    The numbers are those of the registry that is used now.
    """
    registry = registry_of_record(workspace)
    kept = {}
    for folder, registered in versions.items():
        kept[folder] = {
            "model": registered.model,
            "version": registered.version,
            "ungated": registered.ungated,
            "dvc": recorded_hash(workspace, folder),
            "registry": registry,
        }
    atomic_write_json(private_path(workspace, REGISTERED), kept)


def read_registered(workspace: Path, folder: str) -> RegisteredHere | None:
    """Return the version made of the content that ``folder`` has by dvc.lock.

    None without one in the registry that is used now.
    """
    try:
        entry: Mapping[str, Any] | None = read_json(workspace / PRIVATE / REGISTERED).get(folder)
    except DataError:
        return None
    if entry is None or entry["dvc"] is None or entry["dvc"] != recorded_hash(workspace, folder):
        return None
    if entry.get("registry") != registry_of_record(workspace):
        return None
    return RegisteredHere(entry["model"], entry["version"], entry["ungated"])


@dataclass
class Registration:
    """What was registered and what was refused, by the name of the registered model."""

    registered: dict[str, RegisteredHere] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def challenger(self, name: str) -> str | None:
        """The version of ``name`` that may be promoted, None if none was registered."""
        entry = self.registered.get(name)
        return None if entry is None or entry.ungated else entry.version

    def describe(self) -> str:
        """What was registered and what was refused, in one line."""
        parts = []
        for entry in self.registered.values():
            said = f"{entry.model} version {entry.version}"
            if entry.reused:
                said += " (as before)"
            if entry.ungated:
                said += f", ungated ({entry.ungated}): no challenger"
            parts.append(said)
        for name, reason in self.refused.items():
            parts.append(f"{name} not registered: {reason}")
        return "; ".join(parts)


def registrable_models(
    config: RegistryConfig, left_out: Collection[str] = ()
) -> tuple[RegistrableModel, ...]:
    """Reward model and policy, in the order in which they are registered.

    Args:
        left_out: The stages that the workspace does without: neither are there their models, nor
            their gates.
    """
    gates = tuple(gate for gate in GATES if f"gate-{gate}" not in left_out)
    models = (
        RegistrableModel("reward", config.reward_model, "reward", GATES[:3], "gate-reward"),
        RegistrableModel("policy", config.policy, "ppo", gates, "gate-policy"),
    )
    return tuple(model for model in models if model.stage not in left_out)


class NotRegistered(RlhfError):
    """A model is not registered as it is now, so a registration has something to do."""


def register(
    workspace: Path, run_id: str | None = None, *, known_only: bool = False
) -> Registration:
    """Register the reward model and the policy of a workspace and set ``@challenger``.

    A model is refused unless all gates upstream have passed on the files as they are. Where gates
    only report (``gates.mode: report``) and one of them failed, the version is registered as
    ungated: it is no challenger, and only a forced promotion with a reason makes it champion. The
    same content is registered once: its version is used again while the store has its files.

    Args:
        run_id: The pipeline run that the registration belongs to.
        known_only: Change nothing; the stages of the workspace must be up to date.

    Raises:
        NotRegistered: With ``known_only``, where anything would be changed.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    policies = [(policy, policy.version_tags(config)) for policy in active_policies(config)]
    result = Registration()
    versions_here: dict[str, RegisteredHere] = {}
    with registry_session(workspace) as policy:
        graph, stale = read_graph(workspace), {} if known_only else dvc_status(workspace)
        reward_version: dict[str, str] = {}
        for model in registrable_models(policy.config, load_params(workspace).left_out):
            try:
                evidence = [read_gate_evidence(workspace, gate) for gate in model.gates]
                require_recorded(graph, stale, model.gate_stage)
                tags = lineage_tags(workspace) | reward_version
                tags |= _gate_tags(workspace, model, evidence)
                version = _register_one(
                    policy.client, workspace, model, evidence, tags, run_id, policies, known_only
                )
            except GateFailed as error:
                result.refused[model.name] = str(error)
                continue
            result.registered[model.name] = versions_here[model.folder] = version
            reward_version = {REWARD_VERSION_TAG: version.version}
    write_registered(workspace, versions_here)
    return result


def _gate_tags(
    workspace: Path, model: RegistrableModel, evidence: Sequence[GateDecision]
) -> dict[str, str]:
    """What gates said: whether all passed, by which conditions, and the report of the last one."""
    conditions = gate_conditions(workspace)
    own = evidence[-1]
    content = own.as_dict()
    report = json.dumps(content, sort_keys=True)
    if len(report) > TAG_LIMIT:  # the run has the whole
        report = json.dumps({**content, "conditions": len(own.conditions)}, sort_keys=True)
    asked = short_conditions({name: conditions[name] for name in model.gates})
    tags = {
        GATES_TAG: GATES_PASSED,
        GATE_REPORT_TAG: report[:TAG_LIMIT],
        CONDITIONS_TAG: json.dumps(asked),
    }
    objections = [gate.objection() for gate in evidence if not gate.passed]
    if objections:
        tags[GATES_TAG] = GATES_FAILED
        tags[UNGATED_TAG] = "; ".join(objections)[:TAG_LIMIT]
    return tags


def _register_one(
    client: MlflowClient,
    workspace: Path,
    model: RegistrableModel,
    evidence: Sequence[GateDecision],
    tags: Mapping[str, str],
    run_id: str | None,
    policies: Sequence[tuple[RegistryPolicy, dict[str, str]]],
    known_only: bool,
) -> RegisteredHere:
    """Find or make the version of a model, bring its tags up to date, and make it challenger."""
    from mlflow.exceptions import MlflowException

    name, folder = model.name, workspace / model.folder
    content, listed = sha256_tree(folder), versions(client, name)
    known = known_version(client, workspace, listed, folder, content)
    state = ReleaseState.read(client, workspace, name)
    ungated = tags.get(UNGATED_TAG, "")
    borne = {} if known is None else known.tags
    changed = []
    if known is not None:  # the bounds of gates may have changed since it was made
        changed = [key for key in SIGNED_TAGS if borne.get(key) != tags.get(key)]
    waiting = []
    for policy, marks in policies:
        if changed or not marks.items() <= borne.items():
            waiting.append((policy, marks))
    challenger = state.aliases.get(CHALLENGER)
    if known_only:
        is_challenger = known is not None and challenger == str(known.version)
        if known is None or changed or waiting or not (ungated or is_challenger):
            raise NotRegistered(f"{name} is not registered as it is now; `rlhf run` registers it")
    if known is not None and waiting:
        try:
            own_package(client, workspace, known)
        except ModelError as error:
            LOGGER.warning("%s", error)
            known = None  # its files are the same, and nobody can vouch for the rest: a new version is made
    if state.model is None:
        with registry_errors(client, f"create the registered model {name}"):
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
    if known is None:
        number = _create_version(
            client, workspace, model, evidence, {CONTENT_TAG: content, **tags}, run_id
        )
    else:
        number = str(known.version)
    with registry_errors(client, f"update {name} version {number}"):
        # What policies said of other tags is void, also if this call is killed before they are
        # asked again.
        void: set[str] = set()
        for _, marks in waiting:
            void |= marks.keys() & borne.keys()
        for key in sorted(void):
            client.delete_model_version_tag(name, number, key)
        for key in changed:
            if key in tags:
                client.set_model_version_tag(name, number, key, tags[key])
            else:
                client.delete_model_version_tag(name, number, key)
        for policy, marks in waiting:
            policy.register_version(
                client, workspace, client.get_model_version(name, number), content, tags
            )
            for key, value in marks.items():
                client.set_model_version_tag(name, number, key, value)
    if not ungated and challenger != number:
        reason = "its content was registered before" if known else "registered"
        entry = new_entry(name, "register", reason, moves=[(name, CHALLENGER, number)])
        if state.model is None:
            state = ReleaseState.read(client, workspace, name)
        commit(state, entry)
    return RegisteredHere(name, number, ungated, reused=known is not None)


def _create_version(
    client: MlflowClient,
    workspace: Path,
    model: RegistrableModel,
    evidence: Sequence[GateDecision],
    tags: Mapping[str, str],
    run_id: str | None,
) -> str:
    """Log the model in a run of its own, with its evidence, then make the version; its number.

    MLflow's module-level functions would add commit and repository of the folder that the program
    lies in.
    """
    label = run_label(workspace, load_params(workspace).profile, datetime.now())
    origin = origin_tags(workspace, "rlhf run")
    run_tags = {"mlflow.runName": f"register {model.name}{SEPARATOR}{label}", **origin}
    if run_id:
        run_tags[PARENT_TAG] = run_id
    experiment = experiment_id(client, workspace)
    names: dict[str, None] = {}
    for gate in evidence:
        names.update(dict.fromkeys(gate.evidence))
    files = [workspace / name for name in names]
    metrics = {path.stem: read_json(path) for path in files}
    # The numbers by which versions are compared; the files are beside them as artifacts.
    compared = headline_results(metrics)
    rows = flatten(metrics.get("data", {}))
    for name, shown_as in ROW_COUNTS.items():
        compared[shown_as] = rows.get(name)
    with registry_errors(client, f"register {model.name}"), fluent(workspace):
        own_run = str(client.create_run(experiment, tags=run_tags).info.run_id)
        status = "FAILED"
        try:
            logged = client.create_logged_model(
                experiment,
                model.kind,
                source_run_id=training_run(client, workspace, model.stage) or own_run,
                tags=origin,
                params=recorded_params(workspace),
            )
            uri = log_model(workspace, model.folder, tags[CONTENT_TAG], logged, own_run)
            for gate in evidence:
                report = workspace / "gates" / f"{gate.name}.json"
                client.log_artifact(own_run, str(report), "gates")
            for path in files:
                client.log_artifact(own_run, str(path), "metrics")
            if (workspace / DATA_CARD).is_file():
                client.log_artifact(own_run, str(workspace / DATA_CARD), DATA_CARD.parent.name)
            log_data_input(client, own_run, workspace)
            log_numbers(client, own_run, compared, logged.model_id)
            version = client.create_model_version(
                model.name,
                uri,
                own_run,
                tags={**tags, COMPLETE_TAG: "true"},
                model_id=logged.model_id,
            )
            status = "FINISHED"
        finally:
            client.set_terminated(own_run, status)
    return str(version.version)


def training_run(client: MlflowClient, workspace: Path, stage: str) -> str | None:
    """The newest run of ``stage`` that made the metrics of the workspace; None if MLflow has none.

    A result that DVC takes from its cache was made by an earlier run, maybe of another workspace.
    """
    metrics = workspace / "metrics" / f"{stage}.json"
    if not metrics.is_file():
        return None
    made = f"tags.`rlhf.stage` = '{stage}' and tags.`{METRICS_TAG}` = '{sha256_file(metrics)}'"
    newest = client.search_runs([experiment_id(client, workspace)], made, max_results=1)
    return str(newest[0].info.run_id) if newest else None
