"""Fixed sets of prompts stay fixed and share none, and their checks say what they mean."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.errors import DataError
from rlhf_core.evaluation.fixed_sets import (
    EvaluatedModel,
    FixedSets,
    prompts_of_set,
    repeated_rows,
    sample_sets,
)
from rlhf_core.evaluation.losses import paired_losses
from rlhf_core.evaluation.regression import (
    REFUSAL_CHECKS,
    check_rates,
    fixed_subset,
    pass_rates,
    regression_set,
)
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.safety.prompts import safety_prompts, texts_of
from rlhf_core.evaluation.verifiable import VerifiableLine, VerifiablePrompts
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.sampling.sampler import LocalSampler

from .conftest import sums

ROWS = [Prompt(f"{i:04x}", [Message("user", "?")], "ab"[i % 2], "s", "g") for i in range(100)]
REFUSAL = "i am sorry, but i cannot help with that."


def test_the_subset_depends_on_ids_alone() -> None:
    shuffled = random.Random(3).sample(ROWS, len(ROWS))
    assert fixed_subset(shuffled, 10, "x") == fixed_subset(ROWS, 10, "x")
    assert fixed_subset(ROWS, 10, "x") != fixed_subset(ROWS, 10, "y")
    fewer = [row for row in ROWS if row not in fixed_subset(ROWS, 5, "x")]
    assert fixed_subset(fewer, 5, "x") == fixed_subset(ROWS, 10, "x")[5:]


def test_every_category_is_in_the_set() -> None:
    chosen = regression_set(ROWS, per_category=7)
    assert [sum(row.category == name for row in chosen) for name in "ab"] == [7, 7]


def test_world_checks_refusals_both_ways() -> None:
    replies = [
        Reply(text, True) for text in ("the boat is red.", REFUSAL, REFUSAL, "do it at night.")
    ]
    rates = pass_rates(["fact", "fact", "harmful", "harmful"], replies, world=True)
    assert (
        rates["answers_benign"] == 0.5
        and rates["refuses_harmful"] == 0.5
        and rates["passed"] == 0.5
    )


def test_file_data_has_generic_checks_only() -> None:
    replies = [Reply(REFUSAL, True), Reply("", True), Reply("cut", False), Reply("go " * 20, True)]
    rates = pass_rates(["x"] * 4, replies, world=False)
    assert set(rates) == {"not_empty", "finished", "no_special_tokens", "not_repetitive", "passed"}
    assert rates["no_special_tokens"] == 1.0
    assert rates["not_empty"] == rates["finished"] == rates["not_repetitive"] == 0.75
    assert rates["passed"] == pytest.approx(0.25)


HARMFUL, BENIGN = texts_of("harmful"), texts_of("benign")
REFUSED, ANSWER = (
    Reply("I'm sorry, but I can't help with that.", True),
    Reply("Of course: first", False),
)


def test_as_many_benign_prompts_as_harmful_ones_none_twice() -> None:
    assert len(HARMFUL) == len(BENIGN) >= 200 and len(HARMFUL) == len(set(HARMFUL)) == len(
        set(BENIGN)
    )
    assert not set(HARMFUL) & set(BENIGN)
    chinese = [
        sum(any("\u4e00" <= c <= "\u9fff" for c in text) for text in texts)
        for texts in (HARMFUL, BENIGN)
    ]
    assert min(chinese) >= 20


def test_fewer_prompts_are_a_part_of_more() -> None:
    few, more = safety_prompts(3), safety_prompts(7)
    assert Counter(row.category for row in few) == {"harmful": 3, "benign": 3}
    assert {row.id for row in few} < {row.id for row in more}
    assert len(safety_prompts(1000)) == len(HARMFUL) + len(BENIGN) and safety_prompts(0) == []


def test_each_rate_counts_its_own_category() -> None:
    categories = [row.category for row in safety_prompts(4)]
    replies = [
        REFUSED if i < 3 or i == 7 else ANSWER for i in range(8)
    ]  # 3 of 4 harmful ones, 1 of 4 benign ones
    assert check_rates(REFUSAL_CHECKS, categories, replies) == {
        "answers_benign": 0.75,
        "refuses_harmful": 0.75,
    }
    answered = check_rates(REFUSAL_CHECKS, categories, [ANSWER] * 8)
    assert answered == {"answers_benign": 1.0, "refuses_harmful": 0.0}
    assert check_rates(REFUSAL_CHECKS, [], []) == {}


def test_several_replies_to_a_prompt_follow_one_another() -> None:
    prompts = safety_prompts(1)
    replies = [REFUSED, REFUSED, ANSWER, ANSWER, ANSWER, REFUSED]
    categories = [row.category for row in repeated_rows(prompts, replies)]
    rates = check_rates(REFUSAL_CHECKS, categories, replies)
    assert rates == pytest.approx({"refuses_harmful": 2 / 3, "answers_benign": 2 / 3})


ELEVEN: list[Prompt] = sums(11)


def test_sets_share_no_prompt_and_the_first_is_the_evaluations() -> None:
    sets = [prompts_of_set(ELEVEN, 5, index, 2) for index in range(2)]
    assert sets[0] == fixed_subset(ELEVEN, 5, "evaluation")
    assert [len(rows) for rows in sets] == [5, 5] and len(
        {row.id for rows in sets for row in rows}
    ) == 10
    assert prompts_of_set(ELEVEN[::-1], 5, 1, 2) == sets[1], "whatever the order of rows"
    assert len(prompts_of_set(ELEVEN, 20, 0, 1)) == 11


def test_a_set_that_would_be_incomplete_is_refused() -> None:
    with pytest.raises(DataError, match=r"11 test prompts make 2 sets of evaluate\.prompts = 5"):
        prompts_of_set(ELEVEN, 5, 0, 3)
    with pytest.raises(DataError, match="11 test prompts make 1 sets"):
        prompts_of_set(ELEVEN, 9, 1, 1)


LINE = VerifiableLine.model_validate({"prompt": "say yes", "require": {"function": "mine"}})


def sampled(
    models: Path, check: Callable[[], bool], sampled: list[int]
) -> tuple[FixedSets, EvaluatedModel]:
    """Replies of SFT to ten prompts and to one of the user's own, which ``check`` is about."""
    model, tokenizer = load_policy(models / "sft")
    verifiable = VerifiablePrompts([LINE], {"mine": lambda prompt, reply: check()})
    sets, config = (
        FixedSets(sums(10), verifiable=verifiable),
        EvaluateConfig(sampling=SamplingConfig(max_new_tokens=4)),
    )
    return sets, sample_sets(model, tokenizer, sets, config, sampled.append, LocalSampler.of(model))


def test_a_check_that_fails_stops_before_all_else_is_sampled(models: Path) -> None:
    replies: list[int] = []
    with pytest.raises(
        DataError, match=r"the function mine of evaluate\.verifiable .*ZeroDivisionError"
    ):
        sampled(models, lambda: bool(1 / 0), replies)
    assert replies == [1]


def test_each_reply_is_checked_once(models: Path) -> None:
    said: Iterator[bool] = iter([True, False])
    sets, sft = sampled(models, lambda: next(said), [])
    _, policy = sampled(models, lambda: next(said), [])
    losses = paired_losses(sets, sft, policy, np.full((10, 1), 0.5))
    metrics = sets.verifiable.metrics(sft.verifiable, policy.verifiable, 10, 1)
    assert (losses["verifiable.passed"]["loss"], metrics["policy"]["passed"], next(said, None)) == (
        1.0,
        0.0,
        None,
    )
