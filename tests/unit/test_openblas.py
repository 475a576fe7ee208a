"""Which processors and which library of NumPy are told apart, and what `rlhf doctor` says of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import threadpoolctl

from flows.commands import doctor as machine
from rlhf_core.runtime import machine as openblas

FLAGS = "fpu sse4_2 avx2 avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16"
AVX512_HERE = openblas.CPUINFO.exists() and "avx512vl" in openblas.CPUINFO.read_text()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    for cached in (openblas.is_amd_with_full_avx512, openblas.numpy_kernels):
        cached.cache_clear()
    yield
    for cached in (openblas.is_amd_with_full_avx512, openblas.numpy_kernels):
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
    vendor: str, family: str, flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: X: Y\n"
    first = f"processor\t: 0\n{names}flags\t\t: {flags}\n\n"
    other = f"vendor_id\t: Authentic{'' if expected else 'AMD'}\ncpu family\t: 26\n"
    second = f"processor\t: 1\n{other}flags\t\t: {FLAGS}\n\n"
    monkeypatch.setattr(openblas, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(first + second)
    assert openblas.is_amd_with_full_avx512() is expected


def test_a_system_without_that_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "CPUINFO", tmp_path / "absent")
    assert not openblas.is_amd_with_full_avx512()


def test_numpy_of_another_library_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for blas in ({"blas": {"name": "mkl"}}, {"blas": {}}, {}):
        openblas.numpy_kernels.cache_clear()
        monkeypatch.setattr(numpy, "show_config", lambda mode, blas=blas: {"Build Dependencies": blas})
        assert openblas.numpy_kernels() is None


def test_another_copy_of_openblas_is_not_taken_for_that_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(numpy.__file__).parent
    libraries = [
        {"internal_api": "openblas", "architecture": name, "filepath": str(path)}
        for name, path in (
            ("Haswell", folder.with_name("scipy.libs") / "libscipy_openblas.so"),
            ("SkylakeX", folder.with_name("numpy.libs") / "libscipy_openblas64_.so"),
        )
    ]
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: libraries)
    monkeypatch.setattr(numpy, "show_config", lambda mode: {"Build Dependencies": {"blas": {"name": "openblas"}}})
    assert openblas.numpy_kernels() == "SkylakeX"


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
    monkeypatch.setattr(machine, "is_amd_with_full_avx512", lambda: amd)
    monkeypatch.setattr(machine, "numpy_kernels", lambda: kernels)
    findings = [check.finding for check in machine.machine_checks() if check.name == "products"]
    assert len(findings) == bool(finding) and finding in "".join(findings)
