"""A person approves or declines the version that passed, and nothing else becomes champion."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from killed_call import killed_before

from flows.registry.decisions import commit, finish_interrupted, new_entry
from flows.registry.history import ReleaseState, read_history
from flows.registry.promote import approve, decline, promote, rollback
from rlhf_core.errors import ModelError, RlhfError

from .conftest import APPROVAL, MODEL, PARAMS, Registry, ScriptedMatch

BEFORE = {"champion": "1", "challenger": "2"}


@pytest.fixture
def waiting(registry: Registry, contest: Path) -> Path:
    """Version 2 has passed its match against version 1 and waits for approval."""
    (contest / "params.yaml").write_text(APPROVAL)
    assert promote(contest, play=ScriptedMatch()).awaiting_approval
    return contest


def actions(registry: Registry) -> list[tuple[str, str, str]]:
    records = read_history(registry.client, MODEL)
    return [(record["action"], record["who"], record["reason"]) for record in records]


def test_a_version_that_passes_waits_and_is_requested_once(
    registry: Registry, waiting: Path
) -> None:
    match = ScriptedMatch()
    again = promote(waiting, play=match)
    assert (
        again.awaiting_approval and again.unchanged and not again.is_champion and match.played == 0
    )
    assert again.describe().startswith(
        "not promoted yet: version 2 waits for approval (above 0.5 with 95 % confidence"
    )
    assert registry.aliases() == BEFORE
    assert [action for action, _, _ in actions(registry)] == ["promote", "request approval"]


def test_an_approval_says_who_approved(
    registry: Registry, waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_ACTOR", "ann (release 17)")
    decision = approve(waiting, "read 50 replies", version="2")
    assert registry.aliases() == {"champion": "2", "previous": "1", "challenger": "2"}
    (_, _, (action, who, reason)) = actions(registry)
    assert (action, who) == ("approve", "ann (release 17)")
    assert reason.startswith(
        "approved by ann (release 17): read 50 replies (above 0.5 with 95 % confidence"
    )
    assert decision.report is not None
    report = json.loads(decision.report.read_text())
    assert report["promoted"] and not report["awaiting_approval"] and report["reason"] == reason
    assert rollback(waiting, "rude").champion == "1", "going back needs no approval"


def test_the_first_champion_needs_approval_too(registry: Registry) -> None:
    owner = registry.workspace("owner", APPROVAL)
    registry.add_version()
    assert promote(owner).awaiting_approval and registry.aliases() == {"challenger": "1"}
    assert "is owned by" in promote(registry.workspace("second")).reason, (
        "no other workspace goes round it"
    )
    approve(registry.workspace("release", APPROVAL))  # a release manager's own
    assert registry.aliases() == {"champion": "1", "challenger": "1"}


@pytest.mark.slow
def test_a_declined_version_needs_force_and_still_approval(
    registry: Registry, waiting: Path
) -> None:
    with pytest.raises(RlhfError, match="needs a reason"):
        decline(waiting, " ")
    decision = decline(waiting, "not on a Friday")
    assert decision.reason.endswith(": not on a Friday") and not decision.promoted
    assert registry.aliases() == BEFORE
    match = ScriptedMatch()
    refused = promote(waiting, play=match)
    assert (
        "version 2 was declined by " in refused.reason
        and refused.unchanged
        and not refused.awaiting_approval
    )
    assert (
        promote(waiting, force_reason="it is Monday", play=match).awaiting_approval
        and match.played == 0
    )
    assert registry.aliases() == BEFORE, "force is no way round the approval"
    approve(waiting)
    assert registry.aliases()["champion"] == "2"
    assert "declined" not in registry.client.get_model_version(MODEL, "2").tags


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [(approve, approve), (approve, decline), (decline, approve)]
)
def test_a_decision_after_a_decision_is_refused_in_one_line(
    registry: Registry, waiting: Path, first: object, second: object
) -> None:
    first(waiting, "first")  # type: ignore[operator]
    before = registry.aliases(), actions(registry)
    with pytest.raises(
        RlhfError, match=rf"^version 2 of {MODEL} was {first.__name__}d? by .* UTC; `rlhf"
    ) as refused:  # type: ignore[attr-defined]
        second(waiting, "second")  # type: ignore[operator]
    assert "\n" not in str(refused.value)
    assert (registry.aliases(), actions(registry)) == before


def test_nothing_waits_or_another_version_does(registry: Registry, contest: Path) -> None:
    with pytest.raises(RlhfError, match=f"^no version of {MODEL} waits for approval: "):
        approve(contest)
    (contest / "params.yaml").write_text(APPROVAL)
    plan = promote(contest, dry_run=True, play=ScriptedMatch())
    assert plan.awaiting_approval and plan.report is None
    assert [action for action, _, _ in actions(registry)] == ["promote"], (
        "a dry run requests nothing"
    )
    promote(contest, play=ScriptedMatch())
    with pytest.raises(
        RlhfError, match=r"version 1 of .* does not wait for approval; version 2 does"
    ):
        approve(contest, version="1")
    assert registry.aliases() == BEFORE


def change_challenger(registry: Registry, workspace: Path) -> None:
    registry.add_version()


def change_champion(registry: Registry, workspace: Path) -> None:
    registry.client.set_registered_model_alias(MODEL, "champion", registry.add_version())
    registry.client.set_registered_model_alias(MODEL, "challenger", "2")


def roll_back(registry: Registry, workspace: Path) -> None:
    approve(workspace)
    registry.client.set_registered_model_alias(MODEL, "challenger", registry.add_version())
    assert promote(workspace, play=ScriptedMatch()).awaiting_approval
    rollback(workspace, "rude")


def promote_another(registry: Registry, workspace: Path) -> None:
    (workspace / "params.yaml").write_text(PARAMS)
    registry.add_version()
    assert promote(workspace, play=ScriptedMatch()).promoted
    (workspace / "params.yaml").write_text(APPROVAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_challenger,
            "the challenger of rlhf-policy is version 3, and was version 2 when version 2 was judged; `rlhf",
        ),
        (
            change_champion,
            "the champion of rlhf-policy is version 3, and was version 1 when version 2 was judged; `rlhf",
        ),
        (
            promote_another,
            "version 2 of rlhf-policy was judged with version 1 .* by .* UTC .*@champion to version 3 since;",
        ),
        (
            roll_back,
            "version 3 of rlhf-policy was judged with version 2 .* by .* UTC .*@champion to version 1 since;",
        ),
    ],
)
def test_what_was_not_judged_is_not_approved(
    registry: Registry, waiting: Path, change: object, message: str
) -> None:
    change(registry, waiting)  # type: ignore[operator]
    before = registry.aliases()
    for decide in (approve, decline):
        with pytest.raises(RlhfError, match=f"^{message}"):
            decide(waiting, "late")
    assert registry.aliases() == before


def test_a_version_that_was_registered_since_takes_the_place_of_the_request(
    registry: Registry, waiting: Path
) -> None:
    """As registration does it, with an entry in the history."""
    number = registry.add_version()
    entry = new_entry(MODEL, "register", "registered", moves=[(MODEL, "challenger", number)])
    commit(ReleaseState.read(registry.client, waiting, MODEL), entry)
    for decide in (approve, decline):
        with pytest.raises(
            RlhfError,
            match=r"^version 2 of rlhf-policy was judged .* UTC has moved @challenger to version 3",
        ):
            decide(waiting, "late")
    assert promote(waiting, play=ScriptedMatch()).awaiting_approval
    assert approve(waiting).challenger == "3"


def test_two_people_on_two_machines(
    registry: Registry, waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one read the history before the first one's entry was in it, and wrote after."""
    from flows.registry import decisions as session
    from flows.registry import promote as promotion

    def late(*arguments: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(promotion, "commit", commit)
            patch.setattr(session, "registry_lock", lambda *_: nullcontext())
            decline(waiting, "not good enough")
        return commit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(promotion, "commit", late)
    with pytest.raises(
        RlhfError, match=r"was changed from elsewhere meanwhile .*; nothing has changed here"
    ):
        approve(waiting)
    assert registry.aliases() == BEFORE
    assert [action for action, _, _ in actions(registry)] == [
        "promote",
        "request approval",
        "decline",
    ]


@pytest.mark.slow
def test_an_approval_killed_at_a_step_is_completed_or_has_not_begun(
    registry: Registry, waiting: Path
) -> None:
    begun = []
    for step in (1, 2, 3, 4, 7):
        before = registry.aliases()
        assert killed_before(step, lambda: approve(waiting))
        finish_interrupted(registry.client, waiting, MODEL)  # as any use of the registry does
        begun.append(registry.aliases() != before)
        if begun[-1]:
            with pytest.raises(RlhfError, match="was approved by"):
                approve(waiting)
        else:
            approve(waiting)
        assert registry.aliases()["champion"] == before["challenger"]
        assert [action for action, _, _ in actions(registry)].count("approve") == len(begun)
        registry.add_version()
        assert promote(waiting, play=ScriptedMatch()).awaiting_approval
    assert begun == [False, True, True, True, True]


def test_files_that_changed_since_are_not_approved(registry: Registry, waiting: Path) -> None:
    run = registry.client.get_model_version(MODEL, "2").run_id
    (registry.folder / "artifacts" / run / "artifacts/hf/config.json").write_text("{}")
    with pytest.raises(ModelError):
        approve(waiting)
    assert registry.aliases() == BEFORE


def test_a_version_that_no_longer_passes_cannot_be_approved(
    registry: Registry, waiting: Path
) -> None:
    (waiting / "params.yaml").write_text(
        PARAMS + "registry: {approval: true, promote_win_rate_low95: 0.7}\n"
    )
    assert not promote(waiting, play=ScriptedMatch()).awaiting_approval
    with pytest.raises(RlhfError, match=r"was judged again by .* and did not pass: not above 0\.7"):
        approve(waiting)


def test_a_named_version_is_the_challenger_from_its_request_on(
    registry: Registry, contest: Path
) -> None:
    registry.add_version()
    (contest / "params.yaml").write_text(APPROVAL)
    assert promote(contest, version="2", play=ScriptedMatch()).awaiting_approval
    assert registry.aliases() == BEFORE
    approve(contest)
    assert registry.aliases()["champion"] == "2"
