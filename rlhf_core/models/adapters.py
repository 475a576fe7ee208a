"""Adapters: LoRA, on 4-bit weights too, and layers below those that are trained.

4-bit weights are QLoRA's NF4 (Dettmers et al. 2023). bitsandbytes packs and unpacks. Its own layer
is not used: on a CPU it repacks its weights in place at the first pass without gradient, and on a
GPU it multiplies single tokens by other kernels than sequences, while PPO's sampler and trainer
have to agree.

A scalar model may have the lower layers of a language model alone. What tells a good reply from a
bad one is often most linear in the middle: upper layers turn to predicting the next token (Skean et
al., 2025, "Layer by Layer: Uncovering Hidden Representations in Language Models"). Without them a
reward model is cheaper to train and to ask.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError, first_line
from rlhf_core.models.architecture import (
    backbone_of,
    depth_of,
    is_expert_stack,
    layer_index,
    layers_read_directly,
)
from rlhf_core.models.io import quiet
from rlhf_core.models.kernels import is_plain_linear

logger = logging.getLogger(__name__)

BLOCK = 64
MISSING_4BIT = "quantize: nf4 is set, but bitsandbytes is not installed: pip install 'rlhf-pipeline[4bit]', or remove it"


@dataclass(frozen=True)
class PackedWeight:
    """A matrix in 4-bit codes, with one 8-bit scale for every 64 values (double quantisation)."""

    codes: Tensor
    scales: Any

    def unpacked(self) -> Tensor:
        """The dequantised matrix (out, in) in its original precision."""
        import bitsandbytes.functional as bnb

        matrix: Tensor = bnb.dequantize_4bit(self.codes, self.scales)
        return matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return itself, since it is immutable."""
        return self


class NF4Linear(nn.Linear):
    """A frozen linear layer that unpacks its matrix in every forward and backward pass.

    It has no ``weight``.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.packed = packed(layer.weight)

    @property
    def qweight(self) -> Tensor:
        """The codes; peft reads the device of a layer without ``weight`` from this attribute."""
        return self.packed.codes

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Tensor = _Product.apply(input, self.packed)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias

    def unpacked(self) -> nn.Linear:
        """Return the plain layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.packed.unpacked(), requires_grad=False)
        layer.bias = self.bias
        return layer


class _Product(torch.autograd.Function):
    """``x W^T`` with W unpacked on demand and not stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.unpacked())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.unpacked(), None


def packed(weight: Tensor) -> PackedWeight:
    """Quantise ``weight`` (out, in) to NF4, on its device.

    ``RlhfError`` if bitsandbytes is not installed.
    """
    try:
        with quiet():
            import bitsandbytes.functional as bnb
    except ImportError as error:
        raise RlhfError(MISSING_4BIT) from error
    return PackedWeight(
        *bnb.quantize_4bit(
            weight.detach(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )
    )


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain or a packed linear layer, and not a subclass of them."""
    return is_plain_linear(module) or type(module) is NF4Linear


def pack_linear_layers(model: PreTrainedModel) -> None:
    """Pack every linear layer below the head of ``model``, in place."""
    backbone = backbone_of(model)
    for name, layer in list(backbone.named_modules()):
        if is_plain_linear(layer):
            backbone.set_submodule(name, NF4Linear(layer))


