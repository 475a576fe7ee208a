"""Run loggers of plugins: they receive what MLflow's run of a stage receives, while the stage runs.

``tracking.loggers`` names them. Each is an entry point of ``rlhf.run_loggers``: a subclass of
:class:`RunLogger`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.errors import first_line
from rlhf_core.plugins import RUN_LOGGERS, load_plugin, made_by_plugin
from rlhf_core.tracking.stage_run import Tracker, grouped

logger = logging.getLogger(__name__)


class RunLogger(Tracker):
    """What a plugin subclasses: of the methods of ``Tracker`` it defines those that concern it.

    Args:
        stage: Name of the stage.
        workspace: The workspace, where it may write in a folder of its own.
    """

    def __init__(self, stage: str, workspace: Path) -> None:
        self.stage, self.workspace = stage, workspace

    def end(self, failed: bool) -> None:
        """Close what is open: the stage has ended, and ``failed`` unless it came to its end."""


class TrackerWithLoggers(Tracker):
    """A tracker that also feeds loggers.

    One that fails is reported once and left out: a stage never waits for it.

    Attributes:
        loggers: Those that have not failed, by name.
    """

    def __init__(self, tracker: Tracker, loggers: Mapping[str, RunLogger]) -> None:
        self.tracker, self.loggers = tracker, dict(loggers)

    @property
    def run_id(self) -> str:
        return self.tracker.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record under the names that MLflow has, so that every logger shows the same groups."""
        named = {grouped(name): value for name, value in metrics.items()}
        self.tracker.log_metrics(metrics, step)
        self._each(lambda one: one.log_metrics(named, step))

    def log_params(self, params: Mapping[str, Any]) -> None:
        self.tracker.log_params(params)
        self._each(lambda one: one.log_params(params))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self.tracker.log_artifact(path, folder)
        self._each(lambda one: one.log_artifact(path, folder))

    def log_datasets(self, datasets: Mapping[str, Mapping[str, str]]) -> None:
        self.tracker.log_datasets(datasets)
        self._each(lambda one: one.log_datasets(datasets))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tracker.set_tags(tags)
        self._each(lambda one: one.set_tags(tags))

    def end(self, failed: bool) -> None:
        """End all loggers; the tracker itself is ended by whoever began it."""
        self._each(lambda one: one.end(failed))

    def _each(self, call: Callable[[RunLogger], None]) -> None:
        for name, one in list(self.loggers.items()):
            try:
                call(one)
            except (Exception, SystemExit) as error:  # whatever the code of others raises
                del self.loggers[name]
                logger.warning(
                    "the run logger %s fails and is left out: %s", name, first_line(error)
                )


@contextmanager
def with_loggers(
    tracker: Tracker, names: Sequence[str], stage: str, workspace: Path
) -> Iterator[Tracker]:
    """Put the loggers that settings name beside ``tracker``, for the block.

    Raises:
        PluginError: One of them is not installed, cannot be imported, or cannot be made.
    """
    loggers: dict[str, RunLogger] = {}
    for name in names:
        plugin = load_plugin(RUN_LOGGERS, name)
        loggers[name] = made_by_plugin(RUN_LOGGERS, name, plugin, stage, workspace)
    if not loggers:
        yield tracker
        return
    beside = TrackerWithLoggers(tracker, loggers)
    failed = True
    try:
        yield beside
        failed = False
    finally:
        beside.end(failed)
