"""Clean rows in chosen splits, for tests of the rules about the whole set."""

from __future__ import annotations

from typing import Any

from memory_rows import memory_rows
from validation_rows import make_row

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.splits import PairUser, pair_user_of, split_of
from rlhf_core.data.validation.set_rows import SetRows

SPLIT = SplitConfig()


def dialogue(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def group_of(split: str, user: PairUser = PairUser.REWARD) -> str:
    """A group that the hash puts into ``split``, and whose pairs are ``user``'s where it is not test."""
    names = (f"g{i}" for i in range(10_000))
    return next(
        g for g in names if split_of(g, 1, SPLIT) == split and (split == "test" or pair_user_of(g, 1, SPLIT) == user)
    )


def row(kind: str, i: int, split: str, *turns: str, user: PairUser = PairUser.REWARD) -> dict[str, Any]:
    return make_row(kind, i, prompt=dialogue(*turns), group=group_of(split, user))


def set_of(**rows: list[dict[str, Any]]) -> SetRows:
    return SetRows({kind: memory_rows(kind, rows.get(kind, [])) for kind in ROW_TYPES}, 1, SPLIT)
