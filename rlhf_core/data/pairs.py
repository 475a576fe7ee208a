"""Preference pairs as tokens: a pair that training cannot use is dropped and counted, never cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import encode_prompt, encode_reply
from rlhf_core.data.schema import Preference


@dataclass(frozen=True, slots=True)
class TokenisedPair:
    """Token ids of a pair; the replies end with the token that closes a turn.

    ``row`` is its position in the input.
    """

    row: int
    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    category: str = "general"

    @property
    def length(self) -> int:
        """Tokens of the longer of the two sequences: the width that this pair needs in a padded batch."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def length_difference(self) -> int:
        """Tokens of the chosen minus those of the rejected reply."""
        return len(self.chosen) - len(self.rejected)


def tokenised_pairs(
    tokenizer: PreTrainedTokenizerBase, preferences: Iterable[Preference], max_tokens: int
) -> tuple[list[TokenisedPair], dict[str, int]]:
    """Tokenise ``preferences`` and drop the pairs that training cannot use.

    A pair is over-long when prompt + either reply exceeds ``max_tokens``: cutting the end of a reply would remove the
    token that the reward is read at. A pair is identical when both replies have the same tokens (their texts may
    differ, for example in characters that the tokenizer normalises): its loss is log 2 for every model.

    Ids are held as 32-bit integers: a list of Python's own takes ten times the memory.

    Returns:
        The usable pairs, and how many were dropped: ``{"over_long": …, "identical": …}``. Of the over-long ones
        ``identical_if_cut`` counts those that would be identical if they were cut at ``max_tokens``.
    """
    kept: list[TokenisedPair] = []
    dropped = {"over_long": 0, "identical": 0, "identical_if_cut": 0}
    for row, preference in enumerate(preferences):
        pair = TokenisedPair(
            row,
            array("i", encode_prompt(tokenizer, preference.prompt)),
            array("i", encode_reply(tokenizer, preference.chosen)),
            array("i", encode_reply(tokenizer, preference.rejected)),
            preference.category,
        )
        if pair.chosen == pair.rejected:
            dropped["identical"] += 1
        elif pair.length > max_tokens:
            dropped["over_long"] += 1
            room = max(max_tokens - len(pair.prompt), 0)
            dropped["identical_if_cut"] += pair.chosen[:room] == pair.rejected[:room]
        else:
            kept.append(pair)
    return kept, dropped
