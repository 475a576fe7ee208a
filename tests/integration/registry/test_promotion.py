"""Who becomes champion, who stays it, and what is left written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.registry.mlflow_client import connect
from flows.registry.promotion import decline, promote, rollback, verdict
from flows.registry.register import register
from rlhf_core.errors import RlhfError


class Referee:
    """A match with a given outcome, and how often it was played."""

    def __init__(self, **lows: float) -> None:
        self.lows, self.played = lows, 0

    def __call__(self, workspace: Path, champion: Path, challenger: Path) -> dict[str, Any]:
        assert champion != challenger and (challenger / "config.json").is_file()
        self.played += 1
        return {"comparison": {name: {"win_rate": low + 0.1, "win_rate_low95": low} for name, low in self.lows.items()}}


def aliases(workspace: Path, name: str = "rlhf-policy") -> dict[str, str]:
    found = connect(workspace).get_registered_model(name).aliases
    return {alias: str(version) for alias, version in found.items()}


def test_every_judge_must_be_sure() -> None:
    sure, unsure = {"win_rate": 0.7, "win_rate_low95": 0.6}, {"win_rate": 0.55, "win_rate_low95": 0.5}
    assert verdict({"comparison": {"referee": sure, "gold": sure}}, 0.5)[0]
    passed, reason = verdict({"comparison": {"referee": sure, "gold": unsure}}, 0.5)
    assert not passed and reason.startswith("not above 0.5 with 95 % confidence by gold:")
    assert verdict({"comparison": {}}, 0.5) == (False, "no judge has compared them")


def test_the_first_challenger_takes_the_empty_place_with_its_reward_model(workspace: Path) -> None:
    with pytest.raises(RlhfError, match="has no @challenger; `rlhf run` registers one"):
        promote(workspace)
    register(workspace)
    decision = promote(workspace)
    assert decision["promoted"] and aliases(workspace) == {"challenger": "1", "champion": "1"}
    assert aliases(workspace, "rlhf-reward-model")["champion"] == "1"
    again = promote(workspace)
    assert not again["promoted"] and again["reason"] == "the challenger is the champion already"


def test_a_sure_winner_moves_the_aliases_and_is_written_down(contest: Path) -> None:
    decision = promote(contest, play=Referee(referee=0.56, gold=0.61))
    assert aliases(contest) == {"challenger": "2", "champion": "2", "previous": "1"}
    report = Path(decision["report"])
    assert report.stat().st_mode & 0o222 == 0
    assert json.loads(report.read_text())["match"]["comparison"]["gold"]["win_rate_low95"] == 0.61
    client = connect(contest)
    version = client.get_model_version("rlhf-policy", "2")
    assert version.tags["decision.promoted"] == "true"
    assert [a.path for a in client.list_artifacts(version.run_id, "promotions")] == [f"promotions/{report.name}"]


def test_an_unsure_challenger_stays_one_and_is_asked_only_once(contest: Path) -> None:
    referee = Referee(referee=0.56, gold=0.49)
    first, second = promote(contest, play=referee), promote(contest, play=referee)
    assert not first["promoted"] and "by gold" in first["reason"]
    assert not second["promoted"] and second["unchanged"] and referee.played == 1
    assert aliases(contest) == {"challenger": "2", "champion": "1"}
    assert len(list((contest / ".rlhf" / "promotions").glob("*.json"))) == 2  # the first champion, this refusal


def test_a_dry_run_moves_and_writes_nothing(contest: Path) -> None:
    before = sorted((contest / ".rlhf" / "promotions").iterdir())
    referee = Referee(referee=0.9)
    assert promote(contest, dry_run=True, play=referee)["promoted"]
    assert aliases(contest)["champion"] == "1"
    assert sorted((contest / ".rlhf" / "promotions").iterdir()) == before
    with pytest.raises(RlhfError, match="version 2 now, not 1"):
        promote(contest, only_version="1", play=referee)
    assert promote(contest, only_version="2", play=referee)["promoted"] and referee.played == 1


def test_force_needs_a_reason_and_records_it(contest: Path) -> None:
    with pytest.raises(RlhfError, match="needs a reason"):
        promote(contest, force_reason=" ")

    def broken(workspace: Path, champion: Path, challenger: Path) -> dict[str, Any]:
        raise RlhfError("no referee")

    with pytest.raises(RlhfError, match="no referee"):
        promote(contest, play=broken)
    decision = promote(contest, force_reason="legal asked for it", play=broken)
    assert decision["promoted"] and decision["forced"] == "legal asked for it"
    assert "no match: no referee" in json.loads(Path(decision["report"]).read_text())["reason"]


def test_rollback_swaps_and_the_next_run_does_not_undo_it(contest: Path) -> None:
    promote(contest, play=Referee(referee=0.9))
    decision = rollback(contest, "rude in production")
    assert aliases(contest) == {"challenger": "2", "champion": "1", "previous": "2"}
    assert json.loads(Path(decision["report"]).read_text())["reason"] == "rude in production"
    refused = promote(contest, play=Referee(referee=0.9))
    assert not refused["promoted"] and "rolled back (rude in production)" in refused["reason"]
    assert promote(contest, force_reason="fixed", play=Referee(referee=0.9))["promoted"]
    assert "rolled_back" not in connect(contest).get_model_version("rlhf-policy", "2").tags


def test_rollback_without_anything_to_go_back_to(workspace: Path) -> None:
    register(workspace)
    promote(workspace)
    with pytest.raises(RlhfError, match="no @previous to go back to"):
        rollback(workspace, "why not")
    with pytest.raises(RlhfError, match="needs a reason"):
        rollback(workspace, "")


def test_a_person_can_refuse(contest: Path) -> None:
    plan = promote(contest, dry_run=True, play=Referee(referee=0.9))
    decision = decline(contest, plan, "not on a Friday")
    assert json.loads(Path(decision["report"]).read_text())["reason"] == "not approved: not on a Friday"
    assert aliases(contest)["champion"] == "1"


def test_the_real_match_runs_in_a_process_of_its_own(contest: Path) -> None:
    decision = promote(contest)
    result = decision["match"]["comparison"]["referee"]
    assert set(decision["match"]["comparison"]) == {"referee"}  # these prompts are not of the embedded world: no gold
    assert result["prompts"] == 8 and result["win"] + result["tie"] + result["lose"] == pytest.approx(1)
    assert decision["promoted"] == (result["win_rate_low95"] > 0.5)


def test_a_match_that_cannot_be_played_is_one_line(contest: Path) -> None:
    (contest / "data" / "clean" / "prompts" / "test.parquet").unlink()
    with pytest.raises(RlhfError, match=r"the match ended with code .*log: .*match.log"):
        promote(contest)
    assert aliases(contest)["champion"] == "1"


@pytest.mark.parametrize(("approve", "champion"), [(True, "2"), (False, "1")])
def test_the_flow_asks_a_person_before_it_acts(
    contest: Path, monkeypatch: pytest.MonkeyPatch, approve: bool, champion: str
) -> None:
    from prefect.logging import disable_run_logger

    from flows.registry import promotion_flow as flow

    referee, asked = Referee(referee=0.9), []

    def answer(**options: Any) -> flow.Approval:
        asked.append(aliases(contest)["champion"])
        return flow.Approval(approve=approve, reason="seen it")

    monkeypatch.setattr(flow, "pause_flow_run", answer)
    monkeypatch.setattr(flow, "promote", lambda folder, **options: promote(folder, play=referee, **options))
    with disable_run_logger():
        decision = flow.promotion_flow.fn(str(contest), approval=True)
    assert asked == ["1"] and referee.played == 1
    assert decision["promoted"] is approve and aliases(contest)["champion"] == champion
