"""What the stages that train the policy share: their prompts and their outputs."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.errors import DataError
from rlhf_core.ppo.rollout import TrainingPrompts

POLICY_OUTPUTS = {
    "model": "models/policy",
    "metrics": "metrics/ppo.json",
    "history": "history/ppo.jsonl",
    "abandoned": "history/ppo_abandoned.jsonl",
    "samples": "samples/ppo.jsonl",
}


def read_training_prompts(
    clean: Path, tokenizer: PreTrainedTokenizerBase, tokens: Path | None = None
) -> TrainingPrompts:
    """Read the prompts of the train split, tokenised by way of the cache in ``tokens``.

    Of several ranks all must call it.

    Raises:
        DataError: There are none.
    """
    path = clean / "prompts" / "train.parquet"
    rows = read_rows(path, Prompt)
    if not rows:
        raise DataError(f"{path} holds no prompts; the validate stage writes them")
    table = read_tokens(tokens, path, Prompt.KIND, tokenizer)
    return TrainingPrompts([row.prompt for row in rows], table.column("prompt"))
