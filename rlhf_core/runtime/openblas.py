"""Detect where NumPy's OpenBLAS multiplies float32 matrices faster than PyTorch does by MKL, and set its threads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")  # only Linux has it
# From Zen 5 on. Zen 4 computes 512 bits in two halves, with which MKL is as fast.
FULL_WIDTH_FAMILY = 26
AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
# What OpenBLAS calls its kernels with vectors of 512 bits.
AVX512_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")


@cache
def is_amd_with_full_avx512() -> bool:
    """Return whether ``/proc/cpuinfo`` names one of AMD's processors with units of 512 bits; False elsewhere."""
    fields: dict[str, str] = {}
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        return False
    family = fields.get("cpu family", "")
    if fields.get("vendor_id") != "AuthenticAMD" or not family.isdecimal() or int(family) < FULL_WIDTH_FAMILY:
        return False
    return set(fields.get("flags", "").split()) >= AVX512


@cache
def numpy_kernels() -> str | None:
    """Return the name of the kernels by which OpenBLAS computes NumPy's products, None where another library does.

    OpenBLAS takes those of the processor, or what ``OPENBLAS_CORETYPE`` named when it was loaded.
    """
    import numpy
    from threadpoolctl import threadpool_info

    built_with = numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    if "openblas" not in str(built_with.get("name")).lower():
        return None
    libraries = [library for library in threadpool_info() if library.get("internal_api") == "openblas"]
    # SciPy may have loaded another copy, with kernels of its own.
    own = [library for library in libraries if _is_of_numpy(library, Path(numpy.__file__).parent)]
    return str((own or libraries)[0].get("architecture")) if libraries else None


def _is_of_numpy(library: dict[str, Any], package: Path) -> bool:
    """Whether the library lies in NumPy's folder, or beside it in the folder ``numpy.libs`` of a wheel."""
    folders = Path(str(library.get("filepath"))).parents
    return package in folders or package.with_name("numpy.libs") in folders


def set_openblas_threads(count: int) -> None:
    """Let every OpenBLAS of this process compute each product on ``count`` threads."""
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=count)
