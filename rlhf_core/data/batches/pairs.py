"""Preference pairs as tokens: a pair that training cannot use is dropped and counted, never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Preference
from rlhf_core.data.tokens.token_table import CATEGORY, TokenTable


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


class PairTable(Sequence[TokenisedPair]):
    """Pairs that are made of a table of token ids each time they are asked for.

    Args:
        tokens: Token ids of preferences.
        rows: Row numbers of the pairs, in their order.
    """

    def __init__(self, tokens: TokenTable, rows: npt.NDArray[np.int64]) -> None:
        self.tokens, self.rows = tokens, rows
        self._columns = [tokens.column(name) for name in ("prompt", "chosen", "rejected")]
        self._categories = tokens.table.column(CATEGORY)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> TokenisedPair: ...

    @overload
    def __getitem__(self, number: slice) -> PairTable: ...

    def __getitem__(self, number: int | slice) -> TokenisedPair | PairTable:
        if isinstance(number, slice):
            return PairTable(self.tokens, self.rows[number])
        row = int(self.rows[number])
        prompt, chosen, rejected = (column[row] for column in self._columns)
        return TokenisedPair(row, prompt, chosen, rejected, self._categories[row].as_py())


def tokenised_pairs(
    tokenizer: PreTrainedTokenizerBase, preferences: Sequence[Preference], max_tokens: int
) -> tuple[PairTable, dict[str, int]]:
    """Tokenise ``preferences`` that are in memory and drop the pairs that training cannot use: :func:`usable_pairs`."""
    return usable_pairs(TokenTable.of_rows(tokenizer, Preference.KIND, preferences), max_tokens)


def usable_pairs(tokens: TokenTable, max_tokens: int) -> tuple[PairTable, dict[str, int]]:
    """Drop the pairs that training cannot use.

    A pair is over-long when prompt + either reply exceeds ``max_tokens``: cutting the end of a reply would remove the
    token that the reward is read at. A pair is identical when both replies have the same tokens (their texts may
    differ, for example in characters that the tokenizer normalises): its loss is log 2 for every model.

    Returns:
        The usable pairs, and how many were dropped: ``{"over_long": …, "identical": …}``. Of the over-long ones
        ``identical_if_cut`` counts those that would be identical if they were cut at ``max_tokens``.
    """
    prompt, chosen, rejected = (tokens.column(name) for name in ("prompt", "chosen", "rejected"))
    length = prompt.lengths + np.maximum(chosen.lengths, rejected.lengths)
    identical = np.zeros(len(tokens), dtype=bool)
    for row in np.flatnonzero(chosen.lengths == rejected.lengths).tolist():
        identical[row] = chosen[row] == rejected[row]
    over_long = (length > max_tokens) & ~identical
    identical_if_cut = 0
    for row in np.flatnonzero(over_long).tolist():
        room = max(max_tokens - int(prompt.lengths[row]), 0)
        identical_if_cut += chosen[row][:room] == rejected[row][:room]
    dropped = {
        "over_long": int(over_long.sum()),
        "identical": int(identical.sum()),
        "identical_if_cut": identical_if_cut,
    }
    return PairTable(tokens, np.flatnonzero(~identical & ~over_long)), dropped
