"""Registration: a model version is made from evidence that every gate upstream has judged these very files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.aliases import CHALLENGER, aliases_of, read_aliases, registered_model, registry_errors, versions
from flows.registry.client import connect, experiment_id, flatten, fluent, log_data_input, log_numbers
from flows.registry.decisions import AliasMove, AliasTransaction, commit
from flows.registry.evidence import (
    GATES,
    Freshness,
    GateEvidence,
    gate_conditions,
    lineage_tags,
    log_data_card,
    read_gate_evidence,
    short_conditions,
)
from flows.registry.history import read_history
from flows.registry.session import registry_session
from flows.registry.signing import SIGNER_TAG, Signer, require_signer, sign_version
from flows.registry.stored_models import COMPLETE_TAG, CONTENT_TAG, known_version, log_model
from flows.registry.workspace import RegisteredHere, write_registered
from flows.workspace.folder import SEPARATOR, run_label
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import GateFailed
from rlhf_core.storage.files import read_json, sha256_file, sha256_tree
from rlhf_core.tracking.stage_run import METRICS_TAG, origin_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


REWARD_VERSION_TAG = "reward_model_version"
GATES_TAG, UNGATED_TAG, GATE_REPORT_TAG = "gates", "ungated", "gate"
CONDITIONS_TAG = "gate_conditions"
GATES_PASSED, GATES_FAILED = "passed", "ungated"
TAG_LIMIT = 5000  # MLflow refuses longer values


@dataclass(frozen=True)
class RegistrableModel:
    """A model folder of the workspace that may be registered.

    ``stage`` trains it. ``gates`` are all gates upstream of it, its own last; ``gate_stage`` is the stage that runs its
    own gate, which all stages that made the model come before.
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


@dataclass(frozen=True)
class RegisteredVersion:
    """``reused``: the same content had a version already. ``ungated`` says why no gate vouches for it, else empty."""

    version: str
    content_sha256: str
    reused: bool = False
    ungated: str = ""


@dataclass
class Registration:
    """What was registered and what was refused, by the name of the registered model."""

    registered: dict[str, RegisteredVersion] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def challenger(self, name: str) -> str | None:
        """The version of ``name`` from this registration that may be promoted, None if there is none."""
        entry = self.registered.get(name)
        return None if entry is None or entry.ungated else entry.version

    def describe(self) -> str:
        """What was registered and what was refused, in one line."""
        parts = [
            f"{name} version {entry.version}{' (as before)' if entry.reused else ''}"
            f"{f', ungated ({entry.ungated}): no challenger' if entry.ungated else ''}"
            for name, entry in self.registered.items()
        ]
        parts += [f"{name} not registered: {reason}" for name, reason in self.refused.items()]
        return "; ".join(parts)


def registrable_models(config: RegistryConfig) -> tuple[RegistrableModel, RegistrableModel]:
    """Reward model and policy, in the order in which they are registered."""
    return (
        RegistrableModel("reward", config.reward_model, "reward", GATES[:3], "gate-reward"),
        RegistrableModel("policy", config.policy, "ppo", GATES, "gate-policy"),
    )


def register(workspace: Path, run_id: str | None = None) -> Registration:
    """Register the reward model and the policy of a workspace and set ``@challenger``.

    A model is refused unless all gates upstream have passed on the files as they are. Where gates only report
    (``gates.mode: report``) and one of them failed, the version is registered as ungated: it is no challenger, and only
    a forced promotion with a reason makes it champion. The same content is registered once: its version is used again
    while the store has its files.
    ``run_id`` is the pipeline run that the registration belongs to.
    """
    workspace = workspace.resolve()
    signer = require_signer(load_section(workspace, "registry", RegistryConfig).signature)
    result = Registration()
    with registry_session(workspace) as session:
        client, config = session.client, session.config
        freshness = Freshness.of(workspace)
        reward_version: dict[str, str] = {}
        for model in registrable_models(config):
            try:
                evidence = [read_gate_evidence(workspace, gate) for gate in model.gates]
                freshness.require(model.gate_stage)
                tags = {
                    **lineage_tags(workspace),
                    **reward_version,
                    **_gate_tags(workspace, model, evidence),
                }
                version = _register_one(client, workspace, model, evidence, tags, run_id, signer)
            except GateFailed as error:
                result.refused[model.name] = str(error)
                continue
            result.registered[model.name] = version
            reward_version = {REWARD_VERSION_TAG: version.version}
    outcomes = ((model, result.registered.get(model.name)) for model in registrable_models(config))
    registered = {
        model.folder: RegisteredHere(model.name, version.version, version.ungated)
        for model, version in outcomes
        if version is not None
    }
    write_registered(workspace, registered)
    return result


