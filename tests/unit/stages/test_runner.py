"""How a stage's end is told where the disk is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.preemption import PreemptionSignal
from rlhf_core.stages.runtime import runner


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
