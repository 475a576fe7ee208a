"""A world without changes is found as such, and every change is found too; deleted versions leave
no files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.registry.conftest import make_policy, policy_name
from integration.registry.test_promotion import ScriptedMatch, aliases

from flows.commands.run import run
from flows.commands.run_state import read_run_state
from flows.pipeline.preflight import find_unchanged
from flows.registry.client import connect, experiment_id, get_version
from flows.registry.history import Ledger
from flows.registry.promote import promote, rollback
from flows.registry.register import register
from flows.registry.stored_models import verified_folder
from flows.supervision import signals
from rlhf_core.errors import RlhfError
from rlhf_extras.retention.retention import apply_retention

pytestmark = pytest.mark.slow


def records(workspace: Path) -> tuple[int, int]:
    """How many runs MLflow has, and how many entries the history."""
    client = connect(workspace)
    entries = Ledger.open(client, policy_name(workspace)).entries()
    return len(client.search_runs([experiment_id(client, workspace)])), len(entries)


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_nothing_to_do_until_something_changes(
    contest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_unchanged(contest, promotes=True) is None, "version 2 has not met the champion"
    assert find_unchanged(contest, promotes=False) is not None
    match = ScriptedMatch(judge=0.4)
    promote(contest, play=match)
    before = records(contest)
    unchanged = find_unchanged(contest, promotes=True)
    assert unchanged is not None and records(contest) == before
    assert unchanged.message.startswith(
        "nothing to do: every stage is up to date, rlhf-reward-model version 1 (as"
    )
    assert unchanged.verdict.promotion.startswith(
        "Not released: rlhf-policy version 2 was not promoted in place"
    )
    assert {outcome.action for outcome in unchanged.outcomes.values()} == {"cached"}
    params = (contest / "params.yaml").read_text()
    (contest / "params.yaml").write_text(params + "registry: {promote_win_rate_low95: 0.55}\n")
    assert find_unchanged(contest, promotes=True) is None, "another bar"
    (contest / "params.yaml").write_text(params)
    connect(contest).delete_registered_model_alias(policy_name(contest), "challenger")
    assert find_unchanged(contest, promotes=True) is None, "the next run makes it challenger again"
    register(contest)
    assert find_unchanged(contest, promotes=True) is not None
    make_policy(contest, 9)
    assert find_unchanged(contest, promotes=True) is None, "another policy"
    register(contest)
    promote(contest, play=ScriptedMatch(judge=0.9))
    unchanged = find_unchanged(contest, promotes=True)
    assert unchanged is not None and "version 3 is the champion" in unchanged.verdict.promotion
    before = records(contest)
    monkeypatch.setattr(signals, "install", lambda: None)
    assert run(contest) == 0
    printed = capsys.readouterr().out
    assert (
        "Completed: nothing to do: every stage is up to date, rlhf-reward-model version 1 (as before)"
        in printed
    )
    assert (
        "stages: 10 cached" in printed and "Prefect" not in printed and records(contest) == before
    )
    last = read_run_state(contest)
    assert last is not None and last.final_state == "Completed" and last.ran == 0
    (contest / "metrics" / "ppo.json").write_text("{}")
    assert find_unchanged(contest, promotes=True) is None, "a stage is stale"


def test_the_files_of_deleted_versions_are_gone_and_their_runs_stay(contest: Path) -> None:
    promote(contest, play=ScriptedMatch(judge=0.4))
    make_policy(contest, 9)
    register(contest)
    promote(contest, play=ScriptedMatch(judge=0.9))
    make_policy(contest, 10)
    register(contest)
    params = (contest / "params.yaml").read_text()
    if "registry:" not in params:
        params += "registry: {}\n"
    (contest / "params.yaml").write_text(
        params.replace("registry: {", "registry: {retention: {versions: 1}, ")
    )
    client, name = connect(contest), policy_name(contest)
    gone = get_version(client, name, "2")
    folder = verified_folder(contest, gone)
    plan = apply_retention(contest, delete=True)
    assert [str(version.version) for version in plan.deleted] == ["2"] and len(plan.matches) == 1
    assert not folder.exists()
    with pytest.raises(RlhfError, match="has no version 2"):
        get_version(client, name, "2")
    assert client.get_run(gone.run_id).info.lifecycle_stage == "active"
    assert aliases(contest) == {"champion": "3", "previous": "1", "challenger": "4"}
    assert rollback(contest, "rude").champion == "1", "its files are still there"
