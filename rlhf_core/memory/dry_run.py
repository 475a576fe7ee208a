"""Passes of models run on shapes alone: the bytes that each moment of a pass allocates, at any size of model.

Parameters and batches are fake tensors, which have a shape and a pretended device but no storage, so the pipeline's own
modules and distributions run as they do with data, and :class:`TensorMemory` counts what they would have allocated.

Decoder layers are alike, so a pass is run with three of them at most: what the layer in the middle leaves behind counts
once for each layer between the first and the last. The most is held in the first or the last one, since from layer to
layer bytes grow or shrink by the same amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.errors import ModelError
from rlhf_core.memory.architecture import Architecture
from rlhf_core.memory.tensor_memory import MemoryUse, TensorMemory
from rlhf_core.models.adapters.lora import add_adapters
from rlhf_core.models.attention import attention_of
from rlhf_core.models.float32_head import use_float32_unembedding
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.io import quiet
from rlhf_core.training.engine.base import build_adamw
from rlhf_core.training.engine.factory import recomputing
from rlhf_core.training.engine.local import MasterWeights

Head = Literal["causal_lm", "scalar", "reward"]
# The layers that are built, and which of them stands for all between the first and the last.
DEPTH, MIDDLE = 3, 1
# Runs a pass of the fake models, its memory being the first argument; returns the loss, first of what is still held
# while that is differentiated.
PassFunction = Callable[..., Tensor | tuple[Tensor, ...] | None]
# What a pass holds at each of its moments, beside the weights: every gradient whole and in its weight's precision.
Moments = tuple[MemoryUse, ...]


@dataclass(frozen=True)
class ModelVariant:
    """A model as a stage builds it.

    Attributes:
        architecture: Of the language model that it is made from.
        head: ``reward`` is the reward model in training, which keeps an untied unembedding for its imitation loss.
        precision: Of its weights. What ``lora`` quantises is counted by :mod:`~rlhf_core.memory.sharding`.
        trained: ``adapters`` are those of ``lora`` and the head of a scalar model.
        lora: Its adapters.
        gradient_checkpointing: Whether its layers recompute their activations.
    """

    architecture: Architecture
    head: Head
    precision: Literal["float32", "bfloat16"]
    trained: Literal["nothing", "weights", "adapters", "value_head"] = "nothing"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False

    @property
    def in_inference(self) -> ModelVariant:
        """The model as a pass without gradient sees it."""
        return replace(self, trained="nothing", gradient_checkpointing=False)


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters.

    Attributes:
        parameters: All of them, adapters included.
        trainable: Those with a gradient.
        weights: Bytes of all of them; adapters are float32 whatever the model's precision.
        trainable_weights: Bytes of those with a gradient.
        gradients: Bytes of the gradients that plain torch sums up: float32.
        optimizer: Bytes of AdamW's state in plain torch, and of the float32 masters of low-precision weights.
        linear: Parameters of the linear layers below the head, adapters not included.
        matrices: Number of those layers.
        largest: Parameters of the largest of them.
    """

    parameters: int
    trainable: int = 0
    weights: int = 0
    trainable_weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    linear: int = 0
    matrices: int = 0
    largest: int = 0


@cache
def model_size(variant: ModelVariant) -> ModelSize:
    """The size of a model as the pipeline builds it. ``ModelError`` where transformers has no such model."""
    model: Any = _built(variant)
    repeats = _repeats(variant, model)
    backbone = (model.model if isinstance(model, ScalarModel) else model).base_model
    matrices = [
        layer.weight for name, layer in backbone.named_modules() if type(layer) is nn.Linear and "lora_" not in name
    ]
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = optimizer = 0
    if trainable:
        with _fake_mode():
            adamw = build_adamw(model, OptimizerConfig(lr=1.0))
            masters = MasterWeights(model, adamw)
            masters.detach()
            updated = {parameter: masters.of(parameter) for parameter in trainable}
            for one in updated.values():
                one.grad = torch.empty_like(one)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            for parameter, one in updated.items():
                repeat, copy = repeats.get(id(parameter), 1), one.nbytes if one is not parameter else 0
                gradients += repeat * one.nbytes
                optimizer += repeat * (copy + sum(slot.nbytes for slot in adamw.state[one].values()))
    return ModelSize(
        parameters=sum(repeats.get(id(one), 1) * one.numel() for one in parameters),
        trainable=sum(repeats.get(id(one), 1) * one.numel() for one in trainable),
        weights=sum(repeats.get(id(one), 1) * one.nbytes for one in parameters),
        trainable_weights=sum(repeats.get(id(one), 1) * one.nbytes for one in trainable),
        gradients=gradients,
        optimizer=optimizer,
        linear=sum(repeats.get(id(one), 1) * one.numel() for one in matrices),
        matrices=sum(repeats.get(id(one), 1) for one in matrices),
        largest=max((one.numel() for one in matrices), default=0),
    )