def registered_before(workspace: Path) -> Registration | None:
    """What :func:`register` would find registered; None if it would change anything.

    The stages of the workspace must be up to date.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    client = connect(workspace)
    signer = require_signer(config.signature)
    result = Registration()
    for model in registrable_models(config):
        try:
            evidence = [read_gate_evidence(workspace, gate) for gate in model.gates]
        except GateFailed as error:
            result.refused[model.name] = str(error)
            continue
        content = sha256_tree(workspace / model.folder)
        known = known_version(client, workspace, versions(client, model.name), workspace / model.folder, content)
        tags = _gate_tags(workspace, model, evidence)
        if known is None or _changed_gate_tags(known, tags) or not _is_signed(known, signer):
            return None
        ungated = tags.get(UNGATED_TAG, "")
        if not ungated and read_aliases(client, model.name).get(CHALLENGER) != str(known.version):
            return None
        result.registered[model.name] = RegisteredVersion(str(known.version), content, reused=True, ungated=ungated)
    return result


def _gate_tags(workspace: Path, model: RegistrableModel, evidence: Sequence[GateEvidence]) -> dict[str, str]:
    """What a version says of its gates and of their conditions."""
    gates = gate_conditions(workspace)
    return {**gate_tags(evidence), CONDITIONS_TAG: json.dumps(short_conditions({n: gates[n] for n in model.gates}))}


def _register_one(
    client: MlflowClient,
    workspace: Path,
    model: RegistrableModel,
    evidence: Sequence[GateEvidence],
    tags: Mapping[str, str],
    run_id: str | None,
    signer: Signer | None,
) -> RegisteredVersion:
    content = sha256_tree(workspace / model.folder)
    listed = versions(client, model.name)
    known = known_version(client, workspace, listed, workspace / model.folder, content)
    if not listed:
        _ensure_registered_model(client, model.name)
    if known is None:
        number = _create_version(client, workspace, model, evidence, {CONTENT_TAG: content, **tags}, run_id)
    else:
        number = str(known.version)
        _refresh_gate_tags(client, known, tags)
    if signer is not None and (known is None or not _is_signed(known, signer)):
        _sign(client, workspace, model, number, signer)
    ungated = tags.get(UNGATED_TAG, "")
    registered = registered_model(client, model.name)
    if not ungated and aliases_of(registered).get(CHALLENGER) != number:
        move = AliasMove(model.name, CHALLENGER, number)
        reason = "its content was registered before" if known else "registered"
        transaction = AliasTransaction(model.name, (move,), action="register", reason=reason)
        commit(client, workspace, transaction, read_history(client, model.name, registered), registered)
    return RegisteredVersion(number, content, reused=known is not None, ungated=ungated)


def _sign(client: MlflowClient, workspace: Path, model: RegistrableModel, number: str, signer: Signer) -> None:
    """Sign a version whose content is that of the workspace's folder, and then say so in a tag."""
    with registry_errors(f"sign {model.name} version {number}"):
        run_id = str(client.get_model_version(model.name, number).run_id)
        sign_version(client, run_id, workspace / model.folder, signer)
        client.set_model_version_tag(model.name, number, SIGNER_TAG, signer.id)


def _is_signed(version: ModelVersion, signer: Signer | None) -> bool:
    """Whether a version needs no signature of this signer, because it has one or there is no signer."""
    return signer is None or version.tags.get(SIGNER_TAG) == signer.id


def gate_tags(evidence: Sequence[GateEvidence]) -> dict[str, str]:
    """What a version says of its gates: whether all passed, why not, and the report of its own gate (the last)."""
    failures = "; ".join(gate.failed for gate in evidence if gate.failed)
    tags = {GATES_TAG: GATES_FAILED if failures else GATES_PASSED, GATE_REPORT_TAG: gate_summary(evidence[-1].report)}
    return tags | ({UNGATED_TAG: failures[:TAG_LIMIT]} if failures else {})


