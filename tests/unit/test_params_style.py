"""params.yaml is in the style in which DVC writes it: `dvc exp run -S` changes the line that it is asked to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT
from dvc.utils.hydra import apply_overrides

from flows.dvc_repo.recipe import merged_params, with_profile_header
from rlhf_core.config.loading import profiles
from rlhf_core.errors import ConfigError

NAMES = sorted(profiles(ROOT / "profiles"))


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *NAMES])
def test_dvc_changes_one_line(profile: str | None, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = merged_params(ROOT, profile, [], tmp_path)
    path.write_text(before)
    apply_overrides(str(path), ["seed=77"])
    assert path.read_text() == before.replace("seed: 1\n", "seed: 77\n", 1) != before


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *NAMES])
def test_no_line_ends_in_a_space(profile: str | None) -> None:
    # Beside the repository, where paths are short: DVC's style moves a long path to a line of its own, after a space.
    lines = merged_params(ROOT, profile, [], ROOT).splitlines()
    assert [line for line in lines if line.endswith(" ")] == []


def test_dvc_changes_one_line_beside_a_long_path(tmp_path: Path) -> None:
    path, source = tmp_path / "params.yaml", "/data/" + "long/" * 30 + "pairs.jsonl"
    before = merged_params(
        ROOT, "smoke", [f"collect.files.preferences=[{{path: {source}, category: harmless}}]"], tmp_path
    )
    assert f"{source}\n" in before
    path.write_text(before)
    apply_overrides(str(path), ["seed=77"])
    assert path.read_text() == before.replace("seed: 1\n", "seed: 77\n", 1) != before


def test_the_file_in_the_repository_is_what_is_written() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert merged_params(ROOT, None, [], ROOT) == text


def test_every_profile_has_a_header_of_its_own(tmp_path: Path) -> None:
    smoke = merged_params(ROOT, "smoke", ["seed=3"], tmp_path).splitlines()
    assert smoke[2].startswith("# Profile smoke: The whole pipeline") and "demo" not in smoke[2]
    assert "seed: 3" in smoke and any(line.startswith("profile: smoke ") for line in smoke)
    assert (ROOT / "params.yaml").read_text().splitlines()[:2] == smoke[:2]
    long = with_profile_header("# General.\n# Profile demo: one\n# two\nseed: 1\n", "x", "word " * 60)
    first, second, *others = long.splitlines()
    assert first == "# General." and second.startswith("# Profile x: word") and others[-1] == "seed: 1"
    assert max(map(len, long.splitlines())) <= 120 and "two" not in long
    assert with_profile_header("seed: 1\n", "x", "about.") == "# Profile x: about.\nseed: 1\n"


def test_the_profile_of_a_workspace_is_that_of_its_own_params(tmp_path: Path) -> None:
    """A trial of a workspace that was made with a profile names the profile of the trial alone."""
    (tmp_path / "params.yaml").write_text(merged_params(ROOT, "smoke", [], tmp_path))
    trial = merged_params(tmp_path, "vanilla", [], tmp_path)
    assert "# Profile vanilla: " in trial and "Profile smoke" not in trial


def test_an_override_may_allow_what_a_profile_sets(tmp_path: Path) -> None:
    pretrained = "base.source=owner/model"
    with pytest.raises(ConfigError, match="allow_high_learning_rates"):
        merged_params(ROOT, "smoke", [pretrained], tmp_path)
    merged_params(ROOT, "smoke", [pretrained, "base.allow_high_learning_rates=true"], tmp_path)
