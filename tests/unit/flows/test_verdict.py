"""The verdict of a run: by independent judges with intervals, never by a stale evaluation; how a
server shows it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed
from pydantic import TypeAdapter
from scripted_match import match_result

from flows.commands import registry_commands
from flows.commands.run_state import EXIT_CODES, verdict_rows
from flows.commands.status import gate_rows
from flows.commands.text import PlainConsole, gate_table
from flows.pipeline import artifacts, flow
from flows.pipeline import verdict as pipeline
from flows.pipeline.artifacts import publish_gate_tables, publish_report, publish_stage_table
from flows.pipeline.events import EventLog, RunEnded, events_file
from flows.registry.client import mlflow_address
from flows.registry.decisions import PromotionDecision
from flows.stage import StageOutcome
from flows.workspace import record_services
from rlhf_core.config.gates import Condition
from rlhf_core.config.profiles import profiles
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.errors import EXIT_GATE_FAILED, EXIT_TRAINING_PAUSED, EXIT_USER_ERROR, RlhfError
from rlhf_core.evaluation.promotion import conclude, win_rate_criteria
from rlhf_core.evaluation.remedies import remedy_for
from rlhf_core.evaluation.report import note
from rlhf_core.evaluation.report.headline import ReleaseDecision
from rlhf_core.evaluation.verdict import (
    JudgeResult,
    Standing,
    alarms,
    judge_results,
    standing_of,
)
from rlhf_core.gates import GateDecision, decide
from rlhf_core.tracking.pipeline_run import NOTE_TAG, VERDICT_TAG, run_page

EVALUATED = {
    name: StageOutcome(name, "ran", started=0.0, ended=1.0, work_seconds=1.0)
    for name in ("evaluate", "report")
}


VERDICT = pipeline.RunVerdict(
    standing=Standing.BETTER,
    opponent="champion version 3",
    judges=(JudgeResult("gold", 0.71, 0.66, 0.76, 320, 103, 0.684),),
    kl=note.KlEstimate(1.9, 1.7, 2.1),
    failure="",
    registered="policy version 4",
    release=ReleaseDecision(
        state="good",
        headline="Released: version 4 is the champion",
        registered="",
        reason="better by every judge",
        conditions=(),
        decided="",
        champion="",
        next_command="rlhf chat",
        next_hint="talk to the champion",
        as_of="",
    ),
    report="report.html",
)


def interval(low: float, rate: float, high: float) -> dict[str, float]:
    return {
        "win_rate": rate,
        "win_rate_low95": low,
        "win_rate_high95": high,
        "prompts": 320,
        "clusters": 103,
    }


def workspace_with(folder: Path, **judges: dict[str, float]) -> Path:
    evaluation = {"comparison": judges, "kl": 1.9, "kl_low95": 1.7, "kl_high95": 2.1}
    (folder / "metrics").mkdir()
    (folder / "metrics" / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def decided(**changes: Any) -> PromotionDecision:
    return PromotionDecision(
        **{"model": "m", "challenger": "4", "champion": "3", "bar": 0.5, **changes}
    )


def reached(*arguments: Any) -> pipeline.RunVerdict:
    return pipeline.reach_verdict(*arguments)[0]


@pytest.mark.parametrize(
    ("judge", "gold", "standing"),
    [
        ((0.51, 0.6, 0.7), (0.55, 0.6, 0.65), Standing.BETTER),
        (
            (0.51, 0.6, 0.7),
            (0.50, 0.6, 0.65),
            Standing.NOT_SHOWN_BETTER,
        ),  # one half exactly is a tie everywhere
        ((0.45, 0.5, 0.55), (0.40, 0.45, 0.49), Standing.WORSE),
        (
            (0.60, 0.7, 0.80),
            (0.20, 0.3, 0.40),
            Standing.NOT_SHOWN_BETTER,
        ),  # the judges contradict each other
    ],
)
def test_the_standing_is_by_the_intervals_of_every_judge(
    judge: tuple[float, ...], gold: tuple[float, ...], standing: Standing
) -> None:
    assert (
        standing_of(judge_results({"judge": interval(*judge), "gold": interval(*gold)})) is standing
    )


@pytest.mark.parametrize(
    ("order", "decides"),
    [
        ({"order_disagreement": 0.1, "first_preferred": 0.55}, True),
        ({"order_disagreement": 0.88, "first_preferred": 0.5}, False),
        ({"order_disagreement": 0.2, "first_preferred": 0.9}, False),
        ({"order_disagreement": 0.2, "first_preferred": 0.05}, False),
    ],
)
def test_a_judge_by_the_order_of_replies_is_an_alarm_and_moves_no_verdict(
    order: dict[str, float], decides: bool
) -> None:
    comparison = {"judge": interval(0.6, 0.7, 0.8), "llm": interval(0.45, 0.5, 0.55) | order}
    assert standing_of(judge_results(comparison)) is (
        Standing.NOT_SHOWN_BETTER if decides else Standing.BETTER
    )
    sentences = [
        alarm.sentence for alarm in alarms({"comparison": comparison, "sft": {}, "policy": {}})
    ]
    assert [sentence for sentence in sentences if "llm does not decide" in sentence] == (
        [] if decides else sentences
    )
    assert decides or len(sentences) == 1
    asked = win_rate_criteria({"comparison": comparison}, bar=0.5, budget=0.05, attempt=1)
    assert any(criterion.name.startswith("llm ") for criterion in asked) == decides
    alone = win_rate_criteria(
        {"comparison": {"llm": comparison["llm"]}}, bar=0.5, budget=0.05, attempt=1
    )
    assert alone and not all(criterion.passed for criterion in alone), (
        "no judge that decides promotes nothing"
    )


def test_the_reward_model_is_no_judge_and_nor_is_the_referee_that_selected_the_policy(
    tmp_path: Path,
) -> None:
    low, even = interval(0.4, 0.5, 0.6), interval(0.7, 0.8, 0.9)
    workspace_with(tmp_path, judge=low, referee=even, reward=even, gold=even)
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4", decided(champion=None))
    )
    assert [judge.judge for judge in verdict.judges] == ["gold", "judge"]
    assert verdict.headline.startswith(
        "not shown better than SFT: wins 50.0 % (95 % interval 40.0 to 60.0 %) by judge"
    )


@pytest.mark.parametrize("name", note.KL_KEYS)
def test_a_kl_that_is_not_finite_leaves_the_rest_of_the_verdict(tmp_path: Path, name: str) -> None:
    file = workspace_with(tmp_path, judge=interval(0.6, 0.7, 0.8)) / "metrics" / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: None}))
    verdict = reached(tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4"))
    assert verdict.headline.startswith("better than SFT: ") and verdict.kl is None
    assert "KL" not in pipeline.verdict_markdown(verdict) and "KL" not in dict(
        verdict_rows(verdict, tmp_path)
    )


@pytest.mark.parametrize("name", ["win_rate", "win_rate_low95", "win_rate_high95"])
def test_a_win_rate_that_is_not_finite_decides_nothing(tmp_path: Path, name: str) -> None:
    sure = interval(0.6, 0.7, 0.8)
    workspace_with(tmp_path, judge=sure, gold=sure | {name: None})  # type: ignore[dict-item]
    verdict = reached(tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4"))
    assert (
        verdict.standing is Standing.NOT_COMPARED
        and "a win rate against SFT is no number" in verdict.headline
    )
    assert verdict_rows(verdict, tmp_path) and pipeline.verdict_markdown(verdict)


@pytest.mark.parametrize("name", ["win_rate", "win_rate_low95"])
def test_a_match_with_a_win_rate_that_is_not_finite_promotes_nothing(name: str) -> None:
    sure = interval(0.6, 0.7, 0.8)
    match = {"comparison": {"judge": sure, "gold": sure | {name: None}}}
    passed, reason = conclude(win_rate_criteria(match, 0.5, 0.05, 1), 0.5)
    assert not passed and "by gold: gold win rate not measured, judge win rate 0.700" in reason


def test_a_judge_that_the_order_of_replies_sways_neither_promotes_nor_prevents_it() -> None:
    """As docs/judges.md has it, whatever its win rate."""
    sure = match_result({"judge": 0.6, "gold": 0.6})["comparison"]
    for low in (0.1, 0.9):
        swayed = match_result({"llm": low})["comparison"]["llm"] | {"order_disagreement": 0.5}
        passed, reason = conclude(
            win_rate_criteria({"comparison": sure | {"llm": swayed}}, 0.5, 0.05, 1), 0.5
        )
        assert passed and reason.startswith("above 0.5 with 95 % confidence by every judge: gold")
        assert not conclude(win_rate_criteria({"comparison": {"llm": swayed}}, 0.5, 0.05, 1), 0.5)[
            0
        ]


def test_every_judge_must_be_sure() -> None:
    both = match_result({"judge": 0.6, "gold": 0.5})
    passed, reason = conclude(win_rate_criteria(both, 0.5, 0.05, 1), 0.5)
    assert not passed and reason.startswith("not above 0.5 with 95 % confidence by gold:")
    assert conclude(win_rate_criteria({"comparison": {}}, 0.5, 0.05, 1), 0.5) == (
        False,
        "no judge has compared them",
    )


def test_a_match_makes_the_champion_the_opponent(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    match = {"comparison": {"judge": interval(0.2, 0.3, 0.4)}}
    decision = decided(match=match).refused("not above 0.5 with 95 % confidence by judge")
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4", decision)
    )
    assert verdict.headline.startswith("worse than champion version 3: wins 30.0 %")
    assert verdict.judges[0].low95 == 0.2 and verdict.kl is not None and verdict.kl.high95 == 2.1


@pytest.mark.parametrize(
    ("message", "code", "hint"),
    [
        ("out of memory\nmore", 1, "resumes from the last checkpoint"),
        (
            "paused",
            EXIT_TRAINING_PAUSED,
            "after a change of the settings of sft; the report shows why it paused",
        ),
        (
            "no such file",
            EXIT_USER_ERROR,
            "once that is corrected; what is up to date is not repeated",
        ),
    ],
)
def test_evaluation_and_report_of_earlier_runs_do_not_count(
    tmp_path: Path, message: str, code: int, hint: str
) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    (tmp_path / "report.html").touch()
    outcomes = {
        "sft": StageOutcome.failed("sft", message, code),
        "evaluate": StageOutcome("evaluate", "skipped"),
    }
    verdict = reached(tmp_path, outcomes, pipeline.RegistrationResult())
    failure = f"sft failed: {message.partition(chr(10))[0]}"
    assert (
        verdict.standing is Standing.NOT_COMPARED and verdict.kl is None and verdict.report is None
    )
    assert verdict.headline == f"no verdict: {failure}" and verdict.registered == "nothing"
    assert verdict.promotion == "Not registered"
    assert (verdict.release.next_command, verdict.release.next_hint) == ("rlhf run", hint)
    assert sum(failure in text for _, text in verdict_rows(verdict, tmp_path)) == 1
    after_the_error = verdict_rows(verdict, tmp_path, "sft failed, see above")
    assert after_the_error[0] == ("verdict", "no verdict: sft failed, see above")
    assert not any(failure in text for _, text in after_the_error)


def test_a_failed_gate_is_named_with_its_conditions(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    (tmp_path / "gates").mkdir()
    conditions = [
        {
            "metric": "kl",
            "value": 7.1,
            "bound": "<= 6",
            "sign": "<=",
            "limit": 6.0,
            "passed": False,
        },
        {
            "metric": "policy.length",
            "value": 20.0,
            "bound": "<= 30",
            "sign": "<=",
            "limit": 30.0,
            "passed": True,
        },
    ]
    (tmp_path / "gates" / "policy.json").write_text(
        json.dumps({"passed": False, "conditions": conditions})
    )
    failed = StageOutcome.failed("gate-policy", "gate policy: failed\n a table", EXIT_GATE_FAILED)
    verdict = reached(tmp_path, {**EVALUATED, "gate-policy": failed}, pipeline.RegistrationResult())
    assert verdict.headline == (
        "better than SFT: wins 80.0 % (95 % interval 70.0 to 90.0 %) by judge; "
        "the policy gate failed: kl is 7.1, required ≤ 6"
    )
    assert (verdict.registered, verdict.promotion) == (
        "nothing",
        "Not registered: the policy gate refuses it",
    )
    remedies = [text for label, text in pipeline.verdict_facts(verdict) if label == "to do"]
    assert [remedy.partition(":")[0] for remedy in remedies] == ["kl"]
    assert (
        "params.yaml" in verdict.release.next_hint
        and "`rlhf chat models/policy`" in verdict.release.next_hint
    )
    shown = verdict_rows(verdict, tmp_path, "")
    for text in ("\n".join(text for _, text in shown), pipeline.verdict_markdown(verdict)):
        assert text.count("kl is 7.1") == 1 and "raise ppo.kl.coefficient" in text
    assert TypeAdapter(pipeline.RunVerdict).validate_json(json.dumps(asdict(verdict))) == verdict


def test_each_failed_condition_has_a_line_and_each_advice_is_said_once(tmp_path: Path) -> None:
    """At the end of a run, by ``rlhf status`` and by ``rlhf gate --explain``."""
    asked = (
        ("test_accuracy_length_balanced", 0.45, ">=", 0.6),
        ("test_accuracy_length_balanced_low95", 0.33, ">=", 0.5),
        ("test_ece_length_balanced", 0.25, "<=", 0.15),
    )
    names = ("metric", "value", "sign", "limit")
    conditions = [dict(zip(names, row, strict=True)) | {"passed": False} for row in asked]
    gate = GateDecision.of("reward", {"passed": False, "conditions": conditions})
    gate.save(tmp_path / "gates" / "reward.json")
    failed = StageOutcome.failed("gate-reward", "gate reward: failed", EXIT_GATE_FAILED)
    verdict = reached(tmp_path, {"gate-reward": failed}, pipeline.RegistrationResult())
    of_run = [text for _, text in verdict_rows(verdict, tmp_path)]
    assert of_run[0] == "no verdict: the reward gate failed: 3 of 3 conditions do not hold"
    told = [text for text in of_run if "required" in text]
    assert [text.partition(" ")[0] for text in told] == [metric for metric, *_ in asked]
    assert told == [text for _, text in gate_rows(gate) if "required" in text]
    stream = io.StringIO()
    PlainConsole(stream, width=500).print(gate_table(gate))
    of_table = stream.getvalue().splitlines()
    for condition in gate.failed[1:]:
        advice = str(remedy_for(gate, condition))
        assert sum(advice in text for text in of_run) == 1, "two conditions ask for the first"
        said = next(number for number, text in enumerate(of_run) if advice in text)
        assert said > of_run.index(told[-1])
        assert sum(advice in line for line in of_table) == 1


def test_every_command_of_the_next_step_is_typed_where_the_reader_is(tmp_path: Path) -> None:
    hint = "talk to it; `rlhf rollback --reason TEXT` takes it back"
    release = replace(VERDICT.release, next_hint=hint)
    label, text = verdict_rows(replace(VERDICT, release=release), tmp_path)[-1]
    assert label == "next" and text.count(f" --workspace {tmp_path}") == 2
    assert f"`rlhf rollback --reason TEXT --workspace {tmp_path}`" in text


def test_an_error_of_the_registration_is_told(tmp_path: Path) -> None:
    workspace_with(tmp_path, judge=interval(0.7, 0.8, 0.9))
    (tmp_path / "report.html").touch()
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult(error="MLflow does not answer")
    )
    assert (
        verdict.registered == "nothing: MLflow does not answer" and verdict.report == "report.html"
    )
    assert (
        verdict.promotion == "Not registered. MLflow does not answer"
        and verdict.release.next_command == "rlhf run"
    )
    assert verdict.release.next_hint.startswith("tries the registration again")


def test_alarming_figures_are_part_of_the_verdict_everywhere_and_survive_json(
    tmp_path: Path,
) -> None:
    workspace_with(tmp_path, judge=interval(0.51, 0.6, 0.7))
    file = tmp_path / "metrics" / "evaluation.json"
    shares = {
        "sft": {"safety": {"refuses_harmful": 0.28}},
        "policy": {"safety": {"refuses_harmful": 0.31}},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | shares))
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4", decided(champion=None))
    )
    sentence = "harmful requests refused 0.31 (SFT 0.28)"
    assert verdict.alarms == (sentence,) and ("alarms", sentence) in verdict_rows(verdict, tmp_path)
    assert f"- **Read before release:** {sentence}" in pipeline.verdict_markdown(verdict)
    assert TypeAdapter(pipeline.RunVerdict).validate_json(json.dumps(asdict(verdict))) == verdict


@pytest.mark.parametrize(
    ("profile", "toy"), [("own-data,chinese-sample", True), ("smoke", True), ("demo", False)]
)
def test_a_toy_is_called_one_and_the_judges_are_explained_on_the_terminal_and_on_the_servers(
    tmp_path: Path, profile: str, toy: bool
) -> None:
    (tmp_path / "params.yaml").write_text(f"profile: {profile}\n")
    workspace_with(tmp_path, gold=interval(0.51, 0.6, 0.7))
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4", decided(champion=None))
    )
    terminal = "\n".join(text for _, text in verdict_rows(verdict, tmp_path))
    for shown in (terminal, pipeline.verdict_markdown(verdict)):
        assert ("is a toy" in shown) == ("first version" in shown) == toy
        assert "gold is the true preference of the synthetic world" in shown


@pytest.mark.parametrize("steps", [0, 5])
def test_a_run_without_sft_says_what_is_called_sft(tmp_path: Path, steps: int) -> None:
    (tmp_path / "params.yaml").write_text(
        "base: {source: models/champion, allow_high_learning_rates: true}\n"
        f"sft: {{steps: {steps}}}\n"
    )
    workspace_with(tmp_path, judge=interval(0.51, 0.6, 0.7))
    verdict = reached(
        tmp_path, EVALUATED, pipeline.RegistrationResult("policy version 4", decided(champion=None))
    )
    terminal = "\n".join(text for _, text in verdict_rows(verdict, tmp_path))
    for shown in (terminal, pipeline.verdict_markdown(verdict)):
        assert ("SFT is the starting model as it was" in shown) == (steps == 0)
        assert ("models/champion" in shown) == (steps == 0)


@pytest.mark.parametrize("profile", ["smoke", "demo"])
@pytest.mark.parametrize("bound", [1.0, 6.0])
def test_a_dvc_experiment_says_in_mlflow_what_a_run_says(
    tmp_path: Path, profile: str, bound: float
) -> None:
    """No flow ends it: the policy gate or the report tells, and their run hands the note on."""
    (tmp_path / "params.yaml").write_text(f"profile: {profile}\n")
    workspace_with(tmp_path, gold=interval(0.51, 0.6, 0.7), judge=interval(0.4, 0.5, 0.6))
    evaluation = json.loads((tmp_path / "metrics" / "evaluation.json").read_text())
    gate = decide("policy", [Condition(metric="kl", at_most=bound, why="far")], evaluation)
    gate.save(tmp_path / "gates" / "policy.json")
    outcomes = {"gate-policy": EVALUATED["report"], **EVALUATED}
    verdict = reached(tmp_path, outcomes, pipeline.RegistrationResult("policy version 4"))
    tags = note.verdict_tags(tmp_path, evaluation, gate)
    assert tags[VERDICT_TAG] == verdict.headline
    told, by_run = tags[NOTE_TAG].splitlines(), pipeline.verdict_markdown(verdict).splitlines()
    assert len(told) >= 9 and set(told) <= set(by_run)
    more = [line.partition(":")[0] for line in by_run if line not in told]
    assert more == ["- Registered", "- Promotion", "- Next"]


def test_every_toy_is_a_profile() -> None:
    assert set(profiles(profiles_of(recipe_folder()))) > note.TOYS


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The content of each artifact by its key, in place of a Prefect server."""
    contents: dict[str, Any] = {}

    def record(content: Any, key: str, description: str, link_text: str = "") -> None:
        contents[re.sub("-(demo|test.*)$", "", key)] = content

    for kind in ("table", "markdown", "link"):
        monkeypatch.setattr(artifacts, f"create_{kind}_artifact", record)
    return contents


