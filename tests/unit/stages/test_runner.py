"""What a stage's process is set to before it trains, and how its end is told where the disk is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime import runner
from rlhf_core.stages.runtime.contract import Paths


def full(name: str, workspace: Path, preemption: PreemptionSignal) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "history.jsonl")


def test_a_full_disk_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_run", full)
    with pytest.raises(RlhfError, match=r"sft: .*No space left on device.*history\.jsonl.*make room") as raised:
        runner.run_stage("sft", tmp_path)
    assert raised.value.exit_code == EXIT_USER_ERROR and "\n" not in str(raised.value)
    outcome: dict[str, Any] = json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_USER_ERROR and "make room" in outcome["message"]


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