def unpack_linear_layers(model: nn.Module) -> None:
    """Turn packed layers into plain ones that compute the same, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NF4Linear):
            model.set_submodule(name, layer.unpacked())


Result = TypeVar("Result")

MISSING_LORA = "lora is set, but peft is not installed: pip install 'rlhf-pipeline[lora]', or remove the setting"


# Last names of linear layers that PEFT takes for those of experts in kinds that have experts (PEFT
# 0.21, ``_MOE_TARGET_MODULE_MAPPING``): named as modules, dense layers and shared experts would get
# no adapter.
TAKEN_FOR_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
SHOWN_KINDS = 6


@dataclass(frozen=True)
class AdaptedWeights:
    """Which weights below the head get adapters, and which stay as they are.

    Attributes:
        linear: Names of linear layers, in the model's order.
        experts: Names of parameters that hold the matrices of all experts of a layer (experts, ...,
            ...).
        adapted: Numbers in both.
        frozen: Numbers in the other matrices below the head, embeddings left out, by the last names
            of these.
    """

    linear: tuple[str, ...]
    experts: tuple[str, ...]
    adapted: int
    frozen: Mapping[str, int]

    @property
    def total(self) -> int:
        """Numbers in all matrices below the head but embeddings."""
        return self.adapted + sum(self.frozen.values())

    def __str__(self) -> str:
        said = f"{self.adapted:,} of {self.total:,} weights below the head are adapted"
        kinds = sorted(self.frozen, key=lambda name: -self.frozen[name])
        shown = ", ".join(f"{name} ({self.frozen[name]:,})" for name in kinds[:SHOWN_KINDS])
        more = f" and {len(kinds) - SHOWN_KINDS} more" if len(kinds) > SHOWN_KINDS else ""
        return f"{said}; frozen: {shown}{more}" if kinds else said


def adapted_weights(model: PreTrainedModel, config: LoraConfig) -> AdaptedWeights:
    """Find the weights that adapters go into.

    They are those of linear layers, and of experts whose matrices are one parameter.

    Routers that are no linear layer, convolutions and embeddings have no adapters.

    Raises:
        ModelError: ``config.targets`` names what has no adapters, the model has nothing that gets
            some (GPT-2, whose layers are transposed), or it has fewer layers than
            ``config.upper_layers``.
    """
    of_class = type(model).__name__
    depth = depth_of(model.config)
    if config.upper_layers is not None and config.upper_layers > depth:
        raise ModelError(
            f"lora.upper_layers is {config.upper_layers}, but {of_class} has {depth} layers"
        )
    lowest = depth - (config.upper_layers or depth)
    kinds: dict[str, set[str]] = {"linear": set(), "experts": set()}
    names: dict[str, list[str]] = {"linear": [], "experts": []}
    adapted, frozen = 0, dict[str, int]()
    for path, module, weight_name, weight in _matrices(model):
        kind = _adaptable(path, module, weight, model.get_submodule(path.rpartition(".")[0]))
        name = path if kind == "linear" else f"{path}.{weight_name}"
        last = (path if weight_name == "weight" else name).rpartition(".")[2]
        if kind is not None:
            kinds[kind].add(last)
        chosen = kind is not None and (not config.targets or last in config.targets)
        if chosen and kind is not None and layer_index(name) >= lowest:
            names[kind].append(name)
            adapted += _size(module, weight)
        else:
            frozen[last] = frozen.get(last, 0) + _size(module, weight)
    known = kinds["linear"] | kinds["experts"]
    if not known:
        raise ModelError(
            f"{of_class} has no layers of the class Linear, which lora adapts; train it without lora"
        )
    unknown = sorted(set(config.targets) - known)
    if unknown:
        raise ModelError(
            f"{of_class} has no linear layer {unknown[0]} for lora; it has {sorted(known)}"
        )
    if not names["linear"] and not names["experts"]:
        raise ModelError(
            f"none of the {config.upper_layers} upper layers of {of_class} has what lora adapts: raise "
            "lora.upper_layers"
        )
    return AdaptedWeights(tuple(names["linear"]), tuple(names["experts"]), adapted, frozen)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Yield every matrix below the head but embeddings.

    It comes with its module, the module's name and its own.

    Of a layer in 4 bits there is no tensor.
    """
    backbone = backbone_of(model)
    inside = next(path for path, module in model.named_modules() if module is backbone)
    for path, module in backbone.named_modules(prefix=inside):
        if isinstance(module, nn.Embedding):
            continue
        if type(module) is NF4Linear:
            yield path, module, "weight", None
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() >= 2:
                yield path, module, name, weight


def _adaptable(
    path: str, module: nn.Module, weight: Tensor | None, parent: nn.Module
) -> Literal["linear", "experts"] | None:
    """What kind of adapter a matrix may have."""
    if is_linear(module):
        kind: type = type(parent)
        is_bypassed = path.rpartition(".")[2] in layers_read_directly(kind)
        return None if is_bypassed else "linear"
    is_stack = weight is not None and is_expert_stack(module, weight)
    return "experts" if is_stack else None


