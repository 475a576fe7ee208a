"""What differs between architectures of language models, each fact in one place.

Adapters, losses, samplers and the memory plan ask here for a model's parts, its layers, experts and
router, its positions and cache, the arguments of its forward, and what its head does.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.errors import ModelError


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """The input embedding's weight (V, H)."""
    return model.get_input_embeddings().get_parameter("weight")


def is_sharded(weight: Tensor) -> bool:
    """Whether ZeRO 3 has divided a weight among the ranks."""
    return hasattr(weight, "ds_id")


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model below its head.

    Some kinds, such as Llama 4, do not name it.
    """
    base = cast(PreTrainedModel, model.base_model)
    if base is not model or model.get_output_embeddings() is None:
        return base
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if parts else base


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of tokens that a model knows."""
    size: int = model.config.get_text_config().vocab_size
    return size


def depth_of(config: PretrainedConfig) -> int:
    """The number of a model's decoder layers."""
    text = config.get_text_config()
    # LongCat's other number counts the two attentions of each layer.
    depth: int = text.num_layers if text.model_type == "longcat_flash" else text.num_hidden_layers
    return depth


def recomputable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder layers that can recompute their activations, in order.

    There are none in kinds that transformers has not taught it.
    """
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    """Remove the decoder layers above the lowest ``layers``, in place; the last norm stays.

    Args:
        model: A decoder, with or without a head.

    Raises:
        ModelError: The model has fewer layers, or keeps them in a form that is not known here.
    """
    backbone: Any = backbone_of(model)
    # A head may come with a configuration of its own, which knows of fewer layers already.
    depth = depth_of(backbone.config)
    if layers > depth:
        raise ModelError(f"layers is {layers}, but {type(model).__name__} has {depth} layers")
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    stacks = [child for child in lists if len(child) == depth]
    if len(stacks) != 1:
        raise ModelError(
            f"the layers of {type(backbone).__name__} cannot be told apart; remove the setting layers"
        )
    (stack,) = stacks
    (name,) = [name for name, child in backbone.named_children() if child is stack]
    setattr(backbone, name, stack[:layers])
    for config in (model.config, backbone.config):
        limit_layers(config, layers)


def limit_layers(config: PretrainedConfig, layers: int) -> None:
    """Make ``config`` that of its lowest ``layers`` layers, in place."""
    config.num_hidden_layers = layers * (config.num_hidden_layers // depth_of(config))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def layer_index(name: str) -> int:
    """The number of the decoder layer in a name such as ``model.layers.3.mlp``.

    It is 0 outside of the layers.
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def is_expert_stack(module: nn.Module, weight: Tensor) -> bool:
    """Whether a weight of ``module`` holds the matrices of all experts of a layer.

    It is of shape (experts, ..., ...) then.
    """
    return weight.dim() == 3 and "experts" in type(module).__name__.lower()


# What configurations call the number of experts that a router chooses for a token.
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


def chosen_experts(config: PretrainedConfig) -> int | None:
    """How many of a layer's experts a token passes; None where the configuration names none."""
    text = config.get_text_config()
    for name in CHOSEN_EXPERTS:
        number = getattr(text, name, None)
        if isinstance(number, int):
            return number
    return None


# A layer's weight in the code of the module around it, where more than its description is read.
READ_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")


@cache
def layers_read_directly(kind: type) -> frozenset[str]:
    """Names of layers whose weights a module's own code takes, past the layers and their adapters.

    Kernels of Mamba's mixers take them so, and the routers of some mixtures of experts.
    """
    names: set[str] = set()
    for each in kind.__mro__:
        for function in vars(each).values():
            if not inspect.isfunction(function) or each.__module__.startswith("torch."):
                continue
            with suppress(OSError):  # code that was made without a file
                names.update(READ_WEIGHT.findall(inspect.getsource(function)))
    return frozenset(names)


ROUTER_LOSS_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def router_loss_weight(model: PreTrainedModel) -> float:
    """The weight of the auxiliary loss that keeps a router's experts evenly used.

    0 where config.json asks for none.

    It asks by ``output_router_logits``, as transformers has it. Kinds that balance their experts
    otherwise, such as DeepSeek's, have no such loss.
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    for holder in (model, config):
        for name in ROUTER_LOSS_WEIGHTS:
            weight = getattr(holder, name, None)
            if weight is not None:
                return float(weight)
    return 0.0


# Architectures whose first position is the one after the padding token's id.
COUNTED_FROM_PADDING = frozenset(
    (
        "roberta",
        "roberta-prelayernorm",
        "camembert",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "data2vec-text",
    )
)


def first_position(config: PretrainedConfig) -> int:
    """Return the position of a text's first token: 0, except in models like RoBERTa."""
    return (
        (config.pad_token_id or 0) + 1
        if getattr(config, "model_type", "") in COUNTED_FROM_PADDING
        else 0
    )


