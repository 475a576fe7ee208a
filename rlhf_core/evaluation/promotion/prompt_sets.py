"""Rotating prompt sets: attempts at one champion on disjoint test prompts in turn.

Attempts on the same prompts have their luck in common: what these prompts happen to favour, each challenger profits
from again, and whoever looks at the replies in between learns them. Sets that share no prompt take turns. The error
budget counts the attempts on all sets together (:mod:`rlhf_core.evaluation.promotion.error_budget`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.data.schema import Prompt
from rlhf_core.errors import DataError
from rlhf_core.evaluation.regression import fixed_subset


def prompts_of_set(rows: Sequence[Prompt], size: int, index: int, sets: int) -> list[Prompt]:
    """Return set ``index``, from 0, of ``sets`` sets of the test prompts in the order of their hashes.

    Each has ``size`` prompts. The first is the one that policies are evaluated on; where it is the only one, it may be
    smaller.

    Raises:
        DataError: There are not enough prompts for that many sets.
    """
    needed = max(sets, index + 1)
    if needed > 1 and len(rows) < size * needed:
        raise DataError(
            f"{len(rows)} test prompts make {len(rows) // size} sets of evaluate.prompts = {size}, so "
            "registry.prompt_sets must not be more; or raise validate.split.test"
        )
    return fixed_subset(rows, len(rows), "evaluation")[index * size : (index + 1) * size]
