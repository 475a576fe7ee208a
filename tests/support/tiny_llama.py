"""The shape of the smallest Llama that the tests load, serve and register."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerBase


def tiny_config(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> LlamaConfig:
    """Two layers of width 16 for the vocabulary of ``tokenizer``; one label where it is a
    classifier.
    """
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 128,
            "num_labels": 1,
            **shape,
            **special,
            **changes,
        }
    )