def run_pass(run: PassFunction, variants: Sequence[ModelVariant], accumulated: bool = False) -> Moments:
    """The peaks before, in and after the first and the last layer of a pass, and of its backward pass.

    Args:
        run: The pass.
        variants: Its models; the first one is differentiated.
        accumulated: Whether the gradients of an earlier micro-batch exist already.

    Raises:
        ModelError: The architecture computes something that depends on values.
    """
    models = [_built(variant) for variant in variants]
    trainable = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
    repeats = _repeats(variants[0], models[0])
    with _fake_mode(), ExitStack() as stack:
        memory = stack.enter_context(TensorMemory(*models, vocabulary=variants[0].architecture.vocabulary))
        for variant, model in zip(variants, models, strict=True):
            stack.enter_context(_segmented_by_layers(variant, model, memory))
        if variants[0].gradient_checkpointing:
            stack.enter_context(recomputing(models[0])())
        for parameter in trainable:
            if accumulated:
                parameter.grad = torch.empty_like(parameter)
                memory.recount(parameter.grad, "gradients", repeats.get(id(parameter), 1))
            hook = parameter.register_post_accumulate_grad_hook(lambda one: memory.recount(one.grad, "gradients"))
            stack.callback(hook.remove)
            stack.callback(setattr, parameter, "grad", None)
        memory.restart()
        try:
            held = run(memory, *models)
            loss = held[0] if isinstance(held, tuple) else held
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)
        except RuntimeError as error:  # what fake tensors cannot do, and whatever else a model's code objects to
            kind = variants[0].architecture.config(None).model_type
            raise ModelError(f"a model of type {kind!r} cannot be run on shapes alone ({first_line(error)})") from error
        memory.begin_segment()
    return tuple(replace(use, weights=0) for use in memory.segments)


def layer_repeats(variant: ModelVariant) -> tuple[int, ...]:
    """For each layer that is built the number of layers of the model that it stands for.

    Where only the upper layers have adapters, no gradient passes the lower ones, which are stood for on their own.
    """
    layers, upper = variant.architecture.layers, adapted_upper_layers(variant)
    if upper is None:
        return _stand_ins(layers)
    return (*_stand_ins(layers - upper), *_stand_ins(upper))


def adapted_upper_layers(variant: ModelVariant) -> int | None:
    """How many layers next to the head have adapters where the others have none."""
    upper, layers = variant.lora.upper_layers if variant.lora is not None else None, variant.architecture.layers
    if upper is not None and upper > layers:
        raise ModelError(f"lora.upper_layers is {upper}, but the model has {layers} layers")
    return upper if upper != layers else None


def _stand_ins(layers: int) -> tuple[int, ...]:
    return (1,) * layers if layers <= DEPTH else tuple(layers - DEPTH + 1 if n == MIDDLE else 1 for n in range(DEPTH))


def _repeats(variant: ModelVariant, model: nn.Module) -> dict[int, int]:
    """How often each parameter of a layer counts, by its id."""
    counts = zip(layer_repeats(variant), decoder_layers(model), strict=True)
    return {id(parameter): count for count, layer in counts for parameter in layer.parameters()}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a built model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def _segmented_by_layers(variant: ModelVariant, model: nn.Module, memory: TensorMemory) -> Iterator[None]:
    """Begin a segment of ``memory`` with each layer's forward and backward pass, and after the last layer.

    Hidden states and their gradients belong to the layer that they enter.
    """
    repeats = layer_repeats(variant)

    def enter(layer: int, entering: Tensor) -> None:
        memory.begin_segment(repeats[layer])
        memory.recount(entering, repeat=repeats[layer])
        memory.restart()

    def before_forward(layer: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        enter(layer, args[0] if args else kwargs["hidden_states"])

    def after_forward(layer: int, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(partial(enter, layer))
        if layer == len(repeats) - 1:
            memory.begin_segment()

    with ExitStack() as hooks:
        for number, layer in enumerate(decoder_layers(model)):
            hooks.callback(layer.register_forward_pre_hook(partial(before_forward, number), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(partial(after_forward, number)).remove)
        yield


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@cache
def _built(variant: ModelVariant) -> nn.Module:
    """The model with a few layers that stand for all, its parameters and buffers fake tensors on the CPU."""
    config, precision = variant.architecture.config(len(layer_repeats(variant))), getattr(torch, variant.precision)
    lora, upper = variant.lora, adapted_upper_layers(variant)
    if lora is not None:
        built_upper = len(_stand_ins(upper)) if upper is not None else None
        lora = lora.model_copy(update={"quantize": None, "upper_layers": built_upper})
    kind: Any = AutoModelForCausalLM if variant.head == "causal_lm" else AutoModelForSequenceClassification
    with quiet(), torch.device("meta"):
        try:
            model = kind.from_config(config, dtype=precision, attn_implementation=attention_of(kind, config))
        except ValueError as error:
            raise ModelError(f"transformers cannot build a {config.model_type} model ({first_line(error)})") from error
        if len(decoder_layers(model)) != config.num_hidden_layers:
            raise ModelError(f"the decoder layers of a {config.model_type} model cannot be told from its other parts")
        if variant.head != "causal_lm":
            untied = variant.head == "reward" and not config.tie_word_embeddings
            model = ScalarModel(model, torch.empty_like(model.get_input_embeddings().weight) if untied else None)
        else:
            use_float32_unembedding(model)
        if lora is not None and isinstance(model, ScalarModel):
            model.add_adapters(lora, seed=0)
        elif lora is not None:
            add_adapters(model, lora, seed=0)
    if variant.trained in ("nothing", "value_head"):
        model.requires_grad_(False)
    if variant.trained == "value_head":
        model.model.score.requires_grad_(True)
    with _fake_mode():
        _allocate(model)
    fake: nn.Module = model.eval()
    return fake


def _allocate(model: nn.Module) -> None:
    """Replace parameters and buffers of the meta device by tensors of the device in force; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]
