"""Pairs of each of the three reward models by split, and how many can be balanced by length.

The shares of a split decide by the hash of a prompt group alone, so counts under other shares are
exact too. Lengths are in tokens of the starting model where its tokenizer is here. Else what
characters and words tell stands for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.batches import balanced_count
from rlhf_core.data.schema import SPLITS, PairUser, unit_hash

READERS = {"reward": PairUser.REWARD, "referee": PairUser.REFEREE, "judge": PairUser.JUDGE}
SHARE_STEP = 0.01
# A word, an ideograph or a mark, about what a token is. Replies that differ in one word are often
# equally long in tokens, and then neither is the longer one, though their characters differ.
WORD = r"[\p{Han}\p{Hiragana}\p{Katakana}]|[\p{L}\p{M}\p{N}_]+|[^\s\p{L}\p{M}\p{N}_]"
# Of pairs balanced in tokens by the lesser and by the greater of those balanced in characters and in
# words: what lay between the 5th and the 95th percentile of samples of 150 pairs
# (benchmarks/results/own_pairs.md).
LEAST = 0.9
MOST = 1.5
REVERSED = 2  # about the square of 1.96, by half, as in Wilson's interval
Places = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]
Marked = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SplitPairs:
    """Pairs of one split of one reader.

    A measure is of balanced pairs; an epoch of training has those of equal length too.

    Attributes:
        pairs: How many there are.
        balanced: How many are left when lengths are balanced.
        equal: How many are of equal length.
        dropped: How many more there would be, were they not too long or equal as tokens.
    """

    pairs: int
    balanced: int
    equal: int = 0
    dropped: int = 0


# By reader and split. The test pairs are common to all readers.
ReaderCounts = Mapping[str, Mapping[str, SplitPairs]]


@dataclass(frozen=True)
class PairLengths:
    """Preference pairs by what the shares of a split and the balance of lengths look at.

    Attributes:
        groups: The number of each pair's prompt group (N,).
        places: Where each group lies between 0 and 1 for splits, for the judge and for the referee,
            (G, 3).
        estimates: Length of the chosen minus that of the rejected reply in characters and in words
            (2, N).
        tokens: The same in tokens (N,); None where there is no tokenizer.
        dropped: By reader, which pairs it cannot use, as they are too long or equal as tokens (N,).
        longest: By reader, the most tokens of a prompt with a reply.
        hopeful: Whether estimates are high rather than low.
    """

    groups: npt.NDArray[np.int64]
    places: Places
    estimates: Lengths
    tokens: Lengths | None = None
    dropped: Mapping[str, Marked] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)
    hopeful: bool = False

    @classmethod
    def of(
        cls,
        groups: Sequence[str],
        seed: int,
        estimates: Lengths,
        tokens: Lengths | None = None,
        dropped: Mapping[str, Marked] | None = None,
        longest: Mapping[str, int] | None = None,
    ) -> PairLengths:
        """Make them of the name of each pair's group, which ``seed`` places in a split."""
        numbers: dict[str, int] = {}
        for group in groups:
            numbers.setdefault(group, len(numbers))
        places = np.zeros((len(numbers), 3))
        for group, number in numbers.items():
            # as ``schema.split_of`` and ``schema.pair_user_of`` have it
            places[number] = [unit_hash(of, seed, group) for of in ("split", "judge", "referee")]
        of_pairs = np.array([numbers[group] for group in groups], dtype=np.int64)
        return cls(of_pairs, places, estimates, tokens, dropped or {}, longest or {})

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def prompts(self) -> int:
        """How many prompt groups there are."""
        return len(np.unique(self.groups))

    @property
    def differences(self) -> Lengths:
        """Length of the chosen minus that of the rejected reply, in tokens or words (N,)."""
        if self.tokens is None:
            return self.estimates[1]
        return self.tokens

    def in_split(self, split: str, config: SplitConfig) -> Marked:
        """Return which pairs are in a split."""
        position = self.places[self.groups, 0]
        is_test = position < config.test
        is_held_out = position < config.test + config.validation
        of_splits = {"test": is_test, "validation": is_held_out & ~is_test, "train": ~is_held_out}
        return of_splits[split]

    def counts(self, config: SplitConfig) -> ReaderCounts:
        """Count the pairs of every reader and split under the shares of ``config``."""
        of_judge = self.places[self.groups, 1] < config.judge
        of_referee = ~of_judge & (self.places[self.groups, 2] < config.referee)
        users = {"judge": of_judge, "referee": of_referee, "reward": ~of_judge & ~of_referee}
        counts: dict[str, dict[str, SplitPairs]] = {}
        for reader in READERS:
            counts[reader] = {}
            for split in SPLITS:
                here = self.in_split(split, config)
                if split != "test":
                    here = here & users[reader]
                dropped = self.dropped.get(reader, np.zeros(len(self), dtype=bool))
                counts[reader][split] = self._counted(here & ~dropped, here & dropped)
        return counts

    def test_prompts(self, config: SplitConfig) -> int:
        """Count the different prompt groups among the test pairs."""
        return len(np.unique(self.groups[self.in_split("test", config)]))

    def adapted(self, config: SplitConfig) -> SplitConfig:
        """Return the shares with the smallest test share that leaves ``fewest_balanced`` pairs.

        They are left in characters and in words, so that stage validate needs no tokenizer. Where
        no share leaves so many, the shares stay: a larger one would take pairs from training for
        nothing. As data that suffice grow further, the share falls back to what is set, so that no
        training group becomes a test group.
        """
        test = config.test
        while not self._leaves_enough(test, config.fewest_balanced):
            if test >= config.most_test:
                return config
            test = min(round(test + SHARE_STEP, 4), config.most_test)
        return config.model_copy(update={"test": test})

    def grown(self, total: int, generator: np.random.Generator) -> PairLengths:
        """Return these pairs and further ones that their source may give, ``total`` in all.

        Further prompt groups are drawn from a resample of those at hand (bootstrap), so that draws
        differ as much as sources do of which a sample like this one is seen. Where both kinds of
        preference occur, ``REVERSED`` groups of the resample have theirs reversed, as Wilson's
        interval adds some of both kinds: by chance a small sample lacks the rarer one.
        """
        if total <= len(self):
            return self
        count = len(self.places)
        sizes = np.bincount(self.groups, minlength=count)
        sampled = generator.integers(0, count, count)
        signs = np.ones(count, dtype=np.int64)
        if self.differences.min() < 0 < self.differences.max():
            sampled = np.concatenate([sampled, generator.integers(0, count, REVERSED)])
            signs = np.concatenate([signs, np.full(REVERSED, -1)])
        missing = total - len(self)
        drawn = np.zeros(0, dtype=np.int64)
        while sizes[sampled[drawn]].sum() < missing:
            drawn = np.concatenate([drawn, generator.integers(0, len(sampled), missing)])
        drawn = drawn[: np.searchsorted(np.cumsum(sizes[sampled[drawn]]), missing) + 1]
        order = np.argsort(self.groups, kind="stable")
        starts = np.cumsum(sizes) - sizes
        drawn_groups = sampled[drawn]
        rows = [order[starts[group] : starts[group] + sizes[group]] for group in drawn_groups]
        added = np.concatenate(rows)[:missing]
        new = np.repeat(np.arange(len(drawn)), sizes[drawn_groups])[:missing]
        kept = np.concatenate([np.arange(len(self)), added])
        sign = np.concatenate([np.ones(len(self), dtype=np.int64), signs[drawn][new]])
        places = np.concatenate([self.places, generator.random((len(drawn), 3))])
        return replace(
            self,
            groups=np.concatenate([self.groups, count + new]),
            places=places,
            estimates=self.estimates[:, kept] * sign,
            tokens=None if self.tokens is None else self.tokens[kept] * sign,
            dropped={reader: marked[kept] for reader, marked in self.dropped.items()},
        )

    def _counted(self, here: Marked, dropped: Marked) -> SplitPairs:
        pairs = int(here.sum())
        lost = int(dropped.sum())
        if self.tokens is not None:
            of_tokens = self.tokens[here]
            equal = int(np.count_nonzero(of_tokens == 0))
            return SplitPairs(pairs, balanced_count(of_tokens), equal, lost)
        characters, words = (balanced_count(lengths[here]) for lengths in self.estimates)
        equal = int(np.count_nonzero((self.estimates[:, here] == 0).all(axis=0)))
        if self.hopeful:
            balanced = math.ceil(MOST * max(characters, words))
            return SplitPairs(pairs, min(balanced, pairs), equal)
        balanced = math.floor(LEAST * min(characters, words))
        return SplitPairs(pairs, balanced, equal)

    def _leaves_enough(self, test: float, fewest: int) -> bool:
        """Return whether a test share leaves so many pairs when lengths are balanced."""
        is_test = self.places[self.groups, 0] < test
        for lengths in self.estimates:
            differences = lengths[is_test]
            # At most all of the rarer kind are left, which takes less time to count.
            longer = np.count_nonzero(differences > 0)
            rarer = min(longer, np.count_nonzero(differences < 0))
            if 2 * rarer < fewest or balanced_count(differences) < fewest:
                return False
        return True


def estimated_differences(table: pa.Table) -> Lengths:
    """Return by how many characters and words ``chosen`` is longer than ``rejected``, (2, N)."""
    rows = []
    for count in (pc.utf8_length, _words):
        chosen = count(table.column("chosen")).to_numpy().astype(np.int64)
        rejected = count(table.column("rejected")).to_numpy().astype(np.int64)
        rows.append(chosen - rejected)
    return np.stack(rows)


def _words(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.count_substring_regex(texts, WORD)
