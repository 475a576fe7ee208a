"""States of engines that have been on the disk: written as checkpoints are, by all ranks, and read
again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import Tensor

from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import Checkpoint
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.engine.base import Engine


def saved(engine: Engine) -> Checkpoint:
    """The checkpoint of an engine's state; its folder is gone when this returns, but its tensors
    can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(Path(folder, "checkpoints"))
        manager.save(0, *engine.state(), keep=1)
        checkpoint = manager.load_latest()
        distributed.any_rank(False)  # nobody reads from the folder any more
    assert checkpoint is not None
    return checkpoint


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Go on from ``checkpoint``."""
    engine.load_state(checkpoint.tensors, checkpoint.meta)


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Copies of the whole tensors of an engine's state, on every rank."""
    tensors = saved(engine).tensors
    return {name: tensors.whole(name).clone() for name in sorted(tensors.names)}
