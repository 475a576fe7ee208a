"""The cache that jobs of one host share: pruned by its last user, oldest first, never while a result waits there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.jobs.host_cache import LIMIT_VARIABLE, cache_limit, host_cache_in_use, prune
from rlhf_core.errors import RlhfError

KB = 1000
OTHER_JOB = """
import sys
from pathlib import Path
from flows.jobs.host_cache import host_cache_in_use
with host_cache_in_use(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def filled(host: Path, count: int = 4) -> Path:
    """Objects of a kilobyte each, the first the oldest."""
    cache = host / "cache"
    for number in range(count):
        file = cache / "files" / "md5" / f"{number:02d}" / "object"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * KB)
        os.utime(file, (number, number))
    return cache


def left(cache: Path) -> list[str]:
    return sorted(file.parent.name for file in cache.rglob("object"))


def test_the_oldest_go_until_the_limit_holds(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert prune(cache, 10 * KB) == 0 and left(cache) == ["00", "01", "02", "03"]
    assert prune(cache, 2 * KB + 1) == 2 * KB and left(cache) == ["02", "03"]
    assert prune(tmp_path / "nothing", 0) == 0


def test_the_last_job_prunes_and_none_while_another_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    cache = filled(tmp_path)
    command = [sys.executable, "-c", OTHER_JOB, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"in\n"
    with host_cache_in_use(tmp_path):
        pass
    assert left(cache) == ["00", "01", "02", "03"]
    other.communicate()
    assert other.returncode == 0 and left(cache) == ["03"]


def test_nothing_goes_while_a_result_waits_to_be_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    cache = filled(tmp_path)
    (tmp_path / "jobs" / "ppo-1").mkdir(parents=True)
    with host_cache_in_use(tmp_path):
        pass
    assert len(left(cache)) == 4


def test_the_limit_is_a_number_of_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert cache_limit() == 100 * 10**9
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert cache_limit() is None
    for wrong in ("much", "-1", "inf", "nan"):
        monkeypatch.setenv(LIMIT_VARIABLE, wrong)
        with pytest.raises(RlhfError, match=f"{LIMIT_VARIABLE} is '{wrong}'"):
            cache_limit()
