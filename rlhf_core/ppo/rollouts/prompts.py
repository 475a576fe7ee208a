"""The prompts that PPO and critic pre-training sample replies to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.batches.batching import batch_at
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens.batch_encoding import encode_prompts
from rlhf_core.errors import DataError
from rlhf_core.sampling.sampler import PromptBatch


@dataclass(frozen=True)
class TrainingPrompts:
    """Prompts as messages and as tokens.

    Attributes:
        messages: The turns of each prompt, the last one the user's.
        ids: Their token ids, up to where the reply begins.
    """

    messages: Sequence[Sequence[Message]]
    ids: Sequence[Sequence[int]]

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Sequence[Message]]) -> TrainingPrompts:
        """Encode prompts with the tokenizer's chat template."""
        return cls(messages, encode_prompts(tokenizer, messages))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, size: int, seed: int, iteration: int, replies_per_prompt: int = 1) -> list[int]:
        """Row numbers of the prompts of an iteration's ``size`` replies, a function of the arguments alone.

        Each prompt comes ``replies_per_prompt`` times in a row; ``size`` must be a multiple of that.
        """
        prompts = batch_at(len(self), size // replies_per_prompt, seed, iteration)
        return [row for row in prompts for _ in range(replies_per_prompt)]

    def batch(self, rows: Sequence[int], iteration: int, seed: int) -> PromptBatch:
        """The prompts of ``rows``; every reply of every iteration has a random stream of its own."""
        streams = range(iteration * len(rows), (iteration + 1) * len(rows))
        return PromptBatch([list(self.ids[row]) for row in rows], streams, seed)

    def require_room(self, max_new_tokens: int, positions: int | None) -> None:
        """Check that prompts and replies fit the model, because they are never cut.

        Raises:
            DataError: The longest prompt and reply exceed the model's positions.
        """
        require_room(self.ids, max_new_tokens, positions)


def require_room(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, positions: int | None, name: str = "max_new_tokens"
) -> None:
    """Check that a reply of ``max_new_tokens``, which the user knows by ``name``, fits a model of ``positions`` beside
    each prompt's token ids.

    Raises:
        DataError: The longest prompt and reply exceed the model's positions.
    """
    longest = max((len(ids) for ids in prompts), default=0)
    if positions is not None and longest + max_new_tokens > positions:
        raise DataError(
            f"the longest prompt ({longest} tokens) and {name} ({max_new_tokens}) exceed the model's {positions} "
            f"positions: lower {name}, leave out long prompts (validate.max_prompt_chars), or take a model with more "
            "positions"
        )
