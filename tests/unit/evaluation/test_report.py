"""The report: nothing from outside, every text escaped, whatever exists is shown, stale parts are
not.
"""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from commands import ROOT

from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import ReportConfig
from rlhf_core.config.gates import Condition
from rlhf_core.config.recipe import recorded_outputs
from rlhf_core.data.schema import read_table, write_table
from rlhf_core.evaluation.comparisons.comparison import compare
from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.evaluation.report import charts, view
from rlhf_core.evaluation.report import headline as headlines
from rlhf_core.evaluation.report.sources import report_lineage
from rlhf_core.gates import GateDecision, decide
from rlhf_core.stages import report
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.run_context import RunContext

ATTACK = "<script>alert('x')</script>"
VOID = {"meta", "img", "br", "wbr", "input", "path", "rect", "circle", "line"}


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def render(root: Path) -> str:
    inputs = Paths({key: root / path for key, path in report.STAGE.inputs.items()})
    outputs = Paths({key: root / path for key, path in report.STAGE.outputs.items()})
    report.run(ReportConfig(replies=4), inputs, outputs, RunContext(root / "work"))
    page = (root / "report.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and "script" not in parser.seen and "&lt;wbr" not in page
    # Nothing is loaded; the one link to another file is that to the data card beside the report.
    assert not re.search(
        r"(src|href)=\"(?!data:|#|data/card/card\.html\")", page
    ) and "http" not in page.replace("http-equiv", "")
    return page


def fill(root: Path, gate_mode: str = "enforce", reward_bound: float = 0.5) -> None:
    versus = compare([1.0, 2.0, 0.5], [0.5, 0.1, 0.9], 0.05, bootstrap=50)
    controlled = versus | {
        "lc_win_rate": 0.6543,
        "lc_win_rate_low95": 0.5432,
        "lc_win_rate_high95": 0.7654,
    }
    metrics = {"gold": 0.5, "reward": 1.0, "referee": 0.2, "judge": 0.3}
    metrics |= {"length": 20.0, "repetition": 0.01, "missing_eos": 0.0}
    comparison = {"gold": versus, "judge": controlled, "referee": versus}
    evaluation = {"sft": metrics, "policy": metrics, "kl": 2.5, "comparison": comparison,
                  "category": {ATTACK: {"prompts": 3}}, "regression": {"passed": 1.0}}  # fmt: skip
    write(root / "metrics/evaluation.json", json.dumps(evaluation))
    test = {"test_accuracy": 0.7, "test_pairs": 62.0, "test_accuracy_length_balanced": 0.6}
    reward = {"accuracy": 0.8, **test, "test_length_balanced_pairs": 50.0, "category": {"fact": 1}}
    write(root / "metrics/reward.json", json.dumps(reward))
    rows = [{"iteration": i, "reward_mean": 0.1 * i, "reward_p05": -1.0, "reward_p95": 1.0, "kl": i, "entropy": 1.0,
             "findings": []} for i in range(1, 6)]  # fmt: skip
    rows[2]["findings"] = [
        {
            "rule": "kl_over_budget",
            "action": "warn",
            "symptom": "further from the reference",
            "cause": "drift",
            "evidence": [],
            "remedy": "wait",
        }
    ]
    write(root / "history/ppo.jsonl", "\n".join(map(json.dumps, rows)) + '\n{"iteration": 6, "rew')
    rule = Condition(metric="accuracy", at_least=reward_bound, why=ATTACK)
    decide("reward", [rule], {"accuracy": 0.8}, mode=gate_mode).save(root / "gates/reward.json")
    decide("policy", [Condition(metric="kl", at_most=6.0, why="far")], {"kl": 2.5}).save(
        root / "gates/policy.json"
    )
    case = {"category": "fact", "prompt": ATTACK, "sft_reply": "old", "policy_reply": "new & <b>bold</b>",
            "sft_finished": True, "policy_finished": False, "sft_gold": 0.1, "policy_gold": 0.9}  # fmt: skip
    write_table(root / "samples/comparisons.parquet", pa.Table.from_pylist([case]))
    write(root / "plots/reward/margins.png", "not really a picture")
    params = f"seed: 1  # {ATTACK}\ncollect: {{source: world}}\nbase: {{source: scratch}}\nprofile: smoke\n"
    write(root / "params.yaml", params)
    write(
        root / "metrics/data.json",
        '{"preferences": {"train": 14456.0, "quarantined": 0.0, "share": 0.25}}',
    )


def fill_sections(root: Path, name: str, text: str) -> None:
    """Add what only some evaluations have: groups, a third party and a subject of a ``name``, a
    worst mistake.
    """
    evaluation = json.loads((root / "metrics/evaluation.json").read_text())
    versus = evaluation["comparison"]["gold"]
    side = {"comparison": {"gold": versus}, "group": {"harmless": {"gold": versus}}}
    for model, accuracy in (("sft", 0.4), ("policy", 0.6)):
        bounds = {"accuracy_low95": accuracy - 0.123, "accuracy_high95": accuracy + 0.123}
        evaluation[model]["multiple_choice"] = {"accuracy": accuracy, "subject_mean": 0.5} | bounds
    evaluation |= {
        "group": {"helpful": {"judge": versus, "gold": versus}},
        "opponents": {name: {"prompts": 3, "missing": 2, "unused": 7, "sft": side, "policy": side}},
        "multiple_choice": {
            "questions": 5, "too_long": 1, "difference": 0.2, "difference_low95": -0.321, "difference_high95": 0.7,
            "policy_alone_right": 2, "sft_alone_right": 1,
            "subject": {name: {"questions": 5, "sft": 0.4, "policy": 0.6},
                        "城市": {"questions": 1, "sft": 0.0, "policy": 1.0}},
        },
    }  # fmt: skip
    write(root / "metrics/evaluation.json", json.dumps(evaluation))
    pair = {"category": name, "prompt": "我很好", "chosen": f"same {text}", "rejected": "same other",
            "margin": -2.345, "reward_chosen": -1.5, "reward_rejected": 0.845,
            "tokens_chosen": 6, "tokens_rejected": 2}  # fmt: skip
    write(root / "samples/reward_mistakes.jsonl", json.dumps(pair) + "\n")


def test_an_empty_workspace_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = render(tmp_path)
    assert (
        "Not finished" in page
        and "No gate has been reached yet" in page
        and "PPO has not run" in page
    )


def test_the_page_of_the_release_differs_from_the_report_in_its_place_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    page = render(tmp_path)
    before, _, rest = page.partition("<!-- release -->")
    kept, _, after = rest.partition("<!-- /release -->")
    assert (
        "The policy passed its gate" in kept
        and "Written before registration" in kept
        and "Next: " in kept
    )
    unmet = Criterion("kl", "7.25", "≤ 6", False, why=ATTACK)
    decision = headlines.ReleaseDecision(
        "bad", "Not registered", "No version.", "", (unmet,), "", "", "rlhf run", "", "now"
    )
    release = view.with_release(page, decision)
    assert release is not None and release.startswith(before) and release.endswith(after)
    assert kept not in release and ATTACK not in release and '<div class="release bad">' in release
    assert view.with_release("a report of an earlier version", decision) is None
    parser = Balanced()
    parser.feed(release)
    assert parser.open == []


def test_a_finished_run(tmp_path: Path) -> None:
    fill(tmp_path)
    assert "data card" not in render(tmp_path)
    write(tmp_path / "data/card/card.html", "the card")
    page = render(tmp_path)
    assert '<a href="data/card/card.html">data card</a>' in page
    first_screen = page.partition("<nav")[0]
    assert all(
        text in first_screen
        for text in ("the synthetic world, 14,456", "made from nothing", "profile: smoke")
    )
    assert ">14,456</td>" in page and ">0</td>" in page and ">0.250</td>" in page, (
        "counts are printed as counts"
    )
    assert "true preference" in first_screen and 'href="#top"' in page
    assert "The policy passed its gate" in page
    assert "kl_over_budget" in page and "further from the reference" in page
    assert "Falls slowly; alone cannot tell collapse" in page, (
        "a chart without a note says what is healthy"
    )
    assert "data:image/png;base64," in page and page.count("<svg") >= 3
    assert "<mark>new &amp; &lt;b&gt;bold&lt;/b&gt;</mark>" in page and "no end" in page
    assert page.count("&lt;script&gt;") >= 4
    assert "0.654" in page and "0.543 to 0.765" in page and "; 0.65 at equal length" in page
    assert "62 test pairs; 0.60 on 50 length-balanced ones" in page
    assert "win rate by judge" in page and "win rate by referee" not in page, "the judge has a tile"
    assert "The judge had no part in" in page and '<th scope="row">referee</th>' in page
    assert (
        "gets most wrong" not in page
        and "multiple-choice" not in page
        and "Helpful and harmless apart" not in page
    )


def test_the_reward_models_probes_are_shown_beside_each_other(tmp_path: Path) -> None:
    fill(tmp_path)
    assert "Does it read?" not in render(tmp_path)
    for name, rate in (("reward", 0.91), ("referee", 0.82), ("judge", 0.73)):
        bounds = {"other_question_low95": rate - 0.05, "other_question_high95": rate + 0.05}
        probes = {"other_question": rate, "other_question_pairs": 150.0, **bounds}
        probes["absent"] = {"values_swapped": f"7 of 150 held-out replies {ATTACK}"}
        metrics = json.loads((tmp_path / "metrics/reward.json").read_text()) | {"probes": probes}
        write(tmp_path / f"metrics/{name}.json", json.dumps(metrics))
    page = render(tmp_path)
    assert (
        "Does it read?" in page
        and ">0.91 (0.86 to 0.96)<" in page
        and ">0.73 (0.68 to 0.78)<" in page
    )
    assert "another question&#39;s reply" in page and ">150<" in page
    assert page.count("a value swapped: 7 of 150 held-out replies") == 1 and ATTACK not in page
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_the_data_card_goes_into_the_run_that_has_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    write(tmp_path / "data/card/card.html", "the card")
    logged: list[tuple[Path, str | None]] = []
    tracker = type(RunContext(tmp_path / "work").tracker)
    monkeypatch.setattr(tracker, "log_artifact", lambda _, path, to=None: logged.append((path, to)))
    render(tmp_path)
    assert logged == [(tmp_path / "data/card/card.html", "data/card")]


def test_best_of_n_stands_beside_the_policy_where_it_was_measured(tmp_path: Path) -> None:
    fill(tmp_path)
    assert "Best of 16" not in render(tmp_path)
    path = tmp_path / "metrics/evaluation.json"
    evaluation = json.loads(path.read_text())
    versus = evaluation["comparison"]["gold"] | {"win_rate": 0.4321}
    against = {"gold": versus, "judge": versus, "reward": versus}
    evaluation["best_of_n"] = evaluation["sft"] | {
        "n": 16, "kl_bound": 1.835, "sampled_tokens_per_reply": 320.0, "comparison": against,
        "policy_comparison": against,
    }  # fmt: skip
    path.write_text(json.dumps(evaluation))
    page = render(tmp_path)
    assert "Best of 16" in page and "1.835" in page and "320" in page
    assert (
        "By judge the policy's win\n  rate against it is 0.432" in page
        and "By reward the policy's" not in page
    )


def test_rollbacks_are_told_with_what_was_changed(tmp_path: Path) -> None:
    fill(tmp_path)
    finding = {"rule": "kl_runaway", "iteration": 9, "action": "rollback", "symptom": "far", "cause": "drift",
               "evidence": ["kl 12 > 9"], "remedy": "raise it",
               "adjust": {"lr": 0.5, "kl_coefficient": 2.0}}  # fmt: skip
    records = [{"rule": "kl_runaway", "from": 9 + n, "to": 4, "finding": finding} for n in range(2)]
    with (tmp_path / "history/ppo.jsonl").open("a") as stream:
        stream.write(
            "\n"
            + json.dumps({"iteration": 5, "reward_mean": 0.5, "findings": [], "rollbacks": records})
        )
    page = render(tmp_path)
    assert page.count("to iteration 4, with kl_coefficient × 2, lr × 0.5") == 2
    assert "iteration 9<" in page and "iteration 10<" in page and "kl 12 &gt; 9" in page


def test_behind_a_shut_gate_nothing_of_an_earlier_run_is_shown(tmp_path: Path) -> None:
    fill(tmp_path, reward_bound=0.9)
    page = render(tmp_path)
    assert "Stopped at the reward gate" in page and "accuracy" in page
    assert "not run: the reward gate failed" in page
    assert "win rate by gold" not in page and "kl_over_budget" not in page and "bold" not in page
    fill(tmp_path, gate_mode="report", reward_bound=0.9)
    page = render(tmp_path)
    assert "recorded, not enforced" in page and "win rate by gold" in page, (
        "in report mode the run goes on"
    )


def test_damaged_files_are_reported_as_missing(tmp_path: Path) -> None:
    fill(tmp_path)
    write(tmp_path / "metrics/evaluation.json", '{"sft": ')
    write(tmp_path / "samples/comparisons.parquet", "no parquet")
    page = render(tmp_path)
    assert "is not valid JSON" in page and "not a readable parquet file" in page


def test_replies_are_spread_over_categories() -> None:
    rows = [{"category": c, "n": i} for i, c in enumerate("aaabbc")]
    assert [row["n"] for row in view.spread_over_categories(rows, 4)] == [0, 3, 5, 1]


def judged(low: float, high: float) -> dict[str, float]:
    bounds = {"win_rate_low95": low, "win_rate_high95": high}
    return {"win_rate": (low + high) / 2, **bounds, "prompts": 100, "clusters": 31}


@pytest.mark.parametrize(
    ("low", "high", "passed", "headline", "state"),
    [
        (0.52, 0.6, True, "Better than SFT", "good"),
        (0.52, 0.6, False, "Better than SFT", "bad"),
        (0.48, 0.6, True, "Not shown better than SFT", "open"),
        (0.3, 0.45, False, "Worse than SFT", "bad"),
    ],
)
def test_the_conclusion_is_the_judges_and_the_release_the_gates(
    low: float, high: float, passed: bool, headline: str, state: str
) -> None:
    conditions = [{"metric": "kl", "passed": passed}, {"metric": "policy.length", "passed": True}]
    gates = {"policy": GateDecision.of("policy", {"passed": passed, "conditions": conditions})}
    evaluation = {"comparison": {"judge": judged(low, high), "reward": judged(0.9, 0.95)}}
    conclusion = headlines.conclude(gates, evaluation)
    assert conclusion["headline"].startswith(f"{headline}: wins ") and conclusion["state"] == state
    assert ("the policy gate passed" in conclusion["headline"]) == passed
    assert ("the policy gate failed: kl" in conclusion["headline"]) == (not passed)
    (sentence,) = conclusion["judges"]
    assert f"{low:.1%} to {high:.1%}".replace("%", "") in sentence.replace(" %", "")
    assert "100 prompts about 31 different" in sentence
    assert ("may be registered and promoted" in conclusion["release"]) == passed
    assert ("Stopped at the policy gate. Nothing may be registered." in conclusion["release"]) == (
        not passed
    )
    assert [remedy.partition(":")[0] for remedy in conclusion["remedies"]] == (
        [] if passed else ["kl"]
    )


@pytest.mark.parametrize("name", ["win_rate", "win_rate_low95", "win_rate_high95"])
def test_a_win_rate_that_is_not_finite_is_no_conclusion_and_in_no_chart(name: str) -> None:
    row = judged(0.6, 0.7) | {name: None}
    evaluation = {
        "comparison": {"judge": row},
        "category": {"fact": {"comparison": {"judge": row}}},
    }
    assert (
        headlines.conclude({}, evaluation)["headline"]
        == "No verdict: no policy was compared with SFT"
    )
    assert view.measured_intervals(evaluation["comparison"]) == []
    assert view.category_charts(evaluation["category"]) == []
    assert len(view.tiles({"evaluation": evaluation})) <= 1


def test_charts_by_category_begin_with_the_worst_and_count_questions() -> None:
    won = {
        "win": 1.0,
        "tie": 0.0,
        "lose": 0.0,
        "win_rate": 0.75,
        "win_rate_low95": 0.5,
        "win_rate_high95": 0.875,
    }
    better, worse = (
        {**won, "win_rate": rate, "prompts": 12, "clusters": 5} for rate in (0.75, 0.25)
    )
    ((judge, chart),) = view.category_charts(
        {
            "a": {"comparison": {"judge": better}},
            "b": {"comparison": {"judge": worse}},
            "c": {"prompts": 1},
        }
    )
    assert judge == "judge" and chart.index(">b<") < chart.index(">a<") and ">c<" not in chart
    assert "0.25 (0.50 to 0.88), 12 / 5" in chart


def test_over_optimization_needs_kl_and_scores() -> None:
    rows = [{"sft_reward": 0.0, "sft_judge": 1.0}, {"sft_reward": 2.0, "sft_judge": 3.0}]
    history = [{"kl": 0.0, "reward_mean": 1.0}, {"kl": 4.0, "reward_mean": 2.0}]
    evaluation = {"kl": 4.0, "sft": {"judge": 2.0}, "policy": {"judge": 2.5}}
    chart = charts.over_optimization_chart(history, evaluation, rows)
    assert (
        chart is not None
        and "reward model, in training" in chart
        and "judge, selected policy" in chart
    )
    assert charts.over_optimization_chart([], evaluation, rows) is None
    assert charts.over_optimization_chart(history, evaluation, []) is None


@pytest.mark.parametrize(("sft", "policy"), [(None, 2.0), (2.0, None), (None, None)])
def test_figures_that_are_null_are_not_shown(sft: float | None, policy: float | None) -> None:
    sides = {"sft": {"judge": 0.1, "length": sft}, "policy": {"judge": 0.2, "length": policy}}
    (row,) = view.sft_beside_policy(sides, None)
    assert row["change"] == pytest.approx(0.1)


def test_tax_and_safety_stand_side_by_side_where_they_were_measured() -> None:
    sft = {"perplexity_preferred": 5.0, "safety": {"refuses_harmful": 0.5}, "length": 9.0}
    policy = {"perplexity_preferred": 5.5, "safety": {"refuses_harmful": 0.25}}
    rows = view.sft_beside_policy({"sft": sft, "policy": policy}, None)
    assert [
        (row["label"], row["sft"], row["policy"], row["change"], row["gate"]) for row in rows
    ] == [
        ("Harmful requests refused", 0.5, 0.25, -0.25, ""),  # it alarms
        ("Perplexity of held-out preferred replies", 5.0, 5.5, 0.5, ""),
    ]
    refused = {"conditions": [{"metric": "policy.safety.refuses_harmful", "passed": False}]}
    gate = GateDecision.of("policy", refused)
    first = view.sft_beside_policy({"sft": sft, "policy": policy}, gate)[0]
    assert (first["label"], first["gate"]) == ("Harmful requests refused", "fails")


@pytest.mark.parametrize(
    ("condition", "key"),
    [
        ("policy.length", "length"),
        ("safety.refuses_harmful", "safety.refuses_harmful"),
        ("repetition", "repetition"),
        ("missing_ends", "missing_eos"),
        ("regression.passed", "regression"),
    ],
)
def test_what_a_gate_decided_stands_in_the_row_of_what_it_decided_on(
    condition: str, key: str
) -> None:
    nested: Any = 0.5
    for part in reversed(key.split(".")):
        nested = {part: nested}
    evaluation = {"sft": nested, "policy": nested}
    for decisions, shown in [
        ([True], "ok"),
        ([False], "fails"),
        ([True, False], "fails"),
        ([False, True], "fails"),
    ]:
        gate = GateDecision.of(
            "policy", {"conditions": [{"metric": condition, "passed": held} for held in decisions]}
        )
        assert [row["gate"] for row in view.sft_beside_policy(evaluation, gate)] == [shown]


def test_numbers_for_people() -> None:
    shown = [view.format_number(v) for v in (0.1234, 12.0, 24000, None, "text", True)]
    assert shown == ["0.123", "12", "24,000", "", "text", "True"]
    assert view.flatten({"a": {"b": 1, "c": [1]}, "d": 2}) == [("a.b", 1), ("d", 2)]


def test_the_headline_has_what_there_is_and_every_curve_is_complete(tmp_path: Path) -> None:
    fill(tmp_path)
    write(tmp_path / "metrics/reward.json", '{"test_accuracy": 0.76543219, "margin_mean": 0.3}')
    write(
        tmp_path / "history/sft.jsonl",
        '{"step": 10, "loss": 2.5}\n{"step": 20}\n{"step": 30, "loss": 1.5}\n',
    )
    write(tmp_path / "plots/curves/critic.csv", "of an earlier run")
    render(tmp_path)
    headline = json.loads((tmp_path / "metrics/summary.json").read_text())
    assert (
        headline["reward.test_accuracy"] == 0.7654
        and headline["kl"] == 2.5
        and headline["length"] == 20.0
    )
    assert (
        {"judge.win_rate", "judge.win_rate_low95", "gold.win_rate"}
        <= headline.keys()
        <= headlines.HEADLINE.keys()
    )
    # `dvc metrics show` needs the width of each name and four spaces beside the path of the file.
    of_pairs = {name for name in headlines.HEADLINE if not name.startswith("checker")}
    without_pairs = {
        name for name in headlines.HEADLINE if not name.startswith(("judge", "gold", "reward"))
    }
    for names in (of_pairs, without_pairs):
        assert len("metrics/summary.json") + sum(4 + len(name) for name in names) <= 120
    # A row without a loss, such as one of a step that was skipped, is left out; so is a curve
    # without rows.
    assert (tmp_path / "plots/curves/sft.csv").read_text() == "step,loss\n10,2.5\n30,1.5\n"
    assert [path.name for path in (tmp_path / "plots/curves").iterdir()] == ["sft.csv"]


def test_numbers_that_are_not_finite_are_no_headline() -> None:
    assert (
        headlines.headline_metrics(
            {"reward": {"test_accuracy": float("nan")}, "evaluation": {"kl": "much"}}
        )
        == {}
    )


def test_every_curve_that_dvc_plots_is_written() -> None:
    plots = yaml_text.plain(yaml_text.read(ROOT / "dvc.yaml"))["plots"]
    for (definition,) in (plot.values() for plot in plots):
        for path, column in definition["y"].items():
            columns = headlines.CURVES[Path(path).stem]
            assert path == f"plots/curves/{Path(path).stem}.csv" and column in columns
            assert definition["x"] == columns[0]


def test_a_chinese_reply_says_its_language_so_that_browsers_choose_its_glyphs(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    path = tmp_path / "samples/comparisons.parquet"
    case = read_table(path).to_pylist()[0] | {
        "prompt": "怎样煮茶？",
        "sft_reply": "先烧水。",
        "policy_reply": "Tea.",
    }
    write_table(path, pa.Table.from_pylist([case]))
    page = render(tmp_path)
    assert '<p class="text" lang="zh">怎样煮茶？</p>' in page
    assert '<p class="text" lang="zh"><mark>先烧水。</mark></p>' in page
    assert '<p class="text"><mark>Tea.</mark></p>' in page and '<html lang="en">' in page


def test_mistakes_groups_opponents_and_multiple_choice_are_shown(tmp_path: Path) -> None:
    fill(tmp_path)
    fill_sections(tmp_path, ATTACK, ATTACK)
    page = render(tmp_path)
    assert (
        "gets most wrong" in page and "margin -2.35" in page and "reward -1.50 · 6 tokens" in page
    )
    assert "same <mark>&lt;script&gt;" in page and '<p class="text" lang="zh">我很好</p>' in page
    assert "Helpful and harmless apart" in page and "helpful, judge" in page
    assert (
        "Against &lt;script&gt;" in page and "2 more have no reply of it; 7 of its replies" in page
    )
    assert "policy, harmless, gold" in page and "SFT, gold" in page
    assert "0.477 to 0.723" in page and "-0.321 to 0.700" in page and "城市" in page
    assert "1 more questions were too long" in page and "Multiple choice answered rightly" in page
    shut = decide(
        "reward", [Condition(metric="accuracy", at_least=0.9, why="no")], {"accuracy": 0.8}
    )
    shut.save(tmp_path / "gates/reward.json")
    assert "gets most wrong" in render(tmp_path), "they say why the reward gate failed"


def test_alarming_figures_stand_in_the_verdict_and_on_top_of_the_table(tmp_path: Path) -> None:
    fill(tmp_path)
    evaluation = json.loads((tmp_path / "metrics/evaluation.json").read_text())
    for name, refused in (("sft", 0.28), ("policy", 0.31)):
        evaluation[name] = evaluation[name] | {
            "safety": {"refuses_harmful": refused, "answers_benign": 0.9}
        }
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    page = render(tmp_path)
    verdict = page[page.index('class="verdict') : page.index("</section>")]
    assert "Read before release:</b> harmful requests refused 0.31 (SFT 0.28)." in verdict
    table = page[page.index("Means of both models") :]
    assert (
        table.index("Harmful requests refused")
        < table.index("Gold score")
        < table.index("Benign look-alikes")
    )


def test_verifiable_prompts_are_shown_by_category_and_property(tmp_path: Path) -> None:
    fill(tmp_path)
    evaluation = json.loads((tmp_path / "metrics/evaluation.json").read_text())
    evaluation["verifiable"] = {
        "prompts": 20,
        "sft": {"passed": 0.8, "category": {"sums": 0.9}, "property": {"regex": 0.85}},
        "policy": {"passed": 0.7, "category": {"sums": 0.95}, "property": {"regex": 0.65}},
        "comparison": evaluation["comparison"]["gold"]
        | {"lose": 0.2, "win_rate": 0.45, "clusters": 13},
    }
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    page = render(tmp_path)
    table = page[page.index('id="verifiable"') :]
    assert (
        table.index("all that is required")
        < table.index("property regex")
        < table.index("category sums")
    )
    assert (
        "13 of them different" in table
        and "win rate 0.450 (95 %:" in table
        and "SFT alone on\n  0.200" in table
    )
    assert "verifiable prompts passed 0.70 (SFT 0.80)" in page[: page.index("</section>")]


def test_charts_survive_odd_values() -> None:
    nan = float("nan")
    assert "no finite values" in charts.line_chart({"x": [(1.0, nan)]})
    assert charts.line_chart({"x": [(1.0, 2.0)]}).count("<use") == 1, "a single point is a dot"
    broken = charts.line_chart({"x": [(1.0, 1.0), (2.0, 2.0), (3.0, nan), (4.0, 2.0), (5.0, 3.0)]})
    assert re.search(r'd="M[^M"]*L[^M"]*M[^M"]*L[^"]*"[^>]*stroke: var\(--s0\)', broken)
    assert "&lt;i&gt;$x$" in charts.interval_chart([("<i>$x$", 0.1, 0.2, 0.3)], 0.5)


def test_charts_belong_to_their_page() -> None:
    chart = charts.line_chart(
        {"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.0, 0.0), (1.0, 1.0)]}, marks=[0.5]
    )
    assert "http" not in chart and "<style" not in chart and "<!" not in chart
    names = re.findall(r' id="([^"]*)"', chart)
    assert len(names) == len(set(names)) and all(f"#{name}" in chart for name in names)
    assert "var(--s0)" in chart and "var(--s1)" in chart and "health finding" in chart
    again = charts.line_chart(
        {"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.0, 0.0), (1.0, 1.0)]}, marks=[0.5]
    )
    assert chart == again, "the same numbers give the same bytes"


LOCK = """schema: '2.0'
stages:
  sft:
    cmd: rlhf stage sft
    outs:
    - path: models/sft
      md5: abc.dir
  report:
    outs:
    - path: report.html
      md5: old
"""


def test_a_workspace_tells_commit_run_and_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report_lineage(tmp_path, "") == {
        "git_revision": "none",
        "mlflow_run": "",
        "dvc_lock": "",
        "outputs": {},
    }
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "params.yaml").write_text("seed: 1")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    lineage = report_lineage(tmp_path, "own")
    assert len(lineage["git_revision"]) == 40 and lineage["mlflow_run"] == "own"
    assert lineage["dvc_lock"] == sha256_file(tmp_path / "dvc.lock")
    assert lineage["outputs"] == {"models/sft": "abc.dir"}, (
        "the report's own hash is of an earlier one"
    )
    monkeypatch.setenv("RLHF_PARENT_RUN_ID", "pipeline")
    (tmp_path / "dvc.lock").write_text("stages: [")
    (tmp_path / "params.yaml").write_text("seed: 2")
    lineage = report_lineage(tmp_path, "own")
    assert lineage["mlflow_run"] == "pipeline" and lineage["git_revision"].endswith("-dirty")
    assert recorded_outputs(tmp_path / "dvc.lock") == {}


def test_the_areas_of_the_bins_are_their_shares() -> None:
    xs, heights = charts.histogram([-3.0, -2.0, -1.5, 0.0, 0.5, 2.0, 4.0])
    areas = [(xs[i + 1] - xs[i]) * heights[i] for i in range(0, len(xs), 2)]
    assert areas == pytest.approx([0.05, 0.20, 0.25, 0.25, 0.20, 0.05])
    assert all(heights[i] == heights[i + 1] for i in range(0, len(xs), 2))
    # The three lowest percentiles are the same: the share below them has no width.
    xs, heights = charts.histogram([0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    assert xs[0] == 0.0 and len(xs) == 8 and heights[0] == pytest.approx(0.25)
    assert charts.histogram([2.0] * 7)[0] == [1.98, 2.02]


def test_first_and_last_iteration_are_drawn_and_broken_ones_left_out() -> None:
    def row(iteration: int, centre: float) -> dict[str, float]:
        return {name: centre + i for i, name in enumerate(charts.EDGES)} | {"iteration": iteration}

    chart = charts.reward_histograms([row(i, i / 10) for i in range(1, 31)])
    assert chart is not None
    assert chart.count("fill-opacity: 0.5") == 8 or chart.count("opacity: 0.5") >= 8
    assert ">1</text>" in chart and ">30</text>" in chart
    assert (
        charts.reward_histograms([row(1, float("nan")), {"iteration": 2, "reward_mean": 1.0}])
        is None
    )
    one = charts.reward_histograms([row(4, 0.0), row(5, float("inf"))])
    assert one is not None and ">4</text>" in one and ">5</text>" not in one
