"""Gates: bounds by hand, metrics that cannot be read, files that open and shut, and which gates
guarantee others.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.gates import Condition, GatesConfig
from rlhf_core.config.loading import check_params
from rlhf_core.errors import EXIT_GATE_FAILED, ConfigError, DataError, GateFailed
from rlhf_core.gates import check, decide, load_metrics, lookup, settle, weaker_conditions
from rlhf_core.stages.gates import GATE_POLICY, GATE_REWARD, check_policy, check_reward
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.run_context import RunContext

NESTED = {
    "kl": 2.5,
    "policy": {"repetition": 0.03},
    "sft": {"repetition": 0.01},
    "comparison": {"gold": {"win": 0.7}},
}

RELATIVE = ("at_most_of", "at_least_of")


def condition(metric: str, **bound: Any) -> Condition:
    return Condition(metric=metric, why="because", **bound)


@pytest.mark.parametrize(
    ("rule", "passed"),
    [
        (condition("kl", at_most=2.5), True),
        (condition("kl", at_most=2.4), False),
        (condition("comparison.gold.win", at_least=0.7), True),
        (condition("comparison.gold.win", at_least=0.71), False),
        # max(2 * .01, .01 + .02) = .03
        (condition("policy.repetition", at_most_of="sft.repetition", factor=2.0, slack=0.02), True),
        (
            condition("policy.repetition", at_most_of="sft.repetition", factor=2.0, slack=0.01),
            False,
        ),
        (condition("policy.repetition", at_most_of="sft.nothing"), False),
        (condition("sft.repetition", at_least_of="policy.repetition"), False),
        # min(1 * .03, .03 - .02) = .01
        (condition("sft.repetition", at_least_of="policy.repetition", slack=0.02), True),
        (condition("sft.repetition", at_least_of="policy.repetition", slack=0.019), False),
        (condition("sft.repetition", at_least_of="policy.repetition", factor=0.3), True),
        (condition("sft.repetition", at_least_of="policy.nothing"), False),
        (condition("nothing", at_most=1.0), False),
        (condition("policy", at_most=1.0), False),
    ],
)
def test_conditions(rule: Condition, passed: bool) -> None:
    assert check(rule, NESTED).passed is passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.9", [1.0]])
@pytest.mark.parametrize(
    "bound", [{"at_least": -1e9}, {"at_most": 1e9}, {"at_most_of": "fine"}, {"at_least_of": "fine"}]
)
def test_what_is_no_finite_number_fails(value: Any, bound: dict[str, Any]) -> None:
    result = check(condition("m", **bound), {"m": value, "fine": 1e9})
    assert not result.passed and result.value is None and result.note


@pytest.mark.parametrize(
    ("bound", "words"), [(10_000.0, "10000"), (0.65, "0.65"), (1e-5, "1e-05"), (1e12, "1e+12")]
)
def test_bounds_are_written_as_people_write_them(bound: float, words: str) -> None:
    assert check(condition("m", at_least=bound), {"m": 1.0}).bound == f">= {words}"


def test_keys_with_dots_are_found() -> None:
    assert lookup({"a.b": {"c": 1}}, "a.b.c") == (1.0, "")
    assert lookup({"a": {"b.c": 2}, "a.b": {"d": 1}}, "a.b.c") == (2.0, "")


def test_evidence_holds_value_bound_reason_and_hash(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "reward.json"
    path.parent.mkdir()
    path.write_text('{"accuracy": 0.6}')
    other = tmp_path / "metrics" / "referee.json"
    other.write_text('{"accuracy": 0.9}')
    metrics, evidence = load_metrics(path, referee=other)
    rules = [condition("accuracy", at_least=0.65), condition("referee.accuracy", at_least=0.65)]
    decision = decide("reward", rules, metrics, evidence=evidence)
    decision.save(tmp_path / "gates" / "reward.json")
    saved = json.loads((tmp_path / "gates" / "reward.json").read_text())
    assert saved["passed"] is False
    first = saved["conditions"][0]
    assert (first["metric"], first["value"], first["limit"], first["passed"]) == (
        "accuracy",
        0.6,
        0.65,
        False,
    )
    assert first["bound"] == ">= 0.65" and first["why"] == "because"
    assert saved["evidence"]["metrics/reward.json"] == sha256_file(path)
    assert saved["conditions"][1]["passed"] is True


def test_a_bound_by_another_metric_is_written_out() -> None:
    bounds = [
        check(condition("kl", **{kind: "sft.repetition"}, factor=1.03), NESTED).bound
        for kind in RELATIVE
    ]
    assert bounds == [
        "<= max(1.03 * sft.repetition, sft.repetition + 0)",
        ">= min(1.03 * sft.repetition, sft.repetition - 0)",
    ]
    assert (
        check(condition("kl", at_least_of="nothing"), NESTED).note
        == "nothing is missing or not finite"
    )


def test_the_failure_is_one_line_that_names_what_failed_and_by_how_much() -> None:
    rules = [
        condition("kl", at_most=1.0),
        condition("kl", at_least=1.0),
        condition("nothing", at_least=0.0),
    ]
    decision = decide("policy", rules, NESTED)
    failure = decision.describe(decision.reasons())
    assert (
        failure
        == "the policy gate failed: kl is 2.5, required ≤ 1; nothing is missing, required ≥ 0"
    )


def test_a_shut_gate_leaves_evidence_and_no_stale_pass(tmp_path: Path) -> None:
    evidence, pass_file = tmp_path / "g.json", tmp_path / "g.pass"
    pass_file.write_text("passed\n")
    with pytest.raises(GateFailed, match="kl") as caught:
        settle(decide("policy", [condition("kl", at_most=1.0)], NESTED), evidence, pass_file)
    assert caught.value.exit_code == EXIT_GATE_FAILED
    assert evidence.exists() and not pass_file.exists()


def test_the_pass_file_never_changes_its_content(tmp_path: Path) -> None:
    contents = set()
    for bound in (3.0, 4.0):
        settle(
            decide("policy", [condition("kl", at_most=bound)], NESTED),
            tmp_path / "g.json",
            tmp_path / "g.pass",
        )
        contents.add((tmp_path / "g.pass").read_bytes())
    decision = decide("policy", [condition("kl", at_most=1.0)], NESTED, mode="report")
    settle(decision, tmp_path / "g.json", tmp_path / "g.pass")
    contents.add((tmp_path / "g.pass").read_bytes())
    assert len(contents) == 1
    assert json.loads((tmp_path / "g.json").read_text())["passed"] is False


def stage_paths(stage: Any, root: Path) -> tuple[Paths, Paths]:
    inputs = {key: root / path for key, path in stage.inputs.items()}
    outputs = {key: root / path for key, path in stage.outputs.items()}
    for path in (*inputs.values(), *outputs.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
    return Paths(inputs), Paths(outputs)


def test_reward_stage_reads_all_three_models(tmp_path: Path) -> None:
    inputs, outputs = stage_paths(GATE_REWARD, tmp_path)
    inputs.metrics.write_text('{"accuracy": 0.8}')
    inputs.referee_metrics.write_text('{"accuracy": 0.5}')
    inputs.scores.write_text(
        '{"ids": ["a", "b", "c"], "chosen": [1.0, 0.0, 2.0], "rejected": [0.0, 1.0, 1.0]}'
    )
    inputs.referee_scores.write_text(
        '{"ids": ["c", "a", "d"], "chosen": [1.0, 3.0, 0.0], "rejected": [2.0, 1.0, 0.0]}'
    )
    inputs.judge_metrics.write_text('{"accuracy": 0.65}')
    inputs.judge_scores.write_text(
        '{"ids": ["a", "b", "c"], "chosen": [1.0, 0.0, 1.0], "rejected": [0.0, 1.0, 2.0]}'
    )
    names = ("accuracy", "referee.accuracy", "judge.accuracy", "agreement.judge_share")
    config = GatesConfig(reward=tuple(condition(name, at_least=0.6) for name in names))
    with pytest.raises(GateFailed, match=r"referee\.accuracy"):
        check_reward(config, inputs, outputs, RunContext(tmp_path / "work"))
    assert outputs.evidence.exists() and not outputs.pass_.exists()
    inputs.referee_metrics.write_text('{"accuracy": 0.7}')
    assert check_reward(config, inputs, outputs, RunContext(tmp_path / "work"))["passed"] == 1.0
    assert outputs.pass_.exists()
    # Common pairs are a (both prefer it) and c (they differ).
    agreement = json.loads(outputs.metrics.read_text())
    assert (agreement["pairs"], agreement["share"]) == (2.0, 0.5)
    # Of three common pairs the reward model and the judge differ on c alone.
    assert (agreement["judge_pairs"], agreement["judge_share"]) == (3.0, 2 / 3)
    inputs.judge_metrics.write_text('{"accuracy": 0.55}')
    with pytest.raises(GateFailed, match=r"judge\.accuracy is 0\.55"):
        check_reward(config, inputs, outputs, RunContext(tmp_path / "work"))


def test_policy_stage_reads_evaluation_and_ppo(tmp_path: Path) -> None:
    inputs, outputs = stage_paths(GATE_POLICY, tmp_path)
    inputs.metrics.write_text(json.dumps(NESTED))
    inputs.ppo_metrics.write_text('{"kl": 3.0}')
    config = GatesConfig(policy=(condition("kl", at_most=2.6), condition("ppo.kl", at_least=2.9)))
    assert check_policy(config, inputs, outputs, RunContext(tmp_path / "work"))["passed"] == 1.0


@pytest.mark.parametrize(("low95", "passed"), [(-0.05, 1.0), (-0.051, None)])
def test_the_policy_must_not_be_inferior_at_multiple_choice_questions_that_were_asked(
    tmp_path: Path, low95: float, passed: float | None
) -> None:
    inputs, outputs = stage_paths(GATE_POLICY, tmp_path)
    inputs.metrics.write_text(json.dumps(NESTED | {"multiple_choice": {"difference_low95": low95}}))
    inputs.ppo_metrics.write_text("{}")
    config = GatesConfig(policy=(condition("kl", at_most=2.6),))
    if passed:
        assert (
            check_policy(config, inputs, outputs, RunContext(tmp_path / "work"))["conditions"]
            == 2.0
        )
    else:
        with pytest.raises(
            GateFailed, match=r"multiple_choice.difference_low95 is -0.051, required ≥ -0.05"
        ):
            check_policy(config, inputs, outputs, RunContext(tmp_path / "work"))


def test_the_condition_on_multiple_choice_gives_way_to_ones_own_and_to_null() -> None:
    kl = condition("kl", at_most=2.6)
    own = condition("policy.multiple_choice.accuracy", at_least_of="sft.multiple_choice.accuracy")
    asked = {"kl", "multiple_choice"}
    assert len(GatesConfig(policy=(kl,)).policy_conditions(asked)) == 2
    assert GatesConfig(policy=(kl,)).policy_conditions({"kl"}) == (kl,), "no questions were asked"
    assert GatesConfig(policy=(kl, own)).policy_conditions(asked) == (kl, own)
    assert GatesConfig(policy=(kl,), multiple_choice_margin=None).policy_conditions(asked) == (kl,)


def test_missing_metrics_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_metrics(tmp_path / "metrics" / "none.json")


def test_a_gate_without_conditions_fails() -> None:
    decision = decide("policy", [], NESTED)
    assert not decision.passed and not decision.opens
    assert decision.describe() == "the policy gate failed: it has no conditions"


def test_an_empty_gate_is_refused_where_it_would_be_enforced() -> None:
    with pytest.raises(ConfigError, match=r"gates\.policy is empty"):
        check_params({"gates": {"policy": []}})
    assert check_params({"gates": {"mode": "report", "policy": []}}).gates.policy == ()


@pytest.mark.parametrize(
    ("high", "before", "where", "passed"),
    [
        (0.049, 0.5, None, True),
        (0.05, 0.5, None, False),
        (None, 0.5, None, False),  # not measured
        (0.2, 0.09, 0.1, True),  # SFT hardly refuses: not asked
        (0.2, 0.1, 0.1, False),
        (0.01, None, 0.1, False),
    ],
)
def test_a_loss_has_its_margin(
    high: float | None, before: float | None, where: float | None, passed: bool
) -> None:
    loss = {
        name: value
        for name, value in (("loss_high95", high), ("baseline", before))
        if value is not None
    }
    condition = Condition(
        metric="safety.refuses_harmful", worse_by_less_than=0.05, where_at_least=where, why="w"
    )
    result = check(condition, {"losses": {"safety.refuses_harmful": loss}})
    assert result.passed is passed and result.bound == "worse by < 0.05"
    if passed and high is not None and high > 0.05:
        assert "not asked" in result.note


def test_a_margin_guarantees_wider_ones_and_no_other_kind_of_bound() -> None:
    def margin(value: float, where: float | None = None) -> Condition:
        return Condition(
            metric="repetition", worse_by_less_than=value, where_at_least=where, why="w"
        )

    assert weaker_conditions([margin(0.05)], [margin(0.1), margin(0.05), margin(0.1, 0.2)]) == []
    assert len(weaker_conditions([margin(0.1)], [margin(0.05)])) == 1
    assert len(weaker_conditions([margin(0.05, 0.1)], [margin(0.05)])) == 1
    assert (
        len(
            weaker_conditions(
                [Condition(metric="repetition", at_most=0.0, why="w")], [margin(0.05)]
            )
        )
        == 1
    )


NUMBERS = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    kind = draw(st.sampled_from(["at_least", "at_most", "at_least_of", "at_most_of"]))
    metric = draw(st.sampled_from(["kl", "length"]))
    if kind in ("at_least", "at_most"):
        return Condition(metric=metric, why="", **{kind: draw(NUMBERS)})
    return Condition(
        metric=metric, why="", factor=draw(NUMBERS), slack=draw(NUMBERS), **{kind: "other"}
    )


@given(
    st.lists(conditions(), max_size=3),
    conditions(),
    st.fixed_dictionaries(dict.fromkeys(["kl", "length", "other"], NUMBERS)),
)
def test_what_passes_stricter_conditions_passes_the_required_one(
    own: list[Condition], required: Condition, metrics: dict[str, float]
) -> None:
    if not weaker_conditions(own, [required]) and all(
        check(condition, metrics).passed for condition in own
    ):
        assert check(required, metrics).passed


def kl(**fields: Any) -> Condition:
    return Condition(metric="kl", why="", **fields)


@pytest.mark.parametrize(
    ("own", "required", "guaranteed"),
    [
        (kl(at_most=5.0), kl(at_most=6.0), True),
        (kl(at_most=6.0), kl(at_most=6.0), True),
        (kl(at_most=7.0), kl(at_most=6.0), False),
        (kl(at_least=0.7), kl(at_least=0.6), True),
        (kl(at_least=0.6), kl(at_least=0.6), True),
        (kl(at_least=0.5), kl(at_least=0.6), False),
        (kl(at_most=5.0), kl(at_least=5.0), False),
        (kl(at_most=0.0), kl(at_most_of="other"), False),
        (kl(at_most_of="other", factor=2.0), kl(at_most_of="other", factor=2.0, slack=0.1), True),
        (
            kl(at_most_of="other", factor=2.0, slack=0.1),
            kl(at_most_of="other", factor=2.0, slack=0.1),
            True,
        ),
        (kl(at_most_of="other", factor=2.0, slack=0.2), kl(at_most_of="other", factor=2.0), False),
        (kl(at_most_of="other", factor=1.5), kl(at_most_of="other", factor=2.0), False),
        (kl(at_most_of="another"), kl(at_most_of="other"), False),
    ],
)
def test_bounds_by_hand(own: Condition, required: Condition, guaranteed: bool) -> None:
    assert (weaker_conditions([own], [required]) == []) is guaranteed


def test_the_missing_conditions_are_named() -> None:
    required = [kl(at_most=6.0), kl(at_least=0.1)]
    assert weaker_conditions([kl(at_least=0.2)], required) == ["kl <= 6"]
