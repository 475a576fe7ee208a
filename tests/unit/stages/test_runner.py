"""What a stage's process is set to before it trains, and how its end is told where the disk is full."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import create_engine, text

from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime import runner
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking.stage_run import METRICS_TAG, Tracker


def full(name: str, workspace: Path, preemption: PreemptionSignal) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "history.jsonl")


def test_a_full_disk_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_run", full)
    with pytest.raises(RlhfError, match=r"sft: .*No space left on device.*history\.jsonl.*make room") as raised:
        runner.run_stage("sft", tmp_path)
    assert raised.value.exit_code == EXIT_USER_ERROR and "\n" not in str(raised.value)
    outcome: dict[str, Any] = json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_USER_ERROR and "make room" in outcome["message"]


def test_a_database_without_room_is_a_full_disk_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small_database(*_: object) -> NoReturn:
        engine = create_engine(f"sqlite:///{tmp_path / 'mlflow.db'}")
        with engine.begin() as connection:
            connection.execute(text("PRAGMA max_page_count = 2"))
            for number in range(9):
                connection.execute(text(f"CREATE TABLE t{number} (\n  a TEXT\n)"))
        raise AssertionError("it had room")

    monkeypatch.setattr(runner, "_run", small_database)
    with pytest.raises(RlhfError, match=r"^base: [^\n]*database or disk is full; make room[^\n]*$"):
        runner.run_stage("base", tmp_path)


def test_that_the_outcome_cannot_be_noted_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_run", full)
    (tmp_path / ".rlhf").write_text("no folder")
    with pytest.raises(RlhfError, match="make room"):
        runner.run_stage("sft", tmp_path)
    assert "the outcome of sft could not be written" in caplog.text


@pytest.mark.parametrize("allowed", [True, False])
def test_a_training_stage_allows_tf32_as_the_parameters_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    (tmp_path / "params.yaml").write_text(f"compute: {{tf32: {str(allowed).lower()}}}\n")
    calls: list[bool] = []
    monkeypatch.setattr("rlhf_core.models.precision.allow_tf32", calls.append)
    monkeypatch.setattr(runner, "_inputs", lambda stage, workspace: Paths({}))
    monkeypatch.setattr(runner, "_run_on_rank_zero", lambda run: {})
    runner.run_stage("sft", tmp_path)
    assert calls == [allowed]


class NotedTracker(Tracker):
    """Keeps what a stage records."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.tags: dict[str, str] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.metrics |= metrics

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tags |= tags


def test_results_are_recorded_once_and_the_run_can_be_found_by_them(tmp_path: Path) -> None:
    tracker = NotedTracker()
    metrics = {"kl": 1.0, "selected": {"reward": 2.0}, "last": {"reward": 3.0}}
    runner._record(metrics, Paths({"metrics": tmp_path / "ppo.json"}), tracker)
    assert tracker.metrics == {"final/kl": 1.0, "final/selected.reward": 2.0}
    assert tracker.tags == {METRICS_TAG: sha256_file(tmp_path / "ppo.json")}


def test_parameters_have_the_names_of_params_yaml() -> None:
    stage = runner.load_stage("critic")
    names = runner.named_parameters(stage, stage.config())
    assert {"seed", "critic.optimizer.lr", "ppo.max_new_tokens", "policy.method"} <= set(names)
