"""What the stages that train the policy share: their prompts and their outputs."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.errors import DataError
from rlhf_core.ppo.rollout import TrainingPrompts, require_room

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


def require_room_for_replies(
    clean: Path,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    max_new_tokens: int,
    tokens: Path | None = None,
) -> None:
    """Check that a reply of ``max_new_tokens`` fits the model beside the prompts of every split.

    Critic pre-training, PPO and the evaluation would stop at one that does not, after hours. What is tokenised here is
    in the cache ``tokens`` for them. Of several ranks all must call it.

    Raises:
        DataError: A prompt leaves no such room, or the tokenizer cannot write it.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    for split in ("train", "validation", "test"):
        table = read_tokens(tokens, clean / "prompts" / f"{split}.parquet", Prompt.KIND, tokenizer)
        require_room(table.column("prompt"), max_new_tokens, positions, "ppo.max_new_tokens")