def _size(module: nn.Module, weight: Tensor | None) -> int:
    if weight is None:
        assert isinstance(module, NF4Linear)
        return module.in_features * module.out_features
    return weight.numel()


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> AdaptedWeights:
    """Freeze ``model`` and add adapters below its head, in place.

    Untrained adapters change no output.

    Adapters are float32 on a low-precision model too: a layer casts its input for them, and their
    output back. With ``config.quantize`` the frozen linear layers are held in 4 bits from then on;
    experts are not.

    Args:
        seed: Determines the random half of every adapter.

    Returns:
        What is adapted.

    Raises:
        ModelError: As for :func:`adapted_weights`, or merged adapters would leave another model
            than the given one.
        RlhfError: peft is not installed.
    """
    try:
        with quiet():
            import peft  # noqa: F401 - used by what is called here
    except ImportError as error:
        raise RlhfError(MISSING_LORA) from error
    weights = adapted_weights(model, config)
    _require_mergeable(model, weights, config)
    say = (
        logger.warning
        if weights.frozen and not config.targets and config.upper_layers is None
        else logger.info
    )
    say("lora: %s of %s", weights, type(model).__name__)
    model.requires_grad_(False)
    if config.quantize is not None:
        pack_linear_layers(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _inject(model, weights, config)
    # peft gives adapters the precision of a layer's weight. In bfloat16 small steps of them would
    # round to nothing.
    precision = torch.promote_types(model.dtype, torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision)
    _say_what_peft_leaves_out(model)
    model.eval()
    return weights


def _say_what_peft_leaves_out(model: PreTrainedModel) -> None:
    """Warn of adapters that PEFT would not read from a file."""
    lost = _named_adapters(model).keys() - _names_in_peft_files(model).keys()
    if lost:
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in lost}
        logger.warning(
            "lora: PEFT cannot read adapters of %s in a %s from a file, so that only the merged model is saved; "
            "name the other layers in lora.targets to have an adapter as well",
            ", ".join(sorted(layers)),
            type(model).__name__,
        )


def _inject(
    model: PreTrainedModel, weights: AdaptedWeights, config: LoraConfig, empty: bool = False
) -> None:
    """Let PEFT add adapters to the very weights that are named.

    It is given the parts of the model alone: knowing its kind it would take some names for others.
    ``empty`` ones have no numbers.
    """
    import peft

    parts = nn.Module()
    for name, part in model.named_children():
        parts.add_module(name, part)
    named = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(weights.linear),
        target_parameters=list(weights.experts) or None,
        lora_dropout=0.0,
    )
    described: Any = model
    described.peft_config = {"default": _peft_config(model, weights, config)}
    with quiet():
        peft.inject_adapter_in_model(named, parts, low_cpu_mem_usage=empty)


def _peft_config(model: PreTrainedModel, weights: AdaptedWeights, config: LoraConfig) -> Any:
    """The settings by which PEFT adds the same adapters to a language model that it loads."""
    import peft

    depth = depth_of(model.config)
    upper = (
        list(range(depth - config.upper_layers, depth)) if config.upper_layers is not None else None
    )
    last_names = {name.rpartition(".")[2] for name in weights.linear}
    settings: dict[str, Any] = {"target_modules": sorted(last_names), "layers_to_transform": upper}
    for name, module in model.named_modules():
        meant = upper is None or layer_index(name) in upper
        if (
            is_linear(module)
            and meant
            and name not in weights.linear
            and name.rpartition(".")[2] in last_names
        ):
            # One that is not adapted has the same last name.
            settings = {"target_modules": list(weights.linear)}
            break
    if weights.experts:
        taken = [name for name in weights.linear if name.rpartition(".")[2] in TAKEN_FOR_EXPERTS]
        left = [name for name in weights.linear if name not in taken]
        of_taken = [f"{name}.weight" for name in taken]
        settings = {"target_modules": left, "target_parameters": [*weights.experts, *of_taken]}
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, **settings)


def _require_mergeable(model: PreTrainedModel, weights: AdaptedWeights, config: LoraConfig) -> None:
    """Add and merge adapters in a copy of the model without numbers.

    What fails here would otherwise fail after the training.

    Raises:
        ModelError: Something fails, or other weights are left than before.
    """
    empty: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = torch.empty_like(tensor, device="meta")
        empty[id(tensor)] = (
            nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
        )
    copied = copy.deepcopy(model, empty)
    before = {name: weight.shape for name, weight in copied.named_parameters()}
    try:
        _inject(copied, weights, config, empty=True)
        merge_adapters(copied)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise ModelError(
            f"adapters of a {type(model).__name__} cannot be added and merged ({first_line(error)}); name the layers "
            "that they may go into in lora.targets, or train without lora"
        ) from error
    # Packed weights are of another shape after the merge.
    packed = config.quantize is not None
    if not packed and {name: weight.shape for name, weight in copied.named_parameters()} != before:
        raise ModelError(
            f"merged adapters would change the weights' names in a {type(model).__name__}; leave lora out"
        )


