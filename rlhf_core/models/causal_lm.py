"""Causal language models: a new tokenizer and tiny Llama, or any model from a folder or the hub."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from rlhf_core.config.base import BaseConfig
from rlhf_core.data.chat_template import STOP_TOKENS
from rlhf_core.data.tokens import stop_token_ids
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.adapters import ADAPTER_FOLDER, ADAPTER_WEIGHTS, PeftAdapter
from rlhf_core.models.architecture import (
    arguments_of,
    embedding_weight,
    name_outputs,
    positions_of,
    probe_ids,
    router_loss_weight,
    vocabulary_of,
)
from rlhf_core.models.folder_check import ADAPTER_CONFIG
from rlhf_core.models.io import load_model, reading, require_room_for, require_same, save_folder
from rlhf_core.models.precision import (
    float32_unembedding,
    use_float32_unembedding,
    weights_precision,
)

logger = logging.getLogger(__name__)

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def require_replies(config: PretrainedConfig, source: str | Path) -> None:
    """Refuse a reward model or another classifier.

    Where embeddings are tied, its weights would load as those of a language model that was never
    trained as one.

    Raises:
        ModelError: ``config`` says so.
    """
    classifier = next(
        (name for name in config.architectures or () if name.endswith(CLASSIFIERS)), None
    )
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
    other = ""
    if getattr(config, "is_encoder_decoder", False):
        other = "an encoder-decoder"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        other = "no language model"
    elif config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", True
    ):
        other = "an encoder, which reads a text in both directions"
    if other:
        raise ModelError(
            f"{source} is {other} (of type {config.model_type!r}); give a decoder-only language model, one that "
            "transformers loads as AutoModelForCausalLM"
        )


def generation_stop_ids(model: PreTrainedModel) -> list[int]:
    """The ids at which the model's own generation config ends a reply.

    There are none where it has no such file.

    A config that transformers derived from the architecture's defaults is left out: those ids
    belong to the tokenizer of some other model.
    """
    config = model.generation_config
    if (
        config is None
        or config.eos_token_id is None
        or getattr(config, "_from_model_config", False)
    ):
        return []
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [index for index in ids if _is_token_id(model, index)]


def _is_token_id(model: PreTrainedModel, value: object) -> bool:
    """Whether a value of a generation config, which may be anything, is a token of the model."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and 0 <= cast(int, value) < vocabulary_of(model)


def with_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose files name every token that ends a reply.

    It is the given one, or a copy where those are not ``eos_token`` alone.

    The first of them closes a turn. Added tokens at which the generation config of ``model`` ends a
    reply are among them; a word of the vocabulary is not.
    """
    added = [
        index for index in generation_stop_ids(model) if index in tokenizer.added_tokens_decoder
    ]
    stop_ids = list(dict.fromkeys([*stop_token_ids(tokenizer), *added]))
    names = tokenizer.convert_ids_to_tokens(stop_ids)
    if names in ([tokenizer.eos_token], tokenizer.init_kwargs.get(STOP_TOKENS)):
        return tokenizer
    named = copy.deepcopy(tokenizer)
    named.init_kwargs[STOP_TOKENS] = names
    return named


def complete_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name every token that ends a reply in the generation config.

    transformers and vLLM then stop there, too.

    Published models have sampling settings that transformers reads but refuses to save, such as a
    temperature beside ``do_sample: false``. They are left out: what samples here has settings of
    its own.
    """
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        bos, pad = config.bos_token_id, config.pad_token_id
        config = GenerationConfig(
            bos_token_id=bos if _is_token_id(model, bos) else None,
            eos_token_id=generation_stop_ids(model),
            pad_token_id=pad if _is_token_id(model, pad) else None,
        )
        model.generation_config = config
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    known = [index for index in named if _is_token_id(model, index)]
    stop_ids = stop_token_ids(tokenizer)
    if len(known) < len(named) or not set(stop_ids) <= set(known):
        others = [i for i in generation_stop_ids(model) if i not in stop_ids]
        config.eos_token_id = [*stop_ids, *others] if others or len(stop_ids) > 1 else stop_ids[0]
        config._from_model_config = (
            False  # otherwise transformers may take the model configuration's id instead
        )


PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int = 512
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with at most ``vocab_size`` entries.

    The same texts give the same tokenizer.

    Raises:
        ConfigError: ``vocab_size`` has no room for all bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, USER, ASSISTANT, SYSTEM, END]
    if vocab_size < BYTES + len(special):
        raise ConfigError(
            f"base.vocab_size {vocab_size} is too small; at least {BYTES + len(special)} are needed"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT, SYSTEM],
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(
    config: BaseConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> LlamaForCausalLM:
    """Create a tied Llama with random weights.

    They depend on ``config``, the vocabulary's size and ``seed`` alone.

    The process's random state is left unchanged.
    """
    shape = scratch_config(config, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape)
    # Buffers keep their precision: rounded frequencies would give other rotations.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, weights_precision(config.dtype)))
    use_float32_unembedding(model)
    return model


def scratch_config(
    config: BaseConfig, vocabulary: int, pad_id: int | None = None, eos_id: int | None = None
) -> LlamaConfig:
    """The configuration of a model made from nothing: a Llama with tied embeddings.

    ``ConfigError`` for odd heads.
    """
    if config.hidden_size % (2 * config.heads):
        raise ConfigError(
            f"base.hidden_size {config.hidden_size} must be a multiple of 2 * heads = {2 * config.heads}"
        )
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        # A product of a unit-scale input keeps its scale; transformers' 0.02 fits widths above two
        # thousand.
        initializer_range=config.hidden_size**-0.5,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
        bos_token_id=None,
    )


def load_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id. It pads on the left, as generation needs."""
    with reading(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), revision=revision, padding_side="left", trust_remote_code=False
        )
        # Values of another kind in its files, such as a length that is no number, show only when it
        # is used.
        tokenizer.convert_tokens_to_ids([*(tokenizer.init_kwargs.get(STOP_TOKENS) or ())])
        tokenizer.encode("a")
        return tokenizer


def fitting_length(max_tokens: int, source: Path | PreTrainedModel) -> int:
    """Return ``max_tokens``, or the number of positions that the model has if that is smaller."""
    if not isinstance(source, Path):
        config = source.config
    else:
        with reading(source):
            config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    positions = positions_of(config)
    return max_tokens if positions is None else min(max_tokens, positions)


def tokenizer_of_policy(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, whose configuration is that of one that writes replies.

    Raises:
        ModelError: Something is missing or damaged, or it is another kind of model.
    """
    tokenizer = load_tokenizer(path, revision)
    with reading(path):
        config = AutoConfig.from_pretrained(str(path), revision=revision, trust_remote_code=False)
        require_replies(config, path)
    return tokenizer


def load_policy(
    path: str | Path,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer.

    Only safetensors, never remote code.

    Args:
        path: A folder or a hub id.
        dtype: Precision of the weights; None keeps that of the files.
        device: None for this process's own.

    Raises:
        ModelError: Something is missing or damaged.
    """
    tokenizer = tokenizer_of_policy(path, revision)
    model = load_model(AutoModelForCausalLM, path, dtype, revision, device)
    require_room_for(tokenizer, embedding_weight(model).shape[0], path)
    return model, tokenizer


def save_policy(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter: PeftAdapter | None = None,
) -> None:
    """Save a causal language model as a Hugging Face folder.

    The saved copy is checked to compute the same.

    The generation config of ``model`` is completed by the tokens that end a reply.

    Args:
        adapter: What was trained and is merged; saved in the folder ``adapter``, for PEFT.

    Raises:
        ModelError: The saved copy differs; nothing is published.
    """
    ids = probe_ids(len(tokenizer)).to(model.device)
    complete_generation_config(model, tokenizer)

    def verify(folder: Path) -> None:
        require_same(
            path, folder, model, AutoModelForCausalLM, lambda each: probe_logits(each, ids)
        )

    settings: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    if adapter is not None:
        settings = {f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}": adapter.settings}
        tensors = {f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}": adapter.tensors}
    save_folder(path, model, tokenizer, json_files=settings, verify=verify, tensor_files=tensors)


def probe_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of a few tokens, to compare a model with its saved copy."""
    with float32_unembedding(model):
        logits: Tensor = model(**arguments_of(model, input_ids=ids))[0]
    return logits


def own_copy(model: PreTrainedModel, name: str = "model") -> PreTrainedModel:
    """A copy of a model to train.

    What is frozen in it stays so, unless everything is: then all of it is trained.

    Merging adapters by PEFT leaves all weights frozen.
    """
    copied = copy.deepcopy(model)
    name_outputs(copied)
    weights = list(copied.parameters())
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    if frozen == sum(weight.numel() for weight in weights):
        copied.requires_grad_(True)
        logger.info("%s arrives with all weights frozen; all are trained", name)
    elif frozen:
        total = sum(weight.numel() for weight in weights)
        first = next(path for path, weight in copied.named_parameters() if not weight.requires_grad)
        share = f"{frozen:,} of {total:,}"
        logger.warning("%s: %s weights are frozen (such as %s) and stay so", name, share, first)
    return copied


def say_router_loss(model: PreTrainedModel, added: bool, what: str) -> None:
    """Say whether the routers' auxiliary loss is trained on.

    config.json asks for it by ``output_router_logits``.
    """
    weight = router_loss_weight(model)
    if not weight:
        return
    if added:
        logger.info(
            "%s: the routers' auxiliary loss is added, with router_aux_loss_coef %g", what, weight
        )
    else:
        logger.warning(
            "%s: output_router_logits is set, but the routers' auxiliary loss is part of SFT and DPO alone; nothing is "
            "added here",
            what,
        )
