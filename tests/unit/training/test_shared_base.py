"""One copy of the weights for policy, reference, reward model and referee: the same scores, and the same training."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.training.test_ppo_stages import SETTINGS, SHARED, pretrain
from unit.training.test_ppo_stages import paths as stage_paths

from rlhf_core.config.load import check_params
from rlhf_core.config.lora import LoraConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.base import load_policy, load_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.lora import add_adapters, merge_adapters
from rlhf_core.models.nf4 import pack_linear_layers
from rlhf_core.models.shared_base import SharedBase, adapters_of
from rlhf_core.stages import ppo
from rlhf_core.stages.contract import Paths
from rlhf_core.tracking import NullTracker
from rlhf_core.training.loop import LoopResult
from rlhf_core.training.reward_run import TrainedScalar

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
KINDS = [None, pytest.param("nf4", marks=needs_bitsandbytes)]
IDS = torch.arange(8, 24).view(2, 8)


def lora(quantize: str | None) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, "alpha": 4, "quantize": quantize})


def make_scalar(sft: Path, folder: Path, seed: int, quantize: str | None) -> Tensor:
    """A reward model as its stage leaves it, with adapters that were moved at random; what it scores before merging."""
    model = ScalarModel.from_causal_lm(sft, seed)
    model.add_adapters(lora(quantize), seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    expected = scores(model)
    adapters = adapters_of(model, lora(quantize), sft)
    merge_adapters(model)
    TrainedScalar(model, load_tokenizer(sft), LoopResult([], 0, 0.0), 0, adapters).save(folder)
    return expected


@torch.no_grad()
def scores(model: ScalarModel) -> Tensor:
    return model.token_scores(IDS, torch.ones_like(IDS))


@pytest.mark.parametrize("quantize", KINDS)
def test_models_on_one_copy_score_as_on_their_own_while_the_policy_is_trained(
    workspace: Path, tmp_path: Path, quantize: str | None
) -> None:
    sft = workspace / "models/sft"
    expected = {name: make_scalar(sft, tmp_path / name, seed, quantize) for seed, name in enumerate(("a", "b"), 1)}
    policy, _ = load_policy(sft)
    if quantize:
        pack_linear_layers(policy.requires_grad_(False))
    base = SharedBase(policy, sft)
    add_adapters(policy, lora(quantize), seed=3)
    shared = {name: base.scalar(tmp_path / name) for name in expected}
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    for name, model in shared.items():
        assert torch.allclose(scores(model), expected[name], atol=1e-5)
        assert torch.allclose(scores(ScalarModel.load(tmp_path / name)), expected[name], atol=1e-5)
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not torch.allclose(expected["a"], expected["b"], atol=1e-3)
    whole = {parameter.data_ptr() for parameter in policy.parameters()}
    for model in shared.values():
        own = [name for name, p in model.named_parameters() if p.data_ptr() not in whole]
        assert all("lora_" in name or name == "model.score.weight" for name in own), own


def test_adapters_of_other_weights_and_models_without_any_are_refused(workspace: Path, tmp_path: Path) -> None:
    sft, other = workspace / "models/sft", tmp_path / "other"
    make_scalar(sft, tmp_path / "a", 1, None)
    shutil.copytree(sft, other)
    policy, _ = load_policy(other)
    with torch.no_grad():
        policy.get_input_embeddings().get_parameter("weight").add_(0.01)
    policy.save_pretrained(other)
    base = SharedBase(policy, other)
    with pytest.raises(ModelError, match=r"belong to other weights than those of .*other: train it again"):
        base.scalar(tmp_path / "a")
    with pytest.raises(ModelError, match=r"has no adapters .*set ppo\.share_base to false"):
        base.scalar(workspace / "models/reward")


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("critic", [{}, SHARED], ids=["separate", "shared"])
def test_ppo_on_one_copy_is_ppo_on_several(
    workspace: Path, tmp_path: Path, critic: dict[str, Any], quantize: str | None
) -> None:
    rows = {}
    for share in (False, True):
        out = tmp_path / str(share)
        settings = SETTINGS | critic | {"policy_lora": lora(quantize).model_dump(), "share_base": share}
        config = PpoConfig.model_validate(settings)
        pretrain(workspace, out, config)
        judges = {name: out / "models" / name for name in ("reward", "referee")}
        for seed, folder in enumerate(judges.values(), 1):
            make_scalar(workspace / "models/sft", folder, seed, quantize)
        inputs, outputs = stage_paths(ppo, workspace, out)
        ppo.run(config, Paths({**inputs, **judges}), outputs, NullTracker())
        rows[share] = [json.loads(line) for line in (out / "history/ppo.jsonl").read_text().splitlines()]
    assert len(rows[True]) == 3
    for one, several in zip(rows[True], rows[False], strict=True):
        for name in ("reward_mean", "referee_mean", "kl", "length", "policy_loss"):
            assert one[name] == pytest.approx(several[name], rel=1e-3, abs=1e-4), name
    policies = [load_policy(tmp_path / str(share) / "models/policy")[0] for share in (True, False)]
    for one_weight, other in zip(*(policy.parameters() for policy in policies), strict=True):
        assert torch.allclose(one_weight, other, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": {}}, "set ppo.policy_lora, reward.lora and reward.init sft"),
        ({"referee": {"lora": {}, "init": "base"}}, "referee.lora and referee.init sft"),
        (
            {"reward": {"lora": {"quantize": "nf4"}}},
            "reward.lora.quantize is nf4, but ppo.policy_lora",
        ),
        ({"compute": {"launch": {"ppo": {"frozen": "offload"}}}}, "leave compute.launch.ppo.frozen at device"),
        ({"compute": {"launch": {"ppo": {"engine": "deepspeed", "zero": 3}}}}, "zero below 3"),
    ],
)
def test_settings_under_which_nothing_can_be_shared_are_refused(change: dict[str, Any], reason: str) -> None:
    settings = {"reward": {"lora": {}}, "referee": {"lora": {}}, "ppo": {"policy_lora": {}, "share_base": True}}
    assert check_params(settings).ppo.share_base
    with pytest.raises(ConfigError, match=reason.replace(".", r"\.")):
        check_params(settings | change)
