"""What surrounds a run: where it reports and keeps state, and which engine trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.tracking.stage_run import Tracker
from rlhf_core.training.checkpoints.store import CheckpointStore


@dataclass(frozen=True)
class RunContext:
    """Everything a stage or trainer is given besides its parameters and data.

    Apart from the state found in ``work``, nothing here changes its numbers.

    Attributes:
        work: Folder of the run's partial state. What an interrupted run left there is resumed.
        tracker: Receives metrics, parameters and files.
        preemption: Says at safe points whether SIGTERM asks the run to stop.
        store: Receives a copy of the partial state after every checkpoint; None keeps it in
            ``work`` alone.
        launch: Engine and placement of models.
        folder: Folder that relative files named in the settings lie in: the workspace.
        tokens: Folder that token ids of data files are kept in; None keeps none.
        named_by_content: Whether ``work`` is named by a hash of all that the run depends on, so
            that it need not be compared with what an earlier process found there.
        kept: Whether ``work`` outlives the run; False for a temporary folder.
    """

    work: Path
    tracker: Tracker = field(default_factory=Tracker)
    preemption: PreemptionSignal = field(default_factory=PreemptionSignal)
    store: CheckpointStore | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    folder: Path = field(default_factory=Path)
    tokens: Path | None = None
    named_by_content: bool = False
    kept: bool = True
