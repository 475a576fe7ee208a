"""Reward models: what is fitted before training, figures by hand, and training on length-balanced
pairs.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from unit.training.tiny import SHAPE, text

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.gates import Condition
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.batches import TokenisedPair
from rlhf_core.data.schema import Message, Preference
from rlhf_core.data.statistics import wilson_bounds
from rlhf_core.errors import DataError
from rlhf_core.gates import decide
from rlhf_core.models.causal_lm import load_policy, new_model, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.reward import evaluation
from rlhf_core.training.reward.evaluation import LIMITS, bag_of_words_accuracy, fitted_temperature
from rlhf_core.training.reward.first_fits import (
    LengthExpert,
    LengthExperts,
    fit_linear_probe,
    logistic_weights,
    pooled_features,
)
from rlhf_core.training.reward.trainer import score_pairs


def test_accuracy_counts_ties_half() -> None:
    assert evaluation.accuracy(np.array([1.0, -1.0, 0.0, 2.0])) == pytest.approx(2.5 / 4)


def test_calibration_error_by_hand() -> None:
    # Both margins say 0.8; one of the two is right: error 0.3.
    margin = math.log(4)
    assert evaluation.expected_calibration_error(np.array([margin, -margin])) == pytest.approx(0.3)
    # 0.8 said, four of five right: calibrated.
    assert evaluation.expected_calibration_error(
        np.array([margin] * 4 + [-margin])
    ) == pytest.approx(0.0, abs=1e-12)
    # Certain and right.
    assert evaluation.expected_calibration_error(np.array([50.0])) == pytest.approx(0.0, abs=1e-12)


def test_figures_of_a_split() -> None:
    chosen, rejected = np.array([2.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0])
    figures = evaluation.evaluate_scores(chosen, rejected, np.array([5, 2, 3]), np.array([3, 4, 3]))
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["margin_mean"] == pytest.approx(2 / 3)
    assert figures["accuracy_shorter_preferred"] == 0.0
    assert figures["baseline_longer"] == pytest.approx(0.5)  # right, wrong, tie
    assert figures["reward_mean"] == pytest.approx(4 / 6)
    assert all(math.isfinite(value) for value in figures.values())
    longer = evaluation.evaluate_scores(chosen[:1], rejected[:1], np.array([5]), np.array([3]))
    assert "accuracy_shorter_preferred" not in longer


def test_length_balanced_accuracy_by_hand() -> None:
    # 100 pairs: the longer reply is preferred in 80, the model always prefers the longer one.
    longer = np.arange(100) < 80
    chosen_lengths, rejected_lengths = np.where(longer, 30, 20), np.where(longer, 20, 30)
    reward_is_length = chosen_lengths / 10, rejected_lengths / 10
    few = evaluation.evaluate_scores(*reward_is_length, chosen_lengths, rejected_lengths, seed=1)
    assert few["accuracy"] == few["baseline_longer"] == 0.8
    assert few["length_balanced_pairs"] == 40
    assert "accuracy_length_balanced" not in few, "fewer than 50 say nothing"
    twice = [
        np.concatenate([array, array])
        for array in (*reward_is_length, chosen_lengths, rejected_lengths)
    ]
    figures = evaluation.evaluate_scores(*twice, seed=1)
    assert figures["length_balanced_pairs"] == 80
    assert figures["accuracy_length_balanced"] == 0.5
    assert figures["ece_length_balanced"] == pytest.approx(
        1 / (1 + math.exp(-1)) - 0.5
    )  # margins are 1 or -1
    # Wilson's lower bound for 40 of 80, with z = 1.96: (p + z²/2n - z sqrt(p(1-p)/n + z²/4n²)) / (1
    # + z²/n).
    assert figures["accuracy_length_balanced_low95"] == pytest.approx(0.39297, abs=1e-4)


@pytest.mark.parametrize(("clusters", "worth"), [(50, 300), (150, 300), (5, 5)])
def test_pairs_of_one_question_are_no_further_evidence(clusters: int, worth: int) -> None:
    """300 pairs, 200 of them right: with equal ones in each cluster they are worth their clusters
    alone.
    """
    right = np.arange(300) % 3 > 0
    margins = np.where(right, 1.0, -1.0)
    alone = evaluation.length_balanced_accuracy(margins, np.arange(300))
    by_chance = evaluation.length_balanced_accuracy(margins, np.arange(300) // (300 // clusters))
    assert alone["accuracy_length_balanced"] == by_chance["accuracy_length_balanced"]
    low = stats.binomtest(200, 300).proportion_ci(0.95, method="wilson").low
    assert alone["accuracy_length_balanced_low95"] == pytest.approx(low)
    expected = wilson_bounds(2 / 3, worth)[0]
    assert by_chance["accuracy_length_balanced_low95"] == pytest.approx(expected, abs=1e-6)


def test_six_times_the_same_fifty_pairs_are_fifty() -> None:
    margins = np.where(np.arange(50) < 33, 1.0, -1.0)
    once = evaluation.length_balanced_accuracy(margins, np.arange(50))[
        "accuracy_length_balanced_low95"
    ]
    again = evaluation.length_balanced_accuracy(np.tile(margins, 6), np.tile(np.arange(50), 6))
    assert again["accuracy_length_balanced_low95"] == pytest.approx(once, abs=0.003)


def test_a_tie_of_rewards_is_no_success_for_the_bound() -> None:
    figures = evaluation.length_balanced_accuracy(np.zeros(60), np.arange(60))
    assert figures == {
        "length_balanced_pairs": 60.0,
        "accuracy_length_balanced": 0.5,
        "accuracy_length_balanced_low95": 0.0,
        "ece_length_balanced": 0.0,  # a margin of 0 says one half
    }


def test_categories_too_small_to_say_anything_are_left_out() -> None:
    margins = np.array([1.0] * 8 + [-1.0] * 2 + [1.0])
    assert evaluation.accuracy_by_category(margins, ["a"] * 10 + ["b"]) == {"a": 0.8}
    assert evaluation.accuracy_by_category(margins, [""] * 11) == {}


def test_agreement() -> None:
    assert evaluation.agreement(
        np.array([1.0, -2.0, 3.0]), np.array([0.1, 5.0, 2.0])
    ) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [("thing {}", " thanks", " rubbish"), ("这是第{}杯茶", "谢谢你", "烦死了")],
)
def test_bag_of_words_finds_a_word_that_gives_it_away(text: str, good: str, bad: str) -> None:
    def pair(i: int) -> Preference:
        replies = (text.format(i) + end for end in (good, bad))
        return Preference(str(i), [Message("user", "x")], *replies, None, "c", "s", "g")

    assert bag_of_words_accuracy([pair(i) for i in range(20)], {"test": [pair(99)]}) == {
        "test": 1.0
    }


def test_the_temperature_makes_confidence_the_share_that_is_right() -> None:
    # Three of four are right at |margin| 2: sigma(2 / T) = 3 / 4, so that T = 2 / ln 3.
    margins = np.array([2.0, 2.0, 2.0, -2.0])
    temperature = fitted_temperature(margins)
    assert temperature == pytest.approx(2 / math.log(3), rel=1e-3)
    assert evaluation.expected_calibration_error(margins / temperature) == pytest.approx(
        0.0, abs=1e-3
    )
    assert fitted_temperature(10 * margins) == pytest.approx(10 * temperature, rel=1e-3)


def test_the_temperature_is_bounded_where_margins_say_nothing_or_everything() -> None:
    assert fitted_temperature(np.array([1.0, -1.0])) == pytest.approx(LIMITS[1], rel=1e-2)
    assert fitted_temperature(np.array([1.0, 2.0])) == pytest.approx(LIMITS[0], rel=1e-1)


def test_calibration_is_measured_after_scaling_too() -> None:
    chosen, rejected = np.array([2.0, 2.0, 2.0, 0.0]), np.array([0.0, 0.0, 0.0, 2.0])
    figures = evaluation.evaluate_scores(
        chosen, rejected, np.arange(4) + 2, np.arange(4) + 1, 0, 2 / math.log(3)
    )
    # sigma(2) is 0.881, of which 3 in 4 are right.
    assert figures["ece"] == pytest.approx(1 / (1 + math.exp(-2)) - 0.75)
    assert figures["ece_temperature_scaled"] == pytest.approx(0.0, abs=1e-12)
    assert "ece_length_balanced_temperature_scaled" not in figures


CONFIG = RewardConfig(
    steps=40,
    imitation=0.0,
    eval_every=40,
    length_balance="sampling",
    batch=PairBatchConfig(token_budget=1000, min_pairs=8, max_pairs=16),
    optimizer=OptimizerConfig(lr=3e-2),
)


def pair(
    i: int, chosen_words: int, rejected_words: int, good: str = "", bad: str = ""
) -> Preference:
    """A pair of replies of so many words, on the same prompt as every other."""
    prompt = [Message("user", "the sky")]
    chosen, rejected = f"{good}{'red ' * chosen_words}", f"{bad}{'red ' * rejected_words}"
    return Preference(str(i), prompt, chosen, rejected, None, "fact", "test", str(i))


def biased_pairs(n: int) -> list[Preference]:
    """Pairs in which the longer reply is preferred in nine of ten, and "big" in three of four."""
    # 40 pairs hold every combination of the two, in proportion.
    kinds = [
        ((9, 3) if i % 10 else (3, 9), ("big ", "small ") if i // 10 else ("small ", "big "))
        for i in range(40)
    ]
    return [pair(i, *words, *style) for i in range(n) for words, style in [kinds[i % 40]]]


@pytest.fixture(scope="module")
def base():  # type: ignore[no-untyped-def]
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer


def test_balanced_training_takes_length_out_of_the_reward(base) -> None:  # type: ignore[no-untyped-def]
    train, held_out = biased_pairs(400), biased_pairs(400)
    plain_config = CONFIG.model_copy(update={"length_balance": "none"})
    plain, balanced = (
        train_reward_model(*base, train, validation=held_out, config=config).metrics
        for config in (plain_config, CONFIG)
    )
    assert plain["train_length_balanced_pairs"] == balanced["train_length_balanced_pairs"] == 80
    assert plain["length_balanced_pairs"] == balanced["length_balanced_pairs"] == 80
    # Length is the better predictor of the two, and the plain model follows it; where it predicts
    # nothing, the word is right in about three of four.
    assert plain["accuracy"] == 0.9 and plain["accuracy_length_balanced"] == 0.5
    assert balanced["accuracy"] == 0.75 and balanced["accuracy_length_balanced"] > 0.65
    assert abs(balanced["length_correlation"]) < 0.6 * plain["length_correlation"]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"max_epochs": None}, 8),
        ({"max_epochs": 1}, 3),  # 40 pairs, 16 a batch
        ({"max_epochs": 2}, 6),
        ({"max_epochs": 3}, 8),  # steps are the most
        ({"max_epochs": 1, "length_balance": "sampling"}, 1),  # 8 of the pairs can be balanced
        ({"max_epochs": 1, "group_prompts": True}, 3),
    ],
)
def test_few_pairs_are_not_trained_on_for_many_epochs(
    base, changes: dict[str, object], taken: int
) -> None:  # type: ignore[no-untyped-def]
    settings = {"steps": 8, "length_balance": "none", **changes}
    if settings.pop("group_prompts", False):
        settings["batch"] = CONFIG.batch.model_copy(update={"group_prompts": True})
    rows = biased_pairs(40)
    trained = train_reward_model(
        *base, rows, validation=rows, config=CONFIG.model_copy(update=settings)
    )
    assert trained.history[-1]["step"] == taken


def test_pairs_that_cannot_be_balanced_are_refused_in_one_line(base) -> None:  # type: ignore[no-untyped-def]
    rows = [pair(i, 5, 2) for i in range(30)] + [pair(30, 2, 5)]
    with pytest.raises(
        DataError, match=r"reward.length_balance: sampling leaves 2 of 31 .*30 prefer the longer"
    ) as e:
        train_reward_model(*base, rows, validation=rows, config=CONFIG)
    assert "\n" not in str(e.value) and "reward.length_balance: none" in str(e.value)


def test_too_few_balanced_pairs_leave_the_metric_out_and_fail_its_gate(
    base, caplog: pytest.LogCaptureFixture
) -> None:  # type: ignore[no-untyped-def]
    rows = biased_pairs(80)
    config = CONFIG.model_copy(update={"steps": 1})
    with caplog.at_level(logging.WARNING):
        metrics = train_reward_model(*base, rows, validation=rows[:40], config=config).metrics
    assert "validation pairs: 8 can be balanced by length and 50 are needed" in caplog.text
    bound = Condition(
        metric="accuracy_length_balanced_low95", at_least=0.5, why="better than length"
    )
    decision = decide("reward", [bound], metrics)
    assert not decision.passed
    assert (
        decision.describe(decision.reasons())
        == "the reward gate failed: accuracy_length_balanced_low95 is missing, required ≥ 0.5"
    )


DRAW = np.random.default_rng(3)


def test_log_odds_by_hand_change_sign_with_the_order() -> None:
    expert = LengthExpert(scale=10.0, weights=np.array([2.0, 0.5]))
    first, second = np.array([40]), np.array([20])
    # 2 ln(40 / 20) + 0.5 tanh(20 / 10)
    assert expert.log_odds(first, second)[0] == pytest.approx(2 * math.log(2) + 0.5 * math.tanh(2))
    assert expert.log_odds(second, first)[0] == pytest.approx(-expert.log_odds(first, second)[0])
    assert expert.log_odds(first, first)[0] == 0


def test_the_expert_learns_how_often_the_longer_reply_is_preferred() -> None:
    # The longer of 60 and 30 tokens is preferred in three of four pairs: its log-odds are ln 3.
    chosen, rejected = np.array([60, 60, 60, 30] * 500), np.array([30, 30, 30, 60] * 500)
    expert = LengthExpert.fitted(chosen, rejected)
    assert expit(expert.log_odds(np.array([60]), np.array([30])))[0] == pytest.approx(
        0.75, abs=0.01
    )


def test_lengths_that_say_nothing_give_no_odds() -> None:
    lengths = np.array([10, 20, 30, 40])
    chosen, rejected = (
        np.concatenate([lengths, lengths[::-1]]),
        np.concatenate([lengths[::-1], lengths]),
    )
    assert LengthExpert.fitted(chosen, rejected).log_odds(np.array([50]), np.array([5]))[
        0
    ] == pytest.approx(0, abs=1e-6)


def test_a_category_has_an_expert_of_its_own() -> None:
    # Of general pairs three in four prefer the longer reply, of harmless ones three in four the
    # shorter one.
    chosen, rejected = np.array([60, 60, 60, 30] * 500), np.array([30, 30, 30, 60] * 500)
    categories = ["general"] * 2000 + ["harmless"] * 2000
    lengths = np.concatenate([chosen, rejected]), np.concatenate([rejected, chosen])
    apart = LengthExperts.fitted(*lengths, categories, {"harmless": 0.2})
    one_each = np.array([60, 60]), np.array([30, 30])
    odds = expit(apart.log_odds(*one_each, ["general", "harmless"]))
    assert odds == pytest.approx([0.75, 0.25], abs=0.01)
    together = LengthExperts.fitted(*lengths, categories, {})
    assert expit(together.log_odds(*one_each, ["general", "harmless"])) == pytest.approx(
        [0.5, 0.5], abs=0.01
    )


def test_one_weight_by_hand() -> None:
    # Three of four equal differences of 1 are preferred: with no penalty the odds are 3, so the
    # weight is ln 3.
    differences = np.array([[1.0], [1.0], [1.0], [-1.0]])
    assert logistic_weights(differences, np.zeros(4), 1e-9)[0] == pytest.approx(
        math.log(3), abs=1e-4
    )
    # Offsets that explain these odds leave nothing to the weight.
    explained = math.log(3) * differences[:, 0]
    assert logistic_weights(differences, explained, 1e-9)[0] == pytest.approx(0, abs=1e-4)


def test_weights_are_those_of_scikit_learn() -> None:
    differences = DRAW.normal(size=(60, 5))
    both_orders, preferred = np.concatenate([differences, -differences]), np.repeat([1, 0], 60)
    # It penalises |w|^2 / 2 against C times the sum of both orders' losses.
    peer = LogisticRegression(fit_intercept=False, C=1 / (0.3 * 120), tol=1e-8).fit(
        both_orders, preferred
    )
    assert logistic_weights(differences, np.zeros(60), 0.3) == pytest.approx(
        peer.coef_[0], abs=1e-4
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_margins_are_those_of_the_fitted_features(workspace: Path, pooling: str) -> None:
    lm, _ = load_policy(workspace / "models/sft")
    model = ScalarModel.from_causal_lm(lm, 1, layers=1, pooling=pooling)  # type: ignore[arg-type]
    replies = [[int(token) for token in DRAW.integers(8, 40, size)] for size in (3, 9, 4, 6, 5, 7)]
    pairs = [
        TokenisedPair(0, [9, 10], replies[a], replies[b])
        for a, b in ((0, 1), (2, 3), (4, 5), (0, 5), (2, 1))
    ]
    offsets = np.linspace(-1, 1, 5)
    fit_linear_probe(model, pairs, offsets, 0.5, 0, "reward")
    chosen, rejected = pooled_features(model, pairs, 0, "reward")
    scale = np.sqrt(((chosen - rejected) ** 2).mean(axis=0)) + 1e-6
    expected = (
        (chosen - rejected) / scale @ logistic_weights((chosen - rejected) / scale, offsets, 0.5)
    )
    assert score_pairs(model, pairs, 0).margins == pytest.approx(expected, abs=1e-4)
    ids = torch.tensor([[9, 10, *replies[0]]])
    states = model.hidden(ids, torch.ones_like(ids))[0].detach()
    by_hand = states[-1] if pooling == "last" else states[2:].mean(dim=0)
    assert chosen[0] == pytest.approx(by_hand.double().numpy(), abs=1e-5)


def test_a_reward_model_that_nothing_would_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora\.upper_layers 4 is more than layers 2"):
        RewardConfig.model_validate({"layers": 2, "imitation": 0.0, "lora": {"upper_layers": 4}})
    with pytest.raises(ValueError, match="steps is 0 and linear_probe is not set"):
        RewardConfig(steps=0)
    assert RewardConfig(steps=0, linear_probe=1.0).steps == 0
