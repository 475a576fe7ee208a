"""Pairs of each of the three reward models by split, and how many can be balanced by length.

The shares of a split decide by the hash of a prompt group alone, so counts under other shares are
exact too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.batches import length_balanced_rows
from rlhf_core.data.schema import SPLITS, PairUser, pair_user_of, unit_hash

READERS = {"reward": PairUser.REWARD, "referee": PairUser.REFEREE, "judge": PairUser.JUDGE}
SHARE_STEP = 0.01


@dataclass(frozen=True)
class SplitPairs:
    """Pairs of one split of one reader.

    A measure is of balanced pairs; an epoch of training has those of equal length too.

    Attributes:
        pairs: How many there are.
        balanced: How many are left when lengths are balanced.
        equal: How many are of equal length.
    """

    pairs: int
    balanced: int
    equal: int = 0

    @classmethod
    def of(cls, differences: npt.ArrayLike) -> SplitPairs:
        """Count pairs by their length differences (N,)."""
        lengths = np.asarray(differences)
        balanced = len(length_balanced_rows(lengths, seed=0))
        return cls(len(lengths), balanced, equal=int(np.count_nonzero(lengths == 0)))


# By reader and split. The test pairs are common to all readers.
ReaderCounts = Mapping[str, Mapping[str, SplitPairs]]


@dataclass(frozen=True)
class PairLengths:
    """Preference pairs by what the shares of a split and the balance of lengths look at.

    Attributes:
        groups: The prompt group of each pair.
        differences: Length of the chosen minus that of the rejected reply (N,).
        seed: The seed of the split.
    """

    groups: Sequence[str]
    differences: npt.NDArray[np.int64]
    seed: int

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def _positions(self) -> npt.NDArray[np.float64]:
        """Where each pair's group lies between 0 and 1, as ``schema.split_of`` has it."""
        known = {group: unit_hash("split", self.seed, group) for group in set(self.groups)}
        return np.array([known[group] for group in self.groups], dtype=np.float64)

    @cached_property
    def balanced(self) -> int:
        """How many of all pairs are left when lengths are balanced."""
        return SplitPairs.of(self.differences).balanced

    def in_split(self, split: str, config: SplitConfig) -> npt.NDArray[np.bool_]:
        """Return which pairs are in a split."""
        is_test = self._positions < config.test
        is_held_out = self._positions < config.test + config.validation
        return {"test": is_test, "validation": is_held_out & ~is_test, "train": ~is_held_out}[split]

    def counts(self, config: SplitConfig) -> ReaderCounts:
        """Count the pairs of every reader and split under the shares of ``config``."""
        known = {group: pair_user_of(group, self.seed, config) for group in set(self.groups)}
        users = np.array([known[group] for group in self.groups], dtype=object)
        counts: dict[str, dict[str, SplitPairs]] = {}
        for reader, user in READERS.items():
            counts[reader] = {}
            for split in SPLITS:
                here = self.in_split(split, config)
                if split != "test":
                    here = here & (users == user)
                counts[reader][split] = SplitPairs.of(self.differences[here])
        return counts

    def test_prompts(self, config: SplitConfig) -> int:
        """Count the different prompt groups among the test pairs."""
        here = self.in_split("test", config)
        return len({group for group, is_test in zip(self.groups, here, strict=True) if is_test})

    def adapted(self, config: SplitConfig) -> SplitConfig:
        """Return the shares with the smallest test share that leaves ``fewest_balanced`` pairs.

        Where none does, the shares stay: a larger share would take pairs from training for nothing.
        As data that suffice grow further, the share falls back to what is set, so that no training
        group becomes a test group.
        """
        test = config.test
        while self._balanced_test(test, config) < config.fewest_balanced:
            if test >= config.most_test:
                return config
            test = min(round(test + SHARE_STEP, 4), config.most_test)
        return config.model_copy(update={"test": test})

    def _balanced_test(self, share: float, config: SplitConfig) -> int:
        here = self.in_split("test", config.model_copy(update={"test": share}))
        return SplitPairs.of(self.differences[here]).balanced


def pair_lengths(parts: Iterable[pa.Table], seed: int) -> PairLengths:
    """Read pairs from tables with ``group``, ``chosen`` and ``rejected``; lengths are characters."""
    groups: list[str] = []
    differences = [np.zeros(0, np.int64)]
    for table in parts:
        groups += table.column("group").to_pylist()
        chosen = pc.utf8_length(table.column("chosen")).to_numpy()
        rejected = pc.utf8_length(table.column("rejected")).to_numpy()
        differences.append(chosen.astype(np.int64) - rejected.astype(np.int64))
    return PairLengths(groups, np.concatenate(differences), seed)