def gate_summary(report: Mapping[str, Any]) -> str:
    """The gate's report as JSON that fits in a tag: without the reasons, or the conditions, where it is too long."""
    short = [{k: c.get(k) for k in ("metric", "value", "bound", "passed")} for c in report["conditions"]]
    for content in (dict(report), {**report, "conditions": short}, {**report, "conditions": len(short)}):
        text = json.dumps(content, sort_keys=True)
        if len(text) <= TAG_LIMIT:
            break
    return text[:TAG_LIMIT]


def _changed_gate_tags(version: ModelVersion, tags: Mapping[str, str]) -> dict[str, str | None]:
    """The tags about gates that a version must get, None for one to remove: bounds may have changed since it was made.

    ``tags`` are what they say now.
    """
    names = (GATES_TAG, UNGATED_TAG, GATE_REPORT_TAG, CONDITIONS_TAG)
    changed: dict[str, str | None] = {
        name: tags[name] for name in names if name in tags and version.tags.get(name) != tags[name]
    }
    return changed | ({UNGATED_TAG: None} if UNGATED_TAG in version.tags and UNGATED_TAG not in tags else {})


def _refresh_gate_tags(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    number = str(version.version)
    with registry_errors(f"update the tags of {version.name} version {number}"):
        for key, value in _changed_gate_tags(version, tags).items():
            if value is None:
                client.delete_model_version_tag(version.name, number, key)
            else:
                client.set_model_version_tag(version.name, number, key, value)


def _create_version(
    client: MlflowClient,
    workspace: Path,
    model: RegistrableModel,
    evidence: Sequence[GateEvidence],
    tags: Mapping[str, str],
    run_id: str | None,
) -> str:
    """Log the model in a run of its own beneath the pipeline's, with its evidence, then make the version."""
    files = {name: path for gate in evidence for name in gate.files for path in [workspace / name]}
    with (
        registry_errors(f"register {model.name}"),
        fluent(workspace),
        _registration_run(client, workspace, model, run_id) as own_run,
    ):
        trained_by = training_run(client, workspace, model.stage)
        logged = log_model(workspace, model.kind, model.folder, tags[CONTENT_TAG], trained_by)
        for gate in evidence:
            client.log_artifact(own_run, str(workspace / "gates" / f"{gate.gate}.json"), "gates")
        for path in files.values():
            client.log_artifact(own_run, str(path), "metrics")
        log_data_card(client, own_run, workspace)
        log_data_input(client, own_run, workspace)
        numbers = {
            f"{path.stem}.{key}": value for path in files.values() for key, value in flatten(read_json(path)).items()
        }
        log_numbers(client, own_run, numbers, logged.model_id)
        version = client.create_model_version(
            model.name, logged.model_uri, own_run, tags={**tags, COMPLETE_TAG: "true"}, model_id=logged.model_id
        )
    return str(version.version)


def training_run(client: MlflowClient, workspace: Path, stage: str) -> str | None:
    """The newest run of ``stage`` that made the metrics of the workspace, None where MLflow has none of it.

    A result that DVC takes from its cache was made by an earlier run, maybe of another workspace.
    """
    metrics = workspace / "metrics" / f"{stage}.json"
    if not metrics.is_file():
        return None
    made = f"tags.`rlhf.stage` = '{stage}' and tags.`{METRICS_TAG}` = '{sha256_file(metrics)}'"
    newest = client.search_runs([experiment_id(client, workspace)], made, max_results=1)
    return str(newest[0].info.run_id) if newest else None


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    with registry_errors(f"create the registered model {name}"):
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


@contextmanager
def _registration_run(
    client: MlflowClient, workspace: Path, model: RegistrableModel, parent: str | None
) -> Iterator[str]:
    """A run for one model, the active one of MLflow's module-level functions; to be used within :func:`fluent`.

    To make another run active costs four more requests.
    """
    import mlflow

    experiment = experiment_id(client, workspace)
    label = run_label(workspace, load_params(workspace).profile, datetime.now())
    tags = {"mlflow.runName": f"register {model.name}{SEPARATOR}{label}", **origin_tags(workspace, "rlhf run")}
    if parent:
        tags["mlflow.parentRunId"] = parent
    with mlflow.start_run(experiment_id=experiment, tags=tags, log_system_metrics=False) as run:
        yield str(run.info.run_id)
