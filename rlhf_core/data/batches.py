"""Rows into batches: their order, passes over ranks, padding, shares of categories and lengths.

*Shares of categories.* Rows of categories without a share come once in an epoch. Those with one are
repeated, or drawn, until they have it: a few hundred pairs about safety can weigh as much as was
meant beside thousands of others (Bai et al., 2022, "Training a Helpful and Harmless Assistant",
section 4.4, mix helpfulness and harmlessness by such weights).

*Balanced lengths.* The preferred reply is as often the shorter as the longer one, at every
difference of lengths. Annotators tend to prefer the longer reply, and a reward model learns it
(Singhal et al., 2023, "A Long Way to Go: Investigating Length Correlations in RLHF", who balance
preference data as one remedy). Among balanced pairs no rule that reads lengths alone is right in
more than about half. Equal numbers of both kinds are not enough for that: large differences occur
almost only where the longer reply is preferred, so that "longer, if it is much longer" would still
be right. Both kinds are therefore matched within strata of the absolute difference.

*Batches of whole prompts.* Pairs of one prompt share a batch, and a sequence that several of them
have counts once. With K ranked replies to a prompt there are up to K(K-1)/2 pairs, but only K
sequences to compute (Ouyang et al., 2022, "Training language models to follow instructions",
section 3.5, who also find that pairs drawn one by one overfit).

*Prefix rows.* Replies to one prompt stand in one row behind a single copy of it, so that the prompt
is computed once (Wang and Hegde, 2024, "Accelerating Direct Preference Optimization with Prefix
Sharing").
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.tables import TableRows
from rlhf_core.data.tokens import CATEGORY, TokenTable
from rlhf_core.errors import DataError
from rlhf_core.runtime import distributed


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of ``range(n)``, the same on every machine for the same arguments."""
    return generator_of(seed, epoch).permutation(n).tolist()


def generator_of(seed: int, number: int) -> np.random.Generator:
    """Return a generator whose numbers depend on the seed and one further number alone."""
    philox = np.random.Philox(key=[seed, number])
    return np.random.Generator(philox)


def batch_at(n: int, size: int, seed: int, step: int) -> list[int]:
    """Return the batch of optimiser step ``step`` (from 0) in an endless stream of epochs.

    A batch may span two epochs, so all batches have ``size`` indices and the step number alone is
    the data cursor.
    """
    if n < 1:
        raise ValueError("there is nothing to draw a batch from")
    position = step * size
    indices: list[int] = []
    while len(indices) < size:
        epoch, row = divmod(position + len(indices), n)
        missing = size - len(indices)
        indices += epoch_order(n, seed, epoch)[row : row + missing]
    return indices


Rows = TypeVar("Rows", list[int], Tensor)
Result = TypeVar("Result")


def passes(rows: Rows, size: int, rank: int | None = None) -> Iterator[tuple[Rows, float]]:
    """Yield a rank's share of ``rows`` in micro-batches, each with the weight of its loss.

    Every rank makes the same number of passes, because all ranks gather sharded parameters
    together: a rank that has run out of rows gets the first row again with weight 0. All other
    weights are 1.

    Args:
        rows: All rows.
        size: Rows of a micro-batch.
        rank: Whose share it is; this process's own by default.
    """
    own = distributed.shard_for_rank(rows, rank)
    most = math.ceil(len(rows) / distributed.world_size())  # of any rank
    for start in range(0, most, size):
        part = own[start : start + size]
        if len(part):
            yield part, 1.0
        else:
            yield rows[:1], 0.0


def whole_passes(rows: list[int], size: int) -> Iterator[tuple[list[int], float]]:
    """Yield this rank's share of the micro-batches that one process makes of ``rows``.

    Each comes with a weight, as from :func:`passes`. A row has the same companions, and with them
    the same padding and the same bits, on any number of ranks. Every rank makes as many passes as
    in :func:`passes`, but of a last round of them some ranks may have none of their own.
    """
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    own = distributed.shard_for_rank(parts)
    for part in own:
        yield part, 1.0
    most = math.ceil(len(parts) / distributed.world_size())  # of any rank
    for _ in range(most - len(own)):
        yield rows[:1], 0.0


