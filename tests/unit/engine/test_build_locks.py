"""A killed build of an extension does not make every later run wait."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from rlhf_core.training.engine.deepspeed import remove_stale_build_locks


def test_only_old_locks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old, new, other = (tmp_path / "py" / name for name in ("old/lock", "new/lock", "old/build.ninja"))
    for file in (old, new, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    an_hour_ago = time.time() - 3600
    for file in (old, other):
        os.utime(file, (an_hour_ago, an_hour_ago))
    with caplog.at_level(logging.WARNING):
        remove_stale_build_locks()
    assert not old.exists() and new.exists() and other.exists()
    assert caplog.messages == [f"removed {old}, which a build that was killed 60 minutes ago left behind"]


def test_without_an_extension_folder_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    remove_stale_build_locks()
