"""Aggregation, intervals and verdicts of an ablation, against numbers computed by hand."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.ablation import verdicts
from benchmarks.ablation.definition import METRICS, Claim, Expectation, load_ablation
from benchmarks.ablation.page import curve, difference_cell, level_cell, summarise, write_page
from rlhf_core.errors import DataError

HERE = Path()
DEFINITION = """
seeds: [1, 2, 3]
reference: a
variants: [{name: a, about: the recipe}, {name: b, about: another, base: a}]
figures:
  - name: one
    title: The first
    variants: [a, b]
    curves: [kl, win_rate]
    ends: [gold, kl]
    claims:
      - {says: b is worse, expects: [{metric: gold, of: b, is: lower, than: a}]}
      - {says: b drifts, expects: [{metric: kl, of: b, is: higher, than: a}]}
  - {name: two, title: The second, variants: [b], curves: [kl], ends: [gold]}
"""


def table(**values: dict[str, list[float]]) -> verdicts.SeedTable:
    """``table(a={"gold": [1, 2, 3]})``: seeds count from 1."""
    results = []
    for variant, metrics in values.items():
        for seed in range(1, 1 + max(len(v) for v in metrics.values())):
            row = {name: v[seed - 1] for name, v in metrics.items() if seed <= len(v)}
            results.append(
                verdicts.RunResult(verdicts.AblationRun(variant, seed, HERE, "done"), row)
            )
    return verdicts.SeedTable(results)


def expectation(**fields: Any) -> Expectation:
    return Expectation.model_validate(fields)


def test_t_interval_by_hand() -> None:
    # s = 1, t(.975, 2) = 4.302653, half = 4.302653 / sqrt(3) = 2.484138
    interval = verdicts.t_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.low == pytest.approx(-0.484138, abs=1e-6) and interval.high == pytest.approx(
        4.484138, abs=1e-6
    )


def test_equal_values_have_an_interval_of_width_zero_one_value_none_and_nothing_no_mean() -> None:
    assert verdicts.t_interval([0.5, 0.5, 0.5]) == verdicts.Interval(0.5, 0.5, 0.5, 3)
    assert verdicts.t_interval([3.0]) == verdicts.Interval(3.0, -math.inf, math.inf, 1)
    assert math.isnan(verdicts.t_interval([]).mean) and verdicts.t_interval([]).n == 0


def test_differences_are_paired_by_seed() -> None:
    # differences .5, 1, 1.5: s = .5, half = 1.242069; unpaired, the spread of the seeds would drown
    # it
    difference = table(a={"gold": [10.0, 20.0, 30.0]}, b={"gold": [10.5, 21.0, 31.5]}).difference(
        "b", "a", "gold"
    )
    assert difference.mean == pytest.approx(1.0)
    assert (difference.low, difference.high) == pytest.approx((1 - 1.242069, 2.242069), abs=1e-6)


def test_only_seeds_that_both_have_are_compared() -> None:
    difference = table(a={"gold": [1.0, 2.0, 3.0]}, b={"gold": [2.0, 4.0]}).difference(
        "b", "a", "gold"
    )
    assert (difference.mean, difference.n) == (1.5, 2)


def test_ratio_metrics_are_compared_as_factors() -> None:
    data = table(a={"kl": [1.0, 2.0, 4.0]}, b={"kl": [2.0, 4.0, 8.0]})
    difference = data.difference("b", "a", "kl").in_readers_unit(METRICS["kl"])
    assert (difference.mean, difference.low, difference.high) == pytest.approx((2.0, 2.0, 2.0))
    assert data.level("a", "kl").in_readers_unit(METRICS["kl"]).mean == pytest.approx(
        2.0
    )  # geometric


def test_a_kl_below_its_floor_counts_as_the_floor() -> None:
    assert table(a={"kl": [-0.01]}).by_seed("a", "kl") == {
        1: pytest.approx(math.log(METRICS["kl"].floor))
    }


@pytest.mark.parametrize(
    ("fields", "values", "holds", "fails"),
    [
        # mean 2, standard error 1 / sqrt(3); of two degrees of freedom P(T > t) = (1 - t / sqrt(t^2
        # + 2)) / 2
        ({"is": "higher"}, [1.0, 2.0, 3.0], 0.0370899, 0.9629101),
        ({"is": "higher", "by": 2.0}, [1.0, 2.0, 3.0], 0.5, 0.5),
        ({"is": "higher", "by": -1.0}, [1.0, 2.0, 3.0], 0.0175494, 0.9824506),
        ({"is": "lower"}, [1.0, 2.0, 3.0], 0.9629101, 0.0370899),
        ({"is": "lower", "by": 1.0}, [-3.0, -2.0, -1.0], 0.1127017, 0.8872983),
        ({"is": "same", "within": 3.0}, [1.0, 2.0, 3.0], 0.1127017, 1.0),
        ({"is": "same", "within": 1.0}, [1.0, 2.0, 3.0], 0.8872983, 2 * 0.1127017),
        ({"is": "same", "within": 1.0}, [-3.0, -2.0, -1.0], 0.8872983, 2 * 0.1127017),
        ({"is": "higher"}, [0.0, 0.0, 0.0], 1.0, 0.0),
        ({"is": "same", "within": 1.0}, [0.0, 0.0, 0.0], 0.0, 1.0),
    ],
)
def test_p_values_by_hand(
    fields: dict[str, Any], values: list[float], holds: float, fails: float
) -> None:
    wanted = expectation(metric="gold", of="b", than="a", **fields)
    assert verdicts.p_values(wanted, verdicts.t_interval(values), METRICS["gold"]) == pytest.approx(
        (holds, fails), abs=1e-6
    )


def test_margins_of_ratios_are_factors() -> None:
    wanted = expectation(metric="kl", of="b", than="a", **{"is": "same", "within": 2.0})
    inside, outside = (
        [math.log(v) for v in values] for values in ((0.99, 1.0, 1.01), (2.9, 3.0, 3.1))
    )
    assert verdicts.p_values(wanted, verdicts.t_interval(inside), METRICS["kl"])[0] < 0.001
    assert verdicts.p_values(wanted, verdicts.t_interval(outside), METRICS["kl"])[1] < 0.01


def test_holm_by_hand() -> None:
    assert verdicts.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert verdicts.holm([0.5, 0.9]) == [1.0, 1.0] and verdicts.holm([]) == []


def claims(*expected: list[dict[str, Any]]) -> list[Claim]:
    return [Claim.model_validate({"says": "s", "expects": fields}) for fields in expected]


def test_a_claim_needs_all_its_expectations_and_one_that_does_not_hold_decides() -> None:
    data = table(
        a={"gold": [0.5, 0.6, 0.7], "kl": [1.0, 1.0, 1.0]},
        b={"gold": [0.1, 0.2, 0.3], "kl": [3.0, 3.0, 3.0]},
    )
    lower = {"metric": "gold", "of": "b", "is": "lower", "than": "a"}
    drifts = {"metric": "kl", "of": "b", "is": "higher", "than": "a", "by": 2.0}
    near = {"metric": "kl", "of": "b", "is": "lower", "than": "a"}
    both, one, far = verdicts.judge_claims(claims([lower, drifts], [lower, near], [drifts]), data)
    assert [verdict.outcome for verdict in (both, one, far)] == ["holds", "does not hold", "holds"]
    assert [item.expected for item in both.evidence] == [
        "gold score: b − a < 0",
        "KL, nats per sequence: b / a > 2",
    ]
    assert both.evidence[0].measured == "-0.4, 95 % -0.4 to -0.4, 3 seeds"
    assert both.evidence[1].interval.mean == pytest.approx(3.0)


def test_what_one_claim_shows_is_not_enough_among_ten() -> None:
    # P(T > 4) of four degrees of freedom = 0.00807
    data = table(
        a={"gold": [0.0] * 5},
        b={"gold": [v + 4 * math.sqrt(0.5) for v in (-2.0, -1.0, 0.0, 1.0, 2.0)]},
    )
    higher = [{"metric": "gold", "of": "b", "is": "higher", "than": "a"}]
    alone, *_ = verdicts.judge_claims(claims(higher), data)
    among, *_ = verdicts.judge_claims(claims(*[higher] * 10), data)
    assert (alone.outcome, among.outcome) == (
        verdicts.ClaimOutcome.HOLDS,
        verdicts.ClaimOutcome.OPEN,
    )
    assert (alone.p, among.p) == pytest.approx((0.0080650, 0.080650), rel=1e-4)


def test_against_a_number_the_level_itself_is_shown() -> None:
    data = table(a={"kl": [2.0, 2.0, 2.0]})
    evidence = verdicts.examine(expectation(metric="kl", of="a", than=6.0, **{"is": "lower"}), data)
    assert (evidence.holds, evidence.expected) == (0.0, "KL, nats per sequence: a < 6")
    assert evidence.interval.mean == pytest.approx(2.0)


@pytest.mark.parametrize(("seeds", "measured"), [([], "not run"), ([0.1], "one seed: no interval")])
def test_fewer_than_two_seeds_tell_nothing(seeds: list[float], measured: str) -> None:
    data = table(a={"gold": [0.5]}, b={"gold": seeds})
    evidence = verdicts.examine(
        expectation(metric="gold", of="b", than="a", **{"is": "lower"}), data
    )
    assert (evidence.holds, evidence.fails, evidence.measured) == (1.0, 1.0, measured)


def test_end_values_by_hand() -> None:
    evaluation = {
        "sft": {"gold": 0.2, "reward": -1.0, "referee": 1.0, "judge": 0.0},
        "policy": {"gold": 0.5, "reward": 1.0, "referee": 4.0, "judge": 2.0, "length": 20.0},
        "kl": 1.5,
        "comparison": {"referee": {"win_rate": 0.7}, "judge": {"win_rate": 0.6}},
    }
    values = verdicts.end_values(evaluation, {"reward": 4.0, "referee": 2.0, "judge": 8.0})
    assert values["gold_gain"] == pytest.approx(0.3)
    assert (values["reward_gain"], values["referee_gain"]) == (0.5, 1.5)
    assert (values["judge_gain"], values["judge_win_rate"]) == (0.25, 0.6)
    assert (values["kl"], values["length"], values["referee_win_rate"]) == (1.5, 20.0, 0.7)
    assert math.isnan(values["gold_win_rate"]) and math.isnan(values["repetition"])


def test_history_values_by_hand() -> None:
    rewards = [0.0, 1.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 7.0]
    rows = [{"iteration": i + 1, "reward_mean": r, "reward_std": 2.0, "entropy": float(i), "explained_variance": 0.5}
            for i, r in enumerate(rewards)]  # fmt: skip
    values = verdicts.history_values(rows)
    assert values["reward_jitter_early"] == 0.5  # |1|, |-1| over an SD of 2
    assert values["reward_jitter_late"] == 0.5  # 0, 2 over 2, mean 1
    assert values["entropy"] == 6.0 and values["explained_variance_early"] == 0.5
    assert math.isnan(values["perplexity"])


def test_curves_keep_the_iterations_that_every_seed_has() -> None:
    def run(seed: int, rows: list[dict[str, Any]]) -> verdicts.RunResult:
        return verdicts.RunResult(verdicts.AblationRun("a", seed, HERE, "done"), {"kl": 1.0}, rows)

    first = run(
        1, [{"iteration": 1, "kl": 0.0}, {"iteration": 2, "kl": 1.0}, {"iteration": 3, "kl": None}]
    )
    second = run(
        2, [{"iteration": 1, "kl": 2.0}, {"iteration": 2, "kl": 3.0}, {"iteration": 3, "kl": 4.0}]
    )
    points = curve([first, second], "kl")
    assert points is not None
    assert points[0].tolist() == [1, 2] and points[1].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert curve([first], "entropy") is None


def test_cells() -> None:
    assert level_cell(verdicts.t_interval([1.0, 2.0, 3.0]), METRICS["gold"]) == "2.00 ± 2.48"
    assert [level_cell(verdicts.t_interval(values), METRICS["gold"]) for values in ([1.0], [])] == [
        "1.00",
        "–",
    ]
    assert level_cell(verdicts.t_interval([0.0, 0.0]), METRICS["kl"]) == "1.00 (1.00 to 1.00)"
    assert (
        difference_cell(verdicts.t_interval([0.5, 0.5]), METRICS["gold"])
        == "**+0.50 (0.50 to 0.50)**"
    )
    assert (
        difference_cell(verdicts.t_interval([1.0, 2.0, 3.0]), METRICS["gold"])
        == "+2.00 (-0.48 to 4.48)"
    )
    assert (
        difference_cell(verdicts.t_interval([math.log(2.0)] * 2), METRICS["kl"])
        == "**× 2.00 (2.00 to 2.00)**"
    )


def workspace(folder: Path, gold: float, kl: float) -> Path:
    """What the stages of one run leave."""
    for name in ("metrics", "history", "samples"):
        (folder / name).mkdir(parents=True)
    (folder / "params.yaml").write_text("ppo: {batch_size: 4}\n")
    evaluation = {
        "sft": {"gold": 0.2, "reward": 0.0},
        "policy": {"gold": gold, "reward": 1.0},
        "kl": kl,
    }
    (folder / "metrics" / "evaluation.json").write_text(json.dumps(evaluation))
    rows = [
        {"iteration": i, "kl": kl * i, "win_rate": 0.5, "reward_mean": 0.1 * i, "length": 5.0}
        for i in (1, 2, 3)
    ]
    (folder / "history" / "ppo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"id": ["x", "y"], "sft_reply": ["a", "b"], "sft_finished": [True, True], "sft_reward": [0.0, 2.0],
               "policy_finished": [True, False], "policy_reward": [9.0, 3.0]}  # fmt: skip
    pq.write_table(pa.table(columns), folder / "samples" / "comparisons.parquet")
    return folder


def test_the_whole_summary(tmp_path: Path) -> None:
    (tmp_path / "ablation.yaml").write_text(DEFINITION)
    runs = [
        verdicts.AblationRun(name, seed, workspace(tmp_path / f"{name}{seed}", gold + seed / 100, kl), "done")
        for name, gold, kl, seeds in (("a", 0.6, 1.0, (1, 2, 3)), ("b", 0.1, 9.0, (1, 2))) for seed in seeds
    ]  # fmt: skip
    runs.append(
        verdicts.AblationRun(
            "b", 3, workspace(tmp_path / "b3", -9.0, 1.0), "paused", "ppo: steps not finite"
        )
    )
    out = tmp_path / "out"
    ablation = load_ablation(tmp_path / "ablation.yaml")
    summarise(ablation, runs, out)

    rows = list(csv.DictReader((out / "results.csv").open()))
    last = [(row["variant"], row["seed"], row["state"]) for row in rows[-2:]]
    assert last == [("b", "2", "done"), ("b", "3", "paused")]
    assert float(rows[0]["sampled_tokens"]) == 4 * 3 * 5
    assert float(rows[0]["reward_gain_cut"]) == 2.0 and rows[0]["gold_gain_cut"] == ""
    assert (
        float(rows[0]["reward_gain"]) == 1.0
        and rows[-1]["gold"] == ""
        and rows[0]["referee_gain"] == ""
    )
    told = json.loads((out / "verdicts.json").read_text())
    assert [item["verdict"] for item in told["one"]] == ["holds", "holds"]
    text = (out / "table.md").read_text()
    assert "5 of 6 runs" in text and "2 holds, 0 does not hold, 0 cannot tell" in text
    assert "- b, seed 3: paused. ppo: steps not finite" in text
    for picture in ("one", "two"):
        assert (out / "figures" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert f"![The {'first' if picture == 'one' else 'second'}](figures/{picture}.png)" in text
    # The file of the results is enough to write all but the pictures again.
    again = write_page(ablation, verdicts.read_csv(out / "results.csv"), {})
    assert set(again.splitlines()) == {
        line for line in text.splitlines() if line != "# Ablation" and "![" not in line
    }


def test_a_figure_none_of_whose_claims_was_measured_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "ablation.yaml").write_text(DEFINITION)
    runs = [
        verdicts.AblationRun("a", seed, workspace(tmp_path / f"a{seed}", 0.6, 1.0), "done")
        for seed in (1, 2)
    ]
    assert summarise(load_ablation(tmp_path / "ablation.yaml"), runs, tmp_path / "out") == {
        "two": []
    }


@pytest.mark.parametrize(
    "text", ["variant,seed\na,1\n", "", "variant,seed,state,message,workspace\na,x,done,,\n"]
)
def test_a_file_without_results_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.csv").write_text(text)
    if text:
        with pytest.raises(DataError, match=r"other.csv is not the results.csv of an ablation"):
            verdicts.read_csv(tmp_path / "other.csv")
    with pytest.raises(DataError, match=r"none.csv is not the results.csv of an ablation"):
        verdicts.read_csv(tmp_path / "none.csv")


def test_a_run_that_is_not_done_has_no_values_whatever_lies_there(tmp_path: Path) -> None:
    folder = workspace(tmp_path / "a", 0.5, 1.0)
    assert verdicts.read_results([verdicts.AblationRun("a", 1, folder, "failed")])[0].values == {}
    assert (
        verdicts.read_results([verdicts.AblationRun("a", 1, folder, "done")])[0].values["gold"]
        == 0.5
    )


def test_the_page_says_how_reward_goes_with_gold_and_which_seed_is_worst(tmp_path: Path) -> None:
    (tmp_path / "ablation.yaml").write_text(DEFINITION)
    results = [
        verdicts.RunResult(
            verdicts.AblationRun("a", seed, HERE, "done"),
            {"gold_gain": -seed, "reward_gain": seed, "kl": 11 - seed},
        )
        for seed in range(1, 11)
    ]
    page = write_page(load_ablation(tmp_path / "ablation.yaml"), results, {})
    assert (
        "Rank correlation with gold over all runs: reward -1.00, KL 1.00." in page
        and "| -10.00 |" in page
    )
    assert "Rank correlation" not in write_page(
        load_ablation(tmp_path / "ablation.yaml"), results[:9], {}
    )
