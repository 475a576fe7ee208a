"""The model registry: versions come only from passing gates, with the way back to what made them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.lineage import collect_lineage, passing_gate, require_up_to_date
from flows.registry.mlflow_client import connect, experiment_id, fluent, prepare_tracking
from flows.workspace.lock import locked
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import GateFailed, ModelError, RlhfError
from rlhf_core.files import atomic_dir, sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

CHALLENGER, CHAMPION, PREVIOUS = "challenger", "champion", "previous"
CONTENT_TAG = "content_sha256"
REWARD_VERSION_TAG = "reward_model_version"
CODE = Path(__file__).resolve().parent
REQUIREMENTS = ("mlflow", "torch", "transformers", "pandas")
TAG_LIMIT = 5000  # MLflow refuses longer values


@dataclass(frozen=True)
class Candidate:
    """A model that may be registered: its folder, the gate that vouches for it, the stages whose files must be intact,
    and the file that serves it."""

    kind: str
    name: str
    folder: str
    gate: str
    stages: tuple[str, ...]
    code: str


def candidates(config: RegistryConfig) -> tuple[Candidate, Candidate]:
    """Reward model and policy, in the order in which they are registered."""
    reward = Candidate(
        "reward",
        config.reward_model,
        "models/reward",
        "reward",
        ("reward", "referee", "gate-reward"),
        "reward_pyfunc.py",
    )
    policy = Candidate(
        "policy", config.policy, "models/policy", "policy", ("ppo", "evaluate", "gate-policy"), "policy_pyfunc.py"
    )
    return reward, policy


def register(workspace: Path, run_id: str | None = None) -> dict[str, Any]:
    """Register the reward model and the policy of a workspace, each if its gate passed, and set ``@challenger``.

    Returns ``{"registered": {name: {"version", "reused"}}, "refused": {name: reason}}``. The same content is registered
    once: its version is used again. ``run_id`` is the pipeline run that the registration belongs to.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    prepare_tracking(workspace)
    result: dict[str, Any] = {"registered": {}, "refused": {}}
    with locked(workspace, "registry.lock", wait=True):
        client = connect(workspace)
        extra: dict[str, str] = {}
        for candidate in candidates(config):
            try:
                entry = _register_one(client, workspace, candidate, run_id, extra)
            except GateFailed as error:
                result["refused"][candidate.name] = str(error)
                continue
            result["registered"][candidate.name] = entry
            extra = {REWARD_VERSION_TAG: entry["version"]}
    return result


def _register_one(
    client: MlflowClient, workspace: Path, candidate: Candidate, run_id: str | None, extra: Mapping[str, str]
) -> dict[str, Any]:
    report = passing_gate(workspace, candidate.gate)
    require_up_to_date(workspace, candidate.stages)
    content = sha256_tree(workspace / candidate.folder)
    version = _same_content(client, candidate.name, content)
    reused = version is not None
    if version is None:
        tags = {CONTENT_TAG: content, **collect_lineage(workspace).tags(), **extra}
        version = _create_version(client, workspace, candidate, report, tags, run_id)
    client.set_registered_model_alias(candidate.name, CHALLENGER, version)
    return {"version": version, "reused": reused, "content_sha256": content}


def _same_content(client: MlflowClient, name: str, content: str) -> str | None:
    """The newest complete version with this content; one whose creation was cut short lacks its last tag."""
    found = [
        v for v in versions(client, name) if v.tags.get(CONTENT_TAG) == content and v.tags.get("complete") == "true"
    ]
    return str(found[0].version) if found else None


def versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first; none when the model is unknown."""
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name='{name}'", max_results=200, page_token=token)
        found += list(page)
        token = page.token
        if not token:
            return sorted(found, key=lambda v: int(v.version), reverse=True)


def _create_version(
    client: MlflowClient,
    workspace: Path,
    candidate: Candidate,
    report: Mapping[str, Any],
    tags: Mapping[str, str],
    run_id: str | None,
) -> str:
    """Log the model in a run of its own beneath the pipeline's, make the version, tag it."""
    _ensure_model(client, candidate.name)
    with fluent(workspace), _register_run(client, workspace, candidate, run_id) as own_run:
        uri = log_model(workspace, candidate, own_run)
        client.log_artifact(own_run, str(workspace / "gates" / f"{candidate.gate}.json"), "gates")
        for name in report["evidence"]:
            client.log_artifact(own_run, str(workspace / name), "metrics")
        version = str(client.create_model_version(candidate.name, uri, own_run).version)
        # "complete" comes last: a version without it is never used again.
        for key, value in {**tags, "gate": gate_summary(report), "complete": "true"}.items():
            client.set_model_version_tag(candidate.name, version, key, value)
    return version


