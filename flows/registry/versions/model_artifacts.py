"""Registered models as artifacts: how they are logged, found again, and checked against their content hash."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.mlflow_client import connect, fluent
from flows.registry.versions.signing import verify_signature
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.errors import ModelError, first_line
from rlhf_core.storage.files import atomic_dir, sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

CONTENT_TAG, COMPLETE_TAG = "content_sha256", "complete"
SERVING_CODE = Path(__file__).resolve().with_name("model_pyfunc.py")
REMEDY = (
    "`rlhf run` registers the model again, and if it is the champion `rlhf promote --force --reason TEXT` replaces it; "
    "or roll back"
)
REQUIREMENTS = ("mlflow", "torch", "transformers", "pandas")


@dataclass(frozen=True)
class LoggedFolder:
    """A Hugging Face folder that MLflow has stored as a pyfunc model."""

    uri: str
    model_id: str


def log_model(workspace: Path, kind: str, folder: str, content: str) -> LoggedFolder:
    """Store ``folder`` of the workspace as a pyfunc model of MLflow's active run; to be called within :func:`fluent`.

    Inside, ``artifacts/`` holds the plain Hugging Face folder, which transformers and vLLM load as it is. The model
    carries its ``content`` hash, which is compared when it is loaded, and the sampling that the policy was judged with.
    """
    import mlflow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on type hints and input examples
        info = mlflow.pyfunc.log_model(
            name=kind,
            python_model=str(SERVING_CODE),
            artifacts={"hf": str(workspace / folder)},
            signature=signature(kind, judged_sampling(workspace)),
            model_config={"kind": kind, "content_sha256": content, "sampling": judged_sampling(workspace)},
            pip_requirements=_requirements(),
        )
    return LoggedFolder(str(info.model_uri), str(info.model_id))


def judged_sampling(workspace: Path) -> dict[str, Any]:
    """The sampling settings under which the evaluation judged the policy (section ``evaluate.sampling``)."""
    return load_section(workspace, "evaluate", EvaluateConfig).sampling.model_dump(mode="json")


def stored_sampling(folder: Path) -> dict[str, Any]:
    """The sampling settings under which a registered policy was judged, as MLflow keeps them beside its ``folder``."""
    from mlflow.models import Model

    settings: dict[str, Any] = Model.load(str(folder.parents[1])).flavors["python_function"]["config"]["sampling"]
    return settings


def _requirements() -> list[str]:
    """The versions in use. A local label such as ``+cpu`` is not on package indexes, so it goes."""
    from importlib.metadata import version

    return [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]


def signature(kind: str, sampling: Mapping[str, Any]) -> ModelSignature:
    """``messages`` in; a policy also takes sampling parameters, by default those it was judged with.

    A seed of 0 or more makes the answer repeatable.
    """
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array, ColSpec, DataType, Object, ParamSchema, ParamSpec, Property, Schema

    turn = Object([Property("role", DataType.string), Property("content", DataType.string)])
    inputs = Schema([ColSpec(Array(turn), "messages")])
    if kind == "reward":
        return ModelSignature(inputs=inputs)
    params = ParamSchema(
        [
            ParamSpec("max_new_tokens", DataType.long, sampling["max_new_tokens"]),
            ParamSpec("temperature", DataType.double, float(sampling["temperature"])),
            ParamSpec("top_p", DataType.double, float(sampling["top_p"])),
            ParamSpec("repetition_penalty", DataType.double, float(sampling["repetition_penalty"])),
            ParamSpec("seed", DataType.long, -1),
        ]
    )
    return ModelSignature(inputs=inputs, params=params)


def verified_folder(workspace: Path, version: ModelVersion, client: MlflowClient | None = None) -> Path:
    """The Hugging Face folder of a version, after its content was compared with the hash it was registered under.

    Where ``registry.signature`` wants one, its signature is verified too.

    Raises:
        ModelError: The artifacts are gone, the version names no hash, the content is another, or the signature is not
            that of the content.
    """
    client = client or connect(workspace)
    folder = _folder_by_hash(workspace, version, client)
    config = load_section(workspace, "registry", RegistryConfig).signature
    label = f"{version.name} version {version.version}"
    verify_signature(client, workspace, config, label, version.run_id, folder)
    return folder


def _folder_by_hash(workspace: Path, version: ModelVersion, client: MlflowClient) -> Path:
    expected = version.tags.get(CONTENT_TAG)
    name, number = version.name, str(version.version)
    if not expected:
        raise ModelError(f"{name} version {number} was not registered by this pipeline (it has no {CONTENT_TAG} tag)")
    folder, downloaded = _locate(client, workspace, name, number)
    if sha256_tree(folder) == expected:
        return folder
    if downloaded is not None:  # the kept copy may be of another registry, or damaged
        shutil.rmtree(downloaded, ignore_errors=True)
        folder, _ = _locate(client, workspace, name, number)
        if sha256_tree(folder) == expected:
            return folder
    raise ModelError(
        f"the files of {name} version {number} are not the ones that were registered and judged ({folder}); {REMEDY}"
    )


def _locate(client: MlflowClient, workspace: Path, name: str, number: str) -> tuple[Path, Path | None]:
    """The folder of a version, in place for local artifacts, else downloaded once (then the download's root too)."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.file_utils import local_file_uri_to_path

    try:
        uri = str(client.get_model_version_download_uri(name, number))
        downloaded = None if uri.startswith(("file:", "/")) else _download(workspace, name, number)
        root = downloaded or Path(local_file_uri_to_path(uri))
    except (MlflowException, OSError) as error:
        raise ModelError(f"cannot get {name} version {number} ({first_line(error)})") from error
    configs = sorted((root / "artifacts").glob("*/config.json"))
    if not configs:
        raise ModelError(f"{name} version {number} has no model folder in {root}; {REMEDY}")
    return configs[0].parent, downloaded


def _download(workspace: Path, name: str, number: str) -> Path:
    from mlflow.artifacts import download_artifacts

    target = workspace / ".rlhf" / "models" / name / number
    if not target.is_dir():
        with atomic_dir(target) as temporary, fluent(workspace):
            download_artifacts(f"models:/{name}/{number}", dst_path=str(temporary))
    return target
