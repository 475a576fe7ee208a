"""Forward passes: positions from masks, and logits at chosen positions only, a part at a time.

With a vocabulary of 152,000 the float32 logits of 4,096 positions take 2.5 GB, and their softmax
and its gradient as much again. What losses and metrics need of them is a few numbers per position,
so it is computed in chunks of positions whose logits are dropped at once and recomputed in the
backward pass (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", avoids
them in the same way within one kernel).

Shapes: N positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.config.operations import DEFAULT_LOGITS_MIB, MIB
from rlhf_core.models.precision import Float32Linear
from rlhf_core.runtime import distributed

# Float32 logits that exist at once where nothing else is asked for.
LOGITS_BYTES = DEFAULT_LOGITS_MIB * MIB
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LazyLogits:
    """Logits (..., V) that are computed on demand.

    Attributes:
        states: Hidden states (..., H). Of a model that does more to its logits than unembed they
            are the logits.
        head: Makes logits (..., V) of hidden states.
        vocabulary: V.
        router_loss: The weighted auxiliary loss of the pass's routers, where that was asked for;
            see :func:`router_loss_weight`.
        sharded: Whether the ranks gather the head's weight together in every call.
    """

    states: Tensor
    head: Head
    vocabulary: int
    router_loss: Tensor | None = None
    sharded: bool = False

    def whole(self) -> Tensor:
        """All logits at once (..., V)."""
        return self.head(self.states)

    def chunks(self, limit: int, other: LazyLogits | None = None) -> int:
        """Split the positions into parts with at most ``limit`` bytes of float32 logits.

        Where a head is sharded, all ranks call it as often as the one that needs most parts.

        Args:
            limit: Bytes of one part.
            other: Logits of a second model that are made in the same parts.
        """
        count = chunk_count(math.prod(self.states.shape[:-1]), self.vocabulary, limit)
        together = self.sharded or (other is not None and other.sharded)
        return distributed.largest_of_ranks(count) if together else count

    def repeatable_head(self) -> Head:
        """The head for many calls: what does not change between them is made once."""
        return self.head.repeatable() if isinstance(self.head, Float32Linear) else self.head


def chunk_count(positions: int, vocabulary: int, limit: int) -> int:
    """Split ``positions`` into parts of one or more with at most ``limit`` bytes of float32 logits."""
    count = min(math.ceil(4 * positions * vocabulary / limit), positions)
    return max(count, 1)


def compute_in_chunks(
    compute: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """Run ``compute`` on ``count`` parts of the columns' rows, and join its results.

    Args:
        compute: (n, ...) of each column -> tensors of n rows. What it holds in between is not kept
            for the backward pass, in which it runs again.
        columns: Tensors of N rows.
        count: Number of parts; they differ by one row at most, and are empty where there are more
            parts than rows.
    """
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    parts = zip(*(column.tensor_split(count) for column in columns), strict=True)
    results = [compute(*part) for part in parts]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


Result = TypeVar("Result")

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


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first real token, so that the padding side changes nothing.

    Shapes: (B, L) -> (B, L).
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def right_padded(attention_mask: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return mask (B, L) and positions for rows that begin in the first column.

    On a GPU the mask is None.

    No token sees those after it, so that padding on the right needs no mask, and without one
    attention takes its fastest kernel, and the host does not wait to see whether a row is padded.
    On a CPU that kernel would round otherwise. Positions rise to the end there: transformers takes
    others for several texts in one row.
    """
    if attention_mask.device.type == "cpu":
        return attention_mask, position_ids_from_mask(attention_mask)
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return None, columns.expand_as(attention_mask)


def last_token_indices(attention_mask: Tensor) -> Tensor:
    """Column of the last real token of each row, whichever side is padded: (B, L) -> (B,)."""
    columns = attention_mask.new_ones(attention_mask.shape).cumsum(dim=1)
    return (columns * attention_mask).argmax(dim=1)


