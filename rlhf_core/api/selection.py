"""Which of PPO's checkpoints to keep: the one that the referee prefers, under limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.stages.ppo import PpoConfig, SelectionConfig
from rlhf_core.data.schema import Message
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.replies.generation import OnPolicyReplies, on_policy_replies
from rlhf_core.evaluation.selection import (
    CheckpointCandidate,
    CheckpointChoice,
    SelectionEvaluator,
    SelectionMetrics,
    choose,
)
from rlhf_core.models.heads.scalar import ReplyScorer
from rlhf_core.ppo.callbacks.selection import SelectionResult
from rlhf_core.ppo.checkpoints.run_checkpoint import nonfinite_as_none
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.training.rng import derive_seed


@dataclass
class CheckpointSelector:
    """Wires the referee's evaluation into the trainer; ``last`` keeps every newest checkpoint instead."""

    evaluate: SelectionEvaluator
    limits: SelectionConfig
    candidates: list[CheckpointCandidate] = field(default_factory=list)

    def consider(self, iteration: int, policy: PreTrainedModel) -> SelectionResult:
        """Evaluate, and say whether this is now the checkpoint to keep."""
        # One result for all ranks, however their last digits may differ.
        metrics = distributed.broadcast_from_rank0(self.evaluate(policy).as_dict())
        self.candidates.append(CheckpointCandidate.of(iteration, SelectionMetrics(**metrics)))
        return SelectionResult(metrics, self.choice().candidate.iteration == iteration)

    def choice(self) -> CheckpointChoice:
        """The checkpoint to keep of those seen so far."""
        if self.limits.method == "last":
            last = self.candidates[-1]
            return CheckpointChoice(
                last, not last.broken_limits(self.limits), "the last checkpoint, as ppo.selection.method says"
            )
        return choose(self.candidates, self.limits)

    def state(self) -> dict[str, Any]:
        """The candidates as JSON, numbers that are not finite as null."""
        return {"candidates": [nonfinite_as_none(asdict(seen)) for seen in self.candidates]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.candidates = [_candidate(row) for row in state["candidates"]]


def _candidate(row: Mapping[str, Any]) -> CheckpointCandidate:
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
    return CheckpointCandidate(**values)


def referee_selector(
    config: PpoConfig,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    referee: ReplyScorer,
    reward: ReplyScorer | None,
) -> CheckpointSelector:
    """Let ``referee`` compare replies to fixed ``prompts`` with those of ``reference``, sampled as PPO samples.

    Args:
        reward: The reward model, for the metric ``referee_gap`` alone; None where the reward is no model.
    """
    seed, rows_together = derive_seed(config.seed, "ppo", "selection"), config.selection.batch_size
    sampling = Sampling.for_rollouts(tokenizer, config.rollout)

    def sample(policy: PreTrainedModel) -> OnPolicyReplies:
        return on_policy_replies(policy, tokenizer, prompts, sampling, seed, rows_together)

    judge = ModelJudge(referee, tokenizer, "referee", rows_together)
    proxy = ModelJudge(reward, tokenizer, "reward", rows_together) if reward is not None else None
    return CheckpointSelector(SelectionEvaluator(reference, prompts, judge, sample, proxy), config.selection)
