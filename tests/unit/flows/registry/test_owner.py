"""Several workspaces and one registry: one of them owns a policy, and each shows and promotes what
is its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.commands.registry_output import describe_terms
from flows.commands.status import recorded_run
from flows.pipeline import registration
from flows.pipeline.record import end_pipeline_run, start_pipeline_run
from flows.registry.client import OWNER_TAG
from flows.registry.promote import promote
from rlhf_core.config.gates import Condition
from rlhf_core.config.operations import NonInferiorityConfig

from .conftest import GATES, MODEL, PARAMS, Registry, ScriptedMatch

WEAK_GATES = "seed: 1\ngates:\n  policy:\n  - {metric: kl, at_most: 100.0, why: trivial}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "prompts", "force"),
    [
        (PARAMS, "prompts", "mine"),
        (PARAMS + "registry: {promote_win_rate_low95: 0}\n", "easy ones", None),
        (WEAK_GATES, "prompts", None),
    ],
)
def test_another_workspace_does_not_decide(
    registry: Registry, contest: Path, params: str, prompts: str, force: str | None
) -> None:
    second, match = registry.workspace("second", params, prompts), ScriptedMatch(0.9)
    refused = promote(second, play=match, force_reason=force)
    assert not refused.promoted and match.played == 0 and registry.aliases()["champion"] == "1"
    assert f"is owned by {contest}: promote there" in refused.reason and "\n" not in refused.reason
    assert "registry.policy" in refused.reason and f"delete the tag {OWNER_TAG}" in refused.reason
    assert promote(contest, play=match).promoted, (
        "what another workspace registered, the owner may promote"
    )


def test_another_workspace_becomes_the_owner_once_the_tag_is_deleted(
    registry: Registry, contest: Path
) -> None:
    second = registry.workspace("second", PARAMS + "registry: {promote_win_rate_low95: 0}\n")
    assert f"owned by {contest}" in describe_terms(second)
    disown(registry)
    assert promote(second, play=ScriptedMatch(0.156)).promoted
    terms = describe_terms(second)
    assert (
        "owned by this workspace" in terms
        and "win rate above 0" in terms
        and "gates.policy: kl" in terms
    )
    margins = NonInferiorityConfig().model_dump(
        exclude={"min_refusals", "min_category_prompts"}, exclude_none=True
    )
    assert margins and all(f"{name} {margin:g}" in terms for name, margin in margins.items())
    assert "verifiable" not in terms, "what has no margin is not required"
    registry.add_version()
    assert f"is owned by {second}" in promote(contest, play=ScriptedMatch(0.9)).reason


def test_before_the_first_promotion_nobody_owns_the_name(registry: Registry) -> None:
    assert "owned by nobody yet" in describe_terms(registry.workspace("first"))


def disown(registry: Registry) -> None:
    """What the refusal says to do where the owner is gone."""
    registry.client.delete_registered_model_tag(MODEL, OWNER_TAG)


def test_a_version_that_passed_weaker_gates_is_not_promoted(
    registry: Registry, contest: Path
) -> None:
    trivial = {"policy": (Condition(metric="kl", at_most=100.0, why=""),)}
    registry.add_version(gates=trivial)
    refused = promote(contest, play=ScriptedMatch(0.9))
    assert "; gates.policy does not require kl <= 6, accuracy >= 0.65" in refused.reason
    assert promote(contest, version="2", play=ScriptedMatch(0.9)).promoted
    smoke = registry.workspace("smoke", WEAK_GATES)
    registry.add_version(gates=GATES)
    disown(registry)
    assert promote(smoke, play=ScriptedMatch(0.9)).promoted, (
        "the gates of the owner are those that count"
    )


@pytest.mark.slow
def test_a_version_without_conditions_is_promoted_by_force_only(
    registry: Registry, contest: Path
) -> None:
    registry.client.delete_model_version_tag(MODEL, "2", "gate_conditions")
    assert "no record of its gates' conditions" in promote(contest, play=ScriptedMatch()).reason
    assert promote(contest, force_reason="known", play=ScriptedMatch()).promoted


def test_a_champion_whose_alias_was_removed_is_not_replaced_without_a_match(
    registry: Registry, contest: Path
) -> None:
    registry.client.delete_registered_model_alias(MODEL, "champion")
    match = ScriptedMatch(0.1)
    refused = promote(contest, play=match)
    assert not refused.promoted and match.played == 0 and "champion" not in registry.aliases()
    assert (
        "version 1 was champion, and @champion was removed by something else than rlhf"
        in refused.reason
    )
    assert promote(contest, version="1", force_reason="it was removed by mistake").promoted
    assert registry.aliases() == {"challenger": "2", "champion": "1"}
    assert not promote(contest, play=match).promoted and match.played == 1


def test_a_champion_that_was_deleted_is_not_replaced_without_a_match(
    registry: Registry, contest: Path
) -> None:
    registry.client.delete_model_version(MODEL, "1")
    refused = promote(contest)
    assert not refused.promoted and "version 1 was champion" in refused.reason
    assert promote(contest, force_reason="it was deleted by mistake").promoted
    assert registry.aliases()["champion"] == "2" and not promote(contest).promoted


def test_a_run_promotes_what_it_registered(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = registry.aliases()["challenger"]
    registry.add_version()  # another workspace registers before this run promotes
    monkeypatch.setitem(registration.promote.__kwdefaults__, "play", ScriptedMatch())
    decision = registration.promote_task.fn(contest, version=own)
    assert (decision.challenger, decision.promoted) == (own, True)
    assert registry.aliases()["champion"] == own


def test_status_shows_no_run_of_a_workspace_elsewhere_with_the_same_name(
    registry: Registry,
) -> None:
    here, elsewhere = registry.workspace("here/demo"), registry.workspace("elsewhere/demo")
    start_pipeline_run(elsewhere, "demo · elsewhere")
    assert recorded_run(here, "rlhf-pipeline", False, None) == []
    own = start_pipeline_run(here, "demo · here")
    end_pipeline_run(start_pipeline_run(elsewhere, "demo · again"), "completed", elsewhere)
    assert own in recorded_run(here, "rlhf-pipeline", False, None)[0]
