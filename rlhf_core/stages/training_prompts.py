"""The prompts file of critic pre-training and PPO."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.ppo.prompts import TrainingPrompts


def read_training_prompts(
    clean: Path, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel, max_new_tokens: int
) -> TrainingPrompts:
    """Read the prompts of the train split and encode them.

    Raises:
        DataError: There are none, or one of them leaves no room for a reply of ``max_new_tokens``.
    """
    path = clean / "prompts" / "train.parquet"
    rows = read_rows(path, Prompt)
    if not rows:
        raise DataError(f"{path} holds no prompts; the validate stage writes them")
    prompts = TrainingPrompts.encode(tokenizer, [row.prompt for row in rows])
    prompts.require_room(max_new_tokens, getattr(policy.config, "max_position_embeddings", None))
    return prompts
