"""Adapters: LoRA, on 4-bit weights too, and layers below those that are trained.

4-bit weights are QLoRA's NF4 (Dettmers et al. 2023). bitsandbytes packs and unpacks. Its own layer is not used: on a
CPU it repacks its weights in place at the first pass without gradient, and on a GPU it multiplies single tokens by
other kernels than sequences, while PPO's sampler and trainer have to agree.

A scalar model may have the lower layers of a language model alone. What tells a good reply from a bad one is often most
linear in the middle: upper layers turn to predicting the next token (Skean et al., 2025, "Layer by Layer: Uncovering
Hidden Representations in Language Models"). Without them a reward model is cheaper to train and to ask.

The reference of a policy with adapters is the policy with its adapters off. Below the lowest adapted layer both compute
the same numbers from the same tokens, so the second pass takes what the first left there: the same bits, no work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.io import quiet
from rlhf_core.models.openblas_linear import is_plain_linear

BLOCK = 64
MISSING_4BIT = (
    "quantize: nf4 is set, but bitsandbytes is not installed: pip install 'rlhf-pipeline[4bit]', or remove it"
)


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
    """A frozen linear layer without ``weight`` that unpacks its matrix in every forward and backward pass."""

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
    """Quantise ``weight`` (out, in) to NF4, on its device. ``RlhfError`` if bitsandbytes is not installed."""
    try:
        with quiet():
            import bitsandbytes.functional as bnb
    except ImportError as error:
        raise RlhfError(MISSING_4BIT) from error
    return PackedWeight(
        *bnb.quantize_4bit(weight.detach(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain or a packed linear layer, and not a subclass of them."""
    return is_plain_linear(module) or type(module) is NF4Linear


def pack_linear_layers(model: PreTrainedModel) -> None:
    """Pack every linear layer below the head of ``model``, in place."""
    backbone = model.base_model
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


