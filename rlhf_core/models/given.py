"""Models that callers pass in memory.

One that cannot be trained or read is refused by name before anything else.

What arrives may be anything that PyTorch or another library makes of a model: wrapped, frozen,
sharded, with adapters inside. A folder is checked when it is loaded.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rlhf_core.errors import ConfigError, ModelError, first_line, is_exhausted
from rlhf_core.models.architecture import is_sharded, named_outputs, probe_ids, vocabulary_of
from rlhf_core.models.causal_lm import probe_logits, require_decoder_only, require_replies
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import difference_from_config, require_finite_weights

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
    _require_one_precision(own, name)
    _require_ties_of_config(own, name)
    require_finite_weights(own, name)
    require_computed_buffers(own, name)
    _require_what_config_describes(model, own, name)


def _require_no_adapters(model: nn.Module, name: str) -> None:
    """Refuse a model with adapters inside.

    They would be trained beside it or instead of it, and no folder here could hold both.
    """
    for path, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            where = f"has adapters inside (in {path})" if path else f"is a {type(module).__name__}"
            raise ModelError(f"{name} {where}; adapters are no part of a plain model: {MERGE}")


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
            or is_sharded(weight)
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


def _require_one_precision(model: PreTrainedModel, name: str) -> None:
    """Refuse a model with a layer that takes only what other layers do not give.

    A layer of a kind of its own may cast what comes in, and so may those that the model's class
    keeps in float32.
    """
    kept: set[str] = set()
    for module in model.modules():
        kept.update(getattr(module, "_keep_in_fp32_modules", None) or ())
        kept.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    first: tuple[str, torch.dtype] | None = None
    for path, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Embedding) or any(part in path for part in kept):
            continue
        dtype = module.weight.dtype
        if first is None:
            first = path, dtype
        elif dtype != first[1]:
            own, other = (str(each).removeprefix("torch.") for each in (dtype, first[1]))
            raise ModelError(
                f"{name} mixes precisions: its {path} is in {own}, its {first[0]} in {other}; load it by "
                "from_pretrained(…, dtype=…), which gives all layers one"
            )


def _require_what_config_describes(model: nn.Module, own: PreTrainedModel, name: str) -> None:
    """Refuse a model that was changed without its config, as by taking layers out.

    A saved copy would be another model, which is found out after its training otherwise.
    """
    kind: Any = AutoModelForCausalLM
    ids = probe_ids(vocabulary_of(own)).to(own.device)

    def probe(each: PreTrainedModel) -> Tensor:
        return probe_logits(each, ids)

    if isinstance(model, ScalarModel):
        kind = AutoScalarModel

        def probe(each: PreTrainedModel) -> Tensor:
            return ScalarModel(each).token_scores(ids, torch.ones_like(ids))

    try:
        with named_outputs(own):
            difference = difference_from_config(own, copy.deepcopy(own.config), kind, probe)
    except Exception as error:  # whatever a changed layer does
        if is_exhausted(error):
            raise
        raise ModelError(
            f"{name} is a {type(own).__name__}, which cannot read a few tokens ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error
    if difference is not None:
        raise ModelError(
            f"{name} is not what its config describes ({difference}), so that a saved copy would be another model; "
            "change the config as well, or undo what was changed"
        )


def _require_ties_of_config(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that shares weights of which its config says that it does not.

    It would be saved without one of them, and could not be loaded after its training.
    """
    of_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for path, source in model.all_tied_weights_keys.items():
        if path not in of_config and path in weights and weights[path] is weights.get(source):
            raise ModelError(
                f"{name}: its {path} is {source}, but its config has tie_word_embeddings: false, so that a saved copy "
                "would lack it; set that to true, or copy the weight"
            )


def require_computed_buffers(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose buffers hold values that a saved copy would not compute.

    ``model.to(torch.bfloat16)`` rounds them, and ``model.float()`` keeps what was rounded;
    ``from_pretrained(dtype=…)`` does neither.

    Args:
        name: What messages call the model.

    Raises:
        ModelError: A buffer is in another precision, or holds other numbers.
    """
    dtype = model.dtype
    buffers: list[tuple[str, nn.Module, str]] = []
    for path, module in model.named_modules():
        buffers += [(path, module, key) for key in _computed(module)]
    if not buffers:
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as the library does while it loads a model of that precision
    try:
        with torch.device("meta"):
            twin = dict(type(model)(copy.deepcopy(model.config)).named_buffers())
    finally:
        torch.set_default_dtype(before)
    for path, module, key in buffers:
        full = f"{path}.{key}".removeprefix(".")
        loaded, own = twin.get(full), module._buffers[key]
        if loaded is None or own is None or own.shape != loaded.shape:
            continue  # of a module that was added or changed on purpose
        expected = _computed_anew(_initialiser(model, path), module, key, loaded.dtype)
        if own.dtype != loaded.dtype or not torch.equal(own.cpu(), expected):
            precision = str(dtype).removeprefix("torch.")
            raise ModelError(
                f"{name}: its buffer {full} was rounded by a change of precision, so that a saved copy would compute "
                f"otherwise; load the model by from_pretrained(…, dtype=torch.{precision}) in place of model.to(…)"
            )


def _computed(module: nn.Module) -> list[str]:
    """Names of a module's buffers of real numbers that are not saved."""
    named = ((key, module._buffers.get(key)) for key in sorted(module._non_persistent_buffers_set))
    return [key for key, buffer in named if buffer is not None and buffer.is_floating_point()]


def _initialiser(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost model that holds the module at ``path``.

    The library initialises modules by it.
    """
    parts = path.split(".")
    holders = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next((holder for holder in holders if isinstance(holder, PreTrainedModel)), model)


def _computed_anew(
    model: PreTrainedModel, module: nn.Module, key: str, dtype: torch.dtype
) -> Tensor:
    """Compute a buffer as loading does.

    The library initialises a copy of ``module`` without weights.
    """
    parameters: dict[str, nn.Parameter | None] = {}
    buffers: dict[str, Tensor | None] = {}
    for name, weight in module._parameters.items():
        parameters[name] = None
        if weight is not None:
            empty = torch.empty_like(weight, device="meta")
            parameters[name] = nn.Parameter(empty, requires_grad=False)
    for name, buffer in module._buffers.items():
        buffers[name] = None
        if buffer is not None:
            own_dtype = dtype if name == key else buffer.dtype
            buffers[name] = torch.empty(buffer.shape, dtype=own_dtype, device="cpu").copy_(buffer)
    fresh = copy.copy(module)
    fresh._parameters, fresh._buffers = parameters, buffers
    with torch.no_grad():
        model._init_weights(fresh)
    result = fresh._buffers[key]
    assert result is not None
    return result
