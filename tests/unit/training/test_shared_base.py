"""One copy of the weights for policy, reference, reward model and referee: the same scores, and the
same training.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from unit.models.adapted import needs_bitsandbytes, needs_peft
from unit.training.test_ppo_stages import SETTINGS, SHARED, pretrain
from unit.training.test_ppo_stages import paths as stage_paths

from rlhf_core.config.loading import check_params
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.adapters import add_adapters, merge_adapters, pack_linear_layers
from rlhf_core.models.causal_lm import load_policy, load_tokenizer, save_policy
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.shared_base import Adapters, SharedBase, adapters_of, stacked
from rlhf_core.stages import critic, ppo
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import read_history
from rlhf_core.training.loop import LoopResult
from rlhf_core.training.reward.run import TrainedScalar
from rlhf_core.training.run_context import RunContext

pytestmark = needs_peft
KINDS = [None, pytest.param("nf4", marks=needs_bitsandbytes)]
IDS = torch.arange(8, 24).view(2, 8)


def lora(quantize: str | None) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, "alpha": 4, "quantize": quantize})


def make_scalar(
    sft: Path, folder: Path, seed: int, quantize: str | None, layers: int | None = None
) -> Tensor:
    """A reward model as its stage leaves it, with adapters that were moved at random; what it
    scores before merging.
    """
    model = ScalarModel.from_causal_lm(sft, seed, layers=layers)
    model.add_adapters(lora(quantize), seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    expected = scores(model)
    adapters = adapters_of(model, lora(quantize), sft)
    merge_adapters(model)
    TrainedScalar(model, load_tokenizer(sft), LoopResult([], 0, 0.0, 0), adapters).save(folder)
    return expected


@torch.no_grad()
def scores(model: ScalarModel) -> Tensor:
    return model.token_scores(IDS, torch.ones_like(IDS))


def test_a_model_of_the_lower_layers_scores_on_the_copy_as_on_its_own(
    workspace: Path, tmp_path: Path
) -> None:
    config = LlamaConfig.from_pretrained(workspace / "models/sft")
    config.num_hidden_layers = 3
    save_policy(
        tmp_path / "sft", LlamaForCausalLM(config).eval(), load_tokenizer(workspace / "models/sft")
    )
    expected = make_scalar(tmp_path / "sft", tmp_path / "reward", 1, None, layers=2)
    policy, _ = load_policy(tmp_path / "sft")
    shared = SharedBase(policy, tmp_path / "sft").scalar(tmp_path / "reward")
    assert torch.allclose(scores(shared), expected, atol=1e-5)
    assert torch.allclose(scores(ScalarModel.load(tmp_path / "reward")), expected, atol=1e-5)
    assert policy.config.num_hidden_layers == len(policy.model.layers) == 3


@pytest.mark.parametrize("quantize", KINDS)
def test_models_on_one_copy_score_as_on_their_own(
    workspace: Path, tmp_path: Path, quantize: str | None
) -> None:
    sft = workspace / "models/sft"
    expected = {
        "a": make_scalar(sft, tmp_path / "a", 1, quantize),
        "b": make_scalar(sft, tmp_path / "b", 2, quantize, 1),
    }
    policy, _ = load_policy(sft)
    if quantize:
        pack_linear_layers(policy.requires_grad_(False))
    base = SharedBase(policy, sft)
    add_adapters(policy, lora(quantize), seed=3)
    frozen = FrozenModels(base=base)
    shared = {name: frozen.scalar(tmp_path / name) for name in expected}
    assert all(frozen.scalar(tmp_path / name) is model for name, model in shared.items())
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    for name, model in shared.items():
        assert torch.allclose(scores(model), expected[name], atol=1e-5)
        assert torch.allclose(scores(ScalarModel.load(tmp_path / name)), expected[name], atol=1e-5)
    assert not torch.allclose(expected["a"], expected["b"], atol=1e-3)
    whole = {parameter.data_ptr() for parameter in policy.parameters()}
    for model in shared.values():
        assert not any(parameter.requires_grad for parameter in model.parameters())
        own = [name for name, p in model.named_parameters() if p.data_ptr() not in whole]
        assert all("lora_" in name or name == "model.score.weight" for name in own), own


def test_adapters_of_other_weights_and_models_without_any_are_refused(
    workspace: Path, tmp_path: Path
) -> None:
    sft, other = workspace / "models/sft", tmp_path / "other"
    make_scalar(sft, tmp_path / "a", 1, None)
    shutil.copytree(sft, other)
    policy, _ = load_policy(other)
    with torch.no_grad():
        policy.get_input_embeddings().get_parameter("weight").add_(0.01)
    policy.save_pretrained(other)
    base = SharedBase(policy, other)
    with pytest.raises(
        ModelError, match=r"belong to other weights than those of .*other: train it again"
    ):
        base.scalar(tmp_path / "a")
    with pytest.raises(ModelError, match=r"has no adapters .*set ppo\.share_base to false"):
        base.scalar(workspace / "models/reward")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("mode", [{}, SHARED], ids=["separate", "shared"])
def test_ppo_on_one_copy_is_as_on_several(
    workspace: Path, tmp_path: Path, mode: dict[str, Any], quantize: str | None
) -> None:
    rows = {}
    for share in (False, True):
        out = tmp_path / str(share)
        settings = (
            SETTINGS | mode | {"policy_lora": lora(quantize).model_dump(), "share_base": share}
        )
        config = PpoConfig.model_validate(settings)
        pretrain(workspace, out, config)
        judges = {name: out / "models" / name for name in ("reward", "referee")}
        for seed, folder in enumerate(judges.values(), 1):
            make_scalar(workspace / "models/sft", folder, seed, quantize)
        inputs, outputs = stage_paths(ppo, workspace, out)
        ppo.run(config, Paths({**inputs, **judges}), outputs, RunContext(out / "work/ppo"))
        rows[share] = read_history(out / "history/ppo.jsonl")
    assert len(rows[True]) == 3
    for one, several in zip(rows[True], rows[False], strict=True):
        for name in ("reward_mean", "referee_mean", "kl", "length", "policy_loss"):
            assert one[name] == pytest.approx(several[name], rel=1e-3, abs=1e-4), name
    policies = [load_policy(tmp_path / str(share) / "models/policy")[0] for share in (True, False)]
    for one_weight, other in zip(*(policy.parameters() for policy in policies), strict=True):
        assert torch.allclose(one_weight, other, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("init", ["reward", "sft"])
def test_a_critic_of_adapters_goes_on_with_them_on_the_one_copy(
    workspace: Path, tmp_path: Path, init: str, quantize: str | None
) -> None:
    sft, models = workspace / "models/sft", tmp_path / "models"
    for seed, name in enumerate(("reward", "referee"), 1):
        make_scalar(sft, models / name, seed, quantize)
    judges = {name: models / name for name in ("reward", "referee")}
    own = {
        "rank": 3,
        "targets": ["q_proj", "up_proj"],
        "quantize": quantize if init == "sft" else None,
    }
    settings = SETTINGS | {"policy_lora": lora(quantize).model_dump()}
    pretraining = CriticStageConfig.model_validate(
        {
            "init": init,
            "max_rollouts": 3,
            "batch_size": 8,
            "explained_variance": 1.0,
            "lora": own,
            "ppo": settings,
        }
    )
    inputs, outputs = stage_paths(critic, workspace, tmp_path)
    critic.run(
        pretraining, Paths({**inputs, **judges}), outputs, RunContext(tmp_path / "work/critic")
    )

    policy, _ = load_policy(sft)
    if quantize:
        pack_linear_layers(policy.requires_grad_(False))
    model = SharedBase(policy, sft).scalar(models / "critic", through=models / "reward")
    assert torch.allclose(scores(model), scores(ScalarModel.load(models / "critic")), atol=1e-5)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert "model.score.weight" in trained and all(
        "lora_" in name or "score" in name for name in trained
    )

    first = {}
    for share in (True, False):
        inputs, outputs = stage_paths(ppo, workspace, tmp_path)
        config = PpoConfig.model_validate(settings | {"share_base": share})
        ppo.run(config, Paths({**inputs, **judges}), outputs, RunContext(tmp_path / str(share)))
        rows = read_history(tmp_path / "history/ppo.jsonl")
        assert len(rows) == 3 and rows[-1]["critic_grad_norm"] > 0
        first[share] = {name: rows[0][name] for name in ("explained_variance", "reward_mean", "kl")}
    assert first[True] == pytest.approx(first[False], rel=1e-3, abs=1e-4)


def test_adapters_on_adapters_are_one_product_of_stacked_matrices() -> None:
    def adapters(rank: int, alpha: int, layer: str, base: str, head: float) -> Adapters:
        a, b = (
            torch.arange(4.0 * rank).view(rank, 4) + rank,
            torch.arange(2.0 * rank).view(2, rank) - 1,
        )
        found = {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
        lora = LoraConfig(rank=rank, alpha=alpha, targets=(layer.rpartition(".")[2],))
        return Adapters({**found, "score.weight": torch.tensor([[head]])}, lora, base)

    def product(one: Adapters, layer: str) -> Tensor:
        a, b = (one.tensors[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        return b @ a * (one.lora.alpha / one.lora.rank)

    first, second = (
        adapters(2, 4, "model.q_proj", "sft", 1.0),
        adapters(3, 3, "model.q_proj", "reward", 2.0),
    )
    both = stacked(first, second)
    assert (both.lora.rank, both.lora.alpha, both.lora.targets, both.base) == (
        5,
        5,
        ("q_proj",),
        "sft",
    )
    assert torch.equal(
        product(both, "model.q_proj"),
        product(first, "model.q_proj") + product(second, "model.q_proj"),
    )
    assert both.tensors["score.weight"].item() == 2.0
    apart = stacked(first, adapters(1, 1, "model.k_proj", "reward", 0.0))
    assert torch.equal(product(apart, "model.q_proj"), product(first, "model.q_proj"))
    assert (
        apart.tensors["model.k_proj.lora_A.default.weight"].shape == (3, 4)
        and len(apart.lora.targets) == 2
    )


def test_adapters_of_experts_are_stacked_expert_by_expert() -> None:
    layer = "model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(0)

    def adapters(rank: int, alpha: int) -> Adapters:
        a, b = (
            torch.randn(3 * rank, 4, generator=generator),
            torch.randn(5, 3 * rank, generator=generator),
        )
        found = {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
        return Adapters(found, LoraConfig(rank=rank, alpha=alpha), "sft")

    def delta(one: Adapters) -> Tensor:
        """(experts, out, in), as PEFT computes it."""
        a, b = (one.tensors[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        product = torch.einsum("ore,eri->eoi", b.view(5, -1, 3), a.view(3, -1, 4))
        return product * (one.lora.alpha / one.lora.rank)

    first, second = adapters(2, 4), adapters(3, 3)
    torch.testing.assert_close(delta(stacked(first, second)), delta(first) + delta(second))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": {}}, "set ppo.policy_lora, reward.lora and reward.init sft"),
        ({"referee": {"lora": {}, "init": "base"}}, "referee.lora and referee.init sft"),
        (
            {"reward": {"lora": {"quantize": "nf4"}}},
            "reward.lora.quantize is nf4, but ppo.policy_lora",
        ),
        (
            {
                "critic": {"lora": {}},
                "ppo": {"policy_lora": {}, "critic_lora": {}, "share_base": True},
            },
            "set ppo.critic_lora",
        ),
        ({"critic": {"lora": {"quantize": "nf4"}}}, "critic.init reward it must be None"),
        (
            {"compute": {"launch": {"ppo": {"frozen": "offload"}}}},
            "leave compute.launch.ppo.frozen at device",
        ),
        ({"compute": {"launch": {"ppo": {"engine": "deepspeed", "zero": 3}}}}, "zero below 3"),
    ],
)
def test_settings_under_which_nothing_can_be_shared_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    settings = {
        "reward": {"lora": {}},
        "referee": {"lora": {}},
        "ppo": {"policy_lora": {}, "share_base": True},
    }
    assert check_params(settings).ppo.share_base
    with pytest.raises(ConfigError, match=reason.replace(".", r"\.")):
        check_params(settings | change)