def adapted_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names, such as ``q_proj``, of the layers that adapters go into.

    Raises:
        ModelError: ``config.targets`` names something that is not a linear layer, the model has none (GPT-2, whose
            layers are transposed), or it has fewer layers than ``config.upper_layers``.
    """
    of_class = type(model).__name__
    layers = {name.rpartition(".")[2] for name, module in model.base_model.named_modules() if is_linear(module)}
    unknown = sorted(set(config.targets) - layers)
    if layers and unknown:
        raise ModelError(f"{of_class} has no linear layer {unknown[0]} for lora; it has {sorted(layers)}")
    if not layers:
        raise ModelError(f"{of_class} has no layers of the class Linear, which lora adapts; train it without lora")
    depth = model.config.get_text_config().num_hidden_layers
    if config.upper_layers is not None and config.upper_layers > depth:
        raise ModelError(f"lora.upper_layers is {config.upper_layers}, but {of_class} has {depth} layers")
    return sorted(config.targets or layers)


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and add adapters to its linear layers, in place. Untrained adapters change no output.

    Adapters are float32 on a low-precision model too: a layer casts its input for them, and their output back.
    With ``config.quantize`` the frozen linear layers are held in 4 bits from then on.

    Args:
        seed: Determines the random half of every adapter.

    Raises:
        ModelError: As for :func:`adapted_names`.
        RlhfError: peft is not installed.
    """
    try:
        with quiet():
            import peft
    except ImportError as error:
        raise RlhfError(MISSING_LORA) from error
    chosen = adapted_names(model, config)
    depth = model.config.get_text_config().num_hidden_layers
    upper = list(range(depth - config.upper_layers, depth)) if config.upper_layers is not None else None
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=chosen, layers_to_transform=upper, lora_dropout=0.0
    )
    model.requires_grad_(False)
    if config.quantize is not None:
        pack_linear_layers(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    # peft gives adapters the precision of a layer's weight. In bfloat16 small steps of them would round to nothing.
    precision = torch.promote_types(model.dtype, torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision)
    model.eval()


ADAPTER_FOLDER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of parameters in PEFT's files


@dataclass(frozen=True)
class PeftAdapter:
    """The trained part of a language model, by which ``PeftModel.from_pretrained`` makes it from its frozen part.

    Attributes:
        settings: The content of ``adapter_config.json``.
        tensors: That of ``adapter_model.safetensors``.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]


def peft_adapter(model: PreTrainedModel) -> PeftAdapter:
    """Copy the adapters of ``model``, before they are merged."""
    config: Any = model.peft_config["default"]
    settings = {**config.to_dict(), "task_type": "CAUSAL_LM", "inference_mode": True}
    plain = json.loads(json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else None))
    tensors = {
        f"{PEFT_PREFIX}{name.replace('.default.', '.')}": parameter.detach().cpu().clone().contiguous()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    return PeftAdapter(plain, tensors)


def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into their weights, unpacked if they were packed, and remove them, in place."""
    unpack_linear_layers(model)
    for name, layer in list(adapted_layers(model)):
        layer.merge()
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
    """The reference of a policy that trains adapters: the same model with the adapters off, sharing its memory."""

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

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def merged_weight(layer: Any) -> Tensor:
    """The weight (out, in) of a layer with its active adapters merged, rounded once to its own precision."""
    base: Tensor = layer.get_base_layer().weight
    weight = base
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        delta = layer.get_delta_weight(adapter)
        weight = weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta
    return weight.to(base.dtype)


def keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    """Remove the decoder layers above the lowest ``layers``, in place; the last norm stays.

    Args:
        model: A decoder, with or without a head.

    Raises:
        ModelError: The model has fewer layers, or keeps them in a form that is not known here.
    """
    backbone: Any = model.base_model
    # A head may come with a configuration of its own, which knows of fewer layers already.
    depth = backbone.config.num_hidden_layers
    if layers > depth:
        raise ModelError(f"layers is {layers}, but {type(model).__name__} has {depth} layers")
    stack = decoder_layers(model)
    if stack is None:
        raise ModelError(f"the layers of {type(backbone).__name__} cannot be told apart; remove the setting layers")
    (name,) = [name for name, child in backbone.named_children() if child is stack]
    setattr(backbone, name, stack[:layers])
    for config in (model.config, backbone.config):
        limit_layers(config, layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of the model's decoder layers, from the embedding up; None where it cannot be told apart."""
    backbone: Any = model.base_model
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    stacks = [child for child in lists if len(child) == backbone.config.num_hidden_layers]
    return stacks[0] if len(stacks) == 1 else None


def limit_layers(config: PretrainedConfig, layers: int) -> None:
    """Make ``config`` that of its lowest ``layers`` layers, in place."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


class FrozenLowerLayers:
    """What the layers below all adapters put out in a pass, for another pass over the same tokens.

    Without such layers, or where the reference is a model of its own, both passes are whole ones.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._output: Any = None

    @classmethod
    def shared_by(cls, policy: PreTrainedModel, reference: object) -> FrozenLowerLayers:
        """Those that ``reference`` shares with ``policy``: none unless it is the policy with its adapters off."""
        same = isinstance(reference, WithoutAdapters) and reference.model is policy
        # Layers that read the keys and values of lower ones cannot do without these.
        reads_lower = getattr(policy.config.get_text_config(), "num_kv_shared_layers", 0) if same else 0
        layers = decoder_layers(policy) if same and not reads_lower else None
        if layers is None:
            return cls([])
        adapted = {id(module) for _, module in adapted_layers(policy)}
        is_adapted = [any(id(module) in adapted for module in layer.modules()) for layer in layers]
        lowest = is_adapted.index(True) if any(is_adapted) else 0
        # What is adapted outside of the layers, such as an embedding, is below all of them.
        inside = {id(module) for layer in layers for module in layer.modules()}
        return cls(list(layers)[:lowest] if adapted <= inside else [])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what the highest of the layers puts out in the pass inside."""
        if not self._layers:
            yield
            return

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        hook = self._layers[-1].register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Take what was recorded in place of computing the layers, in one pass over the same tokens; no gradients."""
        if self._output is None or torch.is_grad_enabled():
            yield
            return
        output, self._output = self._output, None
        forwards = [(layer, vars(layer).get("forward")) for layer in self._layers]
        try:
            for layer in self._layers:
                vars(layer)["forward"] = lambda *_, **__: output
            yield
        finally:
            for layer, own in forwards:
                del vars(layer)["forward"]
                if own is not None:
                    vars(layer)["forward"] = own
