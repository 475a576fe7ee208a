"""The terms of promotion belong to the registered model: no workspace takes its champion by weaker ones of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows.registry.governance.terms import TERMS_TAG, read_terms
from flows.registry.promotion.promote import promote, rollback
from flows.registry.set_terms import describe_terms, set_terms
from rlhf_core.config.stages.gates import Condition
from rlhf_core.errors import RlhfError

from .conftest import GATES, MODEL, PARAMS, Registry, ScriptedMatch

WEAK_BAR = PARAMS + "registry: {promote_win_rate_low95: 0}\n"
STRICT_BAR = PARAMS + "registry: {promote_win_rate_low95: 0.55}\n"
WEAK_GATES = "seed: 1\ngates:\n  policy:\n  - {metric: kl, at_most: 100.0, why: trivial}\n"


def test_a_second_workspace_with_a_weaker_bar_cannot_take_the_champion(registry: Registry, contest: Path) -> None:
    second, match = registry.workspace("second", WEAK_BAR), ScriptedMatch(0.156)
    refused = promote(second, play=match)
    assert not refused.promoted and match.played == 0 and registry.aliases()["champion"] == "1"
    assert "\n" not in refused.reason
    assert "registry.promote_win_rate_low95 is 0 instead of 0.5" in refused.reason
    assert f"from {contest}" in refused.reason and "`rlhf terms --set --reason TEXT`" in refused.reason
    assert not promote(second, force_reason="mine", play=match).promoted


def test_a_second_workspace_on_equal_terms_promotes_and_owns_nothing(registry: Registry, contest: Path) -> None:
    second = registry.workspace("second")
    assert promote(second, play=ScriptedMatch()).promoted
    terms = read_terms(registry.client, MODEL)
    assert terms is not None and terms.workspace == str(contest)
    registry.add_version()
    forced = promote(second, force_reason="mine", play=ScriptedMatch(0.1))
    assert "only the owner's workspace forces a promotion" in forced.reason and not forced.promoted
    assert promote(contest, force_reason="ours", play=ScriptedMatch(0.1)).promoted


def test_a_second_workspace_plays_on_the_owners_prompts_and_settings(registry: Registry, contest: Path) -> None:
    easy = registry.workspace("easy", PARAMS + "evaluate: {prompts: 1}\n", prompts="easy ones")
    refused = promote(easy, play=ScriptedMatch())
    assert "other test prompts; other settings in the section evaluate (set by" in refused.reason
    assert registry.aliases()["champion"] == "1"


def test_the_owner_is_held_to_its_terms_until_it_sets_others(registry: Registry, contest: Path) -> None:
    (contest / "params.yaml").write_text(WEAK_BAR)
    refused = promote(contest, play=ScriptedMatch(0.3))
    assert "here makes the weaker terms hold" in refused.reason
    with pytest.raises(RlhfError, match="need a reason"):
        set_terms(contest, " ")
    set_terms(contest, "a trial of the whole")
    assert promote(contest, play=ScriptedMatch(0.3)).promoted


def test_stricter_terms_of_the_owner_hold_from_its_next_promotion_on(registry: Registry, contest: Path) -> None:
    (contest / "params.yaml").write_text(STRICT_BAR)
    assert promote(contest, play=ScriptedMatch(0.56)).promoted
    registry.add_version()
    assert "0.5 instead of 0.55" in promote(registry.workspace("second"), play=ScriptedMatch()).reason


def test_only_the_owner_sets_terms_unless_another_takes_over(registry: Registry, contest: Path) -> None:
    second = registry.workspace("second", WEAK_BAR)
    with pytest.raises(RlhfError, match="is owned by another workspace"):
        set_terms(second, "I would like to")
    assert f"owned by {contest}" in describe_terms(second)
    assert "this workspace: registry.promote_win_rate_low95 is 0 instead of 0.5" in describe_terms(second)
    set_terms(second, "the first machine is gone", take_over=True)
    assert "owned by this workspace" in describe_terms(second)
    assert promote(second, play=ScriptedMatch(0.156)).promoted


def test_a_copied_workspace_is_the_same_owner(registry: Registry, contest: Path) -> None:
    copy = contest.parent / "moved"
    shutil.copytree(contest, copy)
    assert promote(copy, force_reason="moved", play=ScriptedMatch(0.1)).promoted


def test_a_version_that_passed_weaker_gates_is_not_promoted(registry: Registry, contest: Path) -> None:
    trivial = {"policy": (Condition(metric="kl", at_most=100.0, why=""),)}
    registry.add_version(gates=trivial)
    refused = promote(contest, play=ScriptedMatch(0.9))
    assert "version 3 has passed weaker gates: gates.sft does not require perplexity" in refused.reason
    assert "gates.policy does not require kl <= 6, accuracy >= 0.65" in refused.reason
    assert promote(contest, version="2", play=ScriptedMatch(0.9)).promoted
    smoke = registry.workspace("smoke", WEAK_GATES)
    registry.add_version(gates=GATES)
    assert "gates.policy does not require kl <= 6" in promote(smoke, play=ScriptedMatch(0.9)).reason


def test_a_version_without_conditions_is_promoted_by_force_only(registry: Registry, contest: Path) -> None:
    registry.client.delete_model_version_tag(MODEL, "2", "gate_conditions")
    assert "no record of its gates' conditions" in promote(contest, play=ScriptedMatch()).reason
    assert promote(contest, force_reason="known", play=ScriptedMatch()).promoted


def test_a_registry_from_before_the_terms_gets_them_at_its_first_promotion(registry: Registry) -> None:
    owner = registry.workspace("owner")
    for _ in range(2):
        number = registry.add_version()
        registry.client.delete_model_version_tag(MODEL, number, "gate_conditions")
    registry.client.set_registered_model_alias(MODEL, "champion", "1")
    assert "no terms of promotion yet" in describe_terms(owner)
    assert promote(owner, play=ScriptedMatch()).promoted
    assert read_terms(registry.client, MODEL) is not None
    assert registry.aliases() == {"champion": "2", "previous": "1", "challenger": "2"}


@pytest.mark.parametrize("text", ["", "{}", '{"bar": 0}', "[1]"])
def test_terms_that_cannot_be_read_stop_every_promotion(registry: Registry, contest: Path, text: str) -> None:
    registry.client.set_registered_model_tag(MODEL, TERMS_TAG, text)
    for force in (None, "I insist"):
        with pytest.raises(RlhfError, match=r"cannot be read .* nothing is promoted"):
            promote(contest, force_reason=force, play=ScriptedMatch())
    assert registry.aliases()["champion"] == "1"
    assert rollback_message(contest) == "rlhf-policy has no earlier champion to go back to"
    set_terms(contest, "written anew", take_over=True)
    assert promote(contest, play=ScriptedMatch()).promoted


def rollback_message(workspace: Path) -> str:
    with pytest.raises(RlhfError) as refused:
        rollback(workspace, "rude")
    return str(refused.value).partition(";")[0]


def test_promotions_on_the_same_terms_leave_who_set_them(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_terms(registry.client, MODEL)
    monkeypatch.setenv("RLHF_ACTOR", "somebody else")
    assert promote(contest, play=ScriptedMatch()).promoted
    assert before is not None and read_terms(registry.client, MODEL) == before
    (contest / "data/clean/prompts/test.parquet").write_text("new prompts")
    registry.add_version()
    assert promote(contest, play=ScriptedMatch()).promoted
    terms = read_terms(registry.client, MODEL)
    assert terms is not None and terms.prompts != before.prompts and terms.set_by == "somebody else"


def test_a_champion_whose_alias_was_removed_is_not_replaced_without_a_match(registry: Registry, contest: Path) -> None:
    registry.client.delete_registered_model_alias(MODEL, "champion")
    match = ScriptedMatch(0.1)
    refused = promote(contest, play=match)
    assert not refused.promoted and match.played == 0 and "champion" not in registry.aliases()
    assert "version 1 was champion, and @champion was removed by something else than rlhf" in refused.reason
    assert promote(contest, version="1", force_reason="it was removed by mistake").promoted
    assert registry.aliases() == {"challenger": "2", "champion": "1"}
    assert not promote(contest, play=match).promoted and match.played == 1
