"""Registered models as artifacts: logged, found again, compared with their hash, served."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flows.registry.client import (
    CHALLENGER,
    CHAMPION,
    CONTENT_TAG,
    connect,
    fluent,
    reason_and_remedy,
    registry_address,
    registry_errors,
    version_numbers,
)
from flows.registry.decisions import registry_session
from flows.registry.history import ReleaseState
from flows.registry.model_package import CODE_FOLDER, own_wheel, requirements
from flows.registry.policies import active_policies
from flows.workspace import display_path
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import ModelError, RlhfError, first_line, is_exhausted
from rlhf_core.gates import closed_gate
from rlhf_core.serving.protocol import CompletionId, token_usage
from rlhf_core.storage.files import atomic_dir, full_disks, scratch_folder, sha256_file, sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import Model, ModelSignature
    from mlflow.store.artifact.artifact_repo import ArtifactRepository


COMPLETE_TAG = "complete"
SERVING_CODE = Path(__file__).resolve().with_name("model_pyfunc.py")
REMEDY = (
    "`rlhf run` registers the model again, and if it is the champion `rlhf promote --force --reason TEXT` replaces it; "
    "or roll back"
)
EXAMPLE = [{"role": "user", "content": "What color is the sky?"}]
SCORED_EXAMPLE = [*EXAMPLE, {"role": "assistant", "content": "It is blue."}]


MLMODEL = "MLmodel"


class PortablePyfunc:
    """MLflow's flavour pyfunc, whose file MLmodel names no folder of the machine that saved it.

    MLflow itself writes there where the model's code and its artifacts lay, and loads neither from
    there.
    """

    @staticmethod
    def save_model(path: str, mlflow_model: Model, **settings: Any) -> None:
        """Save a model as ``mlflow.pyfunc.save_model`` does."""
        import mlflow

        mlflow.pyfunc.save_model(path=path, mlflow_model=mlflow_model, **settings)
        saved = mlflow_model.flavors[mlflow.pyfunc.FLAVOR_NAME]
        saved["model_code_path"] = Path(saved["model_code_path"]).name
        for artifact in saved["artifacts"].values():
            artifact["uri"] = artifact["path"]
        mlflow_model.artifact_path = saved["config"]["kind"]
        mlflow_model.save(str(Path(path) / MLMODEL))


def log_model(workspace: Path, folder: str, content: str, model: LoggedModel, run_id: str) -> str:
    """Store a folder as the pyfunc ``model``, within :func:`fluent`; returns its address.

    Inside, ``artifacts/`` holds the plain Hugging Face folder, which transformers and vLLM load as
    it is. The model carries its ``content`` hash, which is compared when it is loaded, the sampling
    that the policy was judged with, and the code that answers, so that MLflow can build an
    environment for it anywhere.

    Args:
        run_id: The run that registers it.
    """
    from mlflow.models import Model

    kind = model.name
    example = EXAMPLE if kind == "policy" else SCORED_EXAMPLE
    sampling = load_section(workspace, "evaluate", EvaluateConfig).sampling.model_dump(mode="json")
    with scratch_folder() as folder_of_wheel, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on type hints
        name, content_of_wheel = own_wheel()
        wheel = folder_of_wheel / name
        wheel.write_bytes(content_of_wheel)
        # What mlflow.pyfunc.log_model calls, which takes no run but the active one.
        info = Model.log(
            artifact_path=None,
            name=kind,
            flavor=PortablePyfunc,
            run_id=run_id,
            model_id=model.model_id,
            python_model=str(SERVING_CODE),
            artifacts={"hf": str(workspace / folder)},
            signature=signature(kind, sampling),
            input_example={"messages": example},
            model_config={"kind": kind, "content_sha256": content, "sampling": sampling},
            code_paths=[str(wheel)],
            pip_requirements=requirements(),
        )
    return str(info.model_uri)


def stored_sampling(folder: Path) -> dict[str, Any]:
    """The sampling settings that MLflow keeps beside the ``folder`` of a registered policy.

    Raises:
        ModelError: MLflow's file is gone or damaged, or has no such settings.
    """
    from mlflow.models import Model

    root = folder.parents[1]
    try:
        pyfunc = Model.load(str(root)).flavors["python_function"]
        settings: dict[str, Any] = pyfunc["config"]["sampling"]
        SamplingConfig.model_validate(settings)
    except Exception as error:  # whatever MLflow makes of a file that somebody has changed
        if is_exhausted(error):
            raise
        raise ModelError(
            f"{root / MLMODEL} does not say how the policy was judged ({first_line(error)}); {REMEDY}"
        ) from error
    return settings


def signature(kind: str, sampling: Mapping[str, Any]) -> ModelSignature:
    """``messages`` in, chat completions or scores out.

    A policy also takes the settings of a chat request, by default those that it was judged with. A
    seed of 0 or more makes the answer repeatable.
    """
    from mlflow.models import infer_signature

    if kind == "reward":
        return infer_signature({"messages": SCORED_EXAMPLE}, [{"score": 0.0}])
    completion = CompletionId(kind, 0).completion("text", "stop", token_usage(1, 1)) | {
        "reply": "text"
    }
    chances = {
        name: float(sampling[name]) for name in ("temperature", "top_p", "repetition_penalty")
    }
    params = {"max_tokens": sampling["max_new_tokens"], **chances, "seed": -1}
    return infer_signature({"messages": EXAMPLE}, [completion], params)


def verified_folder(
    workspace: Path, version: ModelVersion, client: MlflowClient | None = None
) -> Path:
    """The Hugging Face folder of a version, once its content has the hash of its registration.

    The policies that the settings of ``registry`` name may refuse it, such as for its signature.

    Raises:
        ModelError: The artifacts are gone, the version names no hash, the content is another, or
            the signature is not that of the content.
    """
    client, expected = client or connect(workspace), version.tags.get(CONTENT_TAG)
    name, number = version.name, str(version.version)
    label = f"{name} version {number}"
    if not expected:
        raise ModelError(
            f"{label} was not registered by this pipeline (it has no {CONTENT_TAG} tag)"
        )
    folder, downloaded = _locate(client, workspace, name, number)
    content = sha256_tree(folder)
    if downloaded is not None and content != expected:
        # The kept copy may be damaged, or older than what is in the registry.
        shutil.rmtree(downloaded, ignore_errors=True)
        folder, _ = _locate(client, workspace, name, number)
        content = sha256_tree(folder)
    if content != expected:
        raise ModelError(
            f"the files of {label} are not the ones that were registered and judged ({folder}); {REMEDY}"
        )
    config = load_section(workspace, "registry", RegistryConfig)
    for policy in active_policies(config):
        policy.verify_version(client, workspace, config, version, folder)
    return folder


def own_package(client: MlflowClient, workspace: Path, version: ModelVersion) -> Path:
    """The Hugging Face folder of a version, which has this release's code and judged sampling.

    Raises:
        ModelError: The registry keeps other code or other sampling settings with it.
    """
    name, number = version.name, str(version.version)
    folder, downloaded = _locate(client, workspace, name, number)
    if downloaded is not None:  # a kept copy may be older than what is in the registry
        shutil.rmtree(downloaded, ignore_errors=True)
        folder, _ = _locate(client, workspace, name, number)
    root = folder.parents[1]
    judged = load_section(workspace, "evaluate", EvaluateConfig).sampling.model_dump(mode="json")
    if other_code := _other_code(root, folder):
        other = f"other code ({other_code})"
    elif stored_sampling(folder) != judged:
        other = "other sampling settings"
    else:
        return folder
    raise ModelError(
        f"the registry keeps {other} with {name} version {number} than are registered here; {REMEDY}"
    )


def _other_code(root: Path, folder: Path) -> str:
    """Which code the model in ``root`` has beside its ``folder`` that is not this release's."""
    wheel, content = own_wheel()
    own = {
        SERVING_CODE.name: sha256_file(SERVING_CODE),
        f"{CODE_FOLDER}/{wheel}": hashlib.sha256(content).hexdigest(),
    }
    kept = {}
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        is_code = path.suffix == ".py" or inside.parts[0] == CODE_FOLDER
        if is_code and path.is_file() and not path.is_relative_to(folder):
            kept[inside.as_posix()] = sha256_file(path)
    differing = []
    for name in sorted({*own, *kept}):
        if own.get(name) != kept.get(name):
            differing.append(name if name in kept else f"no {name}")
    return ", ".join(differing)


