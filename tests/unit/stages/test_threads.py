"""Threads of a stage's process: their number, and that they spin only where they are told to and have cores."""

from __future__ import annotations

import os

import pytest

from rlhf_core.config.operations.operations import ComputeConfig
from rlhf_core.stages.runtime.threads import SPIN_ROUNDS, limit_threads

NAMES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)


def test_the_environment_goes_before_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(ComputeConfig(threads=3), parallel=1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["RAYON_NUM_THREADS"]) == ("3", "3")
    limit_threads(ComputeConfig(threads=2, spin=True), parallel=1)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_threads(ComputeConfig(spin=True), parallel=1)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("threads", "parallel", "spin", "expected"),
    [
        (None, 1, True, str(SPIN_ROUNDS)),
        (2, 2, True, str(SPIN_ROUNDS)),
        (3, 2, True, None),
        (None, 2, True, None),
        (1, 1, False, None),
    ],
)
def test_threads_spin_where_every_stage_has_cores_for_them(
    threads: int | None, parallel: int, spin: bool, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    limit_threads(ComputeConfig(threads=threads, spin=spin), parallel)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert ("compute.spin is left out" in caplog.text) == (spin and expected is None)
