"""The time of stages on GPUs: against both iterations that were measured, and what ranks do
without rows.
"""

from __future__ import annotations

import pytest
from commands import ROOT

from rlhf_core.config.loading import Params
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.command import PlanRequest
from rlhf_extras.memory.times import LINK, NETWORK, stage_times
from rlhf_extras.memory.workload import (
    DataShape,
    steps_short_of_rows,
    work_of_stage,
    working_stages,
)

# What `make gpu-acceptance` ran (docs/gpus.md): vocabulary, width, feed-forward, layers, heads, and
# heads of keys and values.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
MEASURED = {
    "0.5 B": ((32000, 1024, 4096, 28, 16, 8), 6.90, (1.90, 1.24, 0.37, 2.58)),
    "7 B, 4 layers": ((32000, 4096, 11008, 4, 32, 32), 6.96, (1.39, 1.45, 0.42, 3.00)),
}
ACCEPTANCE = (
    "base.dtype=bfloat16", "ppo.batch_size=256", "ppo.minibatches=1", "ppo.micro_batch_tokens=16384",
    "ppo.max_new_tokens=256",
)  # fmt: skip
ROWS = DataShape(256, 256, 512)


def settings(profile: str | None, *sets: str) -> Params:
    return PlanRequest(ROOT, profile, sets).params


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_iterations_are_projected_within_a_tenth(name: str) -> None:
    sizes, iteration, phases = MEASURED[name]
    config = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
    architecture = Architecture.of(config | dict(zip(SIZES, sizes, strict=True)), name)
    (found,) = stage_times(settings(None, *ACCEPTANCE), architecture, ROWS, ["ppo"])
    assert sum(found.step.values()) == pytest.approx(iteration, rel=0.1)
    for phase, measured in zip(("generation", "forward", "rewards", "update"), phases, strict=True):
        assert found.step[phase] == pytest.approx(measured, rel=0.1), phase
    assert (found.rows_per_rank, found.idle, found.tokens) == (256, 0.0, 256 * 512)


def test_ranks_without_a_row_of_their_own_are_named_with_what_would_do() -> None:
    gpus = [f"compute.launch.{stage}.processes=56" for stage in ("ppo", "critic", "sft", "reward")]
    params = settings(
        None, *gpus, "ppo.batch_size=128", "ppo.minibatches=4", "critic.batch_size=128",
        "critic.minibatches=4", "sft.batch_size=56", "reward.batch.min_pairs=56",
    )  # fmt: skip
    warnings = steps_short_of_rows(params)
    assert [warning.split(":")[0] for warning in warnings] == ["critic", "ppo", "ppo"]
    assert "24 ranks only repeat" in warnings[0] and "critic.batch_size=224" in warnings[0]
    assert "24 ranks only repeat" in warnings[1] and "ppo.batch_size=224" in warnings[1]
    assert "ppo.ptx.batch_size=56" in warnings[2]
    enough = ("critic.batch_size=224", "ppo.batch_size=224", "ppo.ptx.batch_size=56")
    done = settings(
        None, *gpus, "ppo.minibatches=4", "critic.minibatches=4", "sft.batch_size=56",
        "reward.batch.min_pairs=56", *enough,
    )  # fmt: skip
    assert steps_short_of_rows(done) == []


@pytest.mark.parametrize("overlay", ["8x80gb", "64x80gb", "1x24gb", "1x80gb"])
def test_overlays_of_hardware_leave_no_rank_without_rows(overlay: str) -> None:
    assert steps_short_of_rows(settings(f"paper-7b,{overlay}")) == []


def test_what_several_ranks_send_and_idle_is_counted() -> None:
    tiny = Architecture.of(
        {"model_type": "llama", "max_position_embeddings": 2048} | dict(zip(SIZES, MEASURED["0.5 B"][0], strict=True)),
        "tiny",
    )  # fmt: skip
    eight = "compute.launch.ppo.processes=8"
    (alone,) = stage_times(settings(None, *ACCEPTANCE), tiny, ROWS, ["ppo"])
    (within,) = stage_times(settings(None, *ACCEPTANCE, eight), tiny, ROWS, ["ppo"])
    nodes = (
        "pools.ppo=null",
        "compute.launch.ppo.nodes=2",
        'compute.launch.ppo.rendezvous="node1:29500"',
    )
    (between,) = stage_times(
        settings(None, *ACCEPTANCE, "compute.launch.ppo.processes=4", *nodes), tiny, ROWS, ["ppo"]
    )
    assert "sending" not in alone.step
    assert (within.ranks, within.rows_per_rank) == (8, 32)
    assert within.step["update"] == pytest.approx(alone.step["update"] / 8, rel=0.1)
    assert between.step["sending"] == pytest.approx(within.step["sending"] * LINK / NETWORK)
    (idle,) = stage_times(
        settings(None, *ACCEPTANCE, eight, "ppo.batch_size=12"), tiny, ROWS, ["ppo"]
    )
    assert (idle.rows_per_rank, idle.idle) == (2, 0.25)


def test_each_working_stage_has_passes_under_every_method() -> None:
    for sets in ((), ("policy.method=dpo",), ("policy.method=rejection_sampling",)):
        params = settings(None, *sets)
        assert ("critic" in working_stages(params)) == (not sets)
        for stage in working_stages(params):
            kinds = {one.kind for one in work_of_stage(params, stage, ROWS) if one.tokens}
            assert ("train" in kinds) == (stage != "evaluate"), stage
