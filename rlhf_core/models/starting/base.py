"""Causal language models: a new tokenizer and tiny Llama, or any model from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.float32_head import float32_unembedding, use_float32_unembedding
from rlhf_core.models.forward import embedding_weight, probe_ids
from rlhf_core.models.io import (
    load_model,
    reading,
    require_equal,
    require_room_for,
    save_folder,
)
from rlhf_core.models.openblas_linear import default_products
from rlhf_core.models.precision import weights_precision
from rlhf_core.models.starting.model_kind import require_replies
from rlhf_core.models.starting.stop_tokens import complete_generation_config

PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with at most ``vocab_size`` entries. The same texts give the same tokenizer.

    Raises:
        ConfigError: ``vocab_size`` has no room for all bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, USER, ASSISTANT, SYSTEM, END]
    if vocab_size < BYTES + len(special):
        raise ConfigError(f"base.vocab_size {vocab_size} is too small; at least {BYTES + len(special)} are needed")
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


def new_model(config: BaseConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Create a tied Llama with random weights that depend on ``config``, the vocabulary's size and ``seed`` alone.

    The process's random state is left unchanged.
    """
    shape = scratch_config(config, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape)
    for parameter in model.parameters():  # not the buffers: rotations by rounded frequencies would be other ones
        parameter.data = parameter.data.to(getattr(torch, weights_precision(config.dtype)))
    use_float32_unembedding(model)
    return model


def scratch_config(
    config: BaseConfig, vocabulary: int, pad_id: int | None = None, eos_id: int | None = None
) -> LlamaConfig:
    """The configuration of a model made from nothing: a Llama with tied embeddings. ``ConfigError`` for odd heads."""
    if config.hidden_size % (2 * config.heads):
        raise ConfigError(f"base.hidden_size {config.hidden_size} must be a multiple of 2 * heads = {2 * config.heads}")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
        bos_token_id=None,
    )


def load_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id. It pads on the left, as generation needs."""
    with reading(path):
        return AutoTokenizer.from_pretrained(str(path), revision=revision, padding_side="left", trust_remote_code=False)


def fitting_length(max_tokens: int, source: Path | PreTrainedModel) -> int:
    """``max_tokens``, or the number of positions that the model at ``source`` has if those are fewer."""
    if isinstance(source, PreTrainedModel):
        config = source.config
    else:
        with reading(source):
            config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    positions = getattr(config, "max_position_embeddings", None)
    return max_tokens if positions is None else min(max_tokens, int(positions))


def load_policy(
    path: str | Path, dtype: torch.dtype | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer. Only safetensors, never remote code.

    Args:
        path: A folder or a hub id.
        dtype: Precision of the weights; None keeps that of the files.

    Raises:
        ModelError: Something is missing or damaged.
    """
    tokenizer = load_tokenizer(path, revision)
    with reading(path):
        require_replies(AutoConfig.from_pretrained(str(path), revision=revision, trust_remote_code=False), path)
    model = load_model(AutoModelForCausalLM, path, dtype, revision)
    require_room_for(tokenizer, embedding_weight(model).shape[0], path)
    return model, tokenizer


def save_policy(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Save a causal language model as a Hugging Face folder, after checking that the saved copy computes the same.

    The generation config of ``model`` is completed by the tokens that end a reply.

    Args:
        weights: Weights gathered by an engine, in place of the model's own. They are then compared instead of logits.

    Raises:
        ModelError: The saved copy differs; nothing is published.
    """
    ids = probe_ids(len(tokenizer))
    complete_generation_config(model, tokenizer)

    def verify(folder: Path) -> None:
        copy, _ = load_policy(folder)
        if weights is None:
            require_equal(path, _probe(copy, ids), _probe(model, ids))
            return
        parameters = dict(copy.named_parameters())
        for name, expected in weights.items():
            if name in parameters:
                require_equal(path, parameters[name], expected.to(parameters[name]))

    save_folder(path, model, tokenizer, weights=weights, verify=verify)


@torch.no_grad()
def _probe(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of the probe tokens, without drop-out."""
    training = model.training
    with float32_unembedding(model), default_products():
        logits: Tensor = model.eval()(input_ids=ids.to(model.device), use_cache=False).logits.cpu()
    model.train(training)
    return logits
