"""Returns the memory of freed tensors to the system, which glibc and oneDNN would keep for the process."""

from __future__ import annotations

import ctypes
import os
import sys

MIB = 1 << 20
# Options of glibc's mallopt (malloc.h), and the environment's names for them, which glibc reads when a process starts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# Blocks from here on are mapped on their own and unmapped when they are freed.
MAPPED_BLOCK = 4 * MIB
# Free bytes at the end of the heap of smaller blocks that stay for the next ones.
KEPT_AT_THE_END = 256 * MIB
# oneDNN keeps the generated code of as many operations, one for each shape: 1024 unless told otherwise.
ONEDNN_CAPACITY = 128
ONEDNN_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")


def return_freed_memory() -> None:
    """Keep this process from growing over batches of many shapes, by settings of its allocator and of oneDNN.

    glibc raises the size from which blocks are mapped on their own to 32 MiB with the first large block that is freed.
    Activations then share a heap, which small blocks between them keep from shrinking. Here the size stays at 4 MiB.
    Only glibc on Linux has such a setting; elsewhere only oneDNN's cache is bounded. What the environment sets for
    either is left as it is. No result of any operation depends on it.
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