def gather_passes(own: Sequence[Sequence[Result]]) -> list[Result]:
    """Return on every rank what all computed of the rows of :func:`whole_passes`, in their order.

    Args:
        own: JSON values of this rank, a list for each pass whose weight was 1.
    """
    return list(chain.from_iterable(distributed.gather_items(own)))


def rows_by_category_share(
    categories: Sequence[str],
    shares: Mapping[str, float],
    seed: int,
    epoch: int,
    parameter: str,
    rows: Sequence[int] | None = None,
) -> list[int]:
    """Return the row numbers of an epoch, in ascending order.

    A row of a category with a share may be there repeatedly: of ``n`` rows that have to be ``m``,
    each comes ``m // n`` times, and ``m % n`` drawn ones once more.

    Args:
        categories: The category of every row there is.
        shares: By category its share of the epoch, in sum below 1.
        seed: Seed of the draws; each epoch has its own.
        parameter: The parameter that has the shares, for messages.
        rows: The rows to choose from; None for all.

    Raises:
        DataError: A category with a share has no row, or no other has one.
    """
    if rows is None:
        numbers = list(range(len(categories)))
    else:
        numbers = list(rows)
    if not shares:
        return numbers
    of_category: dict[str, list[int]] = {name: [] for name in shares}
    others: list[int] = []
    for row in numbers:
        of_category.get(categories[row], others).append(row)
    for name, listed in of_category.items():
        if not listed:
            known = ", ".join(sorted({categories[row] for row in numbers})) or "none"
            raise DataError(
                f"{parameter} names the category {name}, of which there is no usable row in "
                f"training; there are: {known}"
            )
    if not others:
        raise DataError(
            f"{parameter} names all categories of the rows; leave one out, which gets the rest"
        )
    total = len(others) / (1 - sum(shares.values()))
    chosen = list(others)
    generator = generator_of(seed, epoch)
    for name, share in shares.items():
        listed = of_category[name]
        wanted = max(1, round(share * total))
        repeats, drawn = divmod(wanted, len(listed))
        chosen += listed * repeats
        order = generator.permutation(len(listed))
        chosen += [listed[place] for place in order[:drawn]]
    return sorted(chosen)


MOST_STRATA = 10
SMALLEST_STRATUM = 20


