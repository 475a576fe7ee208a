"""The progress of a run on the console: a line per event, and the state of the running stages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from flows.pipeline.events import (
    PipelineEvent,
    RegistryUpdated,
    StageEnded,
    StagePreempted,
    StageRetried,
    StageStarted,
)
from flows.stage.outcome import last_progress
from flows.supervision.clock import Stopwatch
from flows.supervision.log_reader import LogReader
from flows.workspace.folder import PRIVATE

LINE_EVERY_SECONDS = 10.0
REDRAW_EVERY_SECONDS = 0.5
TAIL_BYTES = 4096


class Display:
    """Prints lines to a pipe; on a terminal it also redraws a last line with the running stages."""

    def __init__(self, workspace: Path, stream: TextIO | None = None) -> None:
        self.workspace = workspace
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.watch = Stopwatch()
        self.running: dict[str, LogReader] = {}
        self.last_lines: dict[str, str] = {}
        self.last_tick = -LINE_EVERY_SECONDS

    def line(self, text: str) -> None:
        """Print one line with the time since the start."""
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}[{self.watch.seconds:6.1f} s] {text}", file=self.stream, flush=True)

    def event(self, event: PipelineEvent) -> None:
        """Print one event of the pipeline process."""
        match event:
            case StageStarted(stage, pool):
                self.running[stage] = LogReader(self.workspace / PRIVATE / "logs" / f"{stage}.log")
                if pool:
                    self.line(f"{stage:<12} submitted to {pool}")
            case StageEnded(outcome):
                self.running.pop(outcome.stage, None)
                if outcome.action != "skipped":
                    message = f"  {outcome.message}" if outcome.message and outcome.action == "failed" else ""
                    seconds = outcome.ended - outcome.started
                    self.line(f"{outcome.stage:<12} {outcome.action:<8} {seconds:6.1f} s{message}")
            case StageRetried(stage, message, delay_seconds):
                self.line(f"{stage:<12} {message}; trying again in {delay_seconds} s")
            case StagePreempted(stage, message):
                self.line(f"{stage:<12} {message}")
            case RegistryUpdated(message):
                self.line(message)

    def tick(self) -> None:
        """Print the progress of running stages: at any time on a terminal's last line, else as lines now and then."""
        interval = REDRAW_EVERY_SECONDS if self.live else LINE_EVERY_SECONDS
        if not self.running or self.watch.seconds - self.last_tick < interval:
            return
        self.last_tick = self.watch.seconds
        progress = {stage: last_progress(log.text(TAIL_BYTES)) for stage, log in self.running.items()}
        lines = {stage: reached.line if reached else "" for stage, reached in progress.items()}
        if self.live:
            text = "   ".join(f"{stage} {line}".strip() for stage, line in lines.items())
            print(f"\r\x1b[K{text[:150]}", end="", file=self.stream, flush=True)
            return
        for stage, line in lines.items():
            if line and self.last_lines.get(stage) != line:
                self.last_lines[stage] = line
                self.line(f"{stage:<12} {line}")
