"""Where a run of this package keeps its partial state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.training.run_context import RunContext


@contextmanager
def run_context(context: RunContext | None) -> Iterator[RunContext]:
    """The given context, or one whose folder is removed when the block ends."""
    if context is not None:
        yield context
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        yield RunContext(Path(folder))
