"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return their number: those of its affinity where the system has one (Linux), else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
