"""The page of the release says as of when a version was registered, promoted, refused or taken
back, and by whom.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.registry.promote import approve, decline, promote, rollback
from flows.registry.register import RegisteredHere, write_registered
from flows.registry.release_page import (
    RunNotes,
    current_page,
    read_release_decision,
    try_release_page,
    write_release_page,
)
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.evaluation.remedies import LESS_FAR
from rlhf_core.evaluation.report.headline import BEGIN, END, ReleaseDecision
from rlhf_core.storage.files import sha256_file

from .conftest import APPROVAL, MODEL, Registry, ScriptedMatch

REPORT = f"<main><p>better</p>{BEGIN}<p>may be registered</p>{END}<p>curves</p></main>"
KL = {"metric": "kl", "value": 7.25, "bound": "<= 6", "sign": "<=", "limit": 6.0, "why": "too far"}
UNMET = Criterion("kl", "7.25", "≤ 6", False, why="too far", remedy=str(LESS_FAR))


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ACTOR", "ann (release 17)")


def write_gate(workspace: Path, passed: bool, mode: str = "enforce") -> None:
    (workspace / "gates").mkdir(exist_ok=True)
    gate = {"passed": passed, "mode": mode, "conditions": [KL | {"passed": passed}]}
    (workspace / "gates/policy.json").write_text(json.dumps(gate))


def hold(workspace: Path, version: str | None, ungated: str = "") -> Path:
    """Let a workspace be as the run leaves it that has made ``version`` and written its report."""
    (workspace / "report.html").write_text(REPORT)
    (workspace / "dvc.lock").write_text(
        "stages: {ppo: {cmd: ppo, outs: [{path: models/policy, md5: p}]}}\n"
    )
    write_gate(workspace, not ungated, "report" if ungated else "enforce")
    made = {} if version is None else {"models/policy": RegisteredHere(MODEL, version, ungated)}
    write_registered(workspace, made)
    return workspace


def decided(workspace: Path, **notes: str) -> ReleaseDecision:
    return read_release_decision(workspace, RunNotes(**notes))


def on_page(workspace: Path) -> str:
    """The text of the page's first lines, which takes the place that the report keeps."""
    write_release_page(workspace)
    page = (workspace / "release.html").read_text()
    assert page.startswith("<main><p>better</p>") and page.endswith("<p>curves</p></main>")
    assert "may be registered" not in page and (workspace / "report.html").read_text() == REPORT
    return " ".join(page.replace("<wbr>", "").split())


def test_an_enforced_gate_refuses_registration(registry: Registry, contest: Path) -> None:
    hold(contest, "2")  # what was registered of an earlier policy says nothing of the refused one
    write_gate(contest, passed=False)
    decision = decided(
        contest, because="the policy gate failed: kl is 7.25, required ≤ 6", gate="policy"
    )
    assert (decision.state, decision.headline) == (
        "bad",
        "Not registered: the policy gate refuses it",
    )
    assert decision.conditions == (UNMET,) and not decision.reason
    assert decision.champion == f"The champion of {MODEL} is version 1."
    assert "rlhf gate policy --explain" in decision.next_hint
    assert "<b>kl</b>: 7.25, required ≤ 6" in on_page(contest)


def test_what_no_run_has_registered(registry: Registry, contest: Path) -> None:
    hold(contest, "2")
    decision = decided(contest, because="ppo failed: out of memory")
    assert (decision.headline, decision.reason) == ("Not registered", "ppo failed: out of memory")
    assert not decision.conditions and not decision.decided
    decision = decided(hold(contest, None))
    assert (decision.state, decision.reason) == (
        "open",
        "No run has registered the policy in models/ yet.",
    )
    assert decision.next_hint == "registers it, once its gates pass"
    write_release_page(contest)
    assert not (contest / "release.html").exists()


def test_a_run_that_trained_nothing_speaks_of_no_policy_of_its_own(
    registry: Registry, contest: Path
) -> None:
    hold(contest, None)
    because = "validate failed: 2 of 9 conditions"
    assert decided(contest, because=because).registered == "No policy was trained."
    (contest / "models/policy").mkdir(parents=True)
    assert decided(contest, because=because).registered == "No version holds this policy."


def test_a_failed_gate_in_report_mode_registers_no_challenger(
    registry: Registry, contest: Path
) -> None:
    because = "the policy gate did not pass (mode: report): kl"
    number = registry.add_version(gates={}, ungated=because)
    registry.client.set_model_version_tag(MODEL, number, "gates", "ungated")
    decision = decided(hold(contest, number, because))
    assert (
        decision.state == "open"
        and decision.headline == f"Not released: {MODEL} version 3 was not promoted"
    )
    assert (
        decision.registered
        == f"Registered as {MODEL} version 3; no gate vouches for it: {because}."
    )
    assert decision.conditions == (UNMET,)


def test_a_rollback_is_named_where_there_is_a_champion_to_go_back_to(
    registry: Registry, contest: Path
) -> None:
    assert "rollback" not in decided(hold(contest, "1")).next_hint
    promote(contest, play=ScriptedMatch(0.55))
    assert registry.aliases()["champion"] == "2"
    assert "`rlhf rollback " in decided(hold(contest, "2")).next_hint