def test_bounds_keep_their_sign_and_values_are_rounded(
    tmp_path: Path, published: dict[str, Any]
) -> None:
    conditions = [
        {
            "metric": "kl",
            "value": 2.3456789,
            "sign": "<=",
            "limit": 6.0,
            "passed": True,
            "why": "nats",
        },
        {
            "metric": "accuracy",
            "value": 0.41,
            "sign": ">=",
            "limit": 0.5,
            "passed": False,
            "why": "a|b",
        },
    ]
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "reward.json").write_text(
        json.dumps({"passed": False, "conditions": conditions})
    )
    publish_gate_tables(tmp_path)
    failed, passed = published["gate-reward"]
    assert "reward.steps" in failed.pop("what to do")
    assert failed == {
        "metric": "accuracy",
        "passed": "NO",
        "value": "0.41",
        "bound": "≥ 0.5",
        "why": "a|b",
    }
    assert list(passed) == ["metric", "passed", "value", "bound", "why", "what to do"]
    assert (passed["passed"], passed["value"], passed["bound"]) == ("yes", "2.346", "≤ 6")


def test_a_message_is_no_markup(published: dict[str, Any]) -> None:
    publish_stage_table(
        Path("demo"), [StageOutcome.failed("sft", "> quote *a* <b>\n>= 0.5 [x](y)")]
    )
    (row,) = published["stages"]
    assert row["message"] == "› quote ∗a∗ ‹b› ≥ 0.5 [x] (y)"
    assert note.markdown_text("> *a* <b>\n>= 0.5 [x](y)|win_rate_low95") == (
        r"&gt; \*a\* &lt;b&gt; ≥ 0.5 \[x\](y)\|win_rate_low95"
    )


