"""One rollout batch with everything that updates need.

Nothing else passes between the phases of PPO.

Shapes: B sequences, P prompt width (left-padded), T response width (right-padded).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from rlhf_core.data.batches import epoch_order
from rlhf_core.errors import TrainingPaused
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import MicroBatchLimits, Tokens


@dataclass(frozen=True)
class Experience:
    """A rollout as it goes through the phases: sampled, rewarded, with advantages.

    All tensors share their first dimension. Masked positions of (B, T) tensors may hold anything
    and are never read. What a phase has not computed yet is NaN.
    """

    tokens: Tensor  # (B, P+T)
    attention_mask: Tensor  # (B, P+T)
    response_mask: Tensor  # (B, T) bool: response tokens, the end marker included
    finished: Tensor  # (B,) bool: the reply ends with its end marker
    sampler_logprobs: Tensor  # (B, T) as the sampler saw them
    trainer_logprobs: Tensor  # (B, T) by the trainer's forward pass, before any update; where ``scored_mask`` holds
    scored_mask: Tensor  # (B, T) bool: response tokens of the replies over which that pass was made
    policy_logprobs: Tensor  # (B, T) the trainer's, or the sampler's where the trainer has not scored all replies
    old_logprobs: Tensor  # (B, T) of the behaviour policy in the ratio: the policy's, or the fixed reference's
    ref_logprobs: Tensor  # (B, T)
    full_kl: Tensor  # (B, T) exact KL(policy || reference) over the vocabulary
    entropy: Tensor  # (B, T) where ``scored_mask`` holds
    values: Tensor  # (B, T) of the state before each token
    rewards: Tensor  # (B,) raw, from the reward function; NaN where it cannot score the reply
    # (B,) bool: the reward function could score the reply; of others nothing is learned
    rewarded: Tensor
    shaped_rewards: Tensor  # (B,) normalised or scaled, clipped, with penalties
    token_rewards: Tensor  # (B, T) shaped rewards and KL penalty
    advantages: Tensor  # (B, T) before normalisation and clip
    returns: Tensor  # (B, T) lambda-returns, the critic's targets
    monte_carlo_returns: Tensor  # (B, T) reward-to-go

    @staticmethod
    def of_rollout(
        rollout: Rollout,
        trainer_logprobs: Tensor,
        ref_logprobs: Tensor,
        entropy: Tensor,
        values: Tensor,
        full_kl: Tensor | None = None,
        *,
        scored: Tensor | None = None,
    ) -> Experience:
        """Make a rollout with what the models say of it, each (B, T).

        It has neither rewards nor advantages yet.

        The policy that sampled is the behaviour policy: by the trainer's log-probabilities, or by
        the sampler's if the trainer has only made those of the rows ``scored`` (B,).
        """
        mask = rollout.response_mask
        scored_mask = mask
        policy_logprobs = trainer_logprobs
        if scored is not None:
            scored_mask = mask & scored.unsqueeze(1)
            policy_logprobs = rollout.logprobs
        unknown = torch.full_like(values, math.nan)
        if full_kl is None:
            full_kl = unknown
        return Experience(
            tokens=rollout.tokens,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            finished=rollout.finished,
            sampler_logprobs=rollout.logprobs,
            trainer_logprobs=trainer_logprobs,
            scored_mask=scored_mask,
            policy_logprobs=policy_logprobs,
            old_logprobs=policy_logprobs,
            ref_logprobs=ref_logprobs,
            full_kl=full_kl,
            entropy=entropy,
            values=values,
            rewards=unknown[:, 0],
            rewarded=torch.ones_like(rollout.finished),
            shaped_rewards=unknown[:, 0],
            token_rewards=unknown,
            advantages=unknown,
            returns=unknown,
            monte_carlo_returns=unknown,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def batch(self) -> Tokens:
        """What models see of it."""
        return Tokens(self.tokens, self.attention_mask, self.response_mask)

    @property
    def lengths(self) -> Tensor:
        """Response tokens of each sequence (B,)."""
        return self.response_mask.sum(dim=1)

    def select(self, rows: Tensor) -> Experience:
        """The given rows, in the given order; widths stay as they are."""
        columns = {column.name: getattr(self, column.name)[rows] for column in fields(self)}
        return Experience(**columns)

    def learnable(self) -> Experience:
        """The rows whose reward is known.

        That is all of them, unless the reward function could not score some.
        """
        if bool(self.rewarded.all()):
            return self
        return self.select(self.rewarded.nonzero().squeeze(1))

    def minibatches(self, count: int, seed: int, epoch: int) -> Iterator[Experience]:
        """``count`` parts in an order that is a function of (seed, epoch) alone.

        Sizes differ by at most one.
        """
        # One copy to the device for all of them: the host waits for each.
        order = torch.tensor(
            epoch_order(len(self), seed, epoch), dtype=torch.long, device=self.tokens.device
        )
        for part in range(count):
            rows = order[part::count]
            if len(rows):
                yield self.select(rows)

    def micro_batches(self, limits: MicroBatchLimits) -> Iterator[tuple[MicroExperience, float]]:
        """This rank's rows in parts of similar length, each with the weight of its terms.

        Needless padding is cut off.
        """
        for micro in limits.split(self.batch):
            width = micro.tokens.width
            columns: dict[str, Tensor] = {}
            for name in _COLUMNS:
                values = getattr(self, name)[micro.rows]
                if values.dim() == 2:
                    values = values[:, :width]
                columns[name] = values
            fields: dict[str, Any] = {**vars(micro.tokens), **columns}
            yield MicroExperience(**fields), micro.weight


_COLUMNS = tuple(column.name for column in fields(Experience))[3:]  # all but what ``Tokens`` has


@dataclass(frozen=True)
class MicroExperience(Experience):
    """The rows of one pass, whose replies may begin in columns of their own; see ``Tokens``."""

    reply_starts: Tensor | None = None
    shortest_prompt: int = 1

    @property
    def batch(self) -> Tokens:
        """What models see of it."""
        return Tokens(
            self.tokens,
            self.attention_mask,
            self.response_mask,
            self.reply_starts,
            self.shortest_prompt,
        )


@dataclass
class IterationRecord:
    """One finished iteration: what was sampled, and what the history will say of it.

    Attributes:
        iteration: Its number, from 1.
        experience: The rollout.
        prompts: The last turn of each prompt.
        replies: Each reply as text, without its end marker.
        metrics: Numbers for the history and the tracker, to which selection adds its own.
        seconds: Time by phase.
        notes: Further fields of the history's row, as JSON.
        paused: Why the update was broken off, if steps kept being non-finite. Unless health rules
            roll the run back, the trainer raises it after the iteration was logged.
    """

    iteration: int
    experience: Experience
    prompts: Sequence[str]
    replies: Sequence[str]
    metrics: dict[str, float]
    seconds: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)
    paused: TrainingPaused | None = None
