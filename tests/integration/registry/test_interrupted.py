"""Promotion and rollback killed at each step, and a registry that refuses: one champion, and the
next call repairs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from champion import champion_folder
from integration.registry.conftest import copy_workspace
from integration.registry.test_promotion import ScriptedMatch, aliases, reports
from killed_call import killed_before

from flows.commands.status import status
from flows.registry.promote import promote, rollback
from flows.registry.register import register
from rlhf_core.errors import RlhfError

MORE_THAN_ALL = 40
PROMOTED = {"challenger": "2", "champion": "2", "previous": "1"}
ROLLED_BACK = {"challenger": "2", "champion": "1"}
BEFORE = {"challenger": "2", "champion": "1"}


def win(workspace: Path) -> Any:
    return promote(workspace, play=ScriptedMatch(judge=0.9))


@pytest.fixture
def contests(champion_and_challenger: Path, tmp_path: Path) -> Iterator[Path]:
    """Contests without end, each new."""
    return (
        copy_workspace(champion_and_challenger, tmp_path / str(number) / "contest")
        for number in count()
    )


@pytest.mark.slow
def test_a_promotion_killed_at_any_step_is_completed_or_has_not_begun(
    contests: Iterator[Path],
) -> None:
    moved = []
    for step, workspace in zip(range(1, MORE_THAN_ALL), contests, strict=False):
        if not killed_before(step, lambda workspace=workspace: win(workspace)):
            break
        moved.append(aliases(workspace) != BEFORE)
        champion_folder(workspace)  # any use of the registry completes what was decided
        begun = aliases(workspace) == PROMOTED
        assert begun or aliases(workspace) == BEFORE
        win(workspace)
        assert aliases(workspace) == PROMOTED
        assert [report["challenger"] for report in reports(workspace)] == ["1", "2"], (
            "one report per decision"
        )
    assert any(moved), "no kill came between two moves"
    assert "interrupted" not in status(workspace).as_text().plain


@pytest.mark.slow
def test_a_rollback_killed_at_any_step_is_completed_or_has_not_begun(
    contests: Iterator[Path],
) -> None:
    completed = []
    for step, workspace in zip(range(1, MORE_THAN_ALL), contests, strict=False):
        killed_before(MORE_THAN_ALL, lambda workspace=workspace: win(workspace))
        if not killed_before(step, lambda workspace=workspace: rollback(workspace, "rude")):
            break
        refused = win(
            workspace
        )  # completes the rollback first, then must not crown the bad version again
        completed.append(aliases(workspace) == ROLLED_BACK)
        if completed[-1]:
            assert "was rolled back (rude)" in refused.reason
            with pytest.raises(RlhfError, match="no earlier champion"):
                rollback(workspace, "rude")
        else:
            assert aliases(workspace) == PROMOTED
            assert rollback(workspace, "rude").champion == "1"
    assert any(completed)


@contextmanager
def locked_database(workspace: Path) -> Iterator[None]:
    connection = sqlite3.connect(workspace / "mlflow.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_registry_that_refuses_a_look_up_is_not_a_registry_without_champion(
    contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is locked during the look-up of the aliases; before and after it answers."""
    from mlflow import MlflowClient

    original, refused = MlflowClient.get_registered_model, []

    def look_up(client: MlflowClient, name: str) -> Any:
        with locked_database(contest):
            refused.append(name)
            return original(client, name)

    monkeypatch.setattr(MlflowClient, "get_registered_model", look_up)
    for action in (
        lambda: promote(contest),
        lambda: rollback(contest, "why"),
        lambda: champion_folder(contest),
    ):
        with pytest.raises(RlhfError, match=r"could not look up .*database is locked"):
            action()
    monkeypatch.undo()
    assert refused and aliases(contest) == BEFORE and len(reports(contest)) == 1


@pytest.mark.slow
def test_a_refused_change_moves_nothing(contest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refuse(*_: Any) -> None:
        raise MlflowException("permission denied")

    monkeypatch.setattr(MlflowClient, "log_param", refuse)
    with pytest.raises(RlhfError, match=r"nothing has changed .*permission denied"):
        win(contest)
    assert aliases(contest) == BEFORE and len(reports(contest)) == 1


@pytest.mark.dear("one interrupted promotion in `make test`; kills at every step are slow")
def test_registering_completes_an_interrupted_promotion_first(contests: Iterator[Path]) -> None:
    workspace = next(contests)
    assert killed_before(5, lambda: win(workspace))
    assert (
        "a promote was interrupted; the next promote, rollback, run or chat completes it"
        in status(workspace).as_text().plain
    )
    register(workspace)
    assert aliases(workspace) == PROMOTED
