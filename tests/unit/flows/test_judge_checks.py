"""``rlhf doctor`` says what the judges of the evaluation lack before a run gets to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.commands.doctor import FAIL, OK, WARN, workspace_checks


def levels(workspace: Path) -> dict[str, str]:
    return {check.name: check.level for check in workspace_checks(workspace)}


def test_a_missing_key_and_a_missing_file_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text(
        "evaluate:\n  llm_judge: {base_url: 'http://127.0.0.1:9/v1', model: m, token_env: JUDGE_KEY_OF_TEST}\n"
        "  verifiable: {path: checks.jsonl}\n"
    )
    assert levels(tmp_path)["llm judge"] == WARN and levels(tmp_path)["verifiable prompts"] == FAIL
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "x")
    (tmp_path / "checks.jsonl").touch()
    assert levels(tmp_path)["llm judge"] == levels(tmp_path)["verifiable prompts"] == OK
