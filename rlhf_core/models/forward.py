"""Forward passes: positions from masks, and logits at chosen positions only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.lazy_logits import LazyLogits

Result = TypeVar("Result")

# Settings by which some architectures change logits after the unembedding: with one of them only the model's own
# forward gives the right logits.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """The input embedding's weight (V, H)."""
    return model.get_input_embeddings().get_parameter("weight")


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions counted from the first real token, so that the padding side changes nothing: (B, L) -> (B, L)."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def last_token_indices(attention_mask: Tensor) -> Tensor:
    """Column of the last real token of each row, whichever side is padded: (B, L) -> (B,)."""
    columns = attention_mask.new_ones(attention_mask.shape).cumsum(dim=1)
    return (columns * attention_mask).argmax(dim=1)


def hidden_states(
    backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """Last hidden states of a backbone without its head: (B, L) -> (B, L, H)."""
    if position_ids is None:
        position_ids = position_ids_from_mask(attention_mask)
    output = backbone(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether a causal LM's logits are its output embedding of the last hidden states, and nothing more."""
    return model.get_output_embeddings() is not None and not changes_logits(model.config)


def changes_logits(config: PretrainedConfig) -> bool:
    """Whether a causal LM scales or bounds its logits, so that only its own forward makes them, all at once."""
    return any(getattr(config, name, None) for name in LOGIT_SETTINGS)


def selected_logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, select: Tensor) -> LazyLogits:
    """Next-token logits of a causal LM at the positions where ``select`` (bool, B, L) holds: (N, V), row-major order.

    Only the N selected hidden states are unembedded: with prompts masked that is a third to a half of the work of a
    small model with a large vocabulary.
    """
    logits = lazy_logits(model, input_ids, attention_mask, position_ids_from_mask(attention_mask), input_ids.shape[1])
    return LazyLogits(logits.states[select], logits.head, logits.vocabulary)


def lazy_logits(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, keep: int
) -> LazyLogits:
    """Next-token logits of a causal LM at the last ``keep`` positions: (B, L) three times -> (B, keep, V).

    The model may be wrapped: the reference is a policy with its adapters off, or a model whose weights are sharded.
    """
    if has_plain_head(model):
        backbone = partial(hidden_states, model.base_model, input_ids, attention_mask, position_ids)
        hidden = run_as_wrapped(model, backbone)
        # A slice of all would cost another tensor of their size in the backward pass.
        return unembedded(model, hidden if keep == hidden.shape[1] else hidden[:, -keep:])
    logits: Tensor = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=keep,
    ).logits
    return LazyLogits(logits, nn.Identity(), logits.shape[-1])


def unembedded(model: PreTrainedModel, hidden: Tensor) -> LazyLogits:
    """Logits (..., V) of the last hidden states (..., H) of a causal LM with a plain head."""
    return LazyLogits(hidden, model.get_output_embeddings(), model.config.get_text_config().vocab_size)


def run_as_wrapped(model: PreTrainedModel, compute: Callable[[], Result]) -> Result:
    """Return ``compute``, a pass of parts of a language model, run as its wrapper demands where it has one."""
    run: Callable[[Callable[[], Result]], Result] | None = getattr(model, "run", None)
    return compute() if run is None else run(compute)
