"""The prompts file of critic pre-training and PPO."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.data.tokens.token_cache import read_tokens
from rlhf_core.errors import DataError
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts


def read_training_prompts(
    clean: Path,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    max_new_tokens: int,
    tokens: Path | None = None,
) -> TrainingPrompts:
    """Read the prompts of the train split, tokenised by way of the cache in ``tokens``.

    Of several ranks all must call it.

    Raises:
        DataError: There are none, or one of them leaves no room for a reply of ``max_new_tokens``.
    """
    path = clean / "prompts" / "train.parquet"
    rows = read_rows(path, Prompt)
    if not rows:
        raise DataError(f"{path} holds no prompts; the validate stage writes them")
    table = read_tokens(tokens, path, Prompt.KIND, tokenizer)
    prompts = TrainingPrompts([row.prompt for row in rows], table.column("prompt"))
    prompts.require_room(max_new_tokens, getattr(policy.config, "max_position_embeddings", None))
    return prompts
