"""Prompts and a function that checks replies, by the real commands: from `rlhf init` to a champion
and its card.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_sums import init_words, write_sums
from commands import run

from rlhf_core.storage.files import read_json

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_a_policy_that_is_right_more_often_becomes_champion_without_any_pairs(
    tmp_path: Path,
) -> None:
    write_sums(tmp_path)
    made = run("rlhf", *init_words("my"), cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    ran = run("rlhf", "run", "--workspace", "my", cwd=tmp_path, timeout=1800)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    (verdict,) = [line for line in lines if line.startswith("verdict  ")]
    assert "better than SFT" in verdict and "by checker" in verdict
    assert any(
        line.startswith("promotion   Released: ") and "version 1 is the champion" in line
        for line in lines
    )
    workspace = tmp_path / "my"
    gain = read_json(workspace / "metrics" / "evaluation.json")["comparison"]["checker"]
    assert gain["mean_difference_low95"] > 0
    assert not [
        name for name in ("reward", "referee", "judge") if (workspace / "models" / name).exists()
    ]
    again = run("rlhf", "run", "--workspace", "my", cwd=tmp_path)
    assert "nothing to do" in again.stdout, again.stdout[-2000:] + again.stderr[-2000:]
    status = run("rlhf", "status", "--workspace", "my", cwd=tmp_path)
    assert status.returncode == 0 and "champion" in status.stdout, status.stderr[-2000:]
    exported = run("rlhf", "export", "out", "--workspace", "my", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr[-2000:]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "reward function" in card and "reward model" not in card.partition("## Limits")[0]
