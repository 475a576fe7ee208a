"""params.yaml is in the style in which DVC writes it: `dvc exp run -S` changes the line that it is asked to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT
from dvc.utils.hydra import apply_overrides

from flows.workspace.recipe import merged_params
from rlhf_core.config.loading.overlay import profiles

NAMES = sorted(profiles(ROOT / "profiles"))


@pytest.mark.parametrize("profile", [None, *NAMES])
def test_dvc_changes_one_line(profile: str | None, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = merged_params(ROOT, profile, [], tmp_path)
    path.write_text(before)
    apply_overrides(str(path), ["seed=77"])
    assert path.read_text() == before.replace("seed: 1\n", "seed: 77\n", 1) != before
    assert [line for line in before.splitlines() if line.endswith(" ")] == []


def test_the_file_in_the_repository_is_what_is_written() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert merged_params(ROOT, None, [], ROOT) == text
