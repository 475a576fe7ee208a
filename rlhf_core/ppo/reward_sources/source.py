"""Reward sources behind one protocol, and the weighted sum of several.

Reward models read the tokens themselves; other sources, such as functions, get text, decoded when
the first of them asks for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import compress
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.batches import passes
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import decode_reply
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.models.heads import ReplyScorer
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import MicroBatchLimits, Tokens
from rlhf_core.training.passes import run_side_by_side

LARGEST = torch.finfo(torch.float32).max
SIGNATURE = "f(prompts, replies)"
RewardFn = Callable[[Tokens], Tensor]  # the raw reward of every reply (B,)


class PromptReader:
    """Finds the messages that prompt tokens were made from.

    Prompts of equal tokens count as one.
    """

    def __init__(self, prompts: TrainingPrompts) -> None:
        self.prompts = prompts

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        """The first row of each prompt, by digests.

        A second copy of all tokens would double their memory.
        """
        rows: dict[bytes, int] = {}
        for row, ids in enumerate(self.prompts.ids):
            rows.setdefault(_digest(ids), row)
        return rows

    def rows(self, batch: Tokens) -> list[int]:
        """The number of the prompt of each row of ``batch``.

        Raises:
            RlhfError: A row's tokens are not those of a known prompt.
        """
        width = batch.tokens.shape[1] - batch.width
        tokens = batch.tokens[:, :width].tolist()
        masks = batch.attention_mask[:, :width].tolist()
        found: list[int] = []
        for number, row in enumerate(tokens):
            prompt = list(compress(row, masks[number]))
            known = self._rows.get(_digest(prompt))
            if known is None:
                raise RlhfError(
                    f"row {number} of the rollout does not begin with any of the prompts"
                )
            found.append(known)
        return found


def _digest(ids: Sequence[int]) -> bytes:
    numbers = np.asarray(ids, dtype=np.int64)
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Replies:
    """B replies.

    They are decoded when a source first asks for text: reward models read the tokens themselves.
    """

    tokens: Tokens
    reader: PromptReader
    tokenizer: PreTrainedTokenizerBase

    def __len__(self) -> int:
        return len(self.tokens.tokens)

    def part(self, rows: Sequence[int]) -> Replies:
        """The given rows."""
        return Replies(self.tokens.part(torch.tensor(rows)), self.reader, self.tokenizer)

    @cached_property
    def _rows(self) -> list[int]:
        return self.reader.rows(self.tokens)

    @property
    def prompts(self) -> list[Sequence[Message]]:
        """The messages that each reply answers."""
        return [self.reader.prompts.messages[row] for row in self._rows]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """What else the record of each reply's prompt says, by name."""
        columns: dict[str, list[Any]] = {}
        for name, values in self.reader.prompts.columns.items():
            columns[name] = [values[row] for row in self._rows]
        return columns

    @cached_property
    def _decoded(self) -> list[tuple[str, bool]]:
        return [decode_reply(self.tokenizer, ids) for ids in self.tokens.replies()]

    @property
    def texts(self) -> list[str]:
        """Each reply without its end marker."""
        return [text for text, _ in self._decoded]

    @property
    def finished(self) -> list[bool]:
        """Whether each reply ends with its end marker."""
        return [finished for _, finished in self._decoded]


class Source(Protocol):
    """Rewards replies; higher is better.

    ``metrics`` describe the newest batch beyond its mean and spread.
    """

    metrics: dict[str, float]

    def rewards(self, replies: Replies) -> Tensor:
        """One raw reward per reply (B,), float32 on the device of the tokens."""


def checked_rewards(
    values: Any, replies: Replies, who: str, none_is_unscored: bool = False
) -> Tensor:
    """Check scores from outside this project, and make rewards of them.

    (B,) float32 on the device of the tokens.

    Args:
        values: The scores, which may be anything.
        replies: The replies that they are of.
        who: What gave them, for messages.
        none_is_unscored: Whether None stands for a reply that cannot be scored, which becomes NaN.

    Raises:
        DataError: They are not one finite number per reply. A guess in place of a reward would be
            trained on.
    """
    scores = checked_scores(values, len(replies), who, none_is_unscored)
    return torch.tensor(scores, dtype=torch.float32, device=replies.tokens.tokens.device)


