"""Charts of the report survive odd values and disturb no other, and the report says where it comes from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rlhf_core.evaluation.report.charts import EDGES, histogram, interval_chart, line_chart, reward_histograms
from rlhf_core.evaluation.report.sources import recorded_outputs, report_lineage
from rlhf_core.storage.files import sha256_file


def test_charts_survive_odd_values() -> None:
    nan = float("nan")
    assert "no finite values" in line_chart({"x": [(1.0, nan)]})
    assert line_chart({"x": [(1.0, 2.0)]}).count("<use") == 1, "a single point is a dot"
    broken = line_chart({"x": [(1.0, 1.0), (2.0, 2.0), (3.0, nan), (4.0, 2.0), (5.0, 3.0)]})
    assert re.search(r'd="M[^M"]*L[^M"]*M[^M"]*L[^"]*"[^>]*stroke: var\(--s0\)', broken)
    assert "&lt;i&gt;$x$" in interval_chart([("<i>$x$", 0.1, 0.2, 0.3)], 0.5)


def test_charts_belong_to_their_page() -> None:
    chart = line_chart({"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.0, 0.0), (1.0, 1.0)]}, marks=[0.5])
    assert "http" not in chart and "<style" not in chart and "<!" not in chart
    names = re.findall(r' id="([^"]*)"', chart)
    assert len(names) == len(set(names)) and all(f"#{name}" in chart for name in names)
    assert "var(--s0)" in chart and "var(--s1)" in chart and "health finding" in chart
    again = line_chart({"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.0, 0.0), (1.0, 1.0)]}, marks=[0.5])
    assert chart == again, "the same numbers give the same bytes"


LOCK = """schema: '2.0'
stages:
  sft:
    cmd: rlhf stage sft
    outs:
    - path: models/sft
      md5: abc.dir
  report:
    outs:
    - path: report.html
      md5: old
"""


def test_a_workspace_tells_commit_run_and_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report_lineage(tmp_path, "") == {"git_revision": "none", "mlflow_run": "", "dvc_lock": "", "outputs": {}}
    (tmp_path / "dvc.lock").write_text(LOCK)
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    lineage = report_lineage(tmp_path, "own")
    assert len(lineage["git_revision"]) == 40 and lineage["mlflow_run"] == "own"
    assert lineage["dvc_lock"] == sha256_file(tmp_path / "dvc.lock")
    assert lineage["outputs"] == {"models/sft": "abc.dir"}, "the report's own hash is of an earlier one"
    monkeypatch.setenv("RLHF_PARENT_RUN_ID", "pipeline")
    (tmp_path / "dvc.lock").write_text("stages: [")
    lineage = report_lineage(tmp_path, "own")
    assert lineage["mlflow_run"] == "pipeline" and lineage["git_revision"].endswith("-dirty")
    assert recorded_outputs(tmp_path / "dvc.lock") == {}


def test_the_areas_of_the_bins_are_their_shares() -> None:
    xs, heights = histogram([-3.0, -2.0, -1.5, 0.0, 0.5, 2.0, 4.0])
    areas = [(xs[i + 1] - xs[i]) * heights[i] for i in range(0, len(xs), 2)]
    assert areas == pytest.approx([0.05, 0.20, 0.25, 0.25, 0.20, 0.05])
    assert all(heights[i] == heights[i + 1] for i in range(0, len(xs), 2))
    # The three lowest percentiles are the same: the share below them has no width.
    xs, heights = histogram([0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    assert xs[0] == 0.0 and len(xs) == 8 and heights[0] == pytest.approx(0.25)
    assert histogram([2.0] * 7)[0] == [1.98, 2.02]


def test_first_and_last_iteration_are_drawn_and_broken_ones_left_out() -> None:
    def row(iteration: int, centre: float) -> dict[str, float]:
        return {name: centre + i for i, name in enumerate(EDGES)} | {"iteration": iteration}

    chart = reward_histograms([row(i, i / 10) for i in range(1, 31)])
    assert chart is not None
    assert chart.count("fill-opacity: 0.5") == 8 or chart.count("opacity: 0.5") >= 8
    assert ">1</text>" in chart and ">30</text>" in chart
    assert reward_histograms([row(1, float("nan")), {"iteration": 2, "reward_mean": 1.0}]) is None
    one = reward_histograms([row(4, 0.0), row(5, float("inf"))])
    assert one is not None and ">4</text>" in one and ">5</text>" not in one
