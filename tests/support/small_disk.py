"""A folder as a file system of its own, which is soon full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """``folder`` as a file system of its own of ``size`` bytes; the test is skipped where none may
    be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode != 0
    ):
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
