"""What a registered model needs beside its weights: ``rlhf_core`` as a wheel, and packages.

MLflow builds environments from a model's requirements. The name of this project is on no index, and
whoever took it there would be installed: so the wheel is a file of the model, and the requirements
name its version, which no index can have.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path

import rlhf_core

PACKAGE = Path(rlhf_core.__file__).parent
CODE_FOLDER = "code"  # where MLflow keeps the files of a model that are code
# What loading a model and answering imports, see tests/integration/registry/test_model_package.py.
INDEX_PACKAGES = (
    "mlflow",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "ruamel.yaml",
    "Jinja2",
    "httpx",
    "rich",
    "psutil",
    "threadpoolctl",
)
METADATA = """\
Metadata-Version: 2.4
Name: rlhf-pipeline
Version: {version}
Summary: The learning system of rlhf-pipeline, as the models that it registers need it
License-Expression: Apache-2.0
Requires-Python: >=3.11
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: rlhf-pipeline
Root-Is-Purelib: true
Tag: py3-none-any
"""


@cache
def own_wheel() -> tuple[str, bytes]:
    """The name and content of ``rlhf_core`` as a wheel; the same sources give the same bytes.

    Its version carries the hash of its files, because MLflow takes an environment again that has
    the same requirements. It has no requirements of its own: those of the model name all packages
    with their versions.
    """
    files = {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in _sources()}
    version = f"{rlhf_core.__version__}+{_digest(files)}"
    information = f"rlhf_pipeline-{version}.dist-info"
    files[f"{information}/METADATA"] = METADATA.format(version=version).encode()
    files[f"{information}/WHEEL"] = WHEEL.encode()
    record = f"{information}/RECORD"
    lines = [f"{name},{_record_hash(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # dated 1980, whenever it is written
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return f"rlhf_pipeline-{version}-py3-none-any.whl", wheel.getvalue()


def requirements() -> list[str]:
    """The model's requirements: its wheel, and packages in the versions that are installed."""
    # pip looks for a wheel that is named by its path in the current folder, which in an image is
    # not the model's; it looks for folders of links beside the file of requirements.
    project, version, *_ = own_wheel()[0].split("-")
    own = [f"--find-links {CODE_FOLDER}", f"{project}=={version}"]
    # A local label of a version, such as ``+cpu``, is not on package indexes.
    pinned = [f"{name}=={installed(name).partition('+')[0]}" for name in INDEX_PACKAGES]
    return [*own, *pinned]


def _sources() -> list[Path]:
    """The files of the package in a fixed order, without what Python and editors leave."""
    found = []
    for path in sorted(PACKAGE.rglob("*")):
        within = path.relative_to(PACKAGE).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in within)
        if path.is_file() and not hidden:
            found.append(path)
    return found


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _record_hash(content: bytes) -> str:
    """A file's hash as the record of a wheel writes it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
