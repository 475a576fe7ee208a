"""Threads and memory of a workspace's process: how many, how they wait, what is given back."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import ComputeConfig
from rlhf_core.runtime.machine import available_cores

logger = logging.getLogger(__name__)

# Rounds of libgomp's waiting loop, about a tenth of a millisecond: as long as a model's small
# operations take between the products of a decoding step.
SPIN_ROUNDS = 5000


def limit_threads(compute: ComputeConfig, parallel: int) -> None:
    """Set up OpenMP, the tokenizers and the GPU's allocator before they are loaded.

    What the environment sets already stays.

    Args:
        compute: Has the number of threads, and whether they spin.
        parallel: Stages that may run at once. Threads that spin while another stage needs their
            core make both several times slower, so they sleep where all stages together may have
            more threads than there are cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Batches of ever other widths would leave fragments that no tensor fits into.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if compute.threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(compute.threads))
        os.environ.setdefault("RAYON_NUM_THREADS", str(compute.threads))
    if compute.spin and "GOMP_SPINCOUNT" not in os.environ:
        cores = available_cores()
        threads = parallel * (compute.threads or cores)
        if threads > cores:
            logger.warning(
                "compute.spin is left out: %d stages at once have %d threads for %d cores; set flow.parallel: 1, or "
                "fewer compute.threads",
                parallel, threads, cores,
            )  # fmt: skip
        else:
            os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)


def limit_threads_of(workspace: Path) -> None:
    """Apply :func:`limit_threads` with the parameters of ``workspace``, while no stage runs there.

    Without it a small model samples with all cores, which wait for each other most of the time.

    Raises:
        ConfigError: The parameters are wrong.
    """
    limit_threads(load_section(workspace, "compute", ComputeConfig), parallel=1)


MIB = 1 << 20
# Options of glibc's mallopt (malloc.h), and the environment's names for them, which glibc reads
# when a process starts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# Blocks from here on are mapped on their own and unmapped when they are freed.
MAPPED_BLOCK = 4 * MIB
# Free bytes at the end of the heap of smaller blocks that stay for the next ones.
KEPT_AT_THE_END = 256 * MIB
# oneDNN keeps the generated code of as many operations, one for each shape: 1024 unless told
# otherwise.
ONEDNN_CAPACITY = 128
ONEDNN_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")


def return_freed_memory() -> None:
    """Keep this process from growing over batches of many shapes.

    Settings of the allocator and of oneDNN see to it.

    glibc raises the size from which blocks are mapped on their own to 32 MiB with the first large
    block that is freed. Activations then share a heap, which small blocks between them keep from
    shrinking. Here the size stays at 4 MiB. Only glibc on Linux has such a setting; elsewhere only
    oneDNN's cache is bounded. What the environment sets for either is left as it is. No result of
    any operation depends on it.
    """
    if not any(name in os.environ for name in ONEDNN_VARIABLES):
        os.environ[ONEDNN_VARIABLES[0]] = str(ONEDNN_CAPACITY)
    if sys.platform != "linux" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_END)