def kept_copy(workspace: Path, name: str, number: str) -> Path:
    """Where a workspace keeps what it downloads of a version of the registry that is used now."""
    registry = hashlib.sha256(registry_address(workspace).encode()).hexdigest()[:16]
    return workspace / ".rlhf" / "models" / registry / name / number


def _locate(
    client: MlflowClient, workspace: Path, name: str, number: str
) -> tuple[Path, Path | None]:
    """The folder of a version, and where it was downloaded to; None for a local one, in place."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    downloaded = None
    try:
        root = _local_root(client, name, number)
        if root is None:
            root = downloaded = kept_copy(workspace, name, number)
            if not root.is_dir():
                with atomic_dir(root) as temporary, fluent(workspace):
                    try:
                        download_artifacts(f"models:/{name}/{number}", dst_path=str(temporary))
                    except MlflowException as error:
                        # Of a version whose source is runs:/ MLflow says that the path is wrong,
                        # whatever happened.
                        if full := full_disks(temporary):
                            raise OSError(
                                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}{full}"
                            ) from error
                        raise
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"cannot get {name} version {number} {reason_and_remedy(client, error)}"
        ) from error
    folder = _model_folder(root)
    if folder is None:
        raise ModelError(f"{name} version {number} has no model folder in {root}; {REMEDY}")
    return folder, downloaded


def _local_root(client: MlflowClient, name: str, number: str) -> Path | None:
    """Where the artifacts of a version lie on this machine; None for those of a server."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    uri = str(client.get_model_version_download_uri(name, number))
    return Path(local_file_uri_to_path(uri)) if uri.startswith(("file:", "/")) else None


