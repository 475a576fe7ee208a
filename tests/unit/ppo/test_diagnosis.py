"""Metrics of a rollout by hand, and rules on trajectories: collapse is caught, health is left
alone.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.health import DEFAULT_RULES, Check, Rule
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.health import Finding, HealthMonitor
from rlhf_core.ppo.rollout import drift_metrics, reward_distribution, rollout_metrics

LIMITS = {"kl": 6.0, "max_new_tokens": 64.0}
START = {
    "kl": 0.05, "reward_mean": 0.0, "reward_std": 1.0, "reward_tail": 1.6, "perplexity": 1.9,
    "perplexity_reference": 1.9, "entropy": 0.6, "length": 22.0, "length_p95": 45.0, "repetition": 0.01,
    "distinct_2": 0.35, "missing_eos": 0.01, "short_replies": 0.0, "distinct_first_sentences": 0.6,
    "commonest_first_sentence": 0.15, "commonest_reply": 0.05, "refusals": 0.12, "reward_length_correlation": 0.4,
    "reward_referee_correlation": 0.6, "policy_loss": 0.0, "value_loss": 0.4, "explained_variance": 0.7,
    "policy_grad_norm": 0.5, "clip_fraction": 0.001, "skipped_steps": 0.0, "ratio_mean": 1.0,
}  # fmt: skip
# End values: healthy as PPO-max was measured to end, collapsed as vanilla PPO did.
HEALTHY = {
    "kl": 3.3, "reward_mean": 1.5, "length": 27.0, "repetition": 0.012, "entropy": 0.15, "perplexity": 1.2,
    "perplexity_reference": 2.2, "distinct_2": 0.25, "commonest_first_sentence": 0.3, "refusals": 0.2,
    "commonest_reply": 0.12, "missing_eos": 0.0,
}  # fmt: skip
VANILLA = {
    "kl": 30.0, "reward_mean": 3.0, "length": 60.0, "repetition": 0.12, "missing_eos": 0.6,
    "perplexity_reference": 9.0, "entropy": 0.5,
}  # fmt: skip


def rule(*checks: Check, action: str = "warn", after: int = 1) -> Rule:
    return Rule("test", checks, "warning", action, "symptom", "cause", "remedy", after)  # type: ignore[arg-type]


def run(
    monitor: HealthMonitor,
    end: dict[str, float],
    iterations: int = 45,
    seed: int = 0,
    noise: float = 0.08,
) -> list[Finding]:
    """Signals that move linearly from START to ``end`` with relative noise."""
    stream = np.random.default_rng(seed)
    found = []
    for i in range(1, iterations + 1):
        share = (i - 1) / (iterations - 1)
        values = {k: v + (end.get(k, v) - v) * share for k, v in START.items()}
        noisy = {k: v * (1 + noise * stream.standard_normal()) for k, v in values.items()}
        if i % 5 == 0:
            noisy |= {
                "win_rate": 0.5 + 0.15 * share + 0.03 * stream.standard_normal(),
                "referee_gap": 0.3 * share,
            }
        found += monitor.observe(i, noisy)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_healthy_ppo_max_is_never_paused(seed: int) -> None:
    assert [f for f in run(HealthMonitor(LIMITS), HEALTHY, seed=seed) if f.stops] == []


@pytest.mark.parametrize("seed", range(10))
def test_vanilla_collapse_is_paused_before_half_time(seed: int) -> None:
    stops = [f for f in run(HealthMonitor(LIMITS), VANILLA, seed=seed) if f.stops]
    assert stops and stops[0].iteration <= 22


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"refusals": 0.95, "kl": 5.0}, "refuses_everything"),
        ({"commonest_reply": 0.9}, "one_reply_for_everything"),
        ({"short_replies": 0.9, "length": 2.0}, "short_replies_runaway"),
        ({"length": 62.0}, "length_at_limit"),
        ({"kl": -2.0}, "kl_negative"),
        ({"perplexity_reference": 12.0}, "reference_perplexity_runaway"),
        ({"entropy": 0.02, "distinct_2": 0.05}, "mode_collapse"),
        ({"repetition": 0.3}, "repetition_runaway"),
        ({"missing_eos": 0.7}, "missing_eos_runaway"),
    ],
)
def test_each_way_to_collapse_has_its_diagnosis(change: dict[str, float], name: str) -> None:
    found = run(HealthMonitor(LIMITS), HEALTHY | change)
    finding = next(f for f in found if f.rule == name)
    assert finding.stops and finding.evidence and finding.cause and finding.remedy


def test_reward_up_while_the_referee_turns_away() -> None:
    monitor = HealthMonitor(LIMITS)
    found: list[Finding] = []
    for i in range(1, 41):
        signals = START | {"reward_mean": 0.05 * i}
        if i % 5 == 0:
            signals["win_rate"] = 0.7 if i <= 20 else 0.35
        found += monitor.observe(i, signals)
    stops = {f.rule: f.iteration for f in reversed(found) if f.stops}
    # Mean of the last two at iteration 25: (.7 + .35) / 2 = .525, a drop of .175 from the best; at
    # 30 both are .35.
    assert stops == {"reward_up_win_rate_down": 25, "losing_to_sft": 30}


def test_progress_that_only_the_reward_model_sees() -> None:
    monitor = HealthMonitor(LIMITS)
    found = [
        f
        for i in range(1, 7)
        for f in monitor.observe(i, {"referee_gap": 0.2 * i, "win_rate": 0.51})
    ]
    # Means of two: .9 at iteration 5 is not above .9, 1.1 at iteration 6 is.
    assert [(f.rule, f.iteration) for f in found if f.stops] == [("reward_without_wins", 6)]


@pytest.mark.parametrize(
    ("pull", "ptx", "stops"),
    [(0.0, 0.0, [4]), (0.05, 0.0, []), (0.0, 0.1, []), (math.nan, 0.0, [])],
)
def test_drift_stops_early_only_where_nothing_pulls_back(
    pull: float, ptx: float, stops: list[int]
) -> None:
    monitor = HealthMonitor(LIMITS)
    drift = [
        0.0,
        0.2,
        0.5,
        0.9,
        1.6,
    ]  # means of two: .35 at iteration 3, .7 at 4; a tenth of the budget is .6
    rows = [{"kl": kl, "kl_pull": pull, "ptx_weight": ptx} for kl in drift]
    found = [f for i, row in enumerate(rows, 1) for f in monitor.observe(i, row)]
    assert [f.iteration for f in found if f.stops][:1] == stops


@pytest.mark.parametrize(
    ("variance", "pull", "stops"), [(0.05, 0.0, [3]), (0.4, 0.0, []), (0.05, 0.05, [])]
)
def test_a_blind_critic_stops_where_nothing_holds_the_policy(
    variance: float, pull: float, stops: list[int]
) -> None:
    monitor = HealthMonitor(LIMITS)
    row = {"explained_variance": variance, "kl_pull": pull, "ptx_weight": 0.0, "kl": 0.05}
    found = [f for i in range(1, 6) for f in monitor.observe(i, row)]
    assert [f.iteration for f in found if f.stops][:1] == stops


def test_flat_reward_is_a_warning_only() -> None:
    found = run(HealthMonitor(LIMITS), {}, noise=0.0)
    assert {f.rule for f in found if f.rule == "reward_flat"} == {"reward_flat"}
    assert not any(f.stops for f in found)


def test_non_finite_signals_three_in_a_row() -> None:
    monitor = HealthMonitor(LIMITS)
    seen = [[f.rule for f in monitor.observe(i, {"policy_loss": math.nan})] for i in range(1, 4)]
    assert seen == [[], [], ["loss_not_finite"]]


def test_window_mean_and_evidence_by_hand() -> None:
    monitor = HealthMonitor(LIMITS, [rule(Check("kl", ">", 0.5, "limit:kl", window=2))])
    assert monitor.observe(1, {"kl": 5.0}) == []
    assert monitor.observe(2, {"kl": 0.9}) == []  # mean 2.95 <= 3
    (finding,) = monitor.observe(3, {"kl": 5.2})  # mean 3.05
    assert finding.evidence == ("kl 3.05 > 3 (limit kl 6, window 2)",)
    assert "kl 3.05" in str(finding) and finding.as_dict()["rule"] == "test"


def test_relative_bounds_have_slack() -> None:
    check = Check("repetition", ">", 2.0, "start", slack=0.02, window=1)
    assert check.limit(0.001) == pytest.approx(0.021)
    assert check.limit(0.1) == pytest.approx(0.2)
    assert Check("entropy", "<", 0.5, "start", slack=0.2).limit(1.0) == 0.5


def test_a_warning_is_said_once_until_it_clears() -> None:
    monitor = HealthMonitor(LIMITS, [rule(Check("kl", ">", 1.0, window=1))])
    fired = [
        bool(monitor.observe(i, {"kl": kl})) for i, kl in enumerate([2.0, 2.0, 0.5, 2.0], start=1)
    ]
    assert fired == [True, False, False, True]
    pausing = HealthMonitor(LIMITS, [rule(Check("kl", ">", 1.0, window=1), action="pause")])
    assert [bool(pausing.observe(i, {"kl": 2.0})) for i in (1, 2)] == [True, True]


def test_rules_wait_for_their_iteration_metric_and_limit() -> None:
    late = HealthMonitor(LIMITS, [rule(Check("kl", ">", 1.0, window=1), after=3)])
    assert [len(late.observe(i, {"kl": 2.0})) for i in (1, 2, 3)] == [0, 0, 1]
    unknown = HealthMonitor({}, [rule(Check("kl", ">", 1.0, "limit:kl", window=1))])
    assert unknown.observe(1, {"kl": 1e9}) == []


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_resumed_monitor_judges_like_the_uninterrupted_one(cut: int) -> None:
    stream = np.random.default_rng(4)
    rows = [
        {k: v * (1 + 0.5 * stream.standard_normal()) for k, v in START.items()} for _ in range(30)
    ]
    rows[5]["policy_loss"] = math.nan
    whole = HealthMonitor(LIMITS)
    expected = [whole.observe(i, row) for i, row in enumerate(rows, start=1)]
    first, second = HealthMonitor(LIMITS), HealthMonitor(LIMITS)
    found = [first.observe(i, row) for i, row in enumerate(rows[:cut], start=1)]
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    found += [second.observe(i, row) for i, row in enumerate(rows[cut:], start=cut + 1)]
    assert found == expected and second.state() == whole.state()


def test_every_default_rule_says_what_to_do() -> None:
    names = [r.name for r in DEFAULT_RULES]
    assert len(names) == len(set(names))
    for item in DEFAULT_RULES:
        assert item.symptom and item.cause and item.remedy and item.checks
        assert (item.severity == "critical") == (item.action != "warn")


MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 99.0, math.nan]])
REFERENCE = torch.tensor([[-1.5, -1.0, -0.5], [-2.5, -99.0, math.nan]])


def test_kl_is_summed_over_tokens_and_averaged_over_sequences() -> None:
    found = drift_metrics(LOGPROBS, REFERENCE, MASK)
    # d: .5, -1, 0 and 1.
    assert found["kl"] == pytest.approx((-0.5 + 1.0) / 2)
    assert found["kl_k2"] == pytest.approx((0.125 + 0.5 + 0.0 + 0.5) / 2)
    k3 = [math.exp(-d) - 1 + d for d in (0.5, -1.0, 0.0, 1.0)]
    assert found["kl_k3"] == pytest.approx(sum(k3) / 2)
    assert found["kl_per_token"] == pytest.approx(0.5 / 4)
    assert found["perplexity"] == pytest.approx(math.exp(5.0 / 4))
    assert found["perplexity_reference"] == pytest.approx(math.exp(5.5 / 4))


def test_reward_distribution() -> None:
    found = reward_distribution(torch.arange(101.0))
    assert (found["reward_p05"], found["reward_p50"], found["reward_p95"]) == (5.0, 50.0, 95.0)
    assert found["reward_mean"] == 50.0 and found["reward_tail"] == 45.0
    assert found["reward_std"] == pytest.approx(np.arange(101).std())


def test_all_metrics_of_a_rollout() -> None:
    unread = torch.zeros(2, 3)
    fields: dict[str, Any] = dict.fromkeys(Experience.__dataclass_fields__, unread)
    fields |= {
        "response_mask": MASK.bool(),
        "finished": torch.tensor([True, False]),
        "sampler_logprobs": LOGPROBS + 0.25,
        "trainer_logprobs": LOGPROBS,
        "scored_mask": MASK.bool(),
        "policy_logprobs": LOGPROBS,
        "old_logprobs": LOGPROBS,
        "ref_logprobs": REFERENCE,
        "full_kl": torch.tensor([[0.1, 0.2, 0.3], [0.4, 50.0, math.nan]]),
        "entropy": torch.tensor([[1.0, 2.0, 3.0], [2.0, 50.0, math.nan]]),
        "values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 50.0, math.nan]]),
        "rewards": torch.tensor([2.0, 1.0]),
        "rewarded": torch.tensor([True, True]),
        "shaped_rewards": torch.tensor([0.5, -1.0]),
        "monte_carlo_returns": torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]),
    }
    metrics = rollout_metrics(Experience(**fields), ["a b", ""], torch.tensor([0.5, 0.1]))
    assert (
        metrics["length"] == 2.0
        and metrics["missing_eos"] == 0.5
        and metrics["short_replies"] == 1.0
    )
    assert metrics["length_p95"] == pytest.approx(2.9) and metrics["reward_mean"] == 1.5
    assert metrics["entropy"] == 2.0 and metrics["kl_full"] == pytest.approx((0.6 + 0.4) / 2)
    assert metrics["reward_length_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["reward_referee_correlation"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["referee_mean"] == pytest.approx(0.3) and metrics["reward_treated"] == -0.25
    assert (
        metrics["explained_variance"] == 1.0
        and metrics["first_ratio"] == 1.0
        and metrics["sampler_gap"] == 0.25
    )
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    alone = rollout_metrics(Experience(**fields), ["a b", ""])
    assert metrics.keys() - alone.keys() == {"referee_mean", "reward_referee_correlation"}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_padding_columns_change_nothing(seed: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference = (
        -torch.rand(4, 5, generator=generator),
        -torch.rand(4, 5, generator=generator),
    )
    lengths = torch.randint(1, 6, (4,), generator=generator)
    mask = (torch.arange(5) < lengths[:, None]).long()
    wide = [
        torch.cat([t, torch.full((4, extra), fill)], dim=1)
        for t, fill in ((logprobs, 7.0), (reference, -9.0))
    ]
    wide_mask = torch.cat([mask, torch.zeros(4, extra, dtype=torch.long)], dim=1)
    assert drift_metrics(*wide, wide_mask) == pytest.approx(
        drift_metrics(logprobs, reference, mask)
    )
