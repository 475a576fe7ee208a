"""The record of what happened: MLflow runs behind a small class. The only package of the core that knows MLflow."""

from rlhf_core.tracking.stage_run import PARENT_RUN_VARIABLE, Tracker, experiment_id, stage_tracker, tracking_uri

__all__ = ["PARENT_RUN_VARIABLE", "Tracker", "experiment_id", "stage_tracker", "tracking_uri"]
