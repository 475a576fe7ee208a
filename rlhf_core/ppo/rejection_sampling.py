"""Best of n as training data.

Of n replies to each prompt, the one is kept that the reward function likes best.

RAFT (Dong et al. 2023) and the rejection sampling of Llama 2 (Touvron et al. 2023, section 3.2.3),
in one round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlhf_core.errors import DataError
from rlhf_core.ppo.reward_sources.source import RewardFn
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.runtime import distributed
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.runtime.progress import progress
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import PromptBatch, Sampler, sample_replies
from rlhf_core.storage.files import atomic_write_json, read_json
from rlhf_core.training.engine.frozen import FrozenModels

PROMPTS_AT_ONCE = 32


@dataclass
class BestReplies:
    """The best reply to each of some prompts, and what it cost to find them.

    Attributes:
        prompts: Number of each prompt that has one.
        replies: Its token ids, end marker included.
        rewards: Its raw reward.
        sampled_rewards: Sum of the raw rewards of all replies that were sampled, of those that are
            finite.
        sampled_replies: How many were sampled.
        unrewarded_replies: How many of these have a reward that is not finite.
        sampled_tokens: Their tokens.
        seconds: Time of sampling and scoring.
    """

    prompts: list[int] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    sampled_rewards: float = 0.0
    sampled_replies: int = 0
    unrewarded_replies: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: BestReplies) -> None:
        """Take in the replies to further prompts."""
        self.prompts += other.prompts
        self.replies += other.replies
        self.rewards += other.rewards
        self.sampled_rewards += other.sampled_rewards
        self.sampled_replies += other.sampled_replies
        self.unrewarded_replies += other.unrewarded_replies
        self.sampled_tokens += other.sampled_tokens
        self.seconds += other.seconds


def best_of_each_prompt(
    rewards: Sequence[float], finished: Sequence[bool], n: int
) -> list[int | None]:
    """Return the number of the best finished reply to each prompt.

    The ``n`` replies to a prompt follow each other.

    Of equal rewards the first wins; one that is not finite says nothing of its reply. None where no
    reply has ended: the reward model has seen finished replies alone, and a policy that is trained
    on others learns not to end its own.
    """
    best: list[int | None] = []
    for start in range(0, len(rewards), n):
        ended = [
            row for row in range(start, start + n) if finished[row] and math.isfinite(rewards[row])
        ]
        best.append(max(ended, key=lambda row: rewards[row], default=None))
    return best


@dataclass
class RejectionSampler:
    """Samples and scores replies part by part.

    The parts of an interrupted run in ``work`` are not made again.

    Attributes:
        sampler: Has the policy's weights as version 0.
        reward_fn: Their raw reward.
        prompts: The training prompts.
        sampling: The training distribution.
        replies_per_prompt: n.
        batch_size: Replies that a process samples at once; None for all of a part.
        seed: Seed of every reply's random stream.
        frozen: The frozen models of the run.
        work: Folder of finished parts.
        preemption: Says between parts whether SIGTERM asks the run to stop.
    """

    sampler: Sampler
    reward_fn: RewardFn
    prompts: TrainingPrompts
    sampling: Sampling
    replies_per_prompt: int
    batch_size: int | None
    seed: int
    frozen: FrozenModels
    work: Path
    preemption: PreemptionSignal

    def best_replies(self, rows: Sequence[int]) -> BestReplies:
        """Return the best replies to the prompts ``rows``.

        Raises:
            DataError: No reply to any of them has ended.
            Preempted: SIGTERM came; the part was finished and is kept.
        """
        best = BestReplies()
        starts = range(0, len(rows), PROMPTS_AT_ONCE)
        with progress(len(rows), "rejection sampling") as bar, self.preemption.deferred():
            for start in starts:
                if self.preemption.requested():
                    made = f"rejection_sampling sampled replies to {start} of {len(rows)} prompts"
                    self.preemption.raise_preempted(made, saved=start > 0)
                part = rows[start : start + PROMPTS_AT_ONCE]
                best.add(self._part(part, start))
                bar.advance(len(part))
        if not best.prompts:
            raise DataError(
                f"none of {self.replies_per_prompt} replies to each of {len(rows)} prompts ended within "
                f"{self.sampling.max_new_tokens} tokens and has a finite reward; raise ppo.max_new_tokens"
            )
        return best

    def _part(self, rows: Sequence[int], start: int) -> BestReplies:
        """Sample and score the replies to one part of the prompts, or read them.

        The part begins at ``start`` of all prompts.
        """
        file = self.work / f"{start:08}.json"
        if file.is_file():
            return BestReplies(**read_json(file))
        started = time.perf_counter()
        n = self.replies_per_prompt
        asked: list[int] = []
        for row in rows:
            asked += [row] * n
        streams = range(start * n, start * n + len(asked))
        batch = PromptBatch([list(self.prompts.ids[row]) for row in asked], streams, self.seed)
        with self.frozen.on_device():
            rollout = sample_replies(self.sampler, 0, batch, self.sampling, self.batch_size)
            rewards = self.reward_fn(rollout.batch).tolist()
        replies = rollout.replies()
        finite = [reward for reward in rewards if math.isfinite(reward)]
        best = best_of_each_prompt(rewards, rollout.finished.tolist(), n)
        part = BestReplies(
            sampled_rewards=sum(finite),
            sampled_replies=len(replies),
            unrewarded_replies=len(replies) - len(finite),
            sampled_tokens=sum(map(len, replies)),
        )
        for row, reply in zip(rows, best, strict=True):
            if reply is not None:
                part.prompts.append(row)
                part.replies.append(replies[reply])
                part.rewards.append(rewards[reply])
        part.seconds = time.perf_counter() - started
        if distributed.is_rank_zero():
            atomic_write_json(file, asdict(part))
        return part
