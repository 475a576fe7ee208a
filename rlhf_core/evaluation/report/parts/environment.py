"""Versions of Python and of the libraries that numbers depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("rlhf-pipeline", "torch", "transformers", "datasets", "peft", "numpy", "scikit-learn")


def package_versions() -> dict[str, str]:
    """Return the version of Python and of each installed library, by name."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
