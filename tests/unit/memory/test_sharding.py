"""What each GPU keeps of a model, by hand: ZeRO's shares, offloading, 4-bit weights and the GPU's
own part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.memory import subjects

from rlhf_core.config.loading import check_params
from rlhf_core.errors import ConfigError
from rlhf_extras.memory.dry_run import MemoryUse, ModelSize, ModelVariant, model_size
from rlhf_extras.memory.sharding import (
    GIB,
    ParallelLayout,
    frozen_footprint,
    packed_size,
    parallel_layout,
    trained_footprint,
    usable_memory,
)
from rlhf_extras.memory.stage_plan import ModelRole, StagePlan
from rlhf_extras.memory.stages import plan_stage, plan_stages, planned_stages

PARAMETERS = 7_500_000_000  # the example of the ZeRO paper, figure 1, on 64 GPUs
SIZE = ModelSize(
    parameters=PARAMETERS, trainable=PARAMETERS, weights=2 * PARAMETERS, trainable_weights=2 * PARAMETERS,
    gradients=4 * PARAMETERS, optimizer=12 * PARAMETERS,
)  # fmt: skip
GIGA = 10**9


def zero(stage: int, **changes: Any) -> ParallelLayout:
    return ParallelLayout(engine="deepspeed", gpus=64, zero=stage, precision="bfloat16", **changes)


def test_zero_shards_optimiser_then_gradients_then_weights() -> None:
    one, two, three = (trained_footprint(SIZE, zero(stage)) for stage in (1, 2, 3))
    assert {footprint.held.optimizer for footprint in (one, two, three)} == {12 * PARAMETERS // 64}
    assert one.step.gradients == 30 * GIGA  # summed in float32
    # ZeRO-3 keeps the memory of its gradients from step to step.
    assert (
        two.step.gradients == three.held.gradients == 30 * GIGA // 64 and three.step.gradients == 0
    )
    assert [one.held.weights, two.held.weights, three.held.weights] == [
        15 * GIGA,
        15 * GIGA,
        15 * GIGA // 64,
    ]
    assert [footprint.at_work.weights for footprint in (one, two, three)] == [0, 0, 15 * GIGA]
    assert three.running.weights == 2 * GIGA  # DeepSpeed's default of live parameters
    # A bucket of 50 million float32 elements, two of bfloat16 ones that overlap, and one.
    assert [footprint.held.other for footprint in (one, two, three)] == [
        GIGA // 5,
        GIGA // 5,
        GIGA // 10,
    ]
    assert trained_footprint(SIZE, zero(2, overlap_comm=False)).held.other == GIGA // 10
    assert {footprint.step.other for footprint in (one, two, three)} == {30 * GIGA // 64}


def test_gradients_of_a_pass_count_as_they_are_kept() -> None:
    moments = (
        MemoryUse(gradients=15 * GIGA, activations=2 * GIGA),
        MemoryUse(activations=10 * GIGA),
    )
    variant = plan_stage(subjects.large(80), "sft").roles[0].variant

    def peak(layout: ParallelLayout) -> MemoryUse:
        role = ModelRole(name="policy", variant=variant, **vars(trained_footprint(SIZE, layout)))
        return role.peak_of_update(moments)

    # Plain torch sums them up in float32.
    assert peak(ParallelLayout(precision="bfloat16")) == MemoryUse(
        gradients=30 * GIGA, activations=2 * GIGA
    )
    assert peak(zero(1)) == MemoryUse(gradients=30 * GIGA, activations=2 * GIGA)
    assert (
        peak(zero(2)) == moments[1]
    )  # the shares of gradients are less than the other moment's activations
    assert peak(zero(3)) == MemoryUse(weights=2 * GIGA, activations=10 * GIGA)


def test_offloading_moves_the_state_to_the_host() -> None:
    footprint = trained_footprint(SIZE, zero(2, offload_optimizer=True))
    assert (footprint.step.total, footprint.held.optimizer) == (0, 0)
    assert footprint.host == (12 + 4) * PARAMETERS // 64
    everything = trained_footprint(SIZE, zero(3, offload_optimizer=True, offload_parameters=True))
    assert everything.held.weights == 0 and everything.host == (12 + 4 + 2) * PARAMETERS // 64


def test_plain_torch_keeps_masters_moments_and_gradients_in_float32() -> None:
    """By hand: two moments of 4 bytes per parameter, and 4 more for the master of a bfloat16
    weight.
    """
    for precision, element, masters in (("float32", 4, 0), ("bfloat16", 2, 1)):
        layout = ParallelLayout(gpus=4, precision=precision)  # type: ignore[arg-type]
        size = model_size(ModelVariant(subjects.TIED, "causal_lm", precision, trained="weights"))  # type: ignore[arg-type]
        parameters, tensors = 512 * 64 + 2 * (4 * 64**2 + 3 * 64 * 176 + 2 * 64) + 64, 1 + 2 * 9 + 1
        footprint = trained_footprint(size, layout)
        optimizer = (
            8 + 4 * masters
        ) * parameters + 4 * tensors  # AdamW counts the steps of every tensor
        assert footprint.held == MemoryUse(weights=element * parameters, optimizer=optimizer)
        assert (
            footprint.step.gradients == 4 * parameters and footprint.gradients_kept == 4 / element
        )
        assert frozen_footprint(parameters, layout).held == MemoryUse(weights=element * parameters)


def test_frozen_models_are_on_the_device_or_in_host_memory_or_sharded() -> None:
    size = 4 * GIGA
    offloaded = frozen_footprint(2 * GIGA, zero(2, frozen="offload"))
    assert (offloaded.held.total, offloaded.host, offloaded.at_work.weights) == (0, size, size)
    sharded = frozen_footprint(2 * GIGA, zero(2, frozen="sharded"))
    assert (sharded.held.weights, sharded.running.weights, sharded.at_work.total) == (
        size // 64,
        2 * GIGA,
        0,
    )
    parameters_away = zero(3, frozen="sharded", offload_optimizer=True, offload_parameters=True)
    assert frozen_footprint(2 * GIGA, parameters_away).held.weights == 0


def test_four_bit_weights_take_codes_scales_and_tables() -> None:
    # One matrix of 64 x 256 x 4 parameters: half a byte each, a scale for 64, a float for 256
    # scales, 273 floats.
    size = ModelSize(
        parameters=65_636, trainable=100, weights=2 * 65_536 + 4 * 100, trainable_weights=400, gradients=400,
        optimizer=800, linear=65_536, matrices=1, largest=65_536,
    )  # fmt: skip
    assert packed_size(size) == 32_768 + 1_024 + 4 * 4 + 273 * 4
    footprint = trained_footprint(size, ParallelLayout(precision="bfloat16"), packed=True)
    assert footprint.held.weights == footprint.loaded.weights == 4 * 100 + packed_size(size)
    assert footprint.whole.weights == 2 * 65_536 + 4 * 100  # it is loaded before it is packed
    assert (
        footprint.running == footprint.at_work == MemoryUse(weights=2 * 65_536 + 4 * 1_024)
    )  # one matrix unpacked


def test_the_launch_settings_are_read_from_params_and_from_a_deepspeed_file(tmp_path: Path) -> None:
    file = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}}'
    (tmp_path / "zero.json").write_text(file)
    launch = {
        "sft": {"engine": "deepspeed", "processes": 4, "nodes": 2, "rendezvous": "host:1"},
        "ppo": {"engine": "deepspeed", "deepspeed": "zero.json", "frozen": "sharded"},
        "critic": {"processes": 3, "gradient_checkpointing": True},
    }
    params = check_params({"compute": {"launch": launch}, "base": {"dtype": "bfloat16"}})
    sft, ppo, critic = (
        parallel_layout(params, stage, tmp_path) for stage in ("sft", "ppo", "critic")
    )
    assert (sft.engine, sft.gpus, sft.zero, sft.offload_optimizer) == ("deepspeed", 8, 2, False)
    assert (ppo.zero, ppo.offload_optimizer, ppo.offload_parameters, ppo.frozen) == (
        3,
        True,
        False,
        "sharded",
    )
    assert trained_footprint(SIZE, ppo).held.other == 2 * 1000
    assert (critic.engine, critic.gpus, critic.zero, critic.gradient_checkpointing) == (
        "local",
        3,
        0,
        True,
    )
    assert parallel_layout(params, "evaluate", tmp_path) == ParallelLayout(precision="bfloat16")


def test_what_the_engine_would_refuse_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 0}}')
    launch = {"sft": {"engine": "deepspeed", "deepspeed": "zero.json"}}
    params = check_params({"compute": {"launch": launch}, "base": {"dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match="no float32 master weights"):
        parallel_layout(params, "sft", tmp_path)


def test_a_gpu_keeps_a_share_of_its_memory_to_itself() -> None:
    assert (usable_memory(22), usable_memory(0.5)) == (20 * GIB, 0)


def ppo(**changes: Any) -> StagePlan:
    return plan_stage(subjects.large(80, ppo={"max_new_tokens": 256, **changes}), "ppo")


def roles_of(stage: StagePlan) -> list[str]:
    return [role.name for role in stage.roles]


FREE = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4}
ENSEMBLE = {
    "sources": [{"kind": "ensemble", "paths": ["a", "b"]}, {"kind": "function", "target": "m:f"}]
}
FROZEN = ["reference", "reward", "referee"]
ROLLOUT = ["loading", "generation", "scoring", "rewards", "update policy", "update ptx"]
# Settings, and the roles and phases of the stage that trains the policy by them.
POLICY_STAGES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["policy", "critic", *FROZEN], [*ROLLOUT, "update critic", "step", "selection", "saving"]),
    (
        {"ppo": {"critic_mode": "shared", "critic_optimizer": None}},
        ["policy", *FROZEN],
        [*ROLLOUT, "step", "selection", "saving"],
    ),
    ({"ppo": FREE}, ["policy", *FROZEN], [*ROLLOUT, "step", "selection", "saving"]),
    (
        {"ppo": {"reward": ENSEMBLE}},
        ["policy", "critic", "reference", "ensemble 1", "ensemble 2", "reward", "referee"],
        [*ROLLOUT, "update critic", "step", "selection", "saving"],
    ),
    (
        {"policy": {"method": "dpo"}},
        ["policy"],
        ["loading", "log-probabilities", "update", "step", "saving"],
    ),
    (
        {"policy": {"method": "rejection_sampling"}},
        ["policy", "reward"],
        ["loading", "generation", "rewards", "update", "step", "saving"],
    ),
]


@pytest.mark.parametrize(("settings", "roles", "phases"), POLICY_STAGES)
def test_the_policy_is_trained_beside_the_models_that_its_settings_ask_for(
    settings: dict[str, Any], roles: list[str], phases: list[str]
) -> None:
    stage = plan_stage(subjects.large(80, **settings), "ppo")
    assert roles_of(stage) == roles and list(stage.phases) == phases


def test_without_a_critic_none_is_trained_before() -> None:
    inputs = subjects.large(80, ppo=FREE)
    assert "critic" in planned_stages(subjects.params()) and "critic" not in planned_stages(
        inputs.params
    )
    assert "critic" not in planned_stages(subjects.params(policy={"method": "dpo"}))
    with pytest.raises(ConfigError, match="stage 'critic' is not one that memory is planned for"):
        plan_stages(inputs, ["critic"])


@pytest.mark.slow
def test_adapters_on_shared_weights_hold_themselves_alone() -> None:
    pytest.importorskip("peft")
    assert roles_of(ppo(policy_lora={"rank": 8})) == ["policy", "critic", "reward", "referee"]
    alone = ppo(policy_lora={"rank": 8}).roles[-1].held.total
    adapters = {"reward": {"lora": {"rank": 4}}, "referee": {"lora": {"rank": 4}}}
    shared = {"policy_lora": {"rank": 8}, "share_base": True}
    together = plan_stage(subjects.large(80, ppo=shared, **adapters), "ppo")
    reward, referee = together.roles[-2:]
    # LLaMA-7B: 32 layers of 4 x (4096 + 4096) + 3 x (4096 + 11008) ends of rank 4 in float32, a
    # bfloat16 head of 4096.
    assert (
        reward.held.total
        == referee.held.total
        == 4 * 4 * 32 * (4 * 8192 + 3 * 15104) + 2 * 4096
        < alone / 100
    )
    assert (
        together.roles[1].held.weights > 2 * 6_600_000_000
    )  # a critic of its own: it has no adapters
    adapted = plan_stage(
        subjects.large(80, critic={"lora": {"rank": 8}}, ppo=shared, **adapters), "ppo"
    )
    critic = adapted.roles[1]
    own, head = 12 * 32 * (4 * 8192 + 3 * 15104), 4096  # the reward model's rank 4 and its own 8
    tensors = 2 * 7 * 32 + 1
    assert (critic.held.weights, critic.step.gradients) == (4 * own + 2 * head, 4 * (own + head))
    assert (
        critic.held.optimizer == 8 * (own + head) + 4 * tensors + 4 * head
    )  # the head has a float32 master


def test_scorers_of_other_sizes_are_counted_by_their_own_config(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(subjects.TIED.text)
    sources = [{"kind": "model", "path": "other"}, {"kind": "classifier", "model": "other"}]
    inputs = replace(subjects.large(80, ppo={"reward": {"sources": sources}}), root=tmp_path)
    sizes = {role.name: role.parameters for role in plan_stage(inputs, "ppo").roles}
    # TIED: 512 x 64 entries, two layers of 4 x 64^2 + 3 x 64 x 176 and two norms, a last norm and a
    # head.
    small = 512 * 64 + 2 * (4 * 64**2 + 3 * 64 * 176 + 2 * 64) + 64 + 64
    assert sizes["model"] == sizes["classifier"] == small < sizes["reward"]


@pytest.mark.parametrize("stage", ["reward", "referee", "judge"])
def test_a_share_of_the_pairs_falls_to_each_gpu(stage: str) -> None:
    def update(processes: int) -> int:
        launch = {"launch": {stage: {"processes": processes}}}
        inputs = subjects.large(80, compute=launch, **{stage: {"max_tokens": 512}})
        return plan_stage(inputs, stage).phases["update"].activations

    assert update(4) < update(1)
