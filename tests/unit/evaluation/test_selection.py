"""Which checkpoint: limits before win rate, win rate before KL, never the reward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.api.critic import MOMENTS
from rlhf_core.api.ppo import PpoInputs, assemble
from rlhf_core.config.model import OptimizerConfig, SamplingConfig
from rlhf_core.config.ppo import PpoConfig, SelectionConfig
from rlhf_core.config.ppo_losses import PtxConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.errors import DataError
from rlhf_core.evaluation.perplexity import measure_drift
from rlhf_core.evaluation.replies import Reply, evaluation_replies, on_policy_replies
from rlhf_core.evaluation.selection import SelectionEvaluator
from rlhf_core.models.causal_lm import load_policy, load_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.selection import CheckpointCandidate, choose
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler
from rlhf_core.training.run_context import RunContext

from .conftest import LengthJudge

LIMITS = SelectionConfig(max_kl=6.0, max_length_ratio=1.6, max_repetition_increase=0.02)


def made(
    iteration: int,
    win_rate: float,
    kl: float = 2.0,
    length: float = 1.0,
    repetition: float = 0.0,
    error: float = 0.0,
) -> CheckpointCandidate:
    return CheckpointCandidate(iteration, win_rate, kl, length, repetition, error)


def test_highest_win_rate_among_those_that_keep_the_limits() -> None:
    beyond = [made(10, 0.9, kl=6.1), made(15, 0.8, length=1.7), made(20, 0.95, repetition=0.03)]
    choice = choose([made(5, 0.6), *beyond, made(25, 0.7)], LIMITS)
    assert choice.candidate.iteration == 25 and choice.admissible


def test_the_reward_has_no_say_in_the_choice() -> None:
    """Trap 9: whatever the reward model says of a checkpoint, the referee's favourite stays the
    same.
    """
    assert {field.name for field in fields(CheckpointCandidate)} == {
        "iteration", "win_rate", "kl", "length_ratio", "repetition_increase", "win_rate_error",
    }  # fmt: skip


def test_equal_win_rates_go_to_the_lower_kl_then_the_earlier() -> None:
    assert (
        choose(
            [made(5, 0.7, 3.0), made(10, 0.7, 2.0), made(15, 0.7, 2.0)], LIMITS
        ).candidate.iteration
        == 10
    )


@pytest.mark.parametrize(
    ("rates", "kls", "kept"),
    [
        (
            (0.57, 0.68, 0.66, 0.67),
            (3.0, 2.3, 1.8, 1.6),
            20,
        ),  # as good as the best, and nearer to SFT
        ((0.57, 0.68, 0.66, 0.67), (1.0, 1.5, 2.0, 2.5), 10),  # as good, and farther away
        ((0.57, 0.68, 0.60, 0.72), (3.0, 2.3, 1.0, 2.8), 20),  # clearly better, though farther away
        ((0.57, 0.68, 0.60, 0.64), (3.0, 2.3, 1.0, 1.0), 10),  # clearly worse, though nearer
    ],
)
def test_within_a_standard_error_the_nearer_checkpoint_is_kept(
    rates: Sequence[float], kls: Sequence[float], kept: int
) -> None:
    candidates = [
        made(5 * (i + 1), *pair, error=0.03) for i, pair in enumerate(zip(rates, kls, strict=True))
    ]
    chosen = [
        choose(candidates[: n + 1], LIMITS).candidate.iteration for n in range(len(candidates))
    ]
    assert chosen[-1] == kept
    # Only the weights of the choice so far are kept: it may change to the newest checkpoint alone.
    for number, (before, after) in enumerate(itertools.pairwise(chosen), start=2):
        assert after in (before, 5 * number)


def test_limits_themselves_are_kept() -> None:
    assert made(1, 0.5, 6.0, 1.6, 0.02).broken_limits(LIMITS) == []


def test_without_an_admissible_checkpoint_the_nearest_is_taken_and_marked() -> None:
    choice = choose([made(5, 0.9, 12.0), made(10, 0.4, 7.0), made(15, 0.99, math.nan)], LIMITS)
    assert choice.candidate.iteration == 10 and not choice.admissible
    assert "KL 7.00 > 6" in choice.reason


def test_nothing_to_choose_from_is_said_clearly() -> None:
    with pytest.raises(DataError, match=r"selection\.every"):
        choose([], LIMITS)


def test_sft_against_itself_is_all_ties_at_no_distance(models: Path, prompts: list[Prompt]) -> None:
    sft, tokenizer = load_policy(models / "sft")
    policy, _ = load_policy(models / "policy")
    rows, referee = prompts[:8], LengthJudge()
    messages = [row.prompt for row in rows]
    sampling = Sampling.for_tokenizer(tokenizer, 12)
    evaluator = SelectionEvaluator(
        sft,
        rows,
        referee,
        lambda m: on_policy_replies(m, tokenizer, messages, sampling, 3),
        reward=LengthJudge(),
    )
    same = evaluator(sft)
    assert same["win_rate"] == 0.5 and same["kl"] == pytest.approx(0.0, abs=1e-4)
    assert (
        same["length_ratio"] == 1.0
        and same["repetition_increase"] == 0.0
        and same["referee_gap"] == 0.0
    )
    other = evaluator(policy)
    assert other == evaluator(policy) and math.isfinite(other["kl"]) and other["kl"] != same["kl"]
    assert referee.calls == 4  # SFT's replies once, then one per checkpoint


SHARP = {"temperature": 0.5, "min_new_tokens": 3}


def test_on_policy_replies_follow_the_training_distribution(
    models: Path, prompts: list[Prompt]
) -> None:
    model, tokenizer = load_policy(models / "policy")
    messages = [row.prompt for row in prompts[:8]]
    plain, sharp = (
        on_policy_replies(
            model, tokenizer, messages, Sampling.for_tokenizer(tokenizer, 10, **settings), seed=1
        )
        for settings in ({}, SHARP)
    )
    assert sharp.sampling.temperature == 0.5 and sharp.replies != plain.replies
    assert min(len(reply.token_ids) for reply in sharp.replies) >= 3
    # Sampled and scored by the same distribution: the model is at no distance from itself.
    assert measure_drift(sharp, model).kl == pytest.approx(0.0, abs=1e-4)


def by_length(prompts: Any, replies: list[str]) -> list[float]:
    return [float(len(reply)) for reply in replies]


def test_selection_samples_as_ppo_does(models: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    tokenizer, rate = load_tokenizer(models / "sft"), OptimizerConfig(lr=1e-4)
    config = PpoConfig(
        max_new_tokens=6,
        ptx=PtxConfig(weight=0.0),
        policy_optimizer=rate,
        critic_optimizer=rate,
        **SHARP,
    )
    encoded = TrainingPrompts.encode(tokenizer, [row.prompt for row in prompts[:4]])
    ScalarModel.load(models / "reward").save(
        tmp_path / "critic", tokenizer, {MOMENTS: RunningMeanStd().to_dict()}, {}
    )
    inputs = PpoInputs(
        config, models / "sft", tokenizer, encoded, by_length, tmp_path / "critic", None, models / "referee",
        prompts[:4], {},
    )  # fmt: skip
    trainer = assemble(inputs, RunContext(tmp_path / "work"), LocalSampler())
    assert trainer.selector is not None
    evaluate: Any = trainer.selector.measure
    sampling = evaluate.sample(load_policy(models / "sft")[0]).sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.min_new_tokens) == (6, 0.5, 3)


class ScriptedJudge(LengthJudge):
    """Scores of its own, call by call."""

    def __init__(self, *scores: Sequence[float]) -> None:
        super().__init__()
        self.scores = [list(row) for row in scores]

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        return self.scores.pop(0)


def test_a_wild_checkpoint_cannot_turn_its_losses_into_ties(
    models: Path, prompts: list[Prompt]
) -> None:
    """SFT's scores have SD 1, so differences up to .05 are ties, whatever the checkpoint's own
    scores are.
    """
    sft, tokenizer = load_policy(models / "sft")
    messages, sampling = [row.prompt for row in prompts[:4]], Sampling.for_tokenizer(tokenizer, 4)
    sft_scores = [-1.0, -1.0, 1.0, 1.0]
    for outlier in (2.0, 2000.0):
        referee = ScriptedJudge(sft_scores, [-1.06, -1.06, 0.94, outlier])
        sample = partial(
            on_policy_replies, tokenizer=tokenizer, prompts=messages, sampling=sampling, seed=3
        )
        assert SelectionEvaluator(sft, prompts[:4], referee, sample)(sft)["win_rate"] == 0.25


def test_several_openings_of_a_question_narrow_no_interval(
    models: Path, prompts: list[Prompt]
) -> None:
    """Eight questions asked five times each are eight questions: of forty rows the interval would
    be half as wide.
    """
    sft, tokenizer = load_policy(models / "sft")
    sampling = Sampling.for_tokenizer(tokenizer, 4)
    widths = []
    for count in (1, 5):
        rows = [replace(row, source="a file") for row in prompts[:8] for _ in range(count)]
        won = [score for score in (1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0) for _ in range(count)]
        messages = [row.prompt for row in rows]
        sample = partial(
            on_policy_replies, tokenizer=tokenizer, prompts=messages, sampling=sampling, seed=3
        )
        measured = SelectionEvaluator(sft, rows, ScriptedJudge([0.0] * len(rows), won), sample)(sft)
        widths.append(measured["win_rate_high95"] - measured["win_rate_low95"])
    assert widths[1] == pytest.approx(widths[0], rel=0.05)


def test_replies_do_not_depend_on_the_company(models: Path, prompts: list[Prompt]) -> None:
    model, tokenizer = load_policy(models / "policy")
    messages = [row.prompt for row in prompts[:6]]
    config = SamplingConfig(max_new_tokens=10)
    together = evaluation_replies(model, tokenizer, messages, config, seed=1)
    assert evaluation_replies(model, tokenizer, messages[:2], config, seed=1) == together[:2]
