"""Commands that load libraries say first what they are doing."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from flows import cli
from flows.commands import registry_commands


class Announced(Exception):
    """Raised in place of what a command would go on to do."""


@pytest.mark.parametrize(
    "command",
    [
        "init my-run", "run", "run --profile smoke", "status", "doctor", "compare .", "report", "export there", "chat",
        "serve", "promote", "approve", "decline --reason no", "rollback --reason no", "history", "registry terms",
        "registry gc",
    ],
)  # fmt: skip
def test_it_is_said_what_a_command_does_before_it_does_anything(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(what: str) -> NoReturn:
        raise Announced(what)

    monkeypatch.setattr(cli, "busy", announce)
    monkeypatch.setattr(registry_commands, "busy", announce)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(CliRunner().invoke(cli.app, command.split()).exception, Announced)
