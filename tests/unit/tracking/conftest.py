"""MLflow's client for a server that a test lets go away, and a clock that it moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

URI = "http://user:secret@127.0.0.1:5000"
AWAY = MlflowException("API request to http://127.0.0.1:5000 failed with exception connection refused")


@dataclass
class Server:
    """MLflow's client for a server that a test lets go away; ``calls`` are the requests that arrived."""

    error: Exception | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    attempts: int = 0
    runs: dict[str, Any] = field(default_factory=dict)

    def _request(self, name: str, content: Any) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.calls.append((name, content))

    def create_run(self, experiment: str, start_time: int, tags: dict[str, str]) -> Any:
        self._request("create", (experiment, start_time, tags["stage"]))
        run = SimpleNamespace(info=SimpleNamespace(run_id="run"))
        self.runs[tags["rlhf.journal"]] = run
        return run

    def search_runs(self, experiments: list[str], query: str) -> list[Any]:
        return [run for tag, run in self.runs.items() if tag in query]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        rows = [(m.key, m.value, m.step) for m in metrics] + [(row.key, row.value) for row in (*params, *tags)]
        self._request("batch", rows)

    def log_artifact(self, run_id: str, path: str, folder: str | None) -> None:
        self._request("artifact", (Path(path).name, Path(path).read_text(), folder))

    def set_terminated(self, run_id: str, status: str, time: int = 0) -> None:
        self._request("end", status)


class Clock:
    """Monotonic time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()