ADAPTER_FOLDER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
INNER_LAYER = ".base_layer"  # as PEFT calls what adapters are wrapped around
PEFT_PREFIX = "base_model.model."  # of parameters in PEFT's files


@dataclass(frozen=True)
class PeftAdapter:
    """The trained part of a language model, in the form that PEFT reads.

    ``PeftModel.from_pretrained`` adds it to the frozen part.

    Attributes:
        settings: The content of ``adapter_config.json``.
        tensors: That of ``adapter_model.safetensors``.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]


def peft_adapter(model: PreTrainedModel) -> PeftAdapter | None:
    """Copy the adapters of ``model``, before they are merged.

    None where PEFT would leave out some of them, as :func:`add_adapters` has said.
    """
    names = _names_in_peft_files(model)
    adapters = _named_adapters(model)
    if len(names) < len(adapters):
        return None
    config: Any = model.peft_config["default"]
    settings = {**config.to_dict(), "task_type": "CAUSAL_LM", "inference_mode": True}
    plain = json.loads(
        json.dumps(
            settings, default=lambda value: sorted(value) if isinstance(value, set) else None
        )
    )
    tensors = {
        names[name]: parameter.cpu().clone().contiguous() for name, parameter in adapters.items()
    }
    return PeftAdapter(plain, tensors)


def _named_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters of the adapters, by the names that PEFT's files have for them as a rule."""
    return {
        f"{PEFT_PREFIX}{name.replace('.default.', '.')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def _names_in_peft_files(model: PreTrainedModel) -> dict[str, str]:
    """Under which names PEFT finds the adapters in its files, by those of :func:`_named_adapters`.

    PEFT renames what it reads as transformers renames the weights of a kind, by patterns that may
    match more than is meant. Names of the kind's own files then lead to the right ones. Adapters
    that it finds under neither name are left out.
    """
    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as read_by_peft,
        )
    except ImportError:  # earlier versions rename nothing
        return {name: name for name in _named_adapters(model)}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    adapters = _named_adapters(model)
    config: Any = model.peft_config["default"]
    read = read_by_peft(model, config, dict(adapters))
    changed = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    back: list[Any] = [
        each.reverse_transform() for each in changed if isinstance(each, WeightRenaming)
    ]
    names = {name: name if name in read else apply_renamings(name, back) for name in adapters}
    stored = {names[name]: tensor for name, tensor in adapters.items()}
    read = read_by_peft(model, config, stored)
    return {name: stored_as for name, stored_as in names.items() if name in read}


def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into their weights and remove them, in place.

    Packed weights are unpacked first.
    """
    unpack_linear_layers(model)
    layers = list(adapted_layers(model))
    for _, layer in layers:
        layer.merge()
    for name, layer in layers:
        # Several parameters of one module are adapted by layers within layers.
        if not name.endswith(INNER_LAYER):
            model.set_submodule(name, layer.get_base_layer())
    for module in model.modules():
        if "peft_config" in vars(module):
            del module.peft_config
    model.requires_grad_(True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the block: the model computes as it did without them."""
    layers = [layer for _, layer in adapted_layers(model)]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trainable:
            parameter.requires_grad_(True)


class WithoutAdapters:
    """The reference of a policy that trains adapters.

    It is the same model with the adapters off, and shares its memory.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        """Run the model's forward with the adapters off."""
        return self.run(lambda: self.model(**inputs))

    def run(self, compute: Callable[[], Result]) -> Result:
        """Return ``compute``, which runs parts of the model, with the adapters off meanwhile."""
        with adapters_off(self.model):
            return compute()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of ``model`` that have adapters, by name."""
    if sys.modules.get("peft") is None:  # whoever added adapters has imported it; it takes seconds
        return iter(())
    from peft.tuners.lora import LoraLayer

    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)
    )


def adapted_parameter(layer: Any) -> str:
    """The name, within its module, of the parameter that a layer adapts."""
    name: str = getattr(layer, "parameter_name", "weight")
    return name


def unadapted_weight(layer: Any) -> Tensor:
    """The weight of a layer without its adapters: (out, in), or (experts, ..., ...)."""
    weight: Tensor = getattr(layer.get_base_layer(), adapted_parameter(layer))
    return weight


def merged_weight(layer: Any) -> Tensor:
    """The weight of a layer with its active adapters merged, rounded once to its own precision."""
    base = unadapted_weight(layer)
    weight = base
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        delta = layer.get_delta_weight(adapter)
        weight = weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta
    return weight.to(base.dtype)
