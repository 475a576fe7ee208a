"""Low-rank adapters (peft): adding them to a model, switching them off, and merging them into its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.adapters.nf4 import is_linear, pack_linear_layers, unpack_linear_layers
from rlhf_core.models.io import quiet

Result = TypeVar("Result")

MISSING = "lora is set, but peft is not installed: pip install 'rlhf-pipeline[lora]', or remove the setting"


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and add adapters to its linear layers, in place. Untrained adapters change no output.

    Adapters are float32 on a low-precision model too: a layer casts its input for them, and their output back.
    With ``config.quantize`` the frozen linear layers are held in 4 bits from then on.

    Args:
        seed: Determines the random half of every adapter.

    Raises:
        ModelError: ``config.targets`` names something that is not a linear layer, or the model has fewer layers than
            ``config.upper_layers``.
        RlhfError: peft is not installed.
    """
    try:
        with quiet():
            import peft
    except ImportError as error:
        raise RlhfError(MISSING) from error
    layers = {name.rpartition(".")[2] for name, module in model.base_model.named_modules() if is_linear(module)}
    unknown = sorted(set(config.targets) - layers)
    if unknown:
        raise ModelError(f"{type(model).__name__} has no linear layer {unknown[0]} for lora; it has {sorted(layers)}")
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layers that lora could adapt; train it without lora")
    chosen = sorted(config.targets or layers)
    depth = model.config.get_text_config().num_hidden_layers
    if config.upper_layers is not None and config.upper_layers > depth:
        raise ModelError(f"lora.upper_layers is {config.upper_layers}, but {type(model).__name__} has {depth} layers")
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


def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into their weights, unpacked if they were packed, and remove them, in place."""
    unpack_linear_layers(model)
    for name, layer in list(adapted_layers(model)):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
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
    if "peft" not in sys.modules:  # whoever added adapters has imported it; it takes seconds
        return iter(())
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
