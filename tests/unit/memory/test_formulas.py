"""Training state, weights and lengths by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.memory import subjects

from rlhf_core.config.loading.load import check_params
from rlhf_core.data.batching import token_budget_batches
from rlhf_core.memory.lengths import Longest, lengths_from_limits
from rlhf_core.memory.optimizer import training_state
from rlhf_core.memory.placement import Placement, placement_of
from rlhf_core.memory.setting import StagePlan
from rlhf_core.memory.weights import frozen_weights, gathered_weights, trained_weights

PARAMETERS = 7_500_000_000  # the example of the ZeRO paper, figure 1, on 64 GPUs
GIGA = 10**9


def zero(stage: int, **changes: Any) -> Placement:
    return Placement(engine="deepspeed", gpus=64, zero=stage, precision="bfloat16", **changes)


def test_zero_shards_optimiser_then_gradients_then_weights() -> None:
    states = {stage: training_state(PARAMETERS, zero(stage)) for stage in (1, 2, 3)}
    assert {stage: state.optimizer for stage, state in states.items()} == dict.fromkeys(
        (1, 2, 3), 12 * PARAMETERS // 64
    )
    assert states[1].gradients == 30 * GIGA  # summed in float32
    assert states[2].gradients == states[3].gradients == 30 * GIGA // 64
    assert [trained_weights(PARAMETERS, zero(stage)) for stage in (1, 2, 3)] == [15 * GIGA, 15 * GIGA, 15 * GIGA // 64]
    assert gathered_weights(PARAMETERS, zero(3), whole=True) == 15 * GIGA
    assert gathered_weights(PARAMETERS, zero(3), whole=False) == 2 * GIGA  # DeepSpeed's default of live parameters


def test_offloading_moves_the_state_to_the_host() -> None:
    state = training_state(PARAMETERS, zero(2, offload_optimizer=True))
    assert (state.gradients, state.optimizer) == (0, 0)
    assert state.host == (12 + 4) * PARAMETERS // 64
    everything = zero(3, offload_optimizer=True, offload_parameters=True)
    assert trained_weights(PARAMETERS, everything) == 0
    assert training_state(PARAMETERS, everything).host == (12 + 4 + 2) * PARAMETERS // 64


def test_plain_torch_keeps_everything_in_the_precision_of_the_weights() -> None:
    for precision, element in (("float32", 4), ("bfloat16", 2)):
        place = Placement(gpus=4, precision=precision)  # type: ignore[arg-type]
        state = training_state(1000, place)
        assert (state.gradients, state.optimizer, state.buffers) == (1000 * element, 2000 * element, 0)
        assert trained_weights(1000, place) == frozen_weights(1000, place) == 1000 * element


def test_the_launch_settings_are_read_from_params_and_from_a_deepspeed_file(tmp_path: Path) -> None:
    file = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    (tmp_path / "zero.json").write_text(file)
    launch = {
        "sft": {"engine": "deepspeed", "processes": 4, "nodes": 2, "rendezvous": "host:1"},
        "ppo": {"engine": "deepspeed", "deepspeed": "zero.json", "frozen": "sharded"},
        "critic": {"processes": 3, "gradient_checkpointing": True},
    }
    params = check_params({"compute": {"launch": launch}, "base": {"dtype": "bfloat16"}})
    sft, ppo, critic = (placement_of(params, stage, tmp_path) for stage in ("sft", "ppo", "critic"))
    assert (sft.engine, sft.gpus, sft.zero, sft.offload_optimizer) == ("deepspeed", 8, 2, False)
    assert (ppo.zero, ppo.offload_optimizer, ppo.offload_parameters, ppo.frozen) == (3, True, False, "sharded")
    assert (critic.engine, critic.gpus, critic.zero, critic.gradient_checkpointing) == ("local", 3, 0, True)
    assert placement_of(params, "evaluate", tmp_path) == Placement(precision="bfloat16")


def roles_of(plan: StagePlan) -> list[str]:
    return [role.name for role in plan.roles]


def test_ppo_keeps_the_models_that_its_settings_ask_for() -> None:
    from rlhf_core.memory.estimate import STAGES

    def ppo(**changes: Any) -> StagePlan:
        recipe = subjects.large(80, ppo={"max_new_tokens": 256, **changes})
        return STAGES["ppo"](recipe.setting("ppo"))

    assert roles_of(ppo()) == ["policy", "critic", "reference", "reward", "referee"]
    assert roles_of(ppo(policy_lora={"rank": 8})) == ["policy", "critic", "reward", "referee"]
    shared = ppo(critic_mode="shared", critic_optimizer=None)
    assert roles_of(shared) == ["policy", "reference", "reward", "referee"]
    assert "update critic" not in [phase.name for phase in shared.phases]
    alone = ppo(policy_lora={"rank": 8}).roles[-1].held.total
    adapters = {"reward": {"lora": {"rank": 4}}, "referee": {"lora": {"rank": 4}}}
    together = subjects.large(80, ppo={"policy_lora": {"rank": 8}, "share_base": True}, **adapters)
    reward, referee = STAGES["ppo"](together.setting("ppo")).roles[-2:]
    # LLaMA-7B: 32 layers of 4 x (4096 + 4096) + 3 x (4096 + 11008) ends, rank 4, a head of 4096, in bfloat16.
    assert reward.held.total == referee.held.total == 2 * (4 * 32 * (4 * 8192 + 3 * 15104) + 4096) < alone / 100
    critic = STAGES["ppo"](together.setting("ppo")).roles[1]
    assert critic.held.weights > 2 * 6_600_000_000  # one of its own, since it has no adapters
    adapted = subjects.large(
        80, critic={"lora": {"rank": 8}}, ppo={"policy_lora": {"rank": 8}, "share_base": True}, **adapters
    )
    critic = STAGES["ppo"](adapted.setting("ppo")).roles[1]
    own = 12 * 32 * (4 * 8192 + 3 * 15104) + 4096  # the reward model's rank 4 and its own 8
    assert (critic.held.weights, critic.held.optimizer, critic.gradients) == (2 * own, 4 * own, 2 * own)
    ensemble = {"sources": [{"kind": "ensemble", "paths": ["a", "b"]}, {"kind": "function", "target": "m:f"}]}
    assert roles_of(ppo(reward=ensemble))[3:] == ["ensemble 1", "ensemble 2", "reward", "referee"]


def test_limits_bound_lengths_and_the_longest_prompt_can_be_given() -> None:
    params = check_params({"sft": {"max_tokens": 256}, "ppo": {"max_new_tokens": 64}})
    lengths = lengths_from_limits(params, 512)
    # 4000 characters of a prompt are about 1,333 tokens, more than the positions leave.
    assert (lengths.prompt, lengths.demonstrations.width, lengths.ptx.width) == (448, 256, 512)
    assert lengths_from_limits(params, None).prompt == 4000 // 3
    given = params.model_copy(update={"plan": params.plan.model_copy(update={"prompt_tokens": 30})})
    assert lengths_from_limits(given, 512).prompt == 30


def test_the_heaviest_batch_is_that_of_the_longest_rows() -> None:
    data = Longest(((10, 4), (9, 9), (3, 1)))
    assert vars(data.batch(2)) == {"rows": 2, "width": 10, "scored": 13}
    assert vars(data.batch(4)) == {"rows": 4, "width": 10, "scored": 15}  # the last row stands for the rest


@given(
    lengths=st.lists(st.integers(2, 60), min_size=8, max_size=80),
    budget=st.integers(40, 900),
    smallest=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_no_batch_of_pairs_is_heavier_than_the_planned_one(
    lengths: list[int], budget: int, smallest: int, seed: int
) -> None:
    rows = Longest(tuple(sorted(((length, length - 1) for length in lengths), reverse=True)))
    planned, _ = rows.pairs(budget, smallest, 16)
    batches = token_budget_batches(lengths, budget, smallest, 16, seed, 0)
    padded = [2 * len(batch) * max(lengths[i] for i in batch) for batch in batches]
    # The last pairs of an epoch, fewer than ``smallest``, may join a full batch.
    heavier = [size for size in padded if size > planned.tokens]
    assert len(heavier) <= 1
    assert all(size <= planned.tokens + 2 * (smallest - 1) * max(lengths) for size in heavier)


def test_a_gpu_keeps_a_share_of_its_memory_to_itself() -> None:
    from rlhf_core.memory.estimate import GIB, usable

    assert usable(22) == 20 * GIB
    assert usable(0.5) == 0


@pytest.mark.parametrize("stage", ["reward", "referee"])
def test_a_share_of_the_pairs_falls_to_each_gpu(stage: str) -> None:
    from rlhf_core.memory.estimate import STAGES

    def update(processes: int) -> int:
        recipe = subjects.large(
            80, compute={"launch": {stage: {"processes": processes}}}, **{stage: {"max_tokens": 512}}
        )
        phases = STAGES[stage](recipe.setting(stage)).phases
        return next(phase.use.activations for phase in phases if phase.name == "update")

    assert update(4) < update(1)