def checked_scores(
    values: Any, count: int, who: str, none_is_unscored: bool = False
) -> list[float]:
    """The same check of ``count`` scores, as numbers; NaN for what cannot be scored."""
    listed = values
    if isinstance(values, np.ndarray | Tensor):
        listed = values.tolist()
    if not isinstance(listed, list | tuple):
        raise DataError(
            f"{who} gave {type(values).__name__} for scores; a list with one number per reply is needed"
        )
    if len(listed) != count:
        raise DataError(
            f"{who} gave {len(listed)} scores for {count} replies; one per reply is needed, in order"
        )
    scores: list[float] = []
    for position, value in enumerate(listed):
        if none_is_unscored and value is None:
            scores.append(math.nan)
            continue
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and abs(value) <= LARGEST:
            scores.append(float(value))
            continue
        shown = repr(value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        problem = "; scores must be finite in single precision"
        if not is_number:
            problem = ", which is not a number"
        raise DataError(f"{who}: score {position} is {shown}{problem}")
    return scores


def reward_model_fn(model: ReplyScorer, limits: MicroBatchLimits = MicroBatchLimits()) -> RewardFn:
    """Make a reward function of a model that scores replies, in passes within ``limits``.

    Ranks share the rows.
    """

    @torch.inference_mode()
    def reply_scores(part: Tokens) -> Tensor:
        return model.reply_scores(part.tokens, part.attention_mask, part.reply_mask).float()

    def reward_fn(batch: Tokens) -> Tensor:
        rewards = torch.zeros(len(batch.tokens), device=batch.tokens.device)
        parts = list(limits.split(batch))
        tasks = [partial(reply_scores, part.tokens) for part in parts]
        scores = run_side_by_side(*tasks, models=[model])
        for part, rewards_of_part in zip(parts, scores, strict=True):
            if part.weight:
                rewards[part.rows] = rewards_of_part
        return distributed.all_reduce_sum(rewards)

    return reward_fn


def reward_metrics(reward_fn: RewardFn) -> dict[str, float]:
    """Metrics about the newest batch, of a reward function that has an attribute ``metrics``.

    Another function has none.
    """
    return dict(getattr(reward_fn, "metrics", {}))


class RewardModelSource:
    """One reward model."""

    def __init__(self, reward_fn: RewardFn) -> None:
        self.reward_fn = reward_fn
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """The model's rewards (B,) as they are.

        One that is not finite makes its step be skipped.
        """
        return self.reward_fn(replies.tokens)


class RankShared:
    """Asks ``source`` for this rank's replies, and gives every rank all rewards.

    A text is rewarded once, however many ranks there are, and a source that is not deterministic
    still gives all of them the same. ``metrics`` are means over the replies of all ranks.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.metrics: dict[str, float] = {}

    @property
    def may_decline(self) -> bool:
        """Whether its NaN stands for a reply that cannot be scored."""
        return getattr(self.source, "may_decline", False)

    def rewards(self, replies: Replies) -> Tensor:
        """One raw reward per reply (B,)."""
        if distributed.world_size() == 1:
            rewards = self.source.rewards(replies)
            self.metrics = self.source.metrics
            return rewards
        total = len(replies)
        ((rows, weight),) = passes(list(range(total)), total)
        own = int(weight) * len(rows)
        rewards = self.source.rewards(replies.part(rows))[:own]
        weighted = {name: own * value for name, value in self.source.metrics.items()}
        sums = distributed.reduce_metrics(weighted)
        self.metrics = {name: value / total for name, value in sums.items()}
        return distributed.gather_rows(rewards, total)


@dataclass(frozen=True)
class WeightedSource:
    """A source with its name in metrics and its weight in the sum."""

    name: str
    weight: float
    source: Source


class RewardMixture:
    """``reward = sum of weight * source reward``: a :data:`~RewardFn`.

    ``metrics`` are about the newest batch: ``source_NAME_mean`` and ``source_NAME_std`` of the
    unweighted rewards (B,) where there is more than one source (population std), a source's own
    metrics as ``source_NAME_...``, and with functions ``unscored``, the share of replies that one
    of them could not score.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        reader: PromptReader,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.sources = tuple(sources)
        self.reader = reader
        self.tokenizer = tokenizer
        self.metrics: dict[str, float] = {}
        # (B,) bool: replies of the newest batch that a source could not score.
        self.unscored: Tensor | None = None

    def __call__(self, batch: Tokens) -> Tensor:
        """Raw reward of every reply (B,); NaN where a source cannot score it."""
        replies = Replies(batch, self.reader, self.tokenizer)
        self.metrics = {}
        self.unscored = None
        parts = []
        for weighted in self.sources:
            source = weighted.source
            rewards = source.rewards(replies)
            parts.append(weighted.weight * rewards)
            scored = rewards
            if getattr(source, "may_decline", False):
                declined = rewards.isnan()
                scored = rewards[~declined]
                if self.unscored is None:
                    self.unscored = declined
                else:
                    self.unscored = self.unscored | declined
            prefix = f"source_{weighted.name}"
            if len(self.sources) > 1:
                self.metrics[f"{prefix}_mean"] = float(scored.mean())
                self.metrics[f"{prefix}_std"] = float(scored.std(unbiased=False))
            for name, value in source.metrics.items():
                self.metrics[f"{prefix}_{name}"] = value
        if self.unscored is not None:
            self.metrics["unscored"] = float(self.unscored.double().mean())
        return reduce(torch.add, parts)
