"""Passes of models run on shapes alone: the bytes that each moment of a pass allocates, at any size
of model.

Parameters and batches are fake tensors, which have a shape and a pretended device but no storage,
so the pipeline's own modules and distributions run as they do with data, and :class:`TensorMemory`
counts what a GPU's allocator would hold.

Decoder layers are alike, so a pass is run with three of them at most: what the layer in the middle
leaves behind counts once for each layer between the first and the last. The most is held in the
first or the last one, since from layer to layer bytes grow or shrink by the same amount.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.errors import ModelError, first_line
from rlhf_core.models.adapters import add_adapters
from rlhf_core.models.architecture import (
    backbone_of,
    chosen_experts,
    depth_of,
    is_expert_stack,
    recomputable_layers,
)
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import attention_of, quiet
from rlhf_core.models.kernels import use_kernels
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.training.engine.base import MasterWeights, build_adamw
from rlhf_core.training.engine.factory import recomputing
from rlhf_extras.memory.architecture import Architecture


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one GPU. ``other`` are communication buffers, temporary gradients of embeddings and
    the rollout.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    logits: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)

    def __add__(self, more: MemoryUse) -> MemoryUse:
        return MemoryUse(*(getattr(self, kind) + getattr(more, kind) for kind in MEMORY_KINDS))


MEMORY_KINDS = tuple(field.name for field in fields(MemoryUse))
NOTHING = MemoryUse()


def largest(uses: Iterable[MemoryUse]) -> MemoryUse:
    """Return the use with the highest total; no bytes where there is none."""
    return max(uses, key=lambda use: use.total, default=NOTHING)


def together(uses: Iterable[MemoryUse]) -> MemoryUse:
    """The sum of all kinds."""
    return sum(uses, NOTHING)


class TensorMemory(TorchDispatchMode):
    """Inside ``with TensorMemory(...)`` every storage that an operation returns counts until
    nothing refers to it.

    ``peak`` is the highest number of bytes since :meth:`restart`. Tensors made before are counted
    by :meth:`hold`. Buffers that a kernel allocates and frees within one operation are not seen.

    Each storage has a kind of :class:`MemoryUse`: results of operations whose last dimension is
    ``vocabulary`` are logits, those whose first dimension it is (gradients of embeddings) are
    other, all else is activations until :meth:`recount` says what it is. A storage counts
    ``repeat`` times, where one stands for several that are alike.
    """

    def __init__(self, *modules: nn.Module, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.repeat = 1
        self.live = self.peak = 0
        self.segments: list[MemoryUse] = []
        self._bytes = dict.fromkeys(MEMORY_KINDS, 0)
        self._at_peak = dict(self._bytes)
        # By storage: its kind and the bytes that it counts.
        self._counted: dict[int, tuple[str, int]] = {}
        for module in modules:
            self.hold([*module.parameters(), *module.buffers()])

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already as weights."""
        for tensor in tensors:
            self._count(tensor, "weights")

    def recount(self, tensor: Tensor, kind: str | None = None, repeat: int | None = None) -> None:
        """Count the storage of ``tensor`` as ``kind``, ``repeat`` times from here on; None leaves
        it as it is.
        """
        storage = tensor.untyped_storage()
        if id(storage) in self._counted:
            old_kind, old_size = self._counted[id(storage)]
            size = old_size if repeat is None else repeat * storage.nbytes()
            self._counted[id(storage)] = kind or old_kind, size
            self._add(old_kind, -old_size)
            self._add(kind or old_kind, size)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self._at_peak = self.live, dict(self._bytes)

    def begin_segment(self, repeat: int = 1) -> None:
        """End the current segment, and begin one whose storages count ``repeat`` times.

        The peak of the current one is appended to ``segments``, unless its storages counted several
        times: their sum is right only once it has ended.
        """
        if self.repeat == 1:
            self.segments.append(MemoryUse(**self._at_peak))
        self.repeat = repeat
        self.restart()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._count(leaf, self._kind_by_shape(leaf))
        return result

    def _kind_by_shape(self, tensor: Tensor) -> str:
        if self.vocabulary is None or self.vocabulary not in tensor.shape:
            return "activations"
        return "logits" if tensor.shape[-1] == self.vocabulary else "other"

    def _count(self, tensor: Tensor, kind: str) -> None:
        # Weights that oneDNN has packed have no storage that Python could ask.
        holder = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        key, size = (
            id(holder),
            self.repeat * (holder.nbytes if isinstance(holder, Tensor) else holder.nbytes()),
        )
        if key not in self._counted and size:
            self._counted[key] = kind, size
            # torch keeps the Python object of a storage for as long as the storage itself lives.
            weakref.finalize(holder, self._freed, key)
            self._add(kind, size)

    def _freed(self, key: int) -> None:
        kind, size = self._counted.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._bytes[kind] += size
        self.live += size
        if self.live > self.peak:
            self.peak, self._at_peak = self.live, dict(self._bytes)


