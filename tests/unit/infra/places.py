"""The files that describe where the pipeline runs, and the command lines that stand in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
INFRA = ROOT / "infra"
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
COMMAND = re.compile(rf"(?:^|guarded |-- |\$\(|`)(?P<words>(?:{'|'.join(PROGRAMS)}) [^`|]*)")
EXPANSION = re.compile(r"\$\{[^}]*\}|\$\$?\w*")


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """``(where, words)`` of every command of ours: in the Dockerfile, scripts and the docs."""
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
