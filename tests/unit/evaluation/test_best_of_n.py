"""Best of n: what is chosen, and its metrics and columns, by hand."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from unit.evaluation.conftest import LengthJudge, made_prompt

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.evaluation.comparisons.opponents import best_of_n, kl_bound
from rlhf_core.evaluation.comparisons.policy_vs_sft import EvaluatedModel, Evaluation
from rlhf_core.evaluation.fixed_sets import FixedSets, SetReplies
from rlhf_core.evaluation.reply import Reply


def test_the_bound_on_kl_by_hand() -> None:
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert kl_bound(16) == pytest.approx(1.8350887)


def test_the_highest_score_of_each_prompt_is_chosen_and_the_first_of_equal_ones() -> None:
    prompts = [made_prompt(f"what is {i}?", "sums") for i in range(3)]
    texts = [["a", "bbb", "c"], ["aa", "b", "d"], ["aaa", "bb", "e"]]
    samples = [[Reply(text, True, tuple(range(len(text)))) for text in row] for row in texts]
    sft, policy = (EvaluatedModel(SetReplies(samples[0], [], [])) for _ in range(2))
    evaluation = Evaluation(FixedSets(prompts, [], []), sft, policy, EvaluateConfig(bootstrap=20))
    evaluation.score(LengthJudge())
    best = best_of_n(LengthJudge(), evaluation, samples)
    assert [reply.text for reply in best.known_replies] == ["aaa", "bbb", "c"]
    best.score(LengthJudge())
    assert best.scores == {"reward": [3.0, 3.0, 1.0]}
    metrics = best.best_of_n_metrics(samples)
    assert (metrics["n"], metrics["kl_bound"]) == (3, kl_bound(3))
    assert metrics["reward"] == pytest.approx(7 / 3) and metrics["sampled_tokens_per_reply"] == 5.0
    assert metrics["comparison"]["reward"]["lose"] == metrics["policy_comparison"]["reward"]["win"] == 0.0
    assert metrics["comparison"]["reward"]["mean_difference"] == pytest.approx((7 - 5) / 3)
    assert best.columns()[1] == {"best_of_n_reply": "bbb", "best_of_n_finished": True, "best_of_n_reward": 3.0}


def test_one_reply_is_no_choice() -> None:
    with pytest.raises(ValidationError, match="best_of_n 1 is SFT itself"):
        EvaluateConfig(best_of_n=1)