def _model_folder(root: Path) -> Path | None:
    configs = sorted((root / "artifacts").glob("*/config.json"))
    return configs[0].parent if configs else None


def known_version(
    client: MlflowClient,
    workspace: Path,
    listed: Sequence[ModelVersion],
    folder: Path,
    content: str,
) -> ModelVersion | None:
    """The newest of ``listed`` that holds ``folder``, None if none does.

    A version counts if its creation was not interrupted (it has the tag "complete") and its files
    have not been changed or deleted since: else nobody could use it, and the folder has to be
    registered again.

    Args:
        listed: The versions of a registered model, newest first.
        content: SHA-256 of ``folder``.
    """
    for version in listed:
        complete = version.tags.get(COMPLETE_TAG) == "true"
        if complete and version.tags.get(CONTENT_TAG) == content:
            with registry_errors(
                client, f"look for the files of {version.name} version {version.version}"
            ):
                if _has_files(client, workspace, version, folder):
                    return version
    return None


def _has_files(client: MlflowClient, workspace: Path, version: ModelVersion, folder: Path) -> bool:
    """Whether the store has the files of ``folder`` for a version.

    Local ones are compared by content, those of a server by names and sizes, without a download.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    name, number = version.name, str(version.version)
    root = _local_root(client, name, number)
    if root is not None:
        stored_folder = _model_folder(root)
        return stored_folder is not None and sha256_tree(stored_folder) == version.tags[CONTENT_TAG]
    expected = {}
    for file in folder.rglob("*"):
        if file.is_file():
            expected[file.relative_to(folder).as_posix()] = file.stat().st_size
    with fluent(workspace):
        store = get_artifact_repository(str(client.get_model_version_download_uri(name, number)))
        folders = [entry.path for entry in store.list_artifacts("artifacts") if entry.is_dir]
        stored = [_sizes(store, path, path) for path in folders]
    return stored == [expected]


def _sizes(store: ArtifactRepository, folder: str, root: str) -> dict[str, int | None]:
    """Bytes of each file below ``folder`` of the store, by its path from ``root``."""
    sizes: dict[str, int | None] = {}
    for entry in store.list_artifacts(folder):
        own = {PurePosixPath(entry.path).relative_to(root).as_posix(): entry.file_size}
        sizes |= _sizes(store, entry.path, root) if entry.is_dir else own
    return sizes


def policy_with_alias(workspace: Path, alias: str = CHAMPION) -> ModelVersion:
    """The version of the policy that ``alias`` points to, once no promotion is unfinished.

    Raises:
        RlhfError: No version has the alias.
    """
    workspace = workspace.resolve()
    state = ReleaseState.of(workspace)
    if state.unfinished:  # else a match of another workspace need not be waited for
        with registry_session(workspace) as state:
            pass
    if (version := state.version_with(alias)) is not None:
        return version
    if alias not in (CHAMPION, CHALLENGER):
        remedy = f"in this workspace; its aliases are {', '.join(sorted(state.aliases)) or 'none'}"
    elif stopped := describe_stopped_policy(workspace):
        remedy = f"in this workspace: {stopped}"
    elif alias == CHAMPION and CHALLENGER in state.aliases:
        number = state.aliases[CHALLENGER]
        remedy = f"in this workspace: version {number} is challenger; `rlhf promote` decides, `rlhf status` says more"
    elif numbers := version_numbers(state.client, state.name):
        newest = max(numbers, key=int)
        remedy = (
            f"in this workspace: version {newest} was not promoted, `rlhf status` says why; "
            f"`rlhf serve --version {newest}` serves it"
        )
    else:
        remedy = "in this workspace yet; `rlhf run` makes one, `rlhf status` shows what is"
    raise RlhfError(f"no {alias} of {state.name} {remedy}")


def describe_stopped_policy(workspace: Path) -> str:
    """Say which policy a gate has stopped and how to talk to it; empty if it stopped none."""
    closed = closed_gate(workspace)
    if closed is None or closed.changed_evidence(workspace):
        return ""
    policy = workspace / "models" / "policy"
    if closed.name != "policy" or not policy.is_dir():
        explain = f"`rlhf gate {closed.name} --explain` has every condition"
        return f"the {closed.name} gate ended the last run before a policy was trained: {closed.tally}; {explain}"
    folder = shlex.quote(display_path(policy))
    return (
        f"the policy gate has stopped the policy in {folder}: {closed.tally}, as `rlhf gate policy --explain` "
        f"says; `rlhf chat {folder}` talks to it, `rlhf serve --model {folder}` serves it"
    )
