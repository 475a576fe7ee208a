"""Charts of the report: odd values do no harm, and a chart loads nothing and disturbs no other."""

from __future__ import annotations

import re

from rlhf_core.evaluation.report.charts import interval_chart, line_chart


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
