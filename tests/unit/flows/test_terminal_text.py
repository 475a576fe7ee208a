"""What others wrote is shown as text: neither a terminal nor rich takes it for commands."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Group
from rich.padding import Padding
from rich.table import Column
from rich.text import Text
from unit.flows.test_compare import command, workspace

from flows.commands.display import Display, LiveDisplay
from flows.commands.run_state import RunState
from flows.commands.text import (
    PlainConsole,
    aligned,
    marked_table,
    plain_table,
    print_error,
)
from rlhf_core.cli import write_plain_logs
from rlhf_core.commands.data import print_text
from rlhf_extras.chat.session import ChatSession, converse

# Clears the screen, sets the title, moves up a line, begins a hyperlink, turns the direction.
CODES = "a\x1b[2J\x1b]0;owned\x07\x1b[1A\x1b]8;;http://x\x1b\\\x9b2J\u202egnp\x08\x7f"
# No tag of rich, an unknown one that ends, a style, an emoji.
MARKUP = "[INST] b [/INST] [bold red]c[/] [link=http://x]d[/link] :smile:"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def table_of(text: str) -> Group:
    table = plain_table(["name", Column(text)])
    table.add_row(text, text)
    return Group(table, Padding(text, 1), Text(text), marked_table(["a"], [(True, text, text, "")]))


PRINTED: dict[str, Callable[[str, io.StringIO], None]] = {
    "a text": lambda text, stream: PlainConsole(stream).print(text),
    "a table": lambda text, stream: PlainConsole(stream, 400).print(table_of(text)),
    "rows": lambda text, stream: PlainConsole(stream, 400).print(aligned([("label", text)])),
    "an error": print_error,
    "a line of a run": lambda text, stream: Display(RunState(Path()), stream).line(text),
}


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
@pytest.mark.parametrize("what", PRINTED)
def test_texts_of_others_are_shown_as_they_are(
    what: str, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # or rich's own colours would stand between
    for text in (CODES, MARKUP):
        written = stream()
        PRINTED[what](text, written)
        said = written.getvalue().replace("\n", "")
        assert said.isprintable(), said
        assert MARKUP in said or text != MARKUP


def test_the_table_of_a_run_on_a_terminal_shows_names_of_metrics_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    display = LiveDisplay(RunState(tmp_path), PlainConsole(screen, 200))
    display.line(CODES)
    display.phase(MARKUP)
    display.close()
    said = screen.getvalue()
    assert "\x1b[2J" not in said and "owned\x07" not in said and "[/INST]" in said


def test_what_commands_print_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(CODES)
    print_text(CODES, err=True)
    for said in capsys.readouterr():
        assert said.removesuffix("\n").isprintable()


def test_warnings_of_a_program_without_logs_have_no_control_characters(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain_logs()
    assert logging.lastResort is not None
    logger = logging.Logger("without handlers")
    logger.warning("%s: weights such as %s are left out", MARKUP, CODES)
    said = capfd.readouterr().err
    assert said.startswith(MARKUP) and said.removesuffix("\n").isprintable()


def test_runs_with_markup_in_settings_and_names_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("[", "b[red]")):
        text = f"{number} {MARKUP} {CODES}"
        workspace(tmp_path / name, params={"ppo": {"batch_size": 10, "note": text}})
    ended = command("[", "b[red]")
    assert ended.exit_code == 0, ended.output
    assert "[/INST]" in ended.stdout and "b[red]" in ended.stdout
    assert ended.stdout.replace("\n", "").isprintable()


@pytest.mark.parametrize("stream", [io.StringIO, Screen])
def test_replies_of_a_model_and_what_is_said_of_it_move_no_cursor(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(self: ChatSession, text: str, on_text: Callable[[str], None] | None = None) -> str:
        if on_text is not None:
            for character in CODES:  # as pieces come
                on_text(character)
        return CODES

    monkeypatch.setattr(ChatSession, "say", say)
    session = object.__new__(ChatSession)
    session.forgotten = 0
    source = stream("hello\n")
    sink = io.StringIO()
    assert converse(session, source, sink, [CODES]) == 1
    assert sink.getvalue().replace("\n", "").isprintable() and "\\x1b[2J" in sink.getvalue()
