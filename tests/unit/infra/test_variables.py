"""Every environment variable that the files of infra/ set or the operations page names is read by somebody."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unit.infra import places

# Read by programs that are not here: boto3, the images of Postgres, the object store and NVIDIA, Slurm, Kubernetes,
# pip, bash, and Prefect's Kubernetes worker (looked up in the source of prefect-kubernetes 0.8).
FOREIGN = re.compile(
    r"(AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|DEFAULT_REGION|ENDPOINT_URL)|POSTGRES_(USER|PASSWORD)|ROOT_(ACCESS|SECRET)_KEY"
    r"|VGW_(PORT|HEALTH)|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|(SLURM|SBATCH|SRUN)_\w+|JOB_COMPLETION_INDEX"
    r"|PREFECT_INTEGRATIONS_KUBERNETES_(WORKER_API_AUTH_STRING_SECRET_(NAME|KEY)|OBSERVER_NAMESPACES)"
    r"|PIP_(NO_INPUT|DISABLE_PIP_VERSION_CHECK)|MASTER_(ADDR|PORT)|PATH|PYTHONUNBUFFERED|DO_NOT_TRACK|PWD)"
)


def variables() -> set[str]:
    """Environment variables that are set or read anywhere in infra/ or named in the operations page."""
    found: set[str] = set()
    for path in (*places.SCRIPTS, places.DOCKERFILE):
        found |= _names(path)
    return found | set(re.findall(r"\b((?:PREFECT|MLFLOW|HF|AWS|RLHF)_[A-Z_]+[A-Z])\b", places.OPERATIONS.read_text()))


def _names(path: Path) -> set[str]:
    pairs = re.findall(r"\$\{?([A-Z][A-Z_]+)\b|\b([A-Z][A-Z_]+)=", path.read_text())
    return {name for pair in pairs for name in pair if name}


def known_to_prefect() -> set[str]:
    from prefect.settings import Settings

    def walk(model: Any) -> set[str]:
        names = set()
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                names |= walk(field.annotation)
            names.add(f"{model.model_config.get('env_prefix', '')}{name}".upper())
            names |= {str(choice).upper() for choice in getattr(field.validation_alias, "choices", [])}
        return names

    return walk(Settings)


def is_known(name: str) -> bool:
    """Whether some program reads the variable, ours or a library's."""
    if FOREIGN.fullmatch(name):
        return True
    if name.startswith("PREFECT_"):
        return name in known_to_prefect() or name in _source("prefect.cli.flow_run")
    if name.startswith("MLFLOW_"):
        modules = ("mlflow.environment_variables", "mlflow.utils.cli_args", "mlflow.cli")
        return any(name in _source(module) for module in modules)
    if name.startswith("HF_"):
        return name in _source("huggingface_hub.constants")
    if name.startswith(("DVC_", "GX_", "RLHF_")):
        patterns = ("flows/**/*.py", "rlhf_core/**/*.py", "tests/*.py", "tests/servers/*.py")
        ours = [path for pattern in patterns for path in places.ROOT.glob(pattern)]
        return any(name in path.read_text() for path in ours)
    return False


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin
    return Path(spec.origin).read_text()


def test_environment_variables_are_read_by_somebody() -> None:
    own = set()  # given a meaning by our own scripts
    for path in (*places.SCRIPTS, places.DOCKERFILE):
        own |= set(re.findall(r"\$\{([A-Z][A-Z_]+):[-?]", path.read_text()))
        own |= set(re.findall(r"^(?:readonly |ARG )([A-Z][A-Z_]+)=", path.read_text(), re.MULTILINE))
    unknown = sorted(name for name in variables() - own if not is_known(name))
    assert not unknown
    assert not is_known("PREFECT_API_ADDRESS") and not is_known("RLHF_NOTHING")
