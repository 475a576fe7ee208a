"""The plan of the profile `smollm2-135m`: every phase of PPO as counted by hand, and processes beside measured ones."""

from __future__ import annotations

from functools import cache

import pytest

from rlhf_core.config.recipe import recipe_folder
from rlhf_core.memory.command import PlanRequest, estimate_of
from rlhf_core.memory.dry_run import MemoryUse
from rlhf_core.memory.estimate import StageEstimate

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KEYS, VOCABULARY = 576, 1536, 30, 9, 192, 49152
PROMPT, REPLY, TEXT, RANK, ADAPTED = 539, 96, 2413, 16, 10
WIDTH, CACHED = PROMPT + REPLY, 576  # the cache grows by 64 tokens
# Inputs and outputs of the seven linear layers of a decoder layer, which are those of the two halves of an adapter.
LINEAR = [(HIDDEN, HIDDEN), (HIDDEN, KEYS), (HIDDEN, KEYS), (HIDDEN, HIDDEN)]
LINEAR += [(HIDDEN, FEED_FORWARD), (HIDDEN, FEED_FORWARD), (FEED_FORWARD, HIDDEN)]
ADAPTER = sum(a + b for a, b in LINEAR)
# MiB: VmHWM of the stages of one run on two threads, of PPO until iteration 17 of 20; see docs/plan.md.
HELD = {"sft": 2277, "reward": 2372, "referee": 2126, "judge": 2344, "critic": 3349, "ppo": 5143}


@cache
def planned() -> dict[str, StageEstimate]:
    sets = ["base.dtype=bfloat16"]
    return {stage.stage: stage for stage in estimate_of(PlanRequest(recipe_folder(), "smollm2-135m", sets)).stages}


def phase(name: str) -> MemoryUse:
    return {phase.name: phase.use for phase in planned()["ppo"].phases}[name]


def kept_by_layer(width: int, rank: int) -> int:
    """Bytes per token that an adapted layer keeps for its backward pass.

    Two norms in float32, attention's queries, keys and values for every head, its output and sums, three tensors of
    SwiGLU, for each adapter its input and its middle in float32, and the mask of a row. The weights are frozen, so
    that their own inputs are not kept.
    """
    norms = 2 * (4 * HIDDEN + 4)
    attention, feed_forward = 4 * 2 * HIDDEN + 4 * HEADS, 3 * 2 * FEED_FORWARD
    adapters = 4 * sum(a for a, _ in LINEAR) + 7 * 4 * rank
    return norms + attention + feed_forward + adapters + 2 * width


def passing(width: int) -> int:
    """Bytes per token of a layer without gradient: three feed-forward and four hidden tensors, mask and rotations."""
    return 3 * 2 * FEED_FORWARD + 4 * 2 * HIDDEN + width + 2 * 2 * 64


@pytest.mark.slow
def test_what_ppo_holds_throughout_is_one_base_and_its_adapters() -> None:
    base, policy = 134_515_008 * 2, ADAPTED * RANK * ADAPTER * 4
    critic, frozen, head = 8 * 2 * RANK * ADAPTER * 4, 8 * RANK * ADAPTER * 4, 2 * HIDDEN
    step = phase("step")
    assert step.weights == base + policy + critic + 2 * frozen + 3 * head
    assert step.gradients == policy + critic + 4 * HIDDEN
    assert step.optimizer == pytest.approx(2 * step.gradients, rel=0.001)


@pytest.mark.parametrize(("name", "rows"), [("generation", 48), ("selection", 32)])
def test_prompts_are_read_in_one_pass_over_a_cache_of_all_layers(name: str, rows: int) -> None:
    use = phase(name)
    assert use.kv_cache == rows * CACHED * LAYERS * 2 * KEYS * 2
    assert use.activations == pytest.approx(rows * PROMPT * passing(PROMPT), rel=0.005)
    head, merged = 4 * VOCABULARY * HIDDEN, ADAPTED * 2 * sum(a * b for a, b in LINEAR)
    rollout = 48 * (WIDTH * 8 * 4 + REPLY * 4 * 20) if name == "selection" else 0
    assert use.other == head + merged + rollout


def test_a_pass_of_2048_positions_is_three_rollouts_of_full_length() -> None:
    rows = 2048 // WIDTH
    logits = rows * REPLY * VOCABULARY * 4
    assert rows == 3
    assert phase("rewards").activations == pytest.approx(rows * WIDTH * passing(WIDTH), rel=0.005)
    assert phase("scoring").logits == pytest.approx(2 * logits, rel=0.01)
    update = phase("update policy")
    kept = ADAPTED * kept_by_layer(WIDTH, RANK) + 4 * HIDDEN + 4
    assert update.activations == pytest.approx(rows * WIDTH * kept, rel=0.005)
    assert update.logits == pytest.approx(3 * logits, rel=0.01)
    # The critic's peak is in its backward pass, where some tensors of a layer are added.
    critic = rows * WIDTH * (8 * kept_by_layer(WIDTH, 2 * RANK) + 4 * HIDDEN + 4)
    assert critic < phase("update critic").activations < 1.04 * critic


def test_the_peak_of_ppo_is_a_pass_of_two_texts_of_ptx() -> None:
    assert planned()["ppo"].peak.name == "update ptx"
    use, tokens = phase("update ptx"), 2 * TEXT
    kept = ADAPTED * kept_by_layer(TEXT, RANK) + 4 * HIDDEN + 4
    assert use.activations == pytest.approx(tokens * kept, rel=0.001)
    # Four parts of at most 256 MiB: logits, their log-softmax and its gradient.
    assert use.logits == 3 * -(-tokens // 4) * VOCABULARY * 4
    assert use.gradients == ADAPTED * RANK * ADAPTER * 4
    assert use.other == 4 * VOCABULARY * HIDDEN + 48 * (WIDTH * 8 * 4 + REPLY * 4 * 20)


@pytest.mark.parametrize("stage", HELD)
def test_processes_are_planned_within_a_fifth_of_what_they_held(stage: str) -> None:
    process = planned()[stage].process
    assert process is not None and process / (1 << 20) == pytest.approx(HELD[stage], rel=0.2)
