"""The order in which workers take the test files, and which of them stay together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from distribution import LONGEST, TOGETHER, LongestFirst, sort_by_length, unit_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Collected:
    """What is read of a collected test."""

    nodeid: str
    marks: tuple[str, ...] = ()
    fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.mark.parametrize("name", [*TOGETHER, *LONGEST])
def test_what_is_named_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_long_files_come_first_and_readers_of_the_smoke_run_later() -> None:
    reader, server = "tests/a/test_reader.py", "tests/a/test_server.py"
    items = [
        Collected("tests/a/test_quick.py::test_one"),
        Collected(f"{reader}::test_plain", ("services",)),
        Collected(f"{reader}::test_reads", ("services",), ("tmp_path", "smoke")),
        Collected(f"{server}::test_one[a::b]", ("services",)),
        Collected(f"{LONGEST[1]}::test_one"),
        Collected(f"{LONGEST[0]}::test_one", ("services",), ("smoke",)),
    ]
    sort_by_length(items)  # type: ignore[arg-type]
    units = [unit_of(item.nodeid) for item in items]
    assert units == [LONGEST[0], LONGEST[1], server, reader, reader, "tests/a/test_quick.py"]


def test_workers_take_files_in_that_order_and_a_folder_as_a_whole() -> None:
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda name: ["popen"] * 2)
    scheduler = LongestFirst(config)  # type: ignore[arg-type]
    workers = [Worker("gw0"), Worker("gw1")]
    tests = [f"{TOGETHER[0]}/test_a.py::test_{n}" for n in range(3)] + [f"{TOGETHER[0]}/test_b.py::test_it"]
    tests += [f"tests/a.py::test_{n}" for n in range(4)] + [f"tests/b.py::test_{n}" for n in range(9)]
    for worker in workers:
        scheduler.add_node(worker)  # type: ignore[arg-type]
        scheduler.add_node_collection(worker, tests)  # type: ignore[arg-type]
    scheduler.schedule()
    assert [worker.given for worker in workers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(scheduler.workqueue) == ["tests/b.py"]


class Worker:
    """A worker that notes which tests it was given."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway, self.given = SimpleNamespace(id=name), list[int]()

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers
