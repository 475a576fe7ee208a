"""Every trap of docs/algorithms.md names tests, and those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("## 9. Traps")[1]
TRAPS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| trap ")]


def test_there_are_ten_traps() -> None:
    assert len(TRAPS) == 10


@pytest.mark.parametrize("trap", TRAPS, ids=lambda line: line[2:40])
def test_the_tests_of_a_trap_exist(trap: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", trap)
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / "unit" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"
