"""How the test files are shared out over pytest-xdist's workers: long files first, dear fixtures
made once.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

# Files and folders that use the same servers, the same estimates of large models, or one process to
# fork ranks from, which imports for ten seconds: one worker runs them all.
TOGETHER = {
    "registry": ("tests/integration/registry/",),
    "memory": ("tests/unit/memory/",),
    "ranks": (
        "tests/unit/engine/",
        "tests/unit/evaluation/test_ranks.py",
        "tests/unit/data/tokens/test_token_cache.py",
        "tests/unit/training/test_checkpoint_manager.py",
    ),
}
# Minutes long each: where one began last, the other workers would be idle until its end.
LONGEST = (
    "tests/e2e/test_smoke_run.py",
    "ranks",
    "registry",
    "tests/faults/test_killed_processes.py",
    "tests/integration/test_flows_run.py",
    "tests/integration/test_remote_jobs.py",
    "memory",
)
SMOKE_RUN = {"smoke", "smoke_copy"}


class LongestFirst(LoadFileScheduling):
    """Give a worker one file, or one group of :data:`TOGETHER`, at a time, in the order of the
    collected tests.
    """

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        # By default files with few tests come last, and the longest are among them.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """Return the group of a test whose files stay together, else its file."""
    file = nodeid.split("::", 1)[0]
    return next((group for group, places in TOGETHER.items() if file.startswith(places)), file)


def sort_by_length(items: list[pytest.Item]) -> None:
    """Order tests by file: the longest, those with servers or processes, most others, those with
    the smoke run.

    A worker whose file reads the smoke run would wait for minutes if it began while another makes
    it.
    """
    with_services = {unit_of(item.nodeid) for item in items if item.get_closest_marker("services")}
    with_smoke_run = {
        unit_of(item.nodeid) for item in items if SMOKE_RUN & {*getattr(item, "fixturenames", ())}
    }

    def position(item: pytest.Item) -> tuple[int, int]:
        unit = unit_of(item.nodeid)
        if unit in LONGEST:
            return 0, LONGEST.index(unit)
        return (3 if unit in with_smoke_run else 1 if unit in with_services else 2), 0

    items.sort(key=position)
