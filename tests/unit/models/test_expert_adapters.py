"""Adapters of mixtures of experts: what they go into, what stays frozen, merged and saved, and read
by PEFT.
"""

from __future__ import annotations

import logging
from pathlib import Path

import peft
import pytest
import torch
from architectures import EXPERTS, SETTINGS, VOCABULARY, tiny_causal_lm
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import (
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    WithoutAdapters,
    adapted_weights,
    add_adapters,
    merge_adapters,
    peft_adapter,
)
from rlhf_core.models.folder_check import ADAPTER_CONFIG
from rlhf_core.storage.files import atomic_write_json
from rlhf_extras.sampling.weight_transfer import as_tensor, plain_weights

LORA = LoraConfig(rank=2, alpha=4)
NOT_READ = ("inkling2_text",)  # PEFT renames layers of its convolutions to what is none
FAST = ("mixtral", "glm4_moe", "gpt_oss", "laguna")


def logits(model: object) -> Tensor:
    ids = torch.arange(4, 40).view(3, 12) % VOCABULARY
    with torch.no_grad():
        return model(input_ids=ids).logits.clone()  # type: ignore[operator]


def trained(model: PreTrainedModel) -> None:
    """Adapters that do something, as after some training."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def written(path: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(path)
    return path


def cases() -> list[object]:
    return [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS
    ]


@pytest.mark.parametrize("name", cases())
def test_experts_are_adapted_merged_saved_and_read_by_peft(name: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    base, exact = written(tmp_path / "base", model), logits(model)
    names = {key: weight.shape for key, weight in model.named_parameters()}
    weights = add_adapters(model, LORA, seed=1)
    assert weights.experts and weights.linear
    assert torch.equal(logits(model), exact)
    trained(model)
    after = logits(model)
    assert not torch.allclose(after, exact, atol=1e-2)
    assert torch.equal(logits(WithoutAdapters(model)), exact)
    sent = {key: as_tensor(weight).clone() for key, weight in plain_weights(model).items()}
    adapter = peft_adapter(model)
    merge_adapters(model)
    torch.testing.assert_close(logits(model), after, atol=2e-4, rtol=1e-3)
    assert {key: weight.shape for key, weight in model.named_parameters()} == names
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(sent[key], weight, atol=1e-5, rtol=1e-4)
    reloaded = AutoModelForCausalLM.from_pretrained(written(tmp_path / "merged", model)).eval()
    assert torch.equal(logits(reloaded), logits(model))
    assert (adapter is None) == (name in NOT_READ)
    if adapter is None:
        return
    (tmp_path / ADAPTER_FOLDER).mkdir()
    atomic_write_json(tmp_path / ADAPTER_FOLDER / ADAPTER_CONFIG, adapter.settings)
    save_file(adapter.tensors, tmp_path / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
    plain = AutoModelForCausalLM.from_pretrained(base)
    read = peft.PeftModel.from_pretrained(plain, str(tmp_path / ADAPTER_FOLDER)).eval()
    torch.testing.assert_close(logits(read), after, atol=2e-4, rtol=1e-3)


def test_what_stays_frozen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_causal_lm("glm4_moe")
    with caplog.at_level(logging.INFO):
        weights = add_adapters(model, LORA, seed=1)
    matrices = [
        weight for name, weight in tiny_causal_lm("glm4_moe").named_parameters() if weight.dim() > 1
    ]
    assert set(weights.frozen) == {"gate"}  # the router
    assert weights.total == sum(weight.numel() for weight in matrices) - 2 * VOCABULARY * 32
    (record,) = [each for each in caplog.records if "adapted" in each.message]
    assert record.levelname == "WARNING"
    assert (
        f"{weights.adapted:,} of {weights.total:,} weights" in record.message
        and "gate (" in record.message
    )


def test_adapters_that_peft_would_leave_out_are_said_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_causal_lm("inkling2_text")
    add_adapters(model, LORA, seed=1)
    (said,) = [each.message for each in caplog.records if "PEFT" in each.message]
    assert "weight_proj" in said and "lora.targets" in said
    model = tiny_causal_lm("inkling2_text")
    add_adapters(model, LORA.model_copy(update={"targets": ("q_proj", "down_proj")}), seed=1)
    assert peft_adapter(model) is not None


def test_a_dense_model_has_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    add_adapters(tiny_causal_lm("llama"), LORA, seed=1)
    assert not caplog.records


def test_experts_are_named_as_targets_like_layers() -> None:
    model = tiny_causal_lm("deepseek_v3")
    weights = adapted_weights(model, LORA.model_copy(update={"targets": ("down_proj",)}))
    assert all(name.endswith("down_proj") for name in (*weights.linear, *weights.experts))
    assert weights.linear and weights.experts
    with pytest.raises(ModelError, match=r"no linear layer w9.*gate_up_proj"):
        adapted_weights(model, LORA.model_copy(update={"targets": ("w9",)}))


# LongCat's layers have two attentions each.
@pytest.mark.parametrize("name", ["mixtral", "lfm2_moe", "longcat_flash"])
def test_only_the_experts_of_upper_layers_are_adapted_where_that_is_asked(name: str) -> None:
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    weights = adapted_weights(model, LORA.model_copy(update={"upper_layers": 1}))
    names = (*weights.linear, *weights.experts)
    assert weights.experts and all(".layers.1." in name for name in names)


PASSED_OVER = {
    **dict.fromkeys(("falcon_h1", "nemotron_h", "mamba", "falcon_mamba", "mamba2"), "out_proj"),
    "jamba": "dt_proj",
    "longcat_flash": "classifier",
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_layer_whose_weight_is_read_directly_has_no_adapter(name: str) -> None:
    """Mamba's kernels and some routers take a layer's weight without what is around the layer."""
    model = tiny_causal_lm(name, **SETTINGS.get(name, {}))
    weights = add_adapters(model, LORA, seed=1)
    read = PASSED_OVER[name]
    assert weights.linear and not any(each.endswith(f".{read}") for each in weights.linear)
    assert read in weights.frozen
    trained(model)
    after = logits(model)
    merge_adapters(model)
    torch.testing.assert_close(logits(model), after, atol=2e-4, rtol=1e-3)
