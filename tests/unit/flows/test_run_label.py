"""Names of runs: workspace, profile and time, the same on both servers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from flows.workspace.folder import job_label, run_label, run_tags

MOMENT = datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("profile", "label"),
    [
        ("smoke", "trial · smoke · 2026-01-02 03:04:05"),
        ("", "trial · 2026-01-02 03:04:05"),
        ("trial", "trial · 2026-01-02 03:04:05"),
    ],
)
def test_a_run_is_named_by_workspace_profile_and_time(tmp_path: Path, profile: str, label: str) -> None:
    assert run_label(tmp_path / "trial", profile, MOMENT) == label


def test_a_job_is_named_by_workspace_and_stage() -> None:
    assert job_label("/a/b/trial", "ppo") == "trial · ppo"


def test_the_tags_are_what_a_person_looks_for(tmp_path: Path) -> None:
    assert run_tags(tmp_path / "trial", "smoke") == {"workspace": "trial", "profile": "smoke"}
    assert run_tags(tmp_path / "trial", "") == {"workspace": "trial"}
