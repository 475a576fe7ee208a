"""How PPO's stage chooses among its checkpoints: the referee on fixed validation prompts, under limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core import distributed
from rlhf_core.config.ppo import PpoConfig, SelectionConfig
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.generation import OnPolicyReplies, on_policy_replies
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.selection import (
    CheckpointCandidate,
    CheckpointChoice,
    SelectionEvaluator,
    SelectionMetrics,
    choose,
)
from rlhf_core.ppo.callbacks.selection import SelectionResult
from rlhf_core.ppo.run_checkpoint import nonfinite_as_none
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.engine.frozen import FrozenModels
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


def make_selector(
    config: PpoConfig,
    inputs: Paths,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frozen: FrozenModels,
) -> CheckpointSelector:
    """The referee on fixed validation prompts; ids are content hashes, so the first of them are a fixed sample.

    Its judges are the models that also score rollouts: the reward model and the referee.
    """
    path = inputs.clean / "prompts" / "validation.parquet"
    rows = sorted(read_rows(path, Prompt), key=lambda row: row.id)[: config.selection.prompts]
    if not rows:
        raise DataError(f"{path} has no rows; raise validate.split.validation")
    prompts = [row.prompt for row in rows]
    seed, rows_together = derive_seed(config.seed, "ppo", "selection"), config.selection.batch_size
    sampling = Sampling.for_rollouts(tokenizer, config.rollout)

    def sample(model: PreTrainedModel) -> OnPolicyReplies:
        return on_policy_replies(model, tokenizer, prompts, sampling, seed, rows_together)

    referee, reward = (
        ModelJudge(inputs[name], name, rows_together, frozen.scalar(inputs[name])) for name in ("referee", "reward")
    )
    with frozen.on_device():
        evaluate = SelectionEvaluator(reference, prompts, referee, sample, reward)
    return CheckpointSelector(evaluate, config.selection)