def gate_summary(report: Mapping[str, Any]) -> str:
    """The gate's report as JSON that fits in a tag: without the reasons, or the conditions, where it is too long."""
    short = [{k: c.get(k) for k in ("metric", "value", "bound", "passed")} for c in report["conditions"]]
    for content in (dict(report), {**report, "conditions": short}, {**report, "conditions": len(short)}):
        text = json.dumps(content, sort_keys=True)
        if len(text) <= TAG_LIMIT:
            break
    return text[:TAG_LIMIT]


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


@contextmanager
def _register_run(client: MlflowClient, workspace: Path, candidate: Candidate, parent: str | None) -> Iterator[str]:
    experiment = experiment_id(client, workspace)
    tags = {"mlflow.runName": f"register {candidate.name}"}
    if parent:
        tags["mlflow.parentRunId"] = parent
    run = str(client.create_run(experiment, tags=tags).info.run_id)
    try:
        yield run
    except BaseException:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run, "FINISHED")


def log_model(workspace: Path, candidate: Candidate, run_id: str) -> str:
    """Store the folder as a pyfunc model of ``run_id`` and return its URI. Inside, ``artifacts/`` holds the plain
    Hugging Face folder, which transformers and vLLM load as it is. To be called within :func:`fluent`."""
    import mlflow

    with warnings.catch_warnings(), mlflow.start_run(run_id=run_id):
        warnings.simplefilter("ignore", UserWarning)  # advice on type hints and input examples
        info = mlflow.pyfunc.log_model(
            name=candidate.kind,
            python_model=str(CODE / candidate.code),
            artifacts={"hf": str(workspace / candidate.folder)},
            signature=signature(candidate.kind),
            pip_requirements=_requirements(),
        )
    return str(info.model_uri)


def _requirements() -> list[str]:
    """The versions in use. A local label such as ``+cpu`` is not on package indexes, so it goes."""
    from importlib.metadata import version

    return [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]


def signature(kind: str) -> ModelSignature:
    """``messages`` in; ``policy`` also takes sampling parameters (a seed of 0 or more makes answers repeatable)."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array, ColSpec, DataType, Object, ParamSchema, ParamSpec, Property, Schema

    turn = Object([Property("role", DataType.string), Property("content", DataType.string)])
    inputs = Schema([ColSpec(Array(turn), "messages")])
    if kind == "reward":
        return ModelSignature(inputs=inputs)
    params = ParamSchema(
        [
            ParamSpec("max_new_tokens", DataType.long, 64),
            ParamSpec("temperature", DataType.double, 0.8),
            ParamSpec("top_p", DataType.double, 0.9),
            ParamSpec("seed", DataType.long, -1),
        ]
    )
    return ModelSignature(inputs=inputs, params=params)


def alias_version(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that an alias points to, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException:
        return None


def model_folder(workspace: Path, name: str, version: str) -> Path:
    """The plain Hugging Face folder of a version: in place for local artifacts, else downloaded once and kept.

    Raises :class:`ModelError` when the artifacts are gone.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.file_utils import local_file_uri_to_path

    try:
        uri = str(connect(workspace).get_model_version_download_uri(name, version))
        local = uri.startswith(("file:", "/"))
        root = Path(local_file_uri_to_path(uri)) if local else _download(workspace, name, version)
    except (MlflowException, OSError) as error:
        raise ModelError(f"cannot get {name} version {version} ({str(error).splitlines()[0]})") from error
    found = sorted((root / "artifacts").glob("*/config.json"))
    if not found:
        raise ModelError(f"{name} version {version} has no model folder in {root}; register it again with `rlhf run`")
    return found[0].parent


def _download(workspace: Path, name: str, version: str) -> Path:
    from mlflow.artifacts import download_artifacts

    target = workspace / ".rlhf" / "models" / name / version
    if not target.is_dir():
        with atomic_dir(target) as temporary, fluent(workspace):
            download_artifacts(f"models:/{name}/{version}", dst_path=str(temporary))
    return target


def champion_folder(workspace: Path, alias: str = CHAMPION) -> Path:
    """The Hugging Face folder of the policy with ``alias``; ``RlhfError`` where there is none yet."""
    workspace = workspace.resolve()
    name = load_section(workspace, "registry", RegistryConfig).policy
    version = alias_version(connect(workspace), name, alias)
    if version is None:
        raise RlhfError(
            f"no {alias} of {name} in this workspace yet; `rlhf run` makes one, `rlhf status` shows what is"
        )
    return model_folder(workspace, name, str(version.version))
