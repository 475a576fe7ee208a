"""Which gates guarantee others: a bound is at least as strict only if nothing that passes it fails the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.gates import Condition
from rlhf_core.gates import check, weaker_conditions

NUMBERS = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    kind = draw(st.sampled_from(["at_least", "at_most", "at_least_of", "at_most_of"]))
    metric = draw(st.sampled_from(["kl", "length"]))
    if kind in ("at_least", "at_most"):
        return Condition(metric=metric, why="", **{kind: draw(NUMBERS)})
    return Condition(metric=metric, why="", factor=draw(NUMBERS), slack=draw(NUMBERS), **{kind: "other"})


@given(
    st.lists(conditions(), max_size=3),
    conditions(),
    st.fixed_dictionaries(dict.fromkeys(["kl", "length", "other"], NUMBERS)),
)
def test_what_passes_stricter_conditions_passes_the_required_one(
    own: list[Condition], required: Condition, metrics: dict[str, float]
) -> None:
    if not weaker_conditions(own, [required]) and all(check(condition, metrics).passed for condition in own):
        assert check(required, metrics).passed


def condition(**fields: Any) -> Condition:
    return Condition(metric="kl", why="", **fields)


@pytest.mark.parametrize(
    ("own", "required", "guaranteed"),
    [
        (condition(at_most=5.0), condition(at_most=6.0), True),
        (condition(at_most=6.0), condition(at_most=6.0), True),
        (condition(at_most=7.0), condition(at_most=6.0), False),
        (condition(at_least=0.7), condition(at_least=0.6), True),
        (condition(at_least=0.5), condition(at_least=0.6), False),
        (condition(at_most=5.0), condition(at_least=5.0), False),
        (condition(at_most=0.0), condition(at_most_of="other"), False),
        (condition(at_most_of="other", factor=2.0), condition(at_most_of="other", factor=2.0, slack=0.1), True),
        (condition(at_most_of="other", factor=2.0, slack=0.2), condition(at_most_of="other", factor=2.0), False),
        (condition(at_most_of="other", factor=1.5), condition(at_most_of="other", factor=2.0), False),
        (condition(at_most_of="another"), condition(at_most_of="other"), False),
    ],
)
def test_bounds_by_hand(own: Condition, required: Condition, guaranteed: bool) -> None:
    assert (weaker_conditions([own], [required]) == []) is guaranteed


def test_the_missing_conditions_are_named() -> None:
    required = [condition(at_most=6.0), condition(at_least=0.1)]
    assert weaker_conditions([condition(at_least=0.2)], required) == ["kl <= 6"]
