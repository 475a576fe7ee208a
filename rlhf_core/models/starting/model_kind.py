"""Which kind of model a configuration describes: only decoder-only language models are trained and reply."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from rlhf_core.errors import ModelError

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def require_replies(config: PretrainedConfig, source: str | Path) -> None:
    """Refuse a reward model or another classifier.

    Where embeddings are tied, its weights would load as those of a language model that was never trained as one.

    Raises:
        ModelError: ``config`` says so.
    """
    classifier = next((name for name in config.architectures or () if name.endswith(CLASSIFIERS)), None)
    if classifier is not None:
        raise ModelError(
            f"{source} holds a {classifier}, which gives scores and no replies; name a language model, such as "
            "models/sft"
        )


def require_decoder_only(config: PretrainedConfig, source: str | Path) -> None:
    """Refuse a model of another kind than a decoder-only language model.

    Raises:
        ModelError: ``config`` says so.
    """
    require_replies(config, source)
    if (other := _other_kind(config)) is not None:
        raise ModelError(
            f"{source} is {other} (of type {config.model_type!r}); give a decoder-only language model, one that "
            "transformers loads as AutoModelForCausalLM"
        )


def _other_kind(config: PretrainedConfig) -> str | None:
    """What a model is instead of a decoder-only language model; None where it is one."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "no language model"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True):
        return "an encoder, which reads a text in both directions"
    return None
