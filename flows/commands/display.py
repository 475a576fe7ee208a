"""What a person sees of a run: a line per stage and event, and the state of what runs now."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flows.stage.outcome import last_progress
from flows.supervision.clock import Stopwatch
from flows.workspace.folder import PRIVATE

LINE_EVERY_SECONDS = 10.0
TAIL_BYTES = 4096


class Display:
    """Line-based on a pipe; on a terminal the running stages stand on a last line that is written anew."""

    def __init__(self, workspace: Path, stream: TextIO | None = None) -> None:
        self.workspace = workspace
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.watch = Stopwatch()
        self.running: dict[str, int] = {}
        self.told: dict[str, str] = {}
        self.ticked = -LINE_EVERY_SECONDS

    def line(self, text: str) -> None:
        """One line with the time since the start."""
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}[{self.watch.seconds:6.1f} s] {text}", file=self.stream, flush=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the pipeline process."""
        stage = event.get("stage", "")
        if event["kind"] == "start":
            log = self._log(stage)
            self.running[stage] = log.stat().st_size if log.exists() else 0
            if event.get("pool"):
                self.line(f"{stage:<12} submitted to {event['pool']}")
        elif event["kind"] == "stage":
            self.running.pop(stage, None)
            if event["action"] not in ("skipped",):
                self.line(self._stage_line(event))
        elif event["kind"] == "retry":
            self.line(f"{stage:<12} {event['message']}; trying again in {event['delay']} s")
        elif event["kind"] == "preempted":
            self.line(f"{stage:<12} {event['message']}")
        elif event["kind"] == "registry":
            self.line(str(event["text"]))

    def tick(self) -> None:
        """Show progress: the last line at any time on a terminal, a line of its own now and then elsewhere."""
        due = 0.5 if self.live else LINE_EVERY_SECONDS
        if not self.running or self.watch.seconds - self.ticked < due:
            return
        self.ticked = self.watch.seconds
        lines = {stage: self._progress(stage, offset) for stage, offset in self.running.items()}
        if self.live:
            text = "   ".join(f"{stage} {line}".strip() for stage, line in lines.items())
            print(f"\r\x1b[K{text[:150]}", end="", file=self.stream, flush=True)
            return
        for stage, line in lines.items():
            if line and self.told.get(stage) != line:
                self.told[stage] = line
                self.line(f"{stage:<12} {line}")

    def _stage_line(self, event: Mapping[str, Any]) -> str:
        seconds = event["ended"] - event["started"]
        text = f"{event['stage']:<12} {event['action']:<8} {seconds:6.1f} s"
        return f"{text}  {event['message']}" if event["message"] and event["action"] == "failed" else text

    def _progress(self, stage: str, offset: int) -> str:
        log = self._log(stage)
        if not log.exists():
            return ""
        with log.open("rb") as stream:
            stream.seek(max(offset, log.stat().st_size - TAIL_BYTES))
            found = last_progress(stream.read().decode("utf-8", errors="replace"))
        return found[2] if found else ""

    def _log(self, stage: str) -> Path:
        return self.workspace / PRIVATE / "logs" / f"{stage}.log"
