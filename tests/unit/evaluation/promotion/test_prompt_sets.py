"""Disjoint sets of test prompts, the first of which is the evaluation's."""

from __future__ import annotations

import pytest

from rlhf_core.data.schema import Prompt
from rlhf_core.errors import DataError
from rlhf_core.evaluation.fixed_sets import prompts_of_set
from rlhf_core.evaluation.regression import fixed_subset

from ..conftest import sums

ROWS: list[Prompt] = sums(11)


def test_sets_share_no_prompt_and_the_first_is_the_evaluations() -> None:
    sets = [prompts_of_set(ROWS, 5, index, 2) for index in range(2)]
    assert sets[0] == fixed_subset(ROWS, 5, "evaluation")
    assert [len(rows) for rows in sets] == [5, 5] and len({row.id for rows in sets for row in rows}) == 10
    assert prompts_of_set(ROWS[::-1], 5, 1, 2) == sets[1], "whatever the order of rows"
    assert len(prompts_of_set(ROWS, 20, 0, 1)) == 11


def test_a_set_that_would_be_incomplete_is_refused() -> None:
    with pytest.raises(DataError, match=r"11 test prompts make 2 sets of evaluate\.prompts = 5"):
        prompts_of_set(ROWS, 5, 0, 3)
    with pytest.raises(DataError, match="11 test prompts make 1 sets"):
        prompts_of_set(ROWS, 9, 1, 1)
