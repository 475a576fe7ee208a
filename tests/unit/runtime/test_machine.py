"""What the machine is: memory that a process may still take, processors and the kernels that NumPy
has for them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import psutil
import pytest
import threadpoolctl

from flows.commands import machine_checks
from rlhf_core.runtime import machine as host
from rlhf_core.runtime.machine import VERSION_1, VERSION_2

MIB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, of which the process is in none."""
    monkeypatch.setattr(host, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("3:cpuset:/\n")
    return tmp_path


def test_without_groups_it_is_what_the_machine_has(groups: Path) -> None:
    assert 0 < host.available_memory() < host.total_memory() == psutil.virtual_memory().total


# The groups that the process is in; by folder the limit, MiB held and MiB of cached files; MiB that
# are available.
GROUPS = {
    "cached files are free": ("0::/job/step\n", VERSION_2, {"job": ("10", 9, 2), "job/step": ("max", 9, 0)}, 3),
    "the narrowest of nested groups": (
        "5:cpu,memory:/job/step\n0::/\n", VERSION_1, {"memory/job": ("10", 9, 0), "memory/job/step": ("8", 5, 0)}, 1
    ),
    "a container's group is the top": ("0::/docker/0123\n", VERSION_2, {"": ("6", 4, 0)}, 2),
    "an overdrawn group": ("0::/\n", VERSION_2, {"": ("6", 7, 0)}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_limits_of_groups_count(groups: Path, case: str) -> None:
    membership, version, folders, available = GROUPS[case]
    (groups / "membership").write_text(membership)
    for name, (limit, held, cached) in folders.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / version.limits[0]).write_text(
            f"{int(limit) * MIB if limit.isdigit() else limit}\n"
        )
        (groups / name / version.usage).write_text(f"{held * MIB}\n")
        lines = [f"{key} {cached * MIB // len(version.cached)}" for key in version.cached]
        (groups / name / "memory.stat").write_text("\n".join(["anon 1", *lines, ""]))
    assert host.available_memory() == available * MIB
    narrowest = min(int(limit) for limit, _, _ in folders.values() if limit.isdigit())
    assert host.total_memory() == narrowest * MIB
    if version is VERSION_2 and "" in folders:  # it is throttled at its high mark
        (groups / "memory.high").write_text(f"{folders[''][1] * MIB + 1}\n")
        assert host.available_memory() == min(1, available)


@pytest.mark.parametrize(
    "membership", [b"0::/caf\xe9\n", b"nonsense\n", b"", b"0::/absent\n", b"1:memory:/../x\n"]
)
def test_a_membership_that_tells_nothing_limits_nothing(groups: Path, membership: bytes) -> None:
    (groups / "membership").write_bytes(membership)
    assert host.available_memory() > 8 * MIB


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ({}, 9),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"WORLD_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "", "WORLD_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"}, 4),
        ({"LOCAL_WORLD_SIZE": "0"}, 9),
        ({"LOCAL_WORLD_SIZE": "x"}, 9),
    ],
)
def test_ranks_of_a_machine_share(
    monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], share: int
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert host.share_of_process(9) == share


@pytest.mark.skipif(not host.STATUS.exists(), reason="only Linux tells the peak of a process")
def test_memory_that_was_given_back_is_part_of_the_peak_until_that_is_forgotten() -> None:
    program = (
        "from rlhf_core.runtime.machine import forget_peak, peak_above_now\n"
        "before = peak_above_now()\n"
        "block = bytearray(200 * 2**20)\n"
        "held = peak_above_now()\n"
        "del block\n"
        "print(before, held, peak_above_now())\n"
        "forget_peak()\n"
        "print(peak_above_now())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, held, after, forgotten = map(int, done.stdout.split())
    assert held <= before + 8 * MIB and 190 * MIB < after < 220 * MIB and forgotten < 8 * MIB


FLAGS = "fpu sse4_2 avx2 avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16"
AVX512_HERE = host.CPUINFO.exists() and "avx512vl" in host.CPUINFO.read_text()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    for cached in (host.is_amd_with_full_avx512, host.numpy_kernels):
        cached.cache_clear()
    yield
    for cached in (host.is_amd_with_full_avx512, host.numpy_kernels):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "expected"),
    [
        ("AuthenticAMD", "26", FLAGS, True),
        ("AuthenticAMD", "27", FLAGS, True),
        ("AuthenticAMD", "25", FLAGS, False),
        ("AuthenticAMD", "unknown", FLAGS, False),
        ("AuthenticAMD", "26", FLAGS.replace(" avx512dq", ""), False),
        ("AuthenticAMD", "26", "fpu sse4_2 avx2", False),
        ("GenuineIntel", "26", FLAGS, False),
    ],
)
def test_the_first_processor_is_looked_at(
    vendor: str,
    family: str,
    flags: str,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: X: Y\n"
    first = f"processor\t: 0\n{names}flags\t\t: {flags}\n\n"
    other = f"vendor_id\t: Authentic{'' if expected else 'AMD'}\ncpu family\t: 26\n"
    second = f"processor\t: 1\n{other}flags\t\t: {FLAGS}\n\n"
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(first + second)
    assert host.is_amd_with_full_avx512() is expected


def test_a_system_without_that_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "absent")
    assert not host.is_amd_with_full_avx512()


def test_numpy_of_another_library_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for blas in ({"blas": {"name": "mkl"}}, {"blas": {}}, {}):
        host.numpy_kernels.cache_clear()
        monkeypatch.setattr(
            numpy, "show_config", lambda mode, blas=blas: {"Build Dependencies": blas}
        )
        assert host.numpy_kernels() is None


def test_another_copy_of_openblas_is_not_taken_for_that_of_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(numpy.__file__).parent
    libraries = [
        {"internal_api": "openblas", "architecture": name, "filepath": str(path)}
        for name, path in (
            ("Haswell", folder.with_name("scipy.libs") / "libscipy_openblas.so"),
            ("SkylakeX", folder.with_name("numpy.libs") / "libscipy_openblas64_.so"),
        )
    ]
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: libraries)
    monkeypatch.setattr(
        numpy, "show_config", lambda mode: {"Build Dependencies": {"blas": {"name": "openblas"}}}
    )
    assert host.numpy_kernels() == "SkylakeX"


@pytest.mark.skipif(not AVX512_HERE, reason="no processor with AVX-512")
@pytest.mark.parametrize("named", ["Haswell", "SkylakeX"])
def test_kernels_are_those_that_openblas_took(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", named)
    code = "from rlhf_core.runtime.machine import numpy_kernels; print(numpy_kernels())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == named


@pytest.mark.parametrize(
    ("amd", "kernels", "finding"),
    [
        (True, "Haswell", "NumPy's OpenBLAS has Haswell kernels"),
        (True, None, "NumPy has no OpenBLAS"),
        (True, "Cooperlake", ""),
        (False, None, ""),
    ],
)
def test_doctor_says_when_numpy_lacks_the_kernels(
    amd: bool, kernels: str | None, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "is_amd_with_full_avx512", lambda: amd)
    monkeypatch.setattr(machine_checks, "numpy_kernels", lambda: kernels)
    findings = [
        check.finding for check in machine_checks.machine_checks() if check.name == "products"
    ]
    assert len(findings) == bool(finding) and finding in "".join(findings)