def _length_strata(difference: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the number of strata, and that of each pair, by the size of its difference (B,)."""
    size = np.abs(difference)
    unequal = size[size > 0]
    if not len(unequal):
        return 0, np.zeros(len(size), dtype=np.int64)
    strata = min(MOST_STRATA, max(1, len(unequal) // SMALLEST_STRATUM))
    bounds = np.quantile(unequal, np.arange(1, strata) / strata)
    return strata, np.searchsorted(bounds, size)


def balanced_count(differences: npt.ArrayLike) -> int:
    """Return how many rows ``length_balanced_rows`` draws of pairs with such differences (B,)."""
    difference = np.asarray(differences)
    strata, stratum = _length_strata(difference)
    longer = np.bincount(stratum[difference > 0], minlength=strata)
    shorter = np.bincount(stratum[difference < 0], minlength=strata)
    return int(2 * np.minimum(longer, shorter).sum())


def length_balanced_rows(differences: npt.ArrayLike, seed: int, draw: int = 0) -> list[int]:
    """Draw equally many pairs of either kind from each stratum, all of the rarer kind.

    Strata are quantiles of the absolute difference: ten, or fewer where they would hold less than
    twenty pairs.

    Args:
        differences: Length of the chosen minus that of the rejected reply, (B,).
        draw: Number of the draw; each is independent of the others.

    Returns:
        Row numbers in ascending order. Pairs of equal length are of neither kind and are left out.
    """
    difference = np.asarray(differences)
    strata, stratum = _length_strata(difference)
    generator = generator_of(seed, draw)
    rows: list[int] = []
    for number in range(strata):
        is_here = stratum == number
        longer = np.flatnonzero(is_here & (difference > 0))
        shorter = np.flatnonzero(is_here & (difference < 0))
        count = min(len(longer), len(shorter))
        for kind in (longer, shorter):
            drawn = generator.permutation(kind)[:count]
            rows += drawn.tolist()
    return sorted(rows)


def length_balanced_epoch(differences: npt.ArrayLike, seed: int, epoch: int) -> list[int]:
    """Draw the pairs of one epoch: balanced ones, anew each time, and all of equal length."""
    ties = np.flatnonzero(np.asarray(differences) == 0)
    balanced = length_balanced_rows(differences, seed, epoch)
    return sorted([*balanced, *ties.tolist()])


MOST_MICRO_BATCHES = 8
# Below this many positions a pass costs nearly as much with fewer of them: the demo's batches of
# 1,000 took the same processor time in one pass and in several.
SMALLEST_MICRO_BATCH = 512
CUT_POSITIONS = 512  # places among the sorted rows at which micro-batches may begin
IMPOSSIBLE = 1 << 50  # positions of a micro-batch that would end before it begins


def padding_share(useful: int, computed: int) -> float:
    """Return the share of computed token positions that hold padding; 0 where nothing was computed.

    Args:
        useful: Tokens that are not padding.
        computed: Positions of all rows, padding included.
    """
    if not computed:
        return 0.0
    return (computed - useful) / computed


@dataclass(frozen=True)
class Partition:
    """Rows in micro-batches, each padded to its own longest row.

    Attributes:
        micro_batches: Row numbers of each.
        computed: Positions of all rows, padding included.
    """

    micro_batches: list[list[int]]
    computed: int


def partitions(lengths: Sequence[int], most: int) -> list[Partition]:
    """Return the partitions into 1, 2, ... ``most`` micro-batches that need the fewest positions.

    A single micro-batch keeps the rows in their order; more of them have the rows sorted by length.

    Args:
        most: The largest number of micro-batches; at most the number of rows.
    """
    tokens = np.asarray(lengths)
    order = np.argsort(tokens, kind="stable")
    count = len(order)
    cut_positions = min(count, max(CUT_POSITIONS, most))
    ends = np.unique(np.linspace(0, count, cut_positions + 1).astype(int))
    longest = tokens[order[ends[1:] - 1]]
    # positions[i, j]: those of one micro-batch from the i-th cut to the (j + 1)-th.
    sizes = ends[np.newaxis, 1:] - ends[:-1, np.newaxis]
    positions = sizes * longest[np.newaxis, :]
    positions = np.where(sizes > 0, positions, IMPOSSIBLE)
    fewest = positions[0]
    begins: list[np.ndarray] = []
    best = [Partition([list(range(count))], int(fewest[-1]))]
    while len(best) < most:
        # The last micro-batch begins at cut i + 1, where the rows before it are cut as well as
        # possible.
        totals = fewest[:-1, np.newaxis] + positions[1:, :]
        begins.append(totals.argmin(axis=0) + 1)
        fewest = totals.min(axis=0)
        cuts = [len(ends) - 1]
        for begin in reversed(begins):
            last = cuts[-1]
            cuts.append(int(begin[last - 1]))
        rows = []
        start = 0
        for cut in reversed(cuts):
            rows.append(order[start : ends[cut]].tolist())
            start = ends[cut]
        best.append(Partition(rows, int(fewest[-1])))
    return best


def least_padded(shards: Sequence[Sequence[int]], max_padding: float) -> list[Partition]:
    """Return the rows of each rank in micro-batches, as few as keep the padding within bounds.

    All ranks get the same number of micro-batches, because they gather sharded parameters together:
    at most eight, no more than a rank has rows, and on average at least 512 positions each before
    they are cut.

    Args:
        shards: Tokens of each row, rank by rank.
        max_padding: The bound of :func:`padding_share`; 1 gives one micro-batch.
    """
    useful = positions = 0
    for lengths in shards:
        useful += sum(lengths)
        positions += len(lengths) * max(lengths)
    filled = positions // (len(shards) * SMALLEST_MICRO_BATCH)
    fewest_rows = min(len(lengths) for lengths in shards)
    most = max(min(MOST_MICRO_BATCHES, filled, fewest_rows), 1)
    of_ranks = [partitions(lengths, most) for lengths in shards]
    for choice in zip(*of_ranks, strict=True):
        computed = sum(part.computed for part in choice)
        if padding_share(useful, computed) <= max_padding:
            break
    return list(choice)


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
        """The width that this pair needs in a padded batch: tokens of its longer sequence."""
        longer_reply = max(len(self.chosen), len(self.rejected))
        return len(self.prompt) + longer_reply

    @property
    def length_difference(self) -> int:
        """Tokens of the chosen minus those of the rejected reply."""
        return len(self.chosen) - len(self.rejected)


def usable_pairs(
    tokens: TokenTable, max_tokens: int
) -> tuple[TableRows[TokenisedPair], dict[str, int]]:
    """Drop the pairs that training cannot use.

    A pair is over-long when prompt + either reply exceeds ``max_tokens``: cutting the end of a
    reply would remove the token that the reward is read at. A pair is identical when both replies
    have the same tokens (their texts may differ, for example in characters that the tokenizer
    normalises): its loss is log 2 for every model.

    Returns:
        The usable pairs, and how many were dropped: ``{"over_long": …, "identical": …}``. Of the
        over-long ones ``identical_if_cut`` counts those that would be identical if they were cut at
        ``max_tokens``.
    """
    prompt = tokens.column("prompt")
    chosen = tokens.column("chosen")
    rejected = tokens.column("rejected")
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
    categories = tokens.table.column(CATEGORY)

    def pairs(rows: npt.NDArray[np.int64]) -> list[TokenisedPair]:
        taken = []
        for row in rows.tolist():
            category = categories[row].as_py()
            taken.append(TokenisedPair(row, prompt[row], chosen[row], rejected[row], category))
        return taken

    return TableRows(np.flatnonzero(~identical & ~over_long), pairs), dropped


def token_budget_batches(
    lengths: Sequence[int],
    budget: int,
    min_pairs: int,
    max_pairs: int,
    seed: int,
    epoch: int,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return an epoch of dynamic batches: as many pairs as fit ``budget`` tokens after padding.

    See section 4.2 of the paper. A batch of b pairs costs ``2 * b * max(length)``. Pairs of similar
    length share a batch: the shuffled epoch is sorted by length within windows, and the batches are
    shuffled again, so that length does not follow the step number. Every index occurs exactly once
    per epoch, or those of ``rows`` do.

    Args:
        lengths: Tokens of one padded row of each pair, that is of the longer of its two sequences.
        budget: Most tokens of a batch, padding included.
        min_pairs: Fewest pairs of a batch, even over the budget: the gradient of a smaller batch is
            noise.
        max_pairs: Most pairs of a batch.
        rows: The pairs of this epoch; None for all.
    """
    if not 1 <= min_pairs <= max_pairs:
        raise ValueError(f"need 1 <= min_pairs <= max_pairs, got {min_pairs} and {max_pairs}")
    if rows is None:
        rows = range(len(lengths))
    order = [rows[place] for place in epoch_order(len(rows), seed, epoch)]
    window = max_pairs * 8
    batches: list[list[int]] = []
    rest: list[int] = []
    for start in range(0, len(order), window):
        rest += order[start : start + window]
        # Longest first, so that the first pair of a batch fixes its width.
        rest.sort(key=lambda row: (-lengths[row], row))
        while rest:
            longest = max(lengths[rest[0]], 1)
            room = budget // (2 * longest)
            size = max(min(room, max_pairs), min_pairs)
            if size > len(rest):
                break
            batches.append(rest[:size])
            rest = rest[size:]
    if rest:
        _place_remainder(batches, rest, min_pairs, max_pairs)
    return _shuffled(batches, seed, epoch)


def _shuffled(batches: list[list[int]], seed: int, epoch: int) -> list[list[int]]:
    """Return batches in another order, which a second stream (offset key) gives."""
    order = epoch_order(len(batches), seed + (1 << 32), epoch)
    return [batches[number] for number in order]


def _place_remainder(
    batches: list[list[int]], rest: list[int], min_pairs: int, max_pairs: int
) -> None:
    """Append the last pairs of an epoch; too few of them join the batch before, or borrow from it."""
    missing = min_pairs - len(rest)
    last = batches[-1] if batches else []
    if missing > 0 and len(last) - missing >= min_pairs:
        borrowed = last[-missing:]
        del last[-missing:]
        batches.append([*borrowed, *rest])
    elif missing > 0 and last and len(last) + len(rest) <= max_pairs:
        last += rest
    else:
        batches.append(rest)


@dataclass(frozen=True)
class PairSequences:
    """The sequences of B pairs.

    Attributes:
        distinct: Prompt and reply of each sequence, in the order of first occurrence: chosen ones
            come first.
        chosen: Number of each pair's chosen sequence (B,).
        rejected: Number of each pair's rejected sequence (B,).
    """

    distinct: list[tuple[Sequence[int], Sequence[int]]]
    chosen: list[int]
    rejected: list[int]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each distinct sequence."""
        return [len(prompt) + len(reply) for prompt, reply in self.distinct]


def pair_sequences(pairs: Sequence[TokenisedPair], share: bool = True) -> PairSequences:
    """Number the sequences of pairs; with ``share`` one that several pairs have gets one number."""
    listed = [(pair.prompt, pair.chosen) for pair in pairs]
    listed += [(pair.prompt, pair.rejected) for pair in pairs]
    distinct = listed
    numbers = list(range(len(listed)))
    if share:
        known: dict[bytes, int] = {}
        distinct = []
        for place, sequence in enumerate(listed):
            prompt, reply = sequence
            key = ids_hash(prompt) + ids_hash(reply)
            numbers[place] = known.setdefault(key, len(known))
            if len(known) > len(distinct):
                distinct.append(sequence)
    count = len(pairs)
    return PairSequences(distinct, numbers[:count], numbers[count:])


def ids_hash(ids: Sequence[int]) -> bytes:
    """Return a 128-bit hash of token ids."""
    return blake2b(array("i", ids).tobytes(), digest_size=16).digest()


WINDOW = 16  # prompts whose batches are made together, longest first


@dataclass(frozen=True)
class _Unit:
    """Pairs of one prompt that fit a batch; ``width`` is the length of their longest sequence."""

    rows: list[int]
    sequences: set[int]
    width: int


class PromptBatches:
    """Epochs of batches of whole prompts, within a budget of ``distinct sequences x longest``."""

    def __init__(self, pairs: Sequence[TokenisedPair], limits: PairBatchConfig, seed: int) -> None:
        self.limits = limits
        self.seed = seed
        self.widths = [pair.length for pair in pairs]
        sequences = pair_sequences(pairs)
        self.sequences = list(zip(sequences.chosen, sequences.rejected, strict=True))
        self.prompts = [ids_hash(pair.prompt) for pair in pairs]

    def epoch(self, epoch: int, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Return every pair once, or every pair of ``rows``, batch by batch."""
        rows_of_prompt: dict[bytes, list[int]] = {}
        if rows is None:
            rows = range(len(self.widths))
        for row in rows:
            rows_of_prompt.setdefault(self.prompts[row], []).append(row)
        groups = list(rows_of_prompt.values())
        order = epoch_order(len(groups), self.seed, epoch)
        batches: list[list[int]] = []
        for start in range(0, len(order), WINDOW):
            units: list[_Unit] = []
            for number in order[start : start + WINDOW]:
                longest_first = sorted(groups[number], key=lambda row: -self.widths[row])
                single = [self._unit([row]) for row in longest_first]
                # The pairs of one prompt are cut where they exceed a batch.
                units += self._packed(single)
            units.sort(key=lambda unit: -unit.width)
            batches += [unit.rows for unit in self._packed(units)]
        return _shuffled(batches, self.seed, epoch)

    def _unit(self, rows: list[int]) -> _Unit:
        sequences: set[int] = set()
        for row in rows:
            sequences.update(self.sequences[row])
        return _Unit(rows, sequences, max(self.widths[row] for row in rows))

    def _packed(self, units: Sequence[_Unit]) -> Iterator[_Unit]:
        """Join neighbours as long as they fit a batch, and cut prompts that do not fit one."""
        packed = units[0]
        for unit in units[1:]:
            rows = packed.rows + unit.rows
            sequences = packed.sequences | unit.sequences
            both = _Unit(rows, sequences, max(packed.width, unit.width))
            positions = len(sequences) * both.width
            fits_budget = positions <= self.limits.token_budget
            fits_pairs = len(rows) <= self.limits.max_pairs
            missing = self.limits.min_pairs - len(packed.rows)
            if missing > 0 and not fits_pairs:
                yield self._unit(packed.rows + unit.rows[:missing])
                packed = self._unit(unit.rows[missing:])
            elif missing > 0 or (fits_budget and fits_pairs):
                packed = both
            else:
                yield packed
                packed = unit
        yield packed
