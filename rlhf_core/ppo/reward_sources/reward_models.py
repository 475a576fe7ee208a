"""Reward sources that read the policy's own tokens: one reward model, or an ensemble penalised by its disagreement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.encoding import encode_dialogue, pad_id
from rlhf_core.data.schema import Demonstration, Message, read_rows
from rlhf_core.errors import ModelError
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.starting.base import load_tokenizer
from rlhf_core.ppo.reward_sources.source import Replies
from rlhf_core.ppo.rewards.token_rewards import RewardFn
from rlhf_core.sampling.token_scoring import MICRO_BATCH
from rlhf_core.training.examples import collate

ORIGIN_REPLIES = 256


class RewardModelSource:
    """One reward model."""

    def __init__(self, reward_fn: RewardFn) -> None:
        self.reward_fn = reward_fn
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """The model's rewards (B,) as they are; one that is not finite makes its step be skipped."""
        return self.reward_fn(replies.tokens)


class EnsembleRewards:
    """``mean - k * std`` over members (population std), each relative to its ``origin``.

    Source: Coste et al. 2023, "Reward model ensembles help mitigate overoptimization" (uncertainty-weighted
    optimisation, there with the variance). Metric ``spread``: mean std over the batch.
    """

    def __init__(self, members: Sequence[RewardFn], origins: Sequence[float], k: float) -> None:
        self.members, self.origins, self.k = tuple(members), tuple(origins), k
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """(B,); a member's reward that is not finite makes the result not finite."""
        columns = [member(replies.tokens) - origin for member, origin in zip(self.members, self.origins, strict=True)]
        rewards = torch.stack(columns)
        spread = rewards.std(dim=0, unbiased=False)
        self.metrics = {"spread": float(spread.mean())}
        return rewards.mean(dim=0) - self.k * spread


def require_same_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model in ``folder`` was trained on the tokens that ``tokenizer`` makes.

    Raises:
        ModelError: It has another vocabulary or chat template.
    """
    own = load_tokenizer(folder)
    dialogue = [Message("user", "What colour is the sky?\n"), Message("assistant", "Blue."), Message("user", "Why? é")]
    same = own.get_vocab() == tokenizer.get_vocab() and own.eos_token_id == tokenizer.eos_token_id
    if not same or encode_dialogue(own, dialogue, "It is.") != encode_dialogue(tokenizer, dialogue, "It is."):
        raise ModelError(
            f"the reward model {folder} has another tokenizer or chat template than the policy, so it cannot read the "
            "policy's tokens; use it as kind classifier, which encodes replies with the model's own tokenizer"
        )


@torch.inference_mode()
def reward_origin(model: ScalarModel, clean: Path, tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean reward of ``model`` on up to 256 demonstrations of the train split, the same ones every time.

    Ids are content hashes, so the first of them are a fixed sample. Demonstrations beyond the model's positions are
    left out.

    Raises:
        ModelError: No demonstration fits the model.
    """
    path = clean / "demonstrations" / "train.parquet"
    rows = sorted(read_rows(path, Demonstration), key=lambda row: row.id)
    positions = getattr(model.model.config, "max_position_embeddings", None)
    encoded = [encode_dialogue(tokenizer, row.prompt, row.reply) for row in rows[:ORIGIN_REPLIES]]
    fitting = [both for both in encoded if positions is None or len(both[0]) + len(both[1]) <= positions]
    if not fitting:
        raise ModelError(f"no demonstration of {path} fits the model, so its score has no origin; set center to false")
    total = 0.0
    for start in range(0, len(fitting), MICRO_BATCH):
        prompts, replies = zip(*fitting[start : start + MICRO_BATCH], strict=True)
        batch = collate(prompts, replies, pad_id(tokenizer)).to(model.model.device)
        total += float(model.reply_scores(batch.input_ids, batch.attention_mask, batch.reply_mask).double().sum())
    return total / len(fitting)
