"""The ledger: entries that are written once, in order, by one process each, and what they say of
the registry.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.commands.registry_output import history_rows, model_history
from flows.commands.text import aligned
from flows.registry.decisions import (
    PromotionDecision,
    commit,
    finish_interrupted,
    new_entry,
    registry_events,
)
from flows.registry.history import (
    DONE_TAG,
    LEDGER_TAG,
    EntryTaken,
    Ledger,
    ReleaseState,
    read_history,
)
from flows.registry.promote import approve, promote, rollback
from rlhf_core.errors import RlhfError

from .conftest import MODEL, Registry, ScriptedMatch


def test_an_entry_is_written_once(registry: Registry) -> None:
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL)
    assert list(ledger.entries()) == []
    ledger.append(1, "one")
    ledger.append(1, "one")
    with pytest.raises(
        EntryTaken, match=r"changed from elsewhere meanwhile \(entry 1 of its history\)"
    ):
        ledger.append(1, "another")
    ledger.append(2, "two")
    assert list(Ledger.open(registry.client, MODEL).entries()) == ["one", "two"]
    assert list(Ledger.open(registry.client, MODEL, kind="attempts").entries()) == []


def test_what_cannot_be_recorded_is_an_error(registry: Registry) -> None:
    with pytest.raises(RlhfError, match="no version yet"):
        Ledger.open(registry.client, "unknown").append(1, "one")
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL)
    with pytest.raises(RlhfError, match="too long"):
        ledger.append(1, "x" * 5001)
    ledger.append(2, "two")
    with pytest.raises(RlhfError, match="lacks entry 1"):
        ledger.entries()


def test_a_ledger_whose_run_is_deleted_takes_no_entry(registry: Registry) -> None:
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL)
    ledger.append(1, "one")
    assert ledger.run_id is not None
    registry.client.delete_run(ledger.run_id)
    with pytest.raises(RlhfError, match="could not record entry 2") as refused:
        ledger.append(2, "two")
    assert not isinstance(refused.value, EntryTaken)


def test_every_change_of_an_alias_is_in_the_history_and_a_dry_run_makes_none(
    registry: Registry, contest: Path
) -> None:
    match = ScriptedMatch()
    plan = promote(contest, dry_run=True, play=match)
    assert (
        plan.promoted
        and plan.dry_run
        and plan.report is None
        and registry.aliases()["champion"] == "1"
    )
    assert len(read_history(registry.client, MODEL)) == 1
    assert promote(contest, play=match).promoted and match.played == 1
    rollback(contest, "rude")
    records = read_history(registry.client, MODEL)
    assert [(record["action"], record["reason"]) for record in records] == [
        ("promote", "there was no champion"),
        (
            "promote",
            "above 0.5 with 95 % confidence by every judge: judge win rate 0.700 (at least 0.600)",
        ),
        ("rollback", "rude"),
    ]
    moved = {move["alias"]: move["version"] for move in records[-1]["moves"]}
    assert moved == {"champion": "1", "previous": None}
    assert all("@" in record["who"] and record["time"].startswith("20") for record in records)


def test_a_reason_looks_like_no_other_entry(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(contest, play=ScriptedMatch())
    monkeypatch.setenv("RLHF_ACTOR", "ann\n9  2026-01-01 00:00:00 UTC  ceo  approve: @champion → 7")
    rollback(contest, "rude\n8  2026-01-01 00:00:00 UTC  ceo\x1b[2J  approve: @champion → 7\u202e")
    foreign = new_entry(MODEL, "note", "one\ntwo") | {"who": "a\r\x1b[1Fb"}
    commit(ReleaseState.read(registry.client, contest, MODEL), foreign)
    lines = aligned(history_rows(model_history(contest))).plain.splitlines()
    assert not [line for line in lines if line.startswith(("8", "9")) or not line.isprintable()]
    assert "   why: rude 8 2026-01-01 00:00:00 UTC ceo [2J approve: @champion → 7" in lines
    assert any("  a [1Fb  note: versions" in line for line in lines) and "   why: one two" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["no JSON", "[]", "[" * 5000, '{"number": 7, "model": "rlhf-policy"}', {"model": "another"}, {"moves": 5},
     {"moves": [{"model": MODEL}]}, {"version_tags": ["rolled_back"]}, {"history": None}, {"who": None}],
    ids=str,
)  # fmt: skip
def test_nothing_is_decided_on_an_entry_that_cannot_be_read(
    registry: Registry, contest: Path, text: Any
) -> None:
    promote(contest, play=ScriptedMatch())
    first = json.loads(Ledger.open(registry.client, MODEL).entries()[0])
    text = text if isinstance(text, str) else json.dumps(first | text)
    with sqlite3.connect(registry.folder / "shared" / "mlflow.db") as database:
        database.execute("UPDATE params SET value = ? WHERE key LIKE 'history.%.1'", (text,))
    for action in (
        lambda: model_history(contest),
        lambda: promote(contest, play=ScriptedMatch()),
        lambda: rollback(contest, "rude"),
        lambda: approve(contest),
    ):
        with pytest.raises(
            RlhfError, match=r"^entry 1 of the history of rlhf-policy cannot be read"
        ):
            action()
    assert registry.aliases()["champion"] == "2"


def test_a_history_that_was_written_anew_is_shown_and_not_called_true(
    registry: Registry, contest: Path
) -> None:
    """Public calls of MLflow's client suffice to write another history, so none is said to be the
    true one.
    """
    promote(contest, play=ScriptedMatch())
    records = read_history(registry.client, MODEL)
    forged = registry.client.create_run(
        registry.client.get_experiment_by_name("versions").experiment_id
    )
    for record in records:
        text = json.dumps(record | {"who": "alice@example.org", "reason": "approved by the board"})
        registry.client.log_param(forged.info.run_id, f"history.{MODEL}.{record['number']}", text)
    registry.client.set_registered_model_tag(MODEL, LEDGER_TAG, forged.info.run_id)
    listed = aligned(history_rows(model_history(contest))).plain
    assert listed.count("alice@example.org") == 2
    assert not [claim for claim in ("unchanged", "hash", "verified", "signed") if claim in listed]


@pytest.mark.parametrize(
    "action",
    [
        lambda folder: promote(folder, play=ScriptedMatch()),
        lambda folder: rollback(folder, "trial"),
        lambda folder: ReleaseState.of(folder, MODEL),
    ],
    ids=["promote", "rollback", "status"],
)
def test_of_a_record_that_is_gone_nobody_says_to_try_again(
    registry: Registry, contest: Path, action: Callable[[Path], object]
) -> None:
    """As a model has it that was copied from another server without its runs."""
    registry.client.set_registered_model_tag(MODEL, LEDGER_TAG, "0" * 32)
    aliases = registry.aliases()
    with pytest.raises(
        RlhfError,
        match=r"^the model registry could not read the history of rlhf-policy \([^\n]*"
        r"not found\); it was deleted there: restore it from a backup$",
    ):
        action(contest)
    assert registry.aliases() == aliases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deleted", "champions"),
    [
        ((MODEL, "1"), ["2", "3"]),
        ((MODEL, "2"), ["1", "3"]),
        (("rlhf-reward-model", "1"), ["1", "2", "3"]),
    ],
    ids=["a former champion", "the champion", "the reward model of the next"],
)
def test_a_version_that_was_deleted_in_mlflow_holds_nothing_up(
    registry: Registry, contest: Path, deleted: tuple[str, str], champions: list[str]
) -> None:
    promote(contest, play=ScriptedMatch())
    registry.add_version("rlhf-reward-model")
    registry.add_version(reward_model_version="1")
    registry.client.delete_model_version(*deleted)
    assert promote(contest, force_reason="it is needed", play=ScriptedMatch()).promoted
    assert (registry.aliases()["champion"], registry.aliases()["previous"]) == ("3", champions[-2])
    state = ReleaseState.read(registry.client, contest, MODEL)
    assert state.champions == champions and not state.unfinished
    assert rollback(contest, "rude").champion == champions[-2]
    assert registry.aliases()["champion"] == champions[-2]


def test_a_decision_on_a_version_that_was_deleted_since_is_completed(
    registry: Registry, contest: Path
) -> None:
    state = ReleaseState.read(registry.client, contest, MODEL)
    entry = new_entry(MODEL, "promote", "why", moves=[(MODEL, "champion", "2"), (MODEL, "previous", "1")],
                      version_tags=[(MODEL, "2", "rolled_back", None)], champions=["1", "2"],
                      decision=PromotionDecision(MODEL, "2", "1", 0.5))  # fmt: skip
    Ledger.open(registry.client, MODEL).append(2, json.dumps(entry | {"number": 2}))
    registry.client.delete_model_version(MODEL, "2")
    assert not finish_interrupted(
        registry.client, contest, MODEL
    ).unfinished and state.champions == ["1"]
    assert registry.aliases() == {"champion": "1", "previous": "1"}


def test_a_former_champion_that_was_made_champion_by_hand_is_no_earlier_one(
    registry: Registry, contest: Path
) -> None:
    promote(contest, play=ScriptedMatch())
    registry.client.set_registered_model_alias(MODEL, "champion", "1")
    with pytest.raises(
        RlhfError, match="version 1 of rlhf-policy is no earlier champion; go back to one of: 2"
    ):
        rollback(contest, "rude", to="1")
    assert rollback(contest, "rude").champion == "2"
    assert registry.aliases() == {"challenger": "2", "champion": "2"}
    with pytest.raises(RlhfError, match="no earlier champion to go back to"):
        rollback(contest, "rude too")


def test_of_two_decisions_on_the_same_state_one_is_refused(
    registry: Registry, contest: Path
) -> None:
    """What two machines would do, which no lock of one machine holds apart."""
    state = ReleaseState.read(registry.client, contest, MODEL)
    promote(contest, play=ScriptedMatch())
    late = new_entry(MODEL, "terms", "decided before")
    with pytest.raises(EntryTaken):
        commit(state, late)
    assert registry.aliases()["champion"] == "2"
    finish_interrupted(registry.client, contest, MODEL)
    assert registry.aliases()["champion"] == "2"
    assert registry.client.get_registered_model(MODEL).tags[DONE_TAG] == "2"


def test_an_entry_makes_an_event_for_each_alias_that_it_changes(
    registry: Registry, contest: Path
) -> None:
    promote(contest, play=ScriptedMatch())
    rollback(contest, "rude")
    records = read_history(registry.client, MODEL)

    def events_of(number: int) -> list[dict[str, Any]]:
        return registry_events(records[number], records[:number])

    events = [
        [
            (event["event"], event["payload"]["version"], event["payload"]["before"])
            for event in events_of(number)
        ]
        for number in range(3)
    ]
    assert events == [
        [("rlhf.champion.changed", "1", None)],
        [("rlhf.previous.changed", "1", None), ("rlhf.champion.changed", "2", "1")],
        [("rlhf.previous.changed", None, "1"), ("rlhf.champion.changed", "1", "2")],
    ]
    request = events_of(2)[1]
    assert request["resource"] == {
        "prefect.resource.id": "rlhf.registered-model.rlhf-policy",
        "prefect.resource.name": "rlhf-policy",
        "rlhf.alias": "champion",
        "rlhf.version": "1",
        "rlhf.action": "rollback",
    }
    assert request["payload"]["reason"] == "rude" and request["payload"]["before"] == "2"
    again = events_of(2)[1]
    assert request["id"] == again["id"], "an entry that is carried out twice is one event"


@pytest.mark.slow
@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_aliases_move_in_an_order_that_a_second_call_completes(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """``@previous`` first, so that whoever sees a new champion can go back; what was done last says
    that all was.
    """
    if action == "rollback":
        promote(contest, play=ScriptedMatch())
    moved: list[str] = []
    for name in (
        "set_registered_model_alias",
        "delete_registered_model_alias",
        "set_registered_model_tag",
    ):
        original = getattr(MlflowClient, name)

        def noted(
            client: MlflowClient, model: str, key: str, *rest: str, original: Any = original
        ) -> Any:
            moved.append(key)
            return original(client, model, key, *rest)

        monkeypatch.setattr(MlflowClient, name, noted)
    if action == "promote":
        promote(contest, play=ScriptedMatch())
    else:
        rollback(contest, "rude")
    assert moved[:2] == ["previous", "champion"] and moved[-1] == DONE_TAG


def test_a_clock_that_was_set_back_is_said_and_orders_nothing_anew(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    version = registry.add_version()
    workspace = registry.workspace("clock")
    times = ["2026-05-01T12:00:00.000000+00:00", "2026-05-01T11:00:00.000000+00:00"]
    for number, moment in enumerate(times):
        state = ReleaseState.read(registry.client, workspace, MODEL)
        entry = new_entry(
            MODEL, "register", f"reason {number}", moves=[(MODEL, "challenger", version)]
        )
        commit(state, {**entry, "time": moment})
    first, second = read_history(registry.client, MODEL)
    assert first["time"] == times[0] < second["time"] == "2026-05-01T12:00:00.000001+00:00"
    assert "the clock of this host says 2026-05-01T11:00" in caplog.text
