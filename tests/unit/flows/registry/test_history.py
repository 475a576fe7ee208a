"""The ledger: entries that are written once, in order, by one process each, and a chain that shows what was changed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from flows.commands.registry.history import describe_history
from flows.registry.approval.decide import approve
from flows.registry.governance.history import HEAD_TAG, chain_hash, checked_history, history_ledger
from flows.registry.governance.ledger import EntryTaken, Ledger
from flows.registry.promotion.promote import promote, rollback
from flows.registry.transactions.alias_events import registry_events
from flows.registry.transactions.alias_transaction import INTENT_TAG, AliasTransaction, commit, finish_interrupted
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError

from .conftest import MODEL, Registry, ScriptedMatch


def test_an_entry_is_written_once(registry: Registry) -> None:
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL, "history")
    assert list(ledger.entries()) == []
    ledger.append(1, "one")
    ledger.append(1, "one")
    with pytest.raises(EntryTaken, match=r"changed from elsewhere meanwhile \(entry 1 of its history\)"):
        ledger.append(1, "another")
    ledger.append(2, "two")
    assert list(Ledger.open(registry.client, MODEL, "history").entries()) == ["one", "two"]
    assert list(Ledger.open(registry.client, MODEL, "attempts").entries()) == []


def test_what_cannot_be_recorded_is_an_error(registry: Registry) -> None:
    with pytest.raises(RlhfError, match="no version yet"):
        Ledger.open(registry.client, "unknown", "history").append(1, "one")
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL, "history")
    with pytest.raises(RlhfError, match="too long"):
        ledger.append(1, "x" * 5001)
    ledger.append(2, "two")
    with pytest.raises(RlhfError, match="lacks entry 1"):
        ledger.entries()


def test_a_ledger_whose_run_is_deleted_takes_no_entry(registry: Registry) -> None:
    registry.add_version()
    ledger = Ledger.open(registry.client, MODEL, "history")
    ledger.append(1, "one")
    assert ledger.run_id is not None
    registry.client.delete_run(ledger.run_id)
    with pytest.raises(RlhfError, match="could not record entry 2") as refused:
        ledger.append(2, "two")
    assert not isinstance(refused.value, EntryTaken)


def test_every_change_of_an_alias_is_in_the_history(registry: Registry, contest: Path) -> None:
    promote(contest, play=ScriptedMatch())
    rollback(contest, "rude")
    records = checked_history(MODEL, history_ledger(registry.client, MODEL).entries())
    assert [(record["action"], record["reason"]) for record in records] == [
        ("promote", "there was no champion"),
        ("promote", "above 0.5 with 95 % confidence by every judge: judge win rate 0.700 (at least 0.600)"),
        ("rollback", "rude"),
    ]
    moved = {move["alias"]: move["version"] for move in records[-1]["moves"]}
    assert moved == {"champion": "1", "previous": None}
    assert records[1]["previous"] == chain_hash(history_ledger(registry.client, MODEL).entries()[0])
    assert all("@" in record["who"] and record["time"].startswith("20") for record in records)


def test_who_decides_comes_from_the_environment(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_ACTOR", "ann (release job 17)")
    promote(contest, play=ScriptedMatch())
    (_, record) = checked_history(MODEL, history_ledger(registry.client, MODEL).entries())
    assert record["who"] == "ann (release job 17)"


def test_a_reason_or_a_name_looks_like_no_other_entry(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(contest, play=ScriptedMatch())
    monkeypatch.setenv("RLHF_ACTOR", "ann\n9  2026-01-01 00:00:00 UTC  ceo  approve: @champion → 7")
    rollback(contest, "rude\n8  2026-01-01 00:00:00 UTC  ceo\x1b[2J  approve: @champion → 7\u202e")
    foreign = AliasTransaction(MODEL, (), action="note", reason="one\ntwo", who="a\r\x1b[1Fb")
    commit(registry.client, contest, foreign)
    lines = describe_history(contest).splitlines()
    assert not [line for line in lines if line.startswith(("8", "9")) or not line.isprintable()]
    assert "   why: rude 8 2026-01-01 00:00:00 UTC ceo [2J approve: @champion → 7" in lines
    assert any("  a [1Fb  note: versions" in line for line in lines) and "   why: one two" in lines


def test_a_changed_entry_breaks_the_chain(registry: Registry, contest: Path) -> None:
    promote(contest, play=ScriptedMatch())
    ledger = history_ledger(registry.client, MODEL)
    changed = json.loads(ledger.entries()[0]) | {"who": "somebody else"}
    with sqlite3.connect(registry.folder / "shared" / "mlflow.db") as database:
        database.execute("UPDATE params SET value = ? WHERE key LIKE 'history.%.1'", (json.dumps(changed),))
    for action in (
        lambda: checked_history(MODEL, ledger.entries()),
        lambda: promote(contest, play=ScriptedMatch()),
        lambda: rollback(contest, "rude"),
    ):
        with pytest.raises(RlhfError, match="entry 2 does not follow from the one before it"):
            action()
    assert registry.aliases()["champion"] == "2" and len(ledger.entries()) == 2


@pytest.mark.parametrize("entries", ["= 'history.rlhf-policy.3'", "LIKE 'history.%'"])
def test_a_history_without_its_last_entries_is_refused(registry: Registry, contest: Path, entries: str) -> None:
    """The chain of those before is whole, but a decision that was taken back would be forgotten."""
    promote(contest, play=ScriptedMatch())
    rollback(contest, "rude")
    with sqlite3.connect(registry.folder / "shared" / "mlflow.db") as database:
        assert database.execute(f"DELETE FROM params WHERE key {entries}").rowcount
    for action in (
        lambda: describe_history(contest),
        lambda: promote(contest, play=ScriptedMatch()),
        lambda: rollback(contest, "rude"),
        lambda: approve(contest),
    ):
        with pytest.raises(RlhfError, match="the history of rlhf-policy was changed: it had 3 entries, and ends other"):
            action()
    assert registry.aliases()["champion"] == "1"


def test_a_history_of_another_model_is_refused(registry: Registry, contest: Path) -> None:
    promote(contest, play=ScriptedMatch())
    entries = history_ledger(registry.client, MODEL).entries()
    with pytest.raises(RlhfError, match="the history of another was changed: entry 1"):
        checked_history("another", entries)


def test_a_decision_that_was_killed_before_it_noted_the_end_is_followed_by_others(
    registry: Registry, contest: Path
) -> None:
    head = registry.client.get_registered_model(MODEL).tags[HEAD_TAG]
    promote(contest, play=ScriptedMatch())
    registry.client.set_registered_model_tag(MODEL, HEAD_TAG, head)
    assert rollback(contest, "rude").champion == "1"
    assert registry.client.get_registered_model(MODEL).tags[HEAD_TAG].startswith("3 ")


def test_of_two_decisions_on_the_same_state_one_is_refused(registry: Registry, contest: Path) -> None:
    """What two machines would do, which no lock of one machine holds apart."""
    entries = history_ledger(registry.client, MODEL).entries()
    promote(contest, play=ScriptedMatch())
    late = AliasTransaction(MODEL, (), action="terms", reason="decided before")
    with pytest.raises(EntryTaken):
        commit(registry.client, contest, late, entries)
    assert registry.aliases()["champion"] == "2"
    finish_interrupted(registry.client, contest, RegistryConfig())
    assert registry.aliases()["champion"] == "2"
    assert INTENT_TAG not in registry.client.get_registered_model(MODEL).tags


def test_an_interrupted_decision_of_a_version_without_history_is_completed_once(
    registry: Registry, contest: Path
) -> None:
    """The tag as earlier versions wrote it, with the decision in it and nowhere else."""
    old = {
        "model": MODEL,
        "moves": [{"model": MODEL, "alias": "champion", "version": "2"}],
        "version_tags": [],
        "history": ["1", "2"],
        "decision": {"action": "promote", "reason": "won", "promoted": True, "time": "2026-01-01T00:00:00+00:00"},
        "decided_on": "2",
        "id": "a" * 32,
    }
    registry.client.set_registered_model_tag(MODEL, INTENT_TAG, json.dumps(old))
    assert len(finish_interrupted(registry.client, contest, RegistryConfig())[1]) == 2
    assert registry.aliases()["champion"] == "2"
    assert len(finish_interrupted(registry.client, contest, RegistryConfig())[1]) == 2


def test_an_entry_makes_an_event_for_each_alias_that_it_changes(registry: Registry, contest: Path) -> None:
    promote(contest, play=ScriptedMatch())
    rollback(contest, "rude")
    records = checked_history(MODEL, history_ledger(registry.client, MODEL).entries())
    events = [
        [(event.name, event.version, event.before) for event in registry_events(record, records[:number])]
        for number, record in enumerate(records)
    ]
    assert events == [
        [("rlhf.champion.changed", "1", None)],
        [("rlhf.champion.changed", "2", "1"), ("rlhf.previous.changed", "1", None)],
        [("rlhf.champion.changed", "1", "2"), ("rlhf.previous.changed", None, "1")],
    ]
    request = registry_events(records[2], records[:2])[0].as_request(records[2])
    assert request["resource"] == {
        "prefect.resource.id": "rlhf.registered-model.rlhf-policy",
        "prefect.resource.name": "rlhf-policy",
        "rlhf.alias": "champion",
        "rlhf.version": "1",
        "rlhf.action": "rollback",
    }
    assert request["payload"]["reason"] == "rude" and request["payload"]["before"] == "2"
    again = registry_events(records[2], records[:2])[0].as_request(records[2])
    assert request["id"] == again["id"], "an entry that is carried out twice is one event"
