"""Models that callers pass in memory.

One that cannot be trained or read is refused by name before anything else.

What arrives may be anything that PyTorch or another library makes of a model: wrapped, frozen,
sharded, with adapters inside. A folder is checked when it is loaded.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.causal_lm import require_decoder_only, require_replies
from rlhf_core.models.computed_buffers import require_computed_buffers
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import require_finite_weights

MERGE = "merge the two (peft's merge_and_unload), and give the result"
SHARDED = ("DTensor", "FlatParameter")  # FSDP's weights


def require_plain(model: object, name: str) -> None:
    """Refuse a model in memory that could not be trained, read and saved as it is.

    A folder and None are left alone.

    Args:
        model: A model, a folder or None.
        name: What messages call it.

    Raises:
        ConfigError: ``model`` is something else, such as the name of a model, or a wrapper around a
            model.
        ModelError: It has adapters inside, is no language model, or weights that are quantised,
            elsewhere or not finite; or a saved copy of it would compute something else.
    """
    if isinstance(model, Path | None):
        return
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} is a {type(model).__name__}; give a model, or its folder as a Path"
        )
    _require_no_adapters(model, name)
    own = model.model if isinstance(model, ScalarModel) else model
    if not isinstance(own, PreTrainedModel):
        inner = next(
            (
                (path, each)
                for path, each in own.named_modules()
                if isinstance(each, PreTrainedModel)
            ),
            None,
        )
        what = (
            f"give the model of transformers itself, its .{inner[0]}"
            if inner
            else "give a model of transformers"
        )
        raise ConfigError(f"{name} is a {type(own).__name__}; {what}")
    if not isinstance(model, ScalarModel):
        _require_language_model(own, name)
    _require_whole_weights(own, name)
    require_finite_weights(own, name)
    require_computed_buffers(own, name)


def _require_no_adapters(model: nn.Module, name: str) -> None:
    """Refuse a model with adapters inside.

    They would be trained beside it or instead of it, and no folder here could hold both.
    """
    for path, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            where = f"has adapters inside (in {path})" if path else f"is a {type(module).__name__}"
            raise ModelError(f"{name} {where}, which are no part of a plain model: {MERGE}")


def _require_language_model(model: PreTrainedModel, name: str) -> None:
    kind = type(model).__name__
    described = copy.copy(model.config)
    described.architectures = [kind]
    require_replies(described, name)
    if model.config.model_type in CONFIG_MAPPING:
        require_decoder_only(described, name)
    if model.base_model is model and model.get_output_embeddings() is None:
        raise ModelError(
            f"{name} is a {kind}, a model without a head that gives tokens; load it as a causal LM"
        )


def _require_whole_weights(model: PreTrainedModel, name: str) -> None:
    for path, weight in model.named_parameters():
        if (
            type(weight).__name__ in SHARDED
            or type(weight.data).__name__ in SHARDED
            or hasattr(weight, "ds_id")
        ):
            raise ModelError(
                f"{name} is sharded (its {path} is in parts): give it whole, ranks shard it themselves"
            )
        if weight.is_meta:
            raise ModelError(
                f"{name} has weights that are not in memory ({path} is on the device meta); load it without device_map"
            )
        if (
            getattr(model, "is_quantized", False)
            or not weight.is_floating_point()
            or weight.itemsize == 1
        ):
            raise ModelError(
                f"{name} has quantised weights ({path}), which cannot be trained; load it in float32, bfloat16 or "
                "float16, and set lora.quantize for adapters on 4-bit weights"
            )
