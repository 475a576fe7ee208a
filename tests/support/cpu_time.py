"""Processor seconds of each test, its child processes included, and a list of the dear ones at the
end of a run.

Processor seconds do not depend on what else the machine does, so they can be compared between runs.
Nothing fails by them: a test over :data:`LIMIT` needs the mark ``slow``, or ``dear`` with the
reason why it stays in `make test`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 5.0
PROPERTY = "cpu_seconds"


def used() -> float:
    """Return the processor seconds of this process and of those children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTime:
    """A plugin that adds the processor seconds of set-up, call and tear-down to each test's
    reports.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.excused: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._start = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            report.user_properties.append((PROPERTY, used() - self._start))
            report.user_properties.append(
                ("excused", any(item.iter_markers("dear")) or any(item.iter_markers("slow")))
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if report.when == "teardown" and PROPERTY in properties:
            self.seconds[report.nodeid] = float(properties[PROPERTY])  # type: ignore[arg-type]
            if properties["excused"]:
                self.excused.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if os.environ.get("RLHF_CPU_TIME_FILE"):
            rows = sorted(self.seconds.items(), key=lambda row: -row[1])
            Path(os.environ["RLHF_CPU_TIME_FILE"]).write_text(
                "".join(f"{s:.2f}\t{test}\n" for test, s in rows)
            )
        dear = {
            test: s for test, s in self.seconds.items() if s > LIMIT and test not in self.excused
        }
        if dear:
            terminalreporter.section(f"over {LIMIT:.0f} processor seconds, neither slow nor dear")
            for test, seconds in sorted(dear.items(), key=lambda row: -row[1]):
                terminalreporter.line(f"{seconds:7.1f}  {test}")
