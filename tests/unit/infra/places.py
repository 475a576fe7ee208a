"""The files that describe where the pipeline runs, and the command lines that stand in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
INFRA = ROOT / "infra"
UNTRIED = INFRA / "untried"
KUBERNETES = UNTRIED / "kubernetes"
TEMPLATE = KUBERNETES / "base-job-template.json"
COMPOSE = (UNTRIED / "compose.yaml", UNTRIED / "compose.gpu.yaml")
SCRIPTS = (
    INFRA / "launch" / "run-stage.sh",
    INFRA / "slurm" / "stage.sbatch",
    INFRA / "slurm" / "worker.sbatch",
    INFRA / "docker" / "postgres-init.sh",
)
DOCKERFILE = INFRA / "docker" / "Dockerfile"
OPERATIONS = ROOT / "docs" / "operations.md"
PROGRAMS = ("rlhf", "prefect", "mlflow", "dvc", "torchrun", "python")
# Where a command of ours begins in a line of shell or prose.
COMMAND = re.compile(rf"(?:^|guarded |-- |\$\(|`| shell )(?P<words>(?:{'|'.join(PROGRAMS)}) [^`|]*)")
EXPANSION = re.compile(r"\$\{[^}]*\}|\$\$?\w*")


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def template() -> dict[str, Any]:
    """The base job template of the Kubernetes pool."""
    return json.loads(TEMPLATE.read_text())


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every Kubernetes object, with the file it stands in; kustomizations are none."""
    return [
        (str(path.relative_to(ROOT)), document)
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for document in documents(path)
        if document["kind"] != "Kustomization"
    ]


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pod of a Deployment or Job."""
    return manifest["spec"]["template"]["spec"]


def services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml."""
    return documents(COMPOSE[0])[0]["services"]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """``(where, words)`` of every command of ours: in compose, manifests, the Dockerfile, scripts and the docs."""
    for name, service in services().items():
        for words in (service.get("command"), service.get("healthcheck", {}).get("test", [])[1:]):
            if words and words[0] in PROGRAMS:
                yield f"compose.yaml {name}", [str(word) for word in words]
    for where, manifest in manifests():
        if manifest["kind"] in ("Deployment", "Job"):
            for container in pod(manifest)["containers"]:
                if container["args"][0] in PROGRAMS:
                    yield where, container["args"]
    for line in re.findall(r"^CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE):
        yield "Dockerfile", json.loads(line)
    for path in (*SCRIPTS, OPERATIONS):
        for line in _lines(path):
            for found in COMMAND.finditer(line):
                words = EXPANSION.sub("1", found["words"].replace("…", "")).split(")")[0].split("&&")[0]
                yield f"{path.name}: {line.strip()}", shlex.split(words.rstrip(" &"), comments=True)


def _lines(path: Path) -> list[str]:
    """Shell lines with continuations joined; of a document, the lines of its code blocks and of its prose."""
    text = path.read_text()
    if path.suffix == ".md":
        blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        spans = [f"`{' '.join(span.split())}`" for span in re.findall(r"`([^`]+)`", prose)]
        return [line.strip() for block in blocks for line in block.splitlines()] + spans
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(code).replace("\\\n", " ").splitlines()]
