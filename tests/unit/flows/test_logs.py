"""What Prefect's log says of an outage, of a run that failed, and of other errors."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from integration.flow_toys import environment
from prefect.exceptions import (
    CancelledRun,
    FailedRun,
    ParameterTypeError,
    PrefectException,
    SignatureMismatchError,
)
from prefect.utilities.services import critical_service_loop
from websockets.exceptions import WebSocketException

from flows.prefect_server.logs import Console
from flows.supervision.processes import PREFECT_SETTINGS


def logged(error: BaseException, message: str = "A service\nof %s failed.") -> str:
    """What a handler writes of ``error``, raised some frames deep."""
    text = io.StringIO()
    logger = logging.Logger("prefect.some.service")
    handler = Console(text)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    try:
        raise error
    except BaseException:
        logger.exception(message, "Prefect")
    return text.getvalue()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connect call failed"),
        httpx.ConnectError("All connection attempts failed"),
        httpx.ReadTimeout("timed out"),
        WebSocketException("timed out while closing connection"),
        RuntimeError("Service exceeded error threshold."),
        asyncio.CancelledError("stopped"),
    ],
)
def test_an_outage_or_a_stop_is_one_line(error: BaseException) -> None:
    line = logged(error)
    assert line.count("\n") == 1 and line.startswith("A service of Prefect failed. (")
    assert type(error).__name__ in line and str(error) in line


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


AWAY = httpx.ConnectError("All connection attempts failed")
REACHED_NOT = "Failed to reach API at http://server:4200/api/"


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("unhandled errors in a TaskGroup", [AWAY]),
        ExceptionGroup("outer", [ExceptionGroup("inner", [AWAY]), TimeoutError("slow")]),
        BaseExceptionGroup("stopped", [asyncio.CancelledError("stopped"), AWAY]),
        caused(RuntimeError(REACHED_NOT), AWAY),
        caused(PrefectException(REACHED_NOT), caused(RuntimeError("retries"), AWAY)),
        caused(RuntimeError(REACHED_NOT), ExceptionGroup("tasks", [AWAY])),
        ExceptionGroup("tasks", [caused(RuntimeError(REACHED_NOT), AWAY)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_so_is_one_that_others_hold_or_follow_from(error: BaseException) -> None:
    line = logged(error)
    assert line.count("\n") == 1 and line.startswith("A service of Prefect failed. (")
    assert type(AWAY).__name__ in line or REACHED_NOT in line


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("tasks", [AWAY, ValueError("a bug")]),
        ExceptionGroup("outer", [AWAY, ExceptionGroup("inner", [ValueError("a bug")])]),
        caused(ValueError("a bug"), AWAY),
        caused(RuntimeError("x"), ValueError("a bug")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_bug_among_them_keeps_its_traceback(error: BaseException) -> None:
    text = logged(error)
    assert "Traceback" in text and "a bug" in text


@pytest.mark.parametrize(
    "error",
    [
        SignatureMismatchError.from_bad_params(["workspace", "promote"], ["workspace", "promte"]),
        ParameterTypeError("Flow run received invalid parameters:\n - promote: not a boolean"),
    ],
)
def test_parameters_that_a_flow_does_not_take_are_one_line(error: Exception) -> None:
    line = logged(error)
    assert line.count("\n") == 1 and "promote" in line


def test_what_could_not_be_sent_is_not_told_whole() -> None:
    """Prefect names an event that it could not send with all its resources, every half minute."""
    line = logged(ConnectionRefusedError(111, "refused"), f"%s failed to process {'item ' * 1000}")
    assert len(line) < 700 and line.startswith("Prefect failed to process item")


@pytest.mark.parametrize("name", ["prefect._internal.concurrency", "prefect.events.clients"])
def test_nor_is_what_its_services_say_without_an_error(name: str) -> None:
    text = io.StringIO()
    handler = Console(text)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.handle(
        logging.LogRecord(name, logging.ERROR, "f", 1, "%s\n" * 2, ("event " * 500,) * 2, None)
    )
    assert text.getvalue().count("\n") == 1 and len(text.getvalue()) < 400


def test_a_service_that_gives_up_prints_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Prefect prints what its services met last, past every log."""
    Console(io.StringIO())

    async def asks() -> None:
        raise httpx.ConnectError("http://user:s3cret@server:4200/api did not answer")

    with pytest.raises(RuntimeError, match="error threshold"):
        asyncio.run(critical_service_loop(asks, 0.0))
    printed = capsys.readouterr().out
    assert "ConnectError" in printed and "Traceback" not in printed and "s3cret" not in printed


RUN = "00000000-0000-0000-0000-000000000007"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "prefect.runner._workspace_supervisor", "job.json"],
        ["-m", "prefect.runner._workspace_resolver", RUN, "."],
        ["-m", "prefect.engine", RUN],
        ["-m", "prefect", "flow-run", "execute", RUN],
    ],
    ids=lambda command: command[1] + command[2],
)
def test_what_starts_a_job_prints_no_traceback_of_an_outage(
    command: list[str], tmp_path: Path
) -> None:
    """Its output is part of the worker's log."""
    job = {"flow_run_id": RUN, "workspace_root": ".", "manifest_path": "manifest.json"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    away = {"PREFECT_API_URL": "http://127.0.0.1:1/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment(**PREFECT_SETTINGS, **away, PREFECT_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode and "ConnectError" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_passwords_stay_out_of_that_line() -> None:
    assert "s3cret" not in logged(OSError("http://user:s3cret@server:4200/api did not answer"))


@pytest.mark.parametrize("error", [FailedRun("ppo: paused"), CancelledRun("stopped")])
def test_the_end_of_a_run_is_told_once(error: Exception) -> None:
    assert logged(error) == ""


def test_other_errors_keep_their_traceback() -> None:
    assert "Traceback" in logged(ValueError("a bug")) and "Traceback" in logged(RuntimeError("x"))


def test_prefect_uses_these_handlers_where_the_settings_are_set() -> None:
    code = """
import logging
from prefect.logging.configuration import ensure_logging_setup
ensure_logging_setup()
for name in ("root", "prefect.flow_runs", "prefect.workers"):
    print(name, *[type(handler).__name__ for handler in logging.getLogger(name).handlers])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**PREFECT_SETTINGS),
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "root Console",
        "prefect.flow_runs Api",
        "prefect.workers WorkerApi",
    ], done.stderr