def test_the_verdict_names_judges_intervals_kl_and_the_next_command() -> None:
    verdict = replace(
        VERDICT, judges=(JudgeResult("judge", 0.61234, 0.5512, 0.6689, 320, 103, 0.5876),)
    )
    text = pipeline.verdict_markdown(
        verdict, "http://127.0.0.1:5000/#/experiments/1/runs/ab/artifacts/report.html"
    )
    assert text.startswith(
        "**Better than champion version 3: wins 61.2 % (95 % interval 55.1 to 66.9 %) by judge**\n"
    )
    assert "| judge | 61.2 % | 55.1 % to 66.9 % | 58.8 % | 320 | 103 |" in text
    assert "- KL: 1.90 nats per reply from SFT, 95 % interval 1.70 to 2.10" in text
    assert (
        "- Report: [report.html](http://127.0.0.1:5000/#/experiments/1/runs/ab/artifacts/report.html)"
        in text
    )
    assert "- Next: `rlhf chat` (talk to the champion)" in text
    assert "file:" not in text and "`report.html` in the workspace" in pipeline.verdict_markdown(
        VERDICT
    )


def test_the_report_is_a_link_only_where_a_server_shows_it(
    tmp_path: Path, published: dict[str, Any]
) -> None:
    publish_report(Path("demo"), tmp_path / "report.html", None)
    assert not published
    (tmp_path / "report.html").touch()
    publish_report(Path("demo"), tmp_path / "report.html", None)
    assert published["report"] == f"The report is the file `{tmp_path / 'report.html'}`."
    publish_report(Path("demo"), tmp_path / "report.html", "http://h/x")
    assert published["report"] == "http://h/x"


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("http://user:secret@host:5000/", "http://host:5000"),
        ("https://mlflow.example", "https://mlflow.example"),
        ("sqlite:///x.db", None),
        ("", None),
    ],
)
def test_the_mlflow_pages_are_those_of_the_server_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, address: str | None
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert mlflow_address(tmp_path) == address