def test_a_challenger_that_was_not_shown_better(registry: Registry, contest: Path) -> None:
    hold(contest, "2")
    match = ScriptedMatch(0.45, length=0.3)
    first, again = promote(contest, play=match), promote(contest, play=match)
    assert not first.promoted and not first.is_champion and not again.promoted
    assert (
        again.unchanged
        and match.played == 1
        and registry.aliases() == {"champion": "1", "challenger": "2"}
    )
    decision = decided(contest)
    assert (
        decision.headline
        == f"Not released: {MODEL} version 2 was not promoted in place of version 1"
    )
    assert decision.registered == f"Registered as {MODEL} version 2; it passed its gates."
    unmet = {
        condition.name: (condition.measured, condition.required)
        for condition in decision.conditions
    }
    assert unmet["judge win rate"] == ("0.550 (at least 0.450)", "> 0.5")
    assert unmet["length"][1] == "worse by less than 0.25"
    assert decision.decided.startswith(
        "Decided by ann (release 17), 20"
    ) and decision.decided.endswith(" UTC")
    page = on_page(contest)
    assert (
        "Not released" in page
        and "0.550 (at least 0.450), required &gt; 0.5" in page
        and "ann (release 17)" in page
    )
    assert "rlhf promote --dry-run --explain" in page and "release.html" not in page


def test_a_challenger_that_nobody_has_decided_on(registry: Registry, contest: Path) -> None:
    decision = decided(hold(contest, "2"), registered="v2", because="registry.auto_promote is off")
    assert decision.headline == f"Not released: nobody has decided on {MODEL} version 2"
    assert (decision.reason, decision.next_command) == (
        "registry.auto_promote is off",
        "rlhf promote",
    )


def test_promoted_then_taken_back(registry: Registry, contest: Path) -> None:
    hold(contest, "2")
    assert promote(contest, play=ScriptedMatch()).promoted
    decision = decided(contest)
    assert (decision.state, decision.headline) == (
        "good",
        f"Released: {MODEL} version 2 is the champion",
    )
    assert decision.reason.startswith(
        "Promoted: above 0.5 with 95 % confidence by every judge: judge win rate 0.700"
    )
    assert decision.champion == "" and decision.decided.startswith("Decided by ann (release 17), ")
    rollback(contest, "rude in production")
    decision = decided(contest)
    assert decision.headline == f"Taken back: {MODEL} version 2 was rolled back to version 1"
    assert (decision.state, decision.reason) == ("bad", "Rolled back: rude in production")
    assert decision.champion == f"The champion of {MODEL} is version 1."
    first = decided(hold(contest, "1"))
    assert first.headline == f"Released: {MODEL} version 1 is the champion again"


def test_forced_promotions_say_so(registry: Registry, contest: Path) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise RlhfError("no judge")

    hold(contest, "2")
    for reason, refusal in ((None, "no judge"), (" ", "needs a reason")):
        with pytest.raises(RlhfError, match=refusal):
            promote(contest, force_reason=reason, play=broken)
    assert (
        promote(contest, force_reason="the champion leaks", play=broken).forced
        == "the champion leaks"
    )
    decision = decided(contest)
    assert (decision.state, decision.headline) == (
        "open",
        f"Released by force: {MODEL} version 2 is the champion",
    )
    assert decision.reason.startswith(
        "Promoted: forced: the champion leaks (otherwise: no match: no judge"
    )


@pytest.mark.slow
def test_waiting_approved_and_declined(registry: Registry, contest: Path) -> None:
    hold(contest, "2")
    (contest / "params.yaml").write_text(APPROVAL)
    assert promote(contest, play=ScriptedMatch()).awaiting_approval
    decision = decided(contest)
    assert decision.headline == f"Not released yet: {MODEL} version 2 waits for approval"
    assert decision.next_command == "rlhf approve --version 2"
    assert decision.decided.startswith("Requested by ann (release 17), ")
    decline(contest, "refuses too much")
    decision = decided(contest)
    assert (decision.state, decision.headline) == (
        "bad",
        f"Not released: {MODEL} version 2 was declined",
    )
    assert decision.reason == "declined by ann (release 17): refuses too much"
    registry.add_version()
    hold(contest, "3")
    assert promote(contest, play=ScriptedMatch()).awaiting_approval
    approve(contest, "read 50 replies")
    assert "approved by ann (release 17): read 50 replies" in decided(contest).reason
    registry.add_version()
    hold(contest, "4")
    assert promote(contest, force_reason="version 3 leaks", play=ScriptedMatch()).awaiting_approval
    approve(contest)
    assert decided(contest).headline == f"Released by force: {MODEL} version 4 is the champion"


