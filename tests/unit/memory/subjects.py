"""Tiny recipes that exercise every phase of the estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.random_models import Subject
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_extras.memory.architecture import Architecture, starting_architecture
from rlhf_extras.memory.sequence_lengths import lengths_from_limits
from rlhf_extras.memory.stage_plan import EstimateInputs


def llama(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
) -> Architecture:
    """A Llama of these sizes with 256 positions."""
    config = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied, "max_position_embeddings": 256,
    }  # fmt: skip
    return Architecture.of(config, "a test")


TIED = llama(512, 64, 176, 2, 4, 4, tied=True)
GROUPED = llama(900, 64, 176, 2, 4, 2, tied=False)
DEEP = llama(512, 64, 176, 6, 4, 4, tied=True)
WIDE = llama(512, 256, 704, 4, 4, 2, tied=True)
BATCHES: dict[str, Any] = {
    "sft": {"batch_size": 8, "micro_batch_size": 4},
    "reward": {"batch": {"token_budget": 512}},
    "critic": {"batch_size": 16},
    "ppo": {"batch_size": 16, "max_new_tokens": 16, "ptx": {"batch_size": 8}},
}


def params(**sections: Any) -> Params:
    """The small batches with changes to whole sections."""
    merged = {
        name: {**BATCHES.get(name, {}), **sections.get(name, {})} for name in {*BATCHES, *sections}
    }
    return check_params(merged)


def plain() -> Subject:
    """Tied embeddings, float32, several micro-batches in SFT."""
    return Subject("plain", TIED, params(), prompt=12, reply=16)


def grouped() -> Subject:
    """Grouped queries, an unembedding of its own, bfloat16, a temperature."""
    ppo = {"temperature": 0.7, "sampling_batch_size": 4, "minibatches": 4}
    return Subject(
        "grouped", GROUPED, params(base={"dtype": "bfloat16"}, ppo=ppo), prompt=12, reply=16
    )


def recomputed() -> Subject:
    """Gradient checkpointing; adapters on policy and critic."""
    launch = {
        stage: {"gradient_checkpointing": True} for stage in ("sft", "reward", "critic", "ppo")
    }
    lora = {"rank": 4}
    ppo = {"batch_size": 32, "policy_lora": lora, "critic_lora": lora}
    sections = {
        "sft": {"batch_size": 32, "micro_batch_size": 16},
        "reward": {"batch": {"token_budget": 2048}},
    }
    return Subject(
        "recomputed",
        DEEP,
        params(compute={"launch": launch}, ppo=ppo, **sections),
        prompt=32,
        reply=16,
    )


def packed() -> Subject:
    """Adapters on 4-bit weights, of matrices large enough to be most of the model."""
    lora = {"rank": 4, "quantize": "nf4"}
    return Subject(
        "packed", WIDE, params(ppo={"policy_lora": lora, "critic_lora": lora}), prompt=12, reply=16
    )


def exact_kl() -> Subject:
    """The loss terms that need more of the vocabulary: an entropy bonus and an exact KL."""
    ppo = {
        "entropy": {"kind": "bonus", "weight": 0.01},
        "kl": {"placement": "loss", "estimator": "full"},
        "sampling_batch_size": 8,
    }
    return Subject(
        "exact_kl", llama(2048, 32, 48, 1, 2, 2, tied=True), params(ppo=ppo), prompt=8, reply=16
    )


def own_logits() -> Subject:
    """A model that bounds its logits, and so makes all of a pass at once; prompts as short as can
    be.
    """
    bounded = {"model_type": "gemma3_text", "final_logit_softcapping": 30.0, "head_dim": 16}
    config = json.loads(llama(2048, 32, 48, 1, 2, 2, tied=True).text) | bounded
    settings = params(ppo={"micro_batch_tokens": 180})
    return Subject(
        "own_logits", Architecture.of(config, "own_logits"), settings, prompt=2, reply=16
    )


def large(gpu_memory: float, **sections: Any) -> EstimateInputs:
    """LLaMA-7B in bfloat16 against GPUs of a given memory, by the limits of the settings."""
    defaults: dict[str, Any] = {
        "base": {
            "source": "huggyllama/llama-7b",
            "dtype": "bfloat16",
            "allow_high_learning_rates": True,
        },
        "plan": {"gpu_memory_gb": gpu_memory},
        "ppo": {"max_new_tokens": 256},
    }
    merged = {
        name: {**defaults.get(name, {}), **sections.get(name, {})}
        for name in {*defaults, *sections}
    }
    checked = check_params(merged)
    architecture = starting_architecture(checked.base, Path())
    lengths = lengths_from_limits(checked, architecture.config().max_position_embeddings)
    return EstimateInputs(checked, architecture, lengths, Path())
