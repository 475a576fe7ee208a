"""Splits by prompt group: one hash decides, so all data sets of a run agree and no group is in two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum

from rlhf_core.config.data import SplitConfig

SPLITS = ("train", "validation", "test")


class PairUser(StrEnum):
    """The folder of the clean data with the training and validation pairs of one of the three reward models."""

    REWARD = "preferences"
    REFEREE = "preferences_referee"
    JUDGE = "preferences_judge"


def unit_hash(*parts: object) -> float:
    """Return a number in [0, 1) from the sha256 of the parts joined by ``|``."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(group: str, seed: int, config: SplitConfig) -> str:
    """Return ``train``, ``validation`` or ``test``: a function of (seed, group) and the shares alone."""
    position = unit_hash("split", seed, group)
    if position < config.test:
        return "test"
    return "validation" if position < config.test + config.validation else "train"


def pair_user_of(group: str, seed: int, config: SplitConfig) -> PairUser:
    """Return which model the pairs of a train or validation group belong to: the judge's are drawn first."""
    if unit_hash("judge", seed, group) < config.judge:
        return PairUser.JUDGE
    return PairUser.REFEREE if unit_hash("referee", seed, group) < config.referee else PairUser.REWARD


def assign(groups: Iterable[str], seed: int, config: SplitConfig) -> list[str]:
    """Return the split of each group in order; each distinct group is hashed once."""
    known: dict[str, str] = {}
    return [known.get(group) or known.setdefault(group, split_of(group, seed, config)) for group in groups]