def hidden_states(
    backbone: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Last hidden states of a backbone without its head: (B, L) -> (B, L, H).

    Without a mask it needs positions.
    """
    if position_ids is None:
        assert attention_mask is not None
        position_ids = position_ids_from_mask(attention_mask)
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    output = backbone(**arguments_of(backbone, input_ids=input_ids, **given))
    hidden: Tensor = output.last_hidden_state
    return hidden


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
    ids = probe_ids(model.config.get_text_config().vocab_size).to(next(head.parameters()).device)
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


def name_outputs(model: PreTrainedModel) -> None:
    """Let a model's passes give outputs by name, in place.

    config.json may have asked otherwise, by ``return_dict: false``.
    """
    for config in (model.config, model.config.get_text_config()):
        if not getattr(config, "return_dict", True):
            config.return_dict = True


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


def selected_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    router_loss: bool = False,
) -> LazyLogits:
    """Next-token logits of a causal LM at the positions that ``select`` (bool, B, L) names.

    Shapes: (N, V), in row-major order.

    Rows are padded on the right.
    Only the N selected hidden states are unembedded: with prompts masked that is a third to a half
    of the work of a small model with a large vocabulary.

    Args:
        router_loss: Whether a pass with gradients computes the auxiliary loss of the routers, too.
    """
    if router_loss and torch.is_grad_enabled() and router_loss_weight(model):
        logits = _logits_and_router_loss(model, input_ids, attention_mask)
    else:
        logits = lazy_logits(model, input_ids, *right_padded(attention_mask), input_ids.shape[1])
    return replace(logits, states=logits.states[select])


def _logits_and_router_loss(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor
) -> LazyLogits:
    """Compute the logits of all positions and the auxiliary loss of the real tokens.

    The loss is that of the model's own forward.
    """
    states: list[Tensor] = []

    def keep_states(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    plain = has_plain_head(model)
    hook = backbone_of(model).register_forward_hook(keep_states)
    given: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids_from_mask(attention_mask),
        "output_router_logits": True,
        # Of a plain head the logits are made later, of the states.
        "logits_to_keep": 1 if plain else input_ids.shape[1],
    }
    try:
        output = model(**arguments_of(model, **given))
    finally:
        hook.remove()
    made = (
        unembedded(model, states[0])
        if plain
        else LazyLogits(output.logits, nn.Identity(), output.logits.shape[-1])
    )
    loss = getattr(output, "aux_loss", None)
    return replace(made, router_loss=None if loss is None else router_loss_weight(model) * loss)


def lazy_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    keep: int,
) -> LazyLogits:
    """Next-token logits of a causal LM at the last ``keep`` positions.

    Shapes: (B, L) three times -> (B, keep, V).

    The model may be wrapped: the reference is a policy with its adapters off, or a model whose
    weights are sharded.
    """
    if has_plain_head(model):
        backbone = partial(
            hidden_states, backbone_of(model), input_ids, attention_mask, position_ids
        )
        hidden = run_as_wrapped(model, backbone)
        # A slice of all would cost another tensor of their size in the backward pass.
        return unembedded(model, hidden if keep == hidden.shape[1] else hidden[:, -keep:])
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": keep}
    logits: Tensor = model(**arguments_of(model, input_ids=input_ids, **given)).logits
    logits = logits if logits.shape[1] == keep else logits[:, -keep:]
    return LazyLogits(logits, nn.Identity(), logits.shape[-1])


def unembedded(model: PreTrainedModel, hidden: Tensor) -> LazyLogits:
    """Logits (..., V) of the last hidden states (..., H) of a causal LM with a plain head."""
    vocabulary = model.config.get_text_config().vocab_size
    sharded = is_sharded(next(model.parameters()))  # ZeRO 3 divides all weights
    return LazyLogits(hidden, model.get_output_embeddings(), vocabulary, sharded=sharded)


def run_as_wrapped(model: PreTrainedModel, compute: Callable[[], Result]) -> Result:
    """Run ``compute``, a pass of parts of a language model, as the model's wrapper demands."""
    run: Callable[[Callable[[], Result]], Result] | None = getattr(model, "run", None)
    return compute() if run is None else run(compute)


def probe_ids(vocabulary: int, rows: int = 2, width: int = 8) -> Tensor:
    """Return fixed token ids (rows, width), spread over the vocabulary.

    They serve to compare a model with its saved copy.
    """
    return (torch.arange(rows * width) * 7919 % vocabulary).view(rows, width)
