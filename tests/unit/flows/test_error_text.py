"""What the command line prints of an error: its lines kept, a gate's refusal as a table."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.commands.text import print_error, print_failed_gates, print_gate_failure
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, GateFailed
from rlhf_core.gates import GateDecision

WHY = "below this the proxy misleads PPO more than it guides it"
LONGER = "max(1.6 * sft.length, sft.length + 0)"
NAMES = ("metric", "value", "bound", "sign", "terms", "limit", "passed", "why")
CONDITIONS = [
    dict(zip(NAMES, row, strict=True))
    for row in (
        ("kl", 2.31, "<= 6", "<=", "", 6.0, True, "nats per sequence"),
        ("comparison.judge.win_rate_low95", 0.4999996, ">= 0.5", ">=", "", 0.5, False, WHY),
        ("policy.length", 55.234567, f"<= {LONGER}", "<=", LONGER, 48.12345, False, "longer"),
        ("absent", None, ">= 1", ">=", "", 1.0, False, "w"),
    )
]
CONDITIONS[-1]["note"] = "missing"
DECISION: dict[str, Any] = {
    "gate": "policy",
    "passed": False,
    "mode": "enforce",
    "conditions": CONDITIONS,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A colour terminal of 80 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.fixture
def failure(tmp_path: Path) -> GateFailed:
    evidence = tmp_path / "policy.json"
    evidence.write_text(json.dumps(DECISION))
    return GateFailed("the policy gate failed: kl is 9", evidence)


def test_conditions_are_rounded_signed_and_sorted_by_failure() -> None:
    rows = GateDecision.of("policy", DECISION).failures_first
    assert [row.metric for row in rows] == [
        "comparison.judge.win_rate_low95",
        "policy.length",
        "absent",
        "kl",
    ]
    # Four digits would show 0.5 ≥ 0.5 as a failure; nine tell the two apart.
    assert (rows[0].measured, rows[0].required) == ("0.4999996", "≥ 0.5")
    assert (rows[1].measured, rows[1].required) == ("55.23", "≤ 48.12")
    assert (rows[2].measured, rows[2].required) == ("missing", "≥ 1")
    assert rows[3].passed and rows[3].measured == "2.31"


def test_a_gate_failure_is_a_table_that_fits_80_columns(
    terminal: Terminal, failure: GateFailed
) -> None:
    terminal.isatty = lambda: False  # type: ignore[method-assign]
    print_gate_failure(failure, terminal)
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "rlhf: the policy gate failed: 3 of 4 conditions do not hold"
    assert all(len(line) <= 80 for line in lines if "evidence" not in line), lines
    assert "\x1b" not in terminal.getvalue()
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["FAIL", "comparison.judge.win_rate_low95"],
        ["FAIL", "policy.length"],
        ["FAIL", "absent"],
        ["ok", "kl"],
    ]
    assert len({line.index(sign) for line, sign in zip(lines[2:6], "≥≤≥≤", strict=True)}) == 1
    assert f"evidence: {failure.evidence}" in lines
    assert "nats per sequence" not in terminal.getvalue()


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_colours_unless_no_color_is_set(
    terminal: Terminal, failure: GateFailed, monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    print_gate_failure(failure, terminal)
    assert ("\x1b[1;31mFAIL" in terminal.getvalue()) is colour
    assert ("\x1b[32mok" in terminal.getvalue()) is colour


def test_a_gate_failure_without_readable_evidence_is_its_message(
    terminal: Terminal, tmp_path: Path
) -> None:
    for evidence in (None, tmp_path / "none.json"):
        stream = io.StringIO()
        print_gate_failure(GateFailed("the policy gate failed: kl is 9", evidence), stream)
        assert stream.getvalue() == "rlhf: the policy gate failed: kl is 9\n"


def test_long_lines_are_wrapped_at_words_on_a_terminal_and_never_in_a_pipe(
    terminal: Terminal,
) -> None:
    message = "word " * 40 + "[bold]/path[/bold] :smile:"
    print_error(message, terminal)
    assert max(map(len, terminal.getvalue().splitlines())) <= 80 + len("\x1b[1;31m\x1b[0m")
    pipe = io.StringIO()
    print_error(message, pipe)
    assert pipe.getvalue() == f"rlhf: {message}\n"


@pytest.fixture
def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str]]:
    """Runs a command, in place of which ``error`` is raised if one is given; returns its status and
    what it prints.
    """

    def run(*words: str, error: BaseException | None = None) -> tuple[object, str]:
        def fail(**_: object) -> None:
            raise error or AssertionError

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "stdout", sys.stdout)
            patch.setattr(sys, "argv", ["rlhf", *words])
            if error is not None:
                patch.setattr(cli, "app", fail)
            cli.main()
        return ended.value.code, capsys.readouterr().err

    return run


def test_two_wrong_settings_are_two_lines(
    tmp_path: Path, ended: Callable[..., tuple[object, str]]
) -> None:
    (tmp_path / "params.yaml").write_text("sft: {stepz: 3, batch_size: 0}\n")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    status, printed = ended("run", "--workspace", str(tmp_path))
    first, *others = printed.splitlines()
    assert (status, first) == (EXIT_USER_ERROR, f"rlhf: {tmp_path / 'params.yaml'}: 2 problems")
    assert sorted(line.strip().split(";")[0] for line in others) == [
        "parameter 'sft.batch_size': input should be greater than 0 (got 0)",
        "unknown parameter 'sft.stepz'",
    ]


DENIED = [
    OSError(number, os.strerror(number), "/theirs")
    for number in (errno.EACCES, errno.EPERM, errno.EROFS)
]
FULL = [
    OSError(number, "no more room", "models/policy")
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
]


@pytest.mark.parametrize(
    ("error", "status", "pattern"),
    [
        (
            ZeroDivisionError("a\nb"),
            1,
            r"rlhf: ZeroDivisionError: a\nb \(add --debug for the traceback\)",
        ),
        (
            BaseException("a panic"),
            1,
            r"rlhf: BaseException: a panic \(add --debug for the traceback\)",
        ),
        (GateFailed("the policy gate failed"), EXIT_GATE_FAILED, "rlhf: the policy gate failed"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "rlhf: stopped"),
        *(
            (error, EXIT_USER_ERROR, f"rlhf: /theirs: {error.strerror}; give yourself the right.*")
            for error in DENIED
        ),
        *((error, EXIT_USER_ERROR, "rlhf: .*models/policy.*make room.*") for error in FULL),
    ],
)
def test_an_error_is_a_message_and_an_exit_status(
    error: BaseException, status: int, pattern: str, ended: Callable[..., tuple[object, str]]
) -> None:
    code, printed = ended(error=error)
    assert code == status and re.fullmatch(f"{pattern}\n", printed), printed


def test_after_a_run_the_tables_of_the_gates_that_failed_are_printed(tmp_path: Path) -> None:
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "policy.json").write_text(json.dumps(DECISION))
    (tmp_path / "gates" / "reward.json").write_text(
        json.dumps({"gate": "reward", "passed": True, "conditions": []})
    )
    (tmp_path / "gates" / "data.json").write_text("not JSON")
    stream = io.StringIO()
    print_failed_gates(tmp_path, stream)
    assert stream.getvalue().startswith("gate policy\n") and stream.getvalue().count("FAIL") == 3
    assert "gate reward" not in stream.getvalue()
