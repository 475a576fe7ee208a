"""A model whose unsaved buffers were rounded is refused at once; one that was loaded in that precision is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_causal_lm
from transformers import AutoModelForCausalLM

from rlhf_core.errors import ModelError
from rlhf_core.models.computed_buffers import require_computed_buffers

NAMES = ("llama", "gemma3_text", "gptj", "xglm", "gpt_oss", "falcon", "gpt2")
# Models whose parts initialise buffers by attributes of their own.
PARTS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "gemma4_text": {},
}
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CASTS: dict[str, Callable[[Any], Any]] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "to bfloat16 and back": lambda model: model.bfloat16().float(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_as_it_is_loaded_is_taken_in_every_precision(name: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(name)
    require_computed_buffers(model, "model")
    model.save_pretrained(tmp_path)
    for dtype in PRECISIONS.values():
        require_computed_buffers(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), "model")


@pytest.mark.parametrize("name", PARTS)
def test_buffers_of_a_part_are_computed_as_the_part_does(name: str) -> None:
    model = tiny_causal_lm(name, **PARTS[name])
    require_computed_buffers(model, "model")
    with pytest.raises(ModelError, match=r"^model: its buffer .* was rounded"):
        require_computed_buffers(model.bfloat16(), "model")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gptj", "gpt_oss", "falcon"])
def test_a_model_that_was_rounded_is_refused(name: str, cast: str) -> None:
    model = CASTS[cast](tiny_causal_lm(name))
    with pytest.raises(ModelError, match=r"^model: its buffer .* was rounded .*from_pretrained"):
        require_computed_buffers(model, "model")


def test_buffers_of_a_lower_precision_that_were_raised_are_refused(tmp_path: Path) -> None:
    tiny_causal_lm("gemma3_text").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()
    with pytest.raises(ModelError, match=r"embed_scale.*dtype=torch.float32"):
        require_computed_buffers(model, "model")


def test_nothing_of_the_model_is_changed() -> None:
    model = tiny_causal_lm("gemma3_text")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    require_computed_buffers(model, "model")
    after = {**model.state_dict(), **dict(model.named_buffers())}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.get_default_dtype() == torch.float32