def test_the_page_keeps_what_the_run_said_until_another_report(
    registry: Registry, contest: Path
) -> None:
    hold(contest, "2")
    write_release_page(contest, RunNotes(because="ppo failed: <b>out</b> of memory"))
    assert "ppo failed: &lt;b&gt;out&lt;/b&gt; of memory" in on_page(contest), (
        "and texts are escaped"
    )
    record: dict[str, Any] = json.loads((contest / ".rlhf/release.json").read_text())
    assert record["report_sha256"] == sha256_file(contest / "report.html")
    assert current_page(contest) == contest / "release.html"
    (contest / "report.html").write_text(REPORT.replace("better", "worse"))
    assert current_page(contest) is None
    write_release_page(contest)
    assert "nobody has decided" in (contest / "release.html").read_text()


def test_a_page_of_another_release_of_the_package_is_written_anew(
    registry: Registry, contest: Path
) -> None:
    hold(contest, "2")
    write_release_page(contest, RunNotes())
    file = contest / ".rlhf/release.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"notes": {"told": "in words that are not known here"}}))
    assert current_page(contest) is None
    write_release_page(contest)
    assert current_page(contest) is not None


def test_the_page_is_attached_to_the_run_of_its_version(registry: Registry, contest: Path) -> None:
    write_release_page(hold(contest, "2"))
    run = registry.client.get_model_version(MODEL, "2").run_id
    assert [file.path for file in registry.client.list_artifacts(run)] == ["release.html"]


def test_a_report_without_a_place_for_it_has_no_page(registry: Registry, contest: Path) -> None:
    write_release_page(contest)
    assert not (contest / "release.html").exists()
    write_release_page(hold(contest, "2"))
    (contest / "report.html").write_text("of another version")
    write_release_page(contest)
    assert not (contest / "release.html").exists()


@pytest.mark.parametrize(("number", "champion"), [("1", "has no champion"), ("2", "is version 1")])
def test_a_version_that_was_deleted_is_no_longer_called_released(
    registry: Registry, contest: Path, number: str, champion: str
) -> None:
    assert f"{MODEL} version {number}" in on_page(hold(contest, number))
    registry.client.delete_model_version(MODEL, number)
    shown, decision = on_page(contest), decided(contest)
    assert (
        f"Not released: {MODEL} version {number} was deleted" in shown
        and "is the champion" not in shown
    )
    assert (decision.state, decision.next_command) == ("bad", "rlhf run")
    assert champion in decision.champion


@pytest.mark.parametrize("by", ["version", "alias"])
def test_a_challenger_whose_champion_was_removed_by_hand(
    registry: Registry, contest: Path, by: str
) -> None:
    hold(contest, "2")
    if by == "version":
        registry.client.delete_model_version(MODEL, "1")
    else:
        registry.client.delete_registered_model_alias(MODEL, "champion")
    refusal = promote(contest, play=ScriptedMatch())
    decision = decided(contest)
    assert (
        not refusal.promoted
        and decision.headline == f"Not released: {MODEL} version 2 was not promoted"
    )
    assert (
        decision.reason[1:] == f"{refusal.reason[1:]}."
        and "version 1 was champion" in refusal.reason
    )
    assert decision.next_command == "rlhf promote --force --reason TEXT"
    promote(contest, force_reason="nothing to compare with")
    assert "is the champion" in on_page(contest)


def test_an_absent_registry_leaves_the_page(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_release_page(hold(contest, "2"))
    before = (contest / "release.html").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    _, problem = try_release_page(contest)
    assert problem.startswith(
        "release.html was not brought up to date: MLflow at http://127.0.0.1:9 does not answer"
    )
    assert (contest / "release.html").read_text() == before
    assert not try_release_page(contest, RunNotes(because="MLflow does not answer"))[1], (
        "and then it says that"
    )
    assert "MLflow does not answer" in (contest / "release.html").read_text()


@pytest.mark.slow
def test_a_former_champion_that_waits_for_approval_or_was_declined(
    registry: Registry, contest: Path
) -> None:
    hold(contest, "1")
    assert promote(contest, play=ScriptedMatch()).promoted
    assert (
        decided(contest).headline == f"No longer released: version 2 has replaced {MODEL} version 1"
    )
    (contest / "params.yaml").write_text(APPROVAL)
    assert promote(contest, version="1", play=ScriptedMatch()).awaiting_approval
    waiting = decided(contest)
    assert waiting.headline == f"Not released yet: {MODEL} version 1 waits for approval"
    assert waiting.next_command == "rlhf approve --version 1"
    decline(contest, "refuses too much")
    assert decided(contest).headline == f"Not released: {MODEL} version 1 was declined"


def test_a_version_of_weaker_gates_that_this_workspace_cannot_force(
    registry: Registry, contest: Path
) -> None:
    because = "the policy gate did not pass (mode: report): kl"
    number = registry.add_version(gates={}, ungated=because)
    registry.client.set_model_version_tag(MODEL, number, "gates", "ungated")
    second = registry.workspace("second", "seed: 1\n")
    decision = decided(hold(second, number, because))
    assert because in decision.registered and not decision.reason, "the reason is given once"
    assert decision.next_command == "rlhf registry terms", "only the owner forces a promotion"
    assert "--force" in decided(hold(contest, number, because)).next_hint
