"""Texts, names and columns of data reach a terminal without the control characters that they hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.commands.text import print_error
from rlhf_core.cli import app

RED, TITLE, C1, BACK = "\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\rgone"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": f"{RED}a?", "chosen": f"{TITLE}b", "rejected": f"{C1}c", f"{RED}d{BACK}": 1}
    name = f"x{RED}{BACK}.jsonl"
    Path(name).write_text(json.dumps(row) + "\n" + json.dumps(row | {"margin": RED}) + "\n")
    return name


@pytest.mark.parametrize("options", [["inspect"], ["inspect", "--json"], ["convert", "--to", "out.jsonl"]])
def test_reports_hold_no_control_characters(hostile: str, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["data", *options, hostile], color=True)
    assert result.exit_code == 0, result.exception
    assert not {character for character in result.stdout if ord(character) < 32 or 127 <= ord(character) < 160} - {"\n"}
    assert "31m" in result.stdout  # shown as an escape
    if "--json" in options:
        (file,) = json.loads(result.stdout)["files"]
        assert file["examples"][0]["rejected"] == f"{C1}c" and file["file"].endswith(hostile)


def test_errors_hold_none() -> None:
    stream = io.StringIO()
    print_error(f"the row {RED}x{C1}\nsecond line", stream)
    assert stream.getvalue() == "rlhf: the row \\x1b[31mx\\x9b31m\nsecond line\n"