Head = Literal["causal_lm", "scalar", "reward"]
DEPTH = 3  # of layers that are alike so many are built: one stands for all between the first and the last
# Runs a pass of the fake models, its memory being the first argument; returns the loss, first of
# what is still held while that is differentiated.
PassFunction = Callable[..., Tensor | tuple[Tensor, ...] | None]
# What a pass holds at each of its moments, beside the weights: every gradient whole and in its
# weight's precision.
Moments = tuple[MemoryUse, ...]


@dataclass(frozen=True)
class ModelVariant:
    """A model as a stage builds it.

    Attributes:
        architecture: Of the language model that it is made from.
        head: ``reward`` is the reward model in training, which keeps an untied unembedding for its
            imitation loss.
        precision: Of its weights. What ``lora`` quantises is counted by
            :mod:`~rlhf_extras.memory.sharding`.
        trained: ``adapters`` are those of ``lora`` and the head of a scalar model.
        lora: Its adapters.
        gradient_checkpointing: Whether its layers recompute their activations.
        on_gpu: Whether norms are computed as on a GPU, which holds fewer copies for them than a
            CPU.
    """

    architecture: Architecture
    head: Head
    precision: Literal["float32", "bfloat16"]
    trained: Literal["nothing", "weights", "adapters", "value_head"] = "nothing"
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    on_gpu: bool = False

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
        optimizer: Bytes of AdamW's state in plain torch, and of the float32 masters of
            low-precision weights.
        linear: Parameters of the linear layers below the head, adapters not included.
        matrices: Number of those layers.
        largest: Parameters of the largest of them.
        experts: Parameters of experts that are one matrix of several dimensions for all.
        chosen_experts: Those of them that a token passes.
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
    experts: int = 0
    chosen_experts: int = 0


@cache
def model_size(variant: ModelVariant) -> ModelSize:
    """The size of a model as the pipeline builds it. ``ModelError`` where transformers has no such
    model.
    """
    model: Any = _built(variant)
    repeats = _repeats_of_parameters(model)
    backbone = backbone_of(model.model if isinstance(model, ScalarModel) else model)
    matrices = [
        layer.weight
        for name, layer in backbone.named_modules()
        if type(layer) is nn.Linear and "lora_" not in name
    ]
    stacks: list[Tensor] = []
    for module in backbone.modules():
        weights = module.parameters(recurse=False)
        stacks += [weight for weight in weights if is_expert_stack(module, weight)]
    chosen = chosen_experts(variant.architecture.config())
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]

    def total(measure: Callable[[Any], int], over: Iterable[Tensor]) -> int:
        return sum(repeats.get(id(one), 1) * measure(one) for one in over)

    gradients = optimizer = 0
    if trainable:
        with _fake_mode():
            adamw = build_adamw(model, OptimizerConfig(lr=1.0))
            masters = MasterWeights(model, adamw)
            updated = {parameter: masters.of(parameter) for parameter in trainable}
            for one in updated.values():
                one.grad = torch.empty_like(one)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            gradients = total(lambda one: updated[one].nbytes, trainable)
            optimizer = total(
                lambda one: updated[one].nbytes if updated[one] is not one else 0, trainable
            )
            optimizer += total(
                lambda one: sum(slot.nbytes for slot in adamw.state[updated[one]].values()),
                trainable,
            )
            masters.detach()
    return ModelSize(
        parameters=total(Tensor.numel, parameters),
        trainable=total(Tensor.numel, trainable),
        weights=total(lambda one: one.nbytes, parameters),
        trainable_weights=total(lambda one: one.nbytes, trainable),
        gradients=gradients,
        optimizer=optimizer,
        linear=total(Tensor.numel, matrices),
        matrices=total(lambda one: 1, matrices),
        largest=max((one.numel() for one in matrices), default=0),
        experts=total(Tensor.numel, stacks),
        chosen_experts=total(lambda one: one.numel() // len(one) * (chosen or len(one)), stacks),
    )


def run_pass(
    run: PassFunction, variants: Sequence[ModelVariant], accumulated: bool = False
) -> Moments:
    """The peaks before, in and after the first and the last layer of a pass, and of its backward
    pass.

    Args:
        run: The pass.
        variants: Its models; the first one is differentiated.
        accumulated: Whether the gradients of an earlier micro-batch exist already.

    Raises:
        ModelError: The architecture computes something that depends on values.
    """
    models = [_built(variant) for variant in variants]
    trainable = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
    repeats = _repeats_of_parameters(models[0])
    with _fake_mode(), ExitStack() as stack:
        memory = stack.enter_context(
            TensorMemory(*models, vocabulary=variants[0].architecture.config().vocab_size)
        )
        for model in models:
            stack.enter_context(_segmented_by_layers(model, memory))
        if variants[0].gradient_checkpointing:
            stack.enter_context(recomputing(models[0])())
        for parameter in trainable:
            if accumulated:
                parameter.grad = torch.empty_like(parameter)
                memory.recount(parameter.grad, "gradients", repeats.get(id(parameter), 1))
            hook = parameter.register_post_accumulate_grad_hook(
                lambda one: memory.recount(one.grad, "gradients")
            )
            stack.callback(hook.remove)
            stack.callback(setattr, parameter, "grad", None)
        memory.restart()
        try:
            held = run(memory, *models)
            loss = held[0] if isinstance(held, tuple) else held
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)
        except (
            RuntimeError
        ) as error:  # what fake tensors cannot do, and whatever else a model's code objects to
            kind = variants[0].architecture.config().model_type
            raise ModelError(
                f"a model of type {kind!r} cannot be run on shapes alone ({first_line(error)})"
            ) from error
        memory.begin_segment()
    return tuple(replace(use, weights=0) for use in memory.segments)


