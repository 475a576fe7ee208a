"""Who becomes champion, who stays it, and what is left written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from integration.registry.conftest import make_policy, policy_name, reward_name, write_gate
from scripted_match import match_result

from flows.registry.client import connect
from flows.registry.history import ReleaseState
from flows.registry.promote import promote, rollback
from flows.registry.register import read_registered, register
from flows.registry.stored_models import verified_folder
from rlhf_core.errors import ModelError, RlhfError


class ScriptedMatch:
    """A match with a given outcome, and how often it was played."""

    def __init__(self, **lows: float) -> None:
        self.lows, self.played = lows, 0

    def __call__(
        self, workspace: Path, champion: Path, challenger: Path, prompt_set: int
    ) -> dict[str, Any]:
        assert champion != challenger and (challenger / "config.json").is_file()
        self.played += 1
        return match_result(self.lows)


def aliases(workspace: Path, name: str | None = None) -> dict[str, str]:
    known = connect(workspace).get_registered_model(name or policy_name(workspace)).aliases
    return {alias: str(version) for alias, version in known.items()}


def reports(workspace: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text())
        for path in sorted((workspace / ".rlhf" / "promotions").glob("*.json"))
    ]


@pytest.mark.slow
def test_the_first_challenger_takes_the_empty_place_with_its_reward_model(workspace: Path) -> None:
    with pytest.raises(RlhfError, match="has no @challenger; `rlhf run` registers one"):
        promote(workspace)
    register(workspace)
    decision = promote(workspace)
    assert decision.promoted and aliases(workspace) == {"challenger": "1", "champion": "1"}
    assert aliases(workspace, reward_name(workspace))["champion"] == "1"
    again = promote(workspace)
    assert (
        not again.promoted
        and again.is_champion
        and again.reason == "the challenger is the champion already"
    )
    for reason, refusal in (
        ("why not", "no earlier champion to go back to"),
        ("", "needs a reason"),
    ):
        with pytest.raises(RlhfError, match=refusal):
            rollback(workspace, reason)


@pytest.mark.parametrize("backend", ["sqlite", "server"], indirect=True)
def test_a_sure_winner_moves_the_aliases_and_is_written_down(contest: Path) -> None:
    decision = promote(contest, play=ScriptedMatch(judge=0.56, gold=0.61))
    assert aliases(contest) == {"challenger": "2", "champion": "2", "previous": "1"}
    report = decision.report
    assert report is not None and report.stat().st_mode & 0o222 == 0
    assert json.loads(report.read_text())["match"]["comparison"]["gold"]["win_rate_low95"] == 0.61
    client = connect(contest)
    version = client.get_model_version(policy_name(contest), "2")
    assert version.tags["decision.promoted"] == "true"
    # Copies of the workspace register versions of the same run.
    assert f"promotions/{report.name}" in [
        a.path for a in client.list_artifacts(version.run_id, "promotions")
    ]
    assert ReleaseState.read(client, contest, policy_name(contest)).champions == ["1", "2"]


def test_rollback_swaps_and_the_next_run_does_not_undo_it(contest: Path) -> None:
    promote(contest, play=ScriptedMatch(judge=0.9))
    rollback(contest, "rude in production")
    assert aliases(contest) == {"challenger": "2", "champion": "1"}
    assert reports(contest)[-1]["reason"] == "rude in production"
    refused = promote(contest, play=ScriptedMatch(judge=0.9))
    assert not refused.promoted and "rolled back (rude in production)" in refused.reason
    assert promote(contest, force_reason="fixed", play=ScriptedMatch(judge=0.9)).promoted
    assert "rolled_back" not in connect(contest).get_model_version(policy_name(contest), "2").tags


@pytest.mark.slow
def test_a_second_rollback_goes_further_back_and_never_to_the_bad_version(contest: Path) -> None:
    promote(contest, play=ScriptedMatch(judge=0.9))
    make_policy(contest, 8)
    register(contest)
    promote(contest, play=ScriptedMatch(judge=0.9))
    assert aliases(contest) == {"challenger": "3", "champion": "3", "previous": "2"}
    for number in ("3", "9", "two"):
        with pytest.raises(
            RlhfError,
            match=f"version {number} of .* is no earlier champion; go back to one of: 1, 2",
        ):
            rollback(contest, "worse", to=number)
    rollback(contest, "worse")
    assert aliases(contest) == {"challenger": "3", "champion": "2", "previous": "1"}
    rollback(contest, "still worse")
    assert aliases(contest) == {"challenger": "3", "champion": "1"}
    with pytest.raises(RlhfError, match="no earlier champion to go back to"):
        rollback(contest, "once more")


def fail_reward_gate_in_report_mode(workspace: Path) -> None:
    evidence = ["metrics/reward.json", "metrics/referee.json", "metrics/judge.json"]
    write_gate(workspace, "reward", evidence, passed=False, mode="report")


@pytest.mark.slow
def test_an_ungated_version_is_no_challenger_and_only_force_promotes_it(contest: Path) -> None:
    fail_reward_gate_in_report_mode(contest)
    make_policy(contest, 9)
    entry = register(contest).registered[policy_name(contest)]
    assert (entry.version, entry.ungated) == (
        "3",
        "the reward gate did not pass (mode: report): kl",
    )
    assert aliases(contest)["challenger"] == "2"
    here = read_registered(
        contest, "models/policy"
    )  # what `rlhf compare` says, without asking the registry
    assert (
        here is not None
        and (here.model, here.version) == (policy_name(contest), "3")
        and here.ungated
    )
    match = ScriptedMatch(judge=0.9)
    refused = promote(contest, version="3", play=match)
    assert (
        not refused.promoted
        and "version 3 is ungated (the reward gate did not pass" in refused.reason
    )
    assert match.played == 0 and aliases(contest)["champion"] == "1"
    forced = promote(contest, version="3", force_reason="a trial", play=match)
    assert forced.promoted and aliases(contest)["champion"] == "3"
    assert "is ungated" in reports(contest)[-1]["reason"]


@pytest.mark.slow
def test_without_a_challenger_the_newest_version_is_named_with_what_keeps_it_from_being_one(
    workspace: Path,
) -> None:
    fail_reward_gate_in_report_mode(workspace)
    make_policy(workspace, 9)
    register(workspace)
    with pytest.raises(
        RlhfError,
        match=r"has no @challenger: version 1 is ungated \(the reward gate did not pass.*; a run whose "
        r"gates pass registers one, and `rlhf promote --version 1 --force --reason TEXT` takes this one$",
    ):
        promote(workspace, dry_run=True)


@pytest.mark.slow
def test_a_version_whose_alias_was_removed_is_named(workspace: Path) -> None:
    register(workspace)
    connect(workspace).delete_registered_model_alias(policy_name(workspace), "challenger")
    with pytest.raises(
        RlhfError, match=r"taken from version 1 by .*; `rlhf promote --version 1` judges that"
    ):
        promote(workspace, dry_run=True)


@pytest.mark.slow
def test_a_version_without_a_record_of_its_gates_is_not_promoted(contest: Path) -> None:
    connect(contest).delete_model_version_tag(policy_name(contest), "2", "gates")
    refused = promote(contest, play=ScriptedMatch(judge=0.9))
    assert not refused.promoted and "no record that its gates passed" in refused.reason
    register(contest)  # the gates have passed on these very files: the version says so again
    assert promote(contest, play=ScriptedMatch(judge=0.9)).promoted


def tamper(workspace: Path, number: str) -> None:
    """Change the registered artifact itself, wherever it lies."""
    version = connect(workspace).get_model_version(policy_name(workspace), number)
    folder = verified_folder(workspace, version)
    (folder / "added.txt").write_text("not what was judged")
    if str(folder).startswith(
        str(workspace / ".rlhf")
    ):  # a downloaded copy: the server's own has to change
        connect(workspace).log_artifact(version.run_id, str(folder / "added.txt"))


@pytest.mark.parametrize("force", [None, "I insist"])
def test_a_changed_artifact_is_never_promoted(contest: Path, backend, force: str | None) -> None:
    if backend.uri is not None:
        pytest.skip("the files of a server's artifact store are out of a workspace's reach")
    tamper(contest, "2")
    with pytest.raises(
        ModelError, match="version 2 are not the ones that were registered and judged"
    ):
        promote(contest, force_reason=force, play=ScriptedMatch(judge=0.9))
    assert aliases(contest)["champion"] == "1"


def test_a_damaged_download_is_replaced_by_a_sound_one(contest: Path, backend) -> None:
    if backend.uri is None:
        pytest.skip("local artifacts are not downloaded")
    version = connect(contest).get_model_version(policy_name(contest), "2")
    (verified_folder(contest, version) / "added.txt").write_text("not what was judged")
    assert not (verified_folder(contest, version) / "added.txt").exists()


def test_a_match_file_that_no_match_has_written_is_not_believed(contest: Path) -> None:
    match = ScriptedMatch(judge=0.3)
    assert not promote(contest, play=match).promoted
    kept = next((contest / ".rlhf" / "matches").glob("*.json"))
    forged = {"comparison": {"judge": {"win_rate": 1.0, "win_rate_low95": 0.99}}}
    kept.write_text(json.dumps(forged))
    assert not promote(contest, play=match).promoted
    assert match.played == 2 and aliases(contest)["champion"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_the_real_match_runs_in_a_process_of_its_own(contest: Path) -> None:
    decision = promote(contest)
    assert decision.match is not None
    result = decision.match["comparison"]["judge"]
    assert set(decision.match["comparison"]) == {
        "judge"
    }  # these prompts are not of the synthetic world: no gold
    assert result["prompts"] == 8 and result["win"] + result["tie"] + result[
        "lose"
    ] == pytest.approx(1)
    assert result["lc_win_rate_low95"] <= result["lc_win_rate"] <= result["lc_win_rate_high95"]
    assert decision.promoted == (result["win_rate_low95"] > 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_match_that_cannot_be_played_is_one_line(contest: Path) -> None:
    (contest / "data" / "clean" / "prompts" / "test.parquet").write_text("no parquet")
    with pytest.raises(
        RlhfError, match=r"the match ended with code 2: .*test\.parquet.*\(log: .*match\.log\)"
    ):
        promote(contest)
    assert aliases(contest)["champion"] == "1"


def exit_code(*arguments: str) -> int:
    from flows.cli import app

    with pytest.raises(SystemExit) as ended:
        app(args=[*arguments], prog_name="rlhf")
    return int(ended.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_the_command_says_by_its_exit_code_whether_the_challenger_is_champion(
    contest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    match = ScriptedMatch(judge=0.4)
    monkeypatch.setitem(promote.__kwdefaults__, "play", match)
    workspace = ("--workspace", str(contest))
    assert exit_code("promote", *workspace) == 5
    assert "not promoted: not above 0.5" in capsys.readouterr().out
    assert exit_code("promote", *workspace, "--dry-run") == 5
    assert exit_code("promote", *workspace, "--force", "--reason", "agreed") == 0
    assert exit_code("promote", *workspace) == 0, "it is champion already"
    assert exit_code("rollback", *workspace, "--to", "1", "--reason", "after all not") == 0
    assert "champion is version 1 again (was 2)" in capsys.readouterr().out
    assert exit_code("promote", *workspace) == 5, "rolled back"
