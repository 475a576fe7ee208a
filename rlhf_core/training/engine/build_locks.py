"""Locks of compiled extensions whose builder was killed.

DeepSpeed compiles its operators at first use, and torch guards the build by a file that whoever comes next waits for
without an end. A process killed in between leaves it, and every later run would hang in silence.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

STALE_SECONDS = 1800.0  # no single build takes that long

logger = logging.getLogger(__name__)


def remove_stale_build_locks() -> None:
    """Remove the locks of torch's extension folder that are older than half an hour, with a warning."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in sorted(root.glob("**/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
            if age > STALE_SECONDS:
                lock.unlink()
                logger.warning("removed %s, which a build that was killed %.0f minutes ago left behind", lock, age / 60)
        except OSError:  # another rank was faster, or the folder belongs to someone else
            continue
