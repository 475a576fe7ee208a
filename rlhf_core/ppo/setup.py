"""What critic pre-training and PPO both begin with: prompts as tokens, the sampling distribution, the critic."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.data.chat import encode_prompt
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling.distribution import Sampling


def sampling_for(tokenizer: PreTrainedTokenizerBase, units: RolloutConfig) -> Sampling:
    """The training distribution of this tokenizer and these settings."""
    return Sampling.for_tokenizer(tokenizer, units.max_new_tokens, units.temperature, units.min_new_tokens)


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[list[int]]]:
    """Prompts and their token ids; ``DataError`` when there are none."""
    rows = read_rows(path, Prompt)
    if not rows:
        raise DataError(f"{path} holds no prompts; the validate stage writes them")
    return rows, [encode_prompt(tokenizer, row.prompt) for row in rows]


def require_room(prompt_ids: list[list[int]], max_new_tokens: int, positions: int | None) -> None:
    """``DataError`` when prompt and reply may not fit the model's positions: truncation would be silent otherwise."""
    longest = max(len(ids) for ids in prompt_ids)
    if positions is not None and longest + max_new_tokens > positions:
        raise DataError(
            f"the longest prompt has {longest} tokens; with ppo.max_new_tokens {max_new_tokens} that exceeds the "
            f"model's {positions} positions; shorten prompts (validate.max_prompt_chars) or max_new_tokens"
        )


def load_scalar(path: Path) -> ScalarModel:
    """A frozen reward model or referee."""
    model = ScalarModel.load(path)
    model.eval().requires_grad_(False)
    return model
