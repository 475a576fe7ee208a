"""A record in a database that is not there, or does not speak, is one line within seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from rlhf_core.errors import RlhfError
from rlhf_core.tracking import stage_run
from rlhf_core.tracking.delivery import address
from rlhf_core.tracking.stage_run import require_database


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def refusal(uri: str) -> str:
    with pytest.raises(RlhfError) as refused:
        require_database(uri)
    message = str(refused.value)
    assert "\n" not in message and "hidden" not in message
    return message


@pytest.mark.parametrize("dialect", ["postgresql", "postgresql+psycopg2", "mysql", "mssql"])
def test_a_database_that_does_not_listen_is_one_line(dialect: str, closed_port: int) -> None:
    message = refusal(f"{dialect}://user:hidden@127.0.0.1:{closed_port}/mlflow")
    assert f"the record {dialect}://127.0.0.1:{closed_port}/mlflow does not answer" in message


def test_a_database_that_says_nothing_is_one_line(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg2")
    monkeypatch.setattr(stage_run, "DATABASE_SECONDS", 2)  # the least that libpq waits
    assert "does not answer" in refusal(f"postgresql://user:hidden@127.0.0.1:{silent_port}/mlflow")


def test_a_host_that_does_not_exist_is_one_line() -> None:
    assert "does not answer" in refusal("postgresql://user:hidden@no-such-host.invalid/mlflow")


def test_a_record_that_is_no_database_is_left_to_mlflow() -> None:
    for uri in ("https://mlflow.host", "file:///srv/mlruns", "databricks"):
        require_database(uri)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////srv/mlflow.db", "sqlite:////srv/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("https://user:hidden@host:5000/base", "https://host:5000/base"),
        (
            "postgresql://user:hidden@host/db?sslmode=require",
            "postgresql://host/db?sslmode=require",
        ),
        ("file:///srv/mlruns", "file:///srv/mlruns"),
    ],
)
def test_an_address_loses_its_password_and_nothing_else(uri: str, shown: str) -> None:
    assert address(uri) == shown
