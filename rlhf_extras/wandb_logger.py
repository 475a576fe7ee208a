"""Weights & Biases as a run logger: ``tracking.loggers: [wandb]``, beside MLflow.

Settings are W&B's own environment variables, such as ``WANDB_API_KEY``, ``WANDB_PROJECT`` and
``WANDB_MODE``. It gets metrics, parameters and tags. Files stay here: samples and plots quote the
data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.tracking.run_loggers import RunLogger
from rlhf_core.tracking.stage_run import PARENT_RUN_VARIABLE

try:
    import wandb
except ImportError as error:
    raise ImportError("it needs the package wandb: pip install 'rlhf-pipeline[wandb]'") from error

PROJECT = "rlhf-pipeline"
FOLDER = Path(".rlhf") / "wandb"  # what waits for `wandb sync` with WANDB_MODE=offline


class WandbLogger(RunLogger):
    """A run of W&B for each stage, in a group with the other stages of its pipeline run."""

    def __init__(self, stage: str, workspace: Path) -> None:
        super().__init__(stage, workspace)
        folder = workspace / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=f"{workspace.resolve().name} · {stage}",
            group=os.environ.get(PARENT_RUN_VARIABLE),
            job_type=stage,
            dir=str(folder),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False
            ),
        )
        # Its own counter only rises, and a resumed stage counts from its checkpoint again.
        self.run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite numbers at a step; without one they are results of the whole run."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if step is None:
            self.run.summary.update(finite)
        else:
            self.run.log(finite | {"step": step})

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings of the run."""
        self.run.config.update(dict(params), allow_val_change=True)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Record labels beside the settings."""
        self.run.config.update(dict(tags), allow_val_change=True)

    def end(self, failed: bool) -> None:
        """Close the run, marked as failed where the stage did."""
        self.run.finish(exit_code=int(failed))