def test_the_mlflow_pages_are_those_of_a_running_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record_services(tmp_path, "http://127.0.0.1:4200/api", "http://127.0.0.1:5000")
    assert mlflow_address(tmp_path) == "http://127.0.0.1:5000"
    of_plot = "#/experiments/1/runs/ab/artifacts/plots/kl%201.png?workflowType=machine_learning"
    assert run_page("1", "ab", "plots/kl 1.png") == of_plot
    record = json.loads((tmp_path / ".rlhf" / "services.json").read_text())
    assert record["pid"] == os.getpid()
    (tmp_path / ".rlhf" / "services.json").write_text(
        json.dumps({**record, "start_token": "another process"})
    )
    assert mlflow_address(tmp_path) is None


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow.signals, "install", lambda: None)
    monkeypatch.setattr(flow, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.mark.usefixtures("no_servers")
@pytest.mark.parametrize(
    ("error", "name", "code"),
    [
        (RlhfError("MLflow at http://server does not answer"), "UserError", EXIT_USER_ERROR),
        (RlhfError("a transfer failed", 1), "StageFailed", 1),
    ],
)
def test_an_error_of_no_stage_is_how_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RlhfError, name: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(flow, "_run_pipeline", fail)
    (tmp_path / "params.yaml").write_text("pools: {}\n")
    assert flow.rlhf_pipeline.fn(str(tmp_path)).name == name
    assert EventLog(events_file(tmp_path)).read_new() == [RunEnded(name, str(error))]
    assert EXIT_CODES.get(name, 1) == code


@pytest.mark.usefixtures("no_servers")
@pytest.mark.parametrize("away", ["publish_run", "end_pipeline_run"])
def test_a_server_that_goes_away_at_the_end_changes_nothing_about_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    def gone(*_: object) -> None:
        raise ConnectionError("no answer from http://user:hidden@server")

    for name in ("publish_run", "end_pipeline_run"):
        monkeypatch.setattr(flow, name, gone if name == away else lambda *_: None)
    said = flow._publish(tmp_path, "run", Completed(), EVALUATED, VERDICT)
    assert said == "its record is incomplete (ConnectionError: no answer from http://***@server)"


def test_reasons_of_a_gate_are_whole_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    report = GateDecision.of(
        "policy",
        {"conditions": [{"metric": "kl", "value": 1.0, "passed": True, "why": "because " * 30}]},
    )
    registry_commands._print(gate_table(report, every_reason=True))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.count("because") == 30 for line in lines) and not any(
        line.endswith(" ") for line in lines
    )
