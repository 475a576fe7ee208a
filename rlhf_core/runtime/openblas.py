"""Whether OpenBLAS, which comes with NumPy, multiplies float32 matrices faster here than PyTorch does by MKL."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # only Linux has it
AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
# What OpenBLAS calls its kernels with vectors of 512 bits.
AVX512_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")


@cache
def is_amd_with_avx512() -> bool:
    """Whether Linux says so of the first processor. MKL has no vectors of full width for those."""
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
    return fields.get("vendor_id") == "AuthenticAMD" and set(fields.get("flags", "").split()) >= AVX512


@cache
def numpy_kernels() -> str | None:
    """Return the name of the kernels by which OpenBLAS computes NumPy's products, None where another library does.

    OpenBLAS takes those of the processor, or what ``OPENBLAS_CORETYPE`` named when it was loaded.
    """
    import numpy
    from threadpoolctl import threadpool_info

    built_with = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    libraries = [library for library in threadpool_info() if library.get("internal_api") == "openblas"]
    return str(libraries[0].get("architecture")) if libraries and "openblas" in built_with.lower() else None


def set_openblas_threads(count: int) -> None:
    """Let OpenBLAS compute each product on ``count`` threads, which wait for work in its own pool."""
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=count)
