"""Memory that was freed goes back to the system, for the processes and on the systems where it is asked for."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.stages.runtime import runner
from rlhf_core.stages.runtime import threads as freed_memory
from rlhf_core.stages.runtime.contract import Paths

ROOT = Path(__file__).parents[3]
# As activations do: blocks of changing sizes, with small ones between them that outlive them. The first block, freed,
# raises glibc's own limit for mapping blocks. Prints how many MiB the process has more than at its start.
CHANGING_SIZES = """
import ctypes, sys
from rlhf_core.stages.runtime.threads import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

if sys.argv[1] == "return":
    return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = resident()
libc.free(libc.malloc(30 << 20))
for size in (5, 11, 7, 19, 23, 13):
    blocks = []
    for _ in range(4):
        blocks.append(libc.malloc(size << 20))
        ctypes.memset(blocks[-1], 1, size << 20)
        libc.malloc(100_000)
    for block in blocks:
        libc.free(block)
print(resident() - before)
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that names neither allocator nor cache, which the test may change."""
    for name in (*freed_memory.ALLOCATOR_VARIABLES, *freed_memory.ONEDNN_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def growth(mode: str, environment: dict[str, str]) -> int:
    command = [sys.executable, "-c", CHANGING_SIZES, mode]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@needs_glibc
def test_blocks_of_changing_sizes_do_not_stay_with_the_process(environment: dict[str, str]) -> None:
    assert growth("keep", environment) > 50  # what is to be avoided
    assert growth("return", environment) < 10
    # Whoever has set the allocator up keeps it so.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    assert growth("return", environment) > 50


@pytest.mark.parametrize(("system", "library"), [("linux", object()), ("darwin", None)], ids=["musl", "macOS"])
def test_other_systems_are_left_as_they_are(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, system: str, library: Any
) -> None:
    def load(name: None) -> Any:
        assert library is not None, "only Linux has what is looked for"
        return library

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", load)
    freed_memory.return_freed_memory()
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(freed_memory.ONEDNN_CAPACITY)


@pytest.mark.parametrize("name", freed_memory.ONEDNN_VARIABLES)
def test_a_bound_of_the_environment_on_onednns_cache_stays(environment: dict[str, str], name: str) -> None:
    environment[name] = "7"
    freed_memory.return_freed_memory()
    assert {key: value for key, value in environment.items() if "CACHE_CAPACITY" in key} == {name: "7"}


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        ("sft", "", True),
        ("evaluate", "", True),
        ("sft", "compute: {return_freed_memory: false}", False),
        ("collect", "", False),
    ],
)
def test_stages_that_run_models_return_it_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, settings: str, expected: bool
) -> None:
    (tmp_path / "params.yaml").write_text(f"seed: 1\n{settings}\n")
    calls: list[str] = []
    monkeypatch.setattr(runner, "return_freed_memory", lambda: calls.append(stage))
    monkeypatch.setattr(runner, "_inputs", lambda stage, workspace: Paths({}))
    monkeypatch.setattr(runner, "_run_on_rank_zero", lambda run: {})
    runner.run_stage(stage, tmp_path)
    assert calls == ([stage] if expected else [])
