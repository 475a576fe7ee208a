"""Best of n, what is chosen, and groups of prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import compare_groups, compare_outcomes
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.comparisons.rivals import best_of_n, group_of, kl_bound
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.replies import Reply

from .conftest import LengthJudge, made_prompt


def test_the_bound_on_kl_by_hand() -> None:
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert kl_bound(16) == pytest.approx(1.8350887)


def test_the_highest_score_of_each_prompt_is_chosen_and_the_first_of_equal_ones() -> None:
    prompts = [made_prompt(f"what is {i}?", "sums") for i in range(3)]
    texts = [["a", "bbb", "c"], ["aa", "b", "d"], ["aaa", "bb", "e"]]
    samples = [[Reply(text, True, tuple(range(len(text)))) for text in row] for row in texts]
    sft, policy = (EvaluatedModel(samples[0]) for _ in range(2))
    evaluation = Evaluation(FixedSets(prompts, [], []), sft, policy, EvaluateConfig(bootstrap=20))
    evaluation.score(LengthJudge())
    best = best_of_n(LengthJudge(), evaluation, samples)
    assert [reply.text for reply in best.known.judged] == ["aaa", "bbb", "c"]
    best.score(LengthJudge())
    assert best.known.scores == {"reward": [3.0, 3.0, 1.0]}
    metrics = best.best_of_n_metrics(samples)
    assert (metrics["n"], metrics["kl_bound"]) == (3, kl_bound(3))
    assert metrics["reward"] == pytest.approx(7 / 3) and metrics["sampled_tokens_per_reply"] == 5.0
    assert (
        metrics["comparison"]["reward"]["lose"]
        == metrics["policy_comparison"]["reward"]["win"]
        == 0.0
    )
    assert metrics["comparison"]["reward"]["mean_difference"] == pytest.approx((7 - 5) / 3)
    assert best.columns()[1] == {
        "best_of_n_reply": "bbb",
        "best_of_n_finished": True,
        "best_of_n_reward": 3.0,
    }


def test_one_reply_is_no_choice() -> None:
    with pytest.raises(ValidationError, match="best_of_n 1 is SFT itself"):
        EvaluateConfig(best_of_n=1)


def prompt_of(category: str, source: str = "a file") -> Prompt:
    return made_prompt("?", category, source)


@pytest.mark.parametrize(
    ("category", "source", "group"),
    [
        ("fact", "world", "helpful"),
        ("howto", "world", "helpful"),
        ("harmful", "world", "harmless"),
        ("safe", "pku", "harmless"),
        ("general", "/data/hh/harmless-base/test.jsonl.gz", "harmless"),
        ("general", "hub:Anthropic/hh-rlhf/helpful-online:test", "helpful"),
        ("general", "/helpful/hh_rlhf_harmless.sample.jsonl.gz", "harmless"),
        ("general", "unhelpful.jsonl", ""),
        ("satisfaction", "a file", ""),
        ("sums", "a file", "maths"),
        ("Red-team-attempts", "helpful", "harmless"),
    ],
)
def test_a_prompt_is_in_the_group_of_its_category_else_of_its_source(
    category: str, source: str, group: str
) -> None:
    assert group_of(prompt_of(category, source), {"sums": "maths"}) == group


def test_a_default_can_be_changed_or_taken_away() -> None:
    assert group_of(prompt_of("howto"), {"howto": "recipes"}) == "recipes"
    assert group_of(prompt_of("howto"), {"howto": ""}) == ""


def test_comparisons_within_a_group_by_hand() -> None:
    outcome = {
        "gold": np.array([[1.0], [0.0], [0.5], [1.0]]),
        "llm": np.array([[1.0], [np.nan], [np.nan], [0.0]]),
        "silent": np.array([[np.nan], [1.0], [np.nan], [np.nan]]),
    }
    table = compare_groups(["helpful", "harmless", "helpful", ""], outcome, 100, 1)
    assert set(table) == {"helpful", "harmless"}, "a prompt of no group counts in none"
    gold = table["helpful"]["gold"]
    assert (gold["win"], gold["tie"], gold["lose"], gold["prompts"]) == (0.5, 0.5, 0.0, 2)
    assert gold == compare_outcomes([1.0, 0.5], 100, 1)
    assert table["helpful"]["llm"]["prompts"] == 1 and "silent" not in table["helpful"]
    assert set(table["harmless"]) == {"gold", "silent"} and table["harmless"]["gold"]["lose"] == 1.0


def test_several_replies_to_a_prompt_are_one_prompt() -> None:
    table = compare_groups(
        ["helpful"] * 2, {"gold": np.array([[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]])}, 100, 1
    )
    gold = table["helpful"]["gold"]
    assert gold["prompts"] == 2 and gold["win"] == 0.5 and gold["tie"] == 0.5
    assert gold["win_rate"] == pytest.approx((2 / 3 + 1 / 2) / 2)