def repeated_layers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The decoder layers of a built model, in order, each with the number of layers that it stands
    for.
    """
    return list(zip(recomputable_layers(model), model.repeats, strict=True))  # type: ignore[arg-type]


def _repeats_of_parameters(model: nn.Module) -> dict[int, int]:
    """How often each parameter of a layer counts, by its id."""
    return {
        id(parameter): repeat
        for layer, repeat in repeated_layers(model)
        for parameter in layer.parameters()
    }


@contextmanager
def _segmented_by_layers(model: nn.Module, memory: TensorMemory) -> Iterator[None]:
    """Begin a segment of ``memory`` with each layer's forward and backward pass, and after the last
    layer.

    Hidden states and their gradients belong to the layer that they enter.
    """
    layers = repeated_layers(model)

    def enter(repeat: int, entering: Tensor) -> None:
        memory.begin_segment(repeat)
        memory.recount(entering, repeat=repeat)
        memory.restart()

    def before_forward(
        repeat: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        enter(repeat, args[0] if args else kwargs["hidden_states"])

    def after_forward(
        repeat: int, module: nn.Module, args: tuple[Tensor, ...], output: Any
    ) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(partial(enter, repeat))
        if module is layers[-1][0]:
            memory.begin_segment()

    with ExitStack() as hooks:
        for layer, repeat in layers:
            hooks.callback(
                layer.register_forward_pre_hook(
                    partial(before_forward, repeat), with_kwargs=True
                ).remove
            )
            hooks.callback(layer.register_forward_hook(partial(after_forward, repeat)).remove)
        yield


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@cache
def _built(variant: ModelVariant) -> nn.Module:
    """The model with a few layers that stand for all, its parameters and buffers fake tensors on
    the CPU.

    Where only the upper layers have adapters, no gradient passes the lower ones, which are stood
    for on their own.
    """
    layers, lora, upper = depth_of(variant.architecture.config()), variant.lora, 0
    if lora is not None:
        upper = lora.upper_layers or 0
        if upper > layers:
            raise ModelError(f"lora.upper_layers is {upper}, but the model has {layers} layers")
        lora = lora.model_copy(update={"quantize": None, "upper_layers": min(upper, DEPTH) or None})
    repeats = [one for alike in (layers - upper, upper) for one in _stand_ins(alike)]
    config, precision = variant.architecture.config(len(repeats)), getattr(torch, variant.precision)
    kind: Any = AutoModelForCausalLM if variant.head == "causal_lm" else AutoScalarModel
    with quiet(), torch.device("meta"):
        try:
            model = kind.from_config(
                config, dtype=precision, attn_implementation=attention_of(kind, config)
            )
        except (
            Exception
        ) as error:  # whatever a model's code makes of sizes and names that it does not know
            raise ModelError(
                f"transformers cannot build a {config.model_type} model ({first_line(error)})"
            ) from error
        if len(recomputable_layers(model)) != len(repeats):
            raise ModelError(
                f"the decoder layers of a {config.model_type} model cannot be told from its other parts"
            )
        if variant.head != "causal_lm":
            untied = variant.head == "reward" and not config.tie_word_embeddings
            model = ScalarModel(
                model, torch.empty_like(model.get_input_embeddings().weight) if untied else None
            )
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
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        if not isinstance(model, ScalarModel):
            model.tie_weights()
    for layer, own in use_kernels(model) if variant.on_gpu else ():
        if own is not nn.Linear:
            layer.forward = partial(_norm_on_shapes, layer)
    model.repeats = repeats
    fake: nn.Module = model.eval()
    return fake


class _NormOnShapes(torch.autograd.Function):
    """What a GPU's kernel of a norm allocates: the CPU, on which fake tensors are, has eight in its
    place.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """(..., H) -> (..., H); kept are the input, the weight and one number of each position."""
        ctx.save_for_backward(
            hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        )
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad
        return torch.empty_like(hidden) if for_hidden else None, torch.empty_like(
            weight
        ) if for_weight else None


def _norm_on_shapes(norm: nn.Module, hidden: Tensor) -> Tensor:
    output: Tensor = _NormOnShapes.apply(hidden, norm.weight)
    return output


def _stand_ins(alike: int) -> list[int]:
    return [1] * alike if alike <= DEPTH else [1, alike - 2, 1]
