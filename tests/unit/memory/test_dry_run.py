"""The passes on shapes alone agree with the formulas at sizes that no test could allocate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.memory import subjects

from rlhf_core.memory.dry_run import dry_run
from rlhf_core.memory.setting import Recipe


def wide(**sections: Any) -> Recipe:
    """LLaMA-7B's widths, two layers deep."""
    recipe = subjects.large(80, ppo={"batch_size": 16, "micro_batch_size": 4, "max_new_tokens": 512}, **sections)
    lengths = replace(recipe.lengths, prompt=512)
    return replace(recipe, shape=replace(recipe.shape, layers=2), lengths=lengths)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_and_counted_bytes_agree_at_the_widths_of_llama_7b(checkpointing: bool) -> None:
    launch = {"ppo": {"gradient_checkpointing": checkpointing}}
    recipe = wide(compute={"launch": launch})
    found = dry_run(recipe)
    shape = recipe.shape
    assert found.parameters == {
        "policy": shape.causal_lm, "reference": shape.causal_lm, "critic": shape.scalar, "reward": shape.scalar,
    }  # fmt: skip
    assert [(one.name, one.shape) for one in found.passes] == [
        ("generation", (16,)),
        ("scoring", (4, 512, 32000)),
        ("update policy", (4, 512, 32000)),
        ("update critic", (4, 512)),
    ]
    for one in found.passes:
        assert one.planned == pytest.approx(one.counted, rel=0.1), one.name
    assert "dry run on shapes alone" in found.text() and found.as_json()["passes"]["scoring"]["shape"] == [
        4,
        512,
        32000,
    ]


def test_a_critic_on_the_policys_backbone_has_no_update_of_its_own() -> None:
    recipe = wide()
    shared = recipe.params.ppo.model_copy(update={"critic_mode": "shared", "critic_optimizer": None})
    small = replace(recipe.shape, hidden=64, intermediate=96, heads=4, kv_heads=4, head_dim=16, vocabulary=100)
    found = dry_run(replace(recipe, shape=small, params=recipe.params.model_copy(update={"ppo": shared})))
    assert [one.name for one in found.passes] == ["generation", "scoring", "update policy"]