def positions_of(config: PretrainedConfig) -> int | None:
    """The most tokens that a model takes in one sequence.

    None where its configuration names no such number.
    """
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    positions = next((int(number) for number in named if isinstance(number, int)), None)
    return None if positions is None else positions - first_position(text)


def cache_argument(model: nn.Module) -> str:
    """What a model's forward calls its cache: state-space models call theirs otherwise."""
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def cache_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Key-value heads and their width, of layers that keep keys and values of each token."""
    heads: int = config.num_attention_heads
    shared: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return shared, width


def name_outputs(model: PreTrainedModel) -> None:
    """Let a model's passes give outputs by name, in place.

    config.json may have asked otherwise, by ``return_dict: false``.
    """
    for config in (model.config, model.config.get_text_config()):
        if not getattr(config, "return_dict", True):
            config.return_dict = True


@contextmanager
def named_outputs(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's passes give outputs by name inside the block (:func:`name_outputs`)."""
    configs = (model.config, model.config.get_text_config())
    flagged = [config for config in configs if not getattr(config, "return_dict", True)]
    name_outputs(model)
    try:
        yield
    finally:
        for config in flagged:
            config.return_dict = False


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block.

    Each of its modules gets its own mode back: somebody may keep one of them in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# Outputs that nobody here reads, whatever config.json asks for; the first also ends a sampler's
# pass by an error.
UNREAD_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")


def arguments_of(model: nn.Module, **given: Any) -> dict[str, Any]:
    """Those of the ``given`` arguments that the model's forward takes.

    Some know no positions, or keep all logits.
    """
    taken = _parameters(getattr(model.forward, "__func__", model.forward))
    given.setdefault("use_cache", False)
    config = getattr(model, "config", None)
    for name in UNREAD_OUTPUTS:
        if getattr(config, name, False):
            given.setdefault(name, False)
    if config is not None and given.get("position_ids") is not None and first_position(config):
        given["position_ids"] = given["position_ids"] + first_position(config)
    if taken is None:
        return given
    return {name: value for name, value in given.items() if name in taken}


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Names of a function's parameters; None where it takes any."""
    taken = inspect.signature(forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return None
    return frozenset(taken)


# Settings by which some architectures change logits after the unembedding. They decide for a model
# without weights; one with weights is tried.
LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)

# The largest logit of the comparison: far above every soft cap, and far below what float16 holds.
PROBED_LOGIT = 500.0

SAME_LOGITS = 1e-3  # relative to the largest

_comparing = threading.Lock()

_KNOWN_HEAD = "_rlhf_plain_head"  # attribute of a model that was compared; copies keep it


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether a causal LM's logits are just its output embedding of the last hidden states.

    The model's own forward is compared with the embedding's product, once: at loading, or here at
    the first question.
    """
    known: bool | None = getattr(model, _KNOWN_HEAD, None)
    if known is None:
        parameter = next(iter(model.parameters()), None)
        if parameter is not None and (parameter.is_meta or is_fake(parameter)):
            return model.get_output_embeddings() is not None and not changes_logits(model.config)
        with _comparing:  # passes of several threads may be the first to ask
            known = getattr(model, _KNOWN_HEAD, None)
            if known is None:
                known = _head_is_plain(model)
                setattr(model, _KNOWN_HEAD, known)
    return known


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Compare the model's logits with its head's product of the same hidden states.

    The head's input is scaled up in both.

    Scaled, so that a soft cap shows in a model whose logits are small.
    """
    head = model.get_output_embeddings()
    if head is None:
        return False
    ids = probe_ids(vocabulary_of(model)).to(next(head.parameters()).device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # Layers that recompute have a mode of their own.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    hooks = []
    try:
        backbone = backbone_of(model)
        states = backbone(**arguments_of(backbone, **given)).last_hidden_state
        scale = PROBED_LOGIT / head(states).abs().max().clamp(min=1e-6)
        expected = head(states * scale)
        own = threading.get_ident()  # another thread may be making a pass of the same model

        def scaled(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (inputs[0] * scale, *inputs[1:]) if threading.get_ident() == own else inputs

        hooks.append(head.register_forward_pre_hook(scaled))
        logits = model(**arguments_of(model, **given)).logits
    except (AttributeError, RuntimeError):  # the head does not take the last hidden states
        return False
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    if logits.shape != expected.shape:
        return False
    return bool((logits - expected).abs().max() <= SAME_LOGITS * expected.abs().max())


def changes_logits(config: PretrainedConfig) -> bool:
    """Whether a configuration says that the model scales or bounds its logits."""
    return any(getattr(config, name, None) for name in LOGIT_SETTINGS)


def probe_ids(vocabulary: int, rows: int = 2, width: int = 8) -> Tensor:
    """Return fixed token ids (rows, width), spread over the vocabulary.

    They serve to compare a model with its saved copy.
    """
    return (torch.arange(rows * width) * 7919 % vocabulary).view(rows, width)
