"""The interfaces of judges, and the one that is a scalar model: reward model, referee or judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import (
    encode_prompt,
    encode_reply,
    pad_id,
    stop_token_ids,
    vocabulary_id,
)
from rlhf_core.errors import DataError, UnwritableText
from rlhf_core.evaluation.replies import Reply
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.models.heads import ReplyScorer, ScalarModel
from rlhf_core.runtime import distributed
from rlhf_core.training.examples import values_of_sequences


class Judge(Protocol):
    """Scores replies; higher is better.

    Attributes:
        name: Prefix of the judge's scores in metrics and samples.
        absolute_tie: Largest difference that is still a tie, in the judge's own unit; None for
            judges whose unit means nothing (their margin is relative to the spread of scores).
    """

    name: str
    absolute_tie: float | None

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Score ``replies[i]`` as the answer to ``prompts[i]``; one score per reply."""
        ...


@dataclass(frozen=True)
class PairwiseJudgements:
    """What a judge without scores says about pairs, in their order.

    Attributes:
        outcomes: 1 if the candidate's reply is better, ½ for a tie, 0 if the baseline's is; NaN
            where the judge gave no usable answer, (pairs,).
        reasons: The judge's own words.
        metrics: How the judge worked, such as the share of pairs without a usable answer.
    """

    outcomes: np.ndarray
    reasons: Sequence[str]
    metrics: Mapping[str, float]

    @property
    def judged(self) -> np.ndarray:
        """The positions of the pairs that have an outcome."""
        return np.flatnonzero(~np.isnan(self.outcomes))


class PairwiseJudge(ABC):
    """Compares replies side by side, where no score of a single one means anything.

    Attributes:
        name: Prefix of what it says in metrics and samples.
    """

    name: str

    @abstractmethod
    def judge(
        self,
        prompts: Sequence[Sequence[Message]],
        candidate: Sequence[Reply],
        baseline: Sequence[Reply],
    ) -> PairwiseJudgements:
        """Compare ``candidate[i]`` with ``baseline[i]`` as answers to ``prompts[i]``."""


def require_finite(scores: ArrayLike) -> None:
    """Raise :class:`DataError` for scores of which one is not finite."""
    if not np.isfinite(scores).all():
        raise DataError(
            "a judge gave a score that is not finite; its model folder is probably damaged"
        )


class ModelJudge:
    """Scores replies by a scalar model.

    A model that reads the last token reads the end marker of a finished reply only.

    Args:
        model: The scalar model.
        tokenizer: Its tokenizer, which encodes the prompts.
        name: See :class:`Judge`.
        batch_size: Replies scored at once.
        positions: How many tokens the model can read; None for any number.
    """

    absolute_tie: float | None = None

    def __init__(
        self,
        model: ReplyScorer,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        batch_size: int = 64,
        positions: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = batch_size
        self.positions = positions
        self.vocabulary = vocabulary_id(tokenizer)

    @classmethod
    def load(
        cls, folder: Path, name: str, batch_size: int = 64, device: torch.device | None = None
    ) -> ModelJudge:
        """Load the model and tokenizer in ``folder``, on ``device`` or else this process's own."""
        scorer = ScalarModel.load(folder, device=device).eval()
        positions = positions_of(scorer.model.config)
        return cls(scorer, load_tokenizer(folder), name, batch_size, positions)

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Return scores in the model's own unit.

        Ranks share the work; batching and padding change no score.

        Raises:
            DataError: A reply that no model of this run sampled, such as a third party's, is too
                long for the model.
        """
        encoded = {
            prompt: encode_prompt(self.tokenizer, prompt)
            for prompt in dict.fromkeys(map(tuple, prompts))
        }
        sequences = [
            (encoded[tuple(prompt)], self._encode_reply(encoded[tuple(prompt)], reply))
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        with torch.inference_mode():
            values = values_of_sequences(
                sequences,
                lambda batch: self.model.reply_scores(
                    batch.input_ids, batch.attention_mask, batch.reply_mask
                ).float(),
                self.batch_size,
                pad_id(self.tokenizer),
                distributed.device(),
            )
        scores: list[float] = values.tolist()
        return scores

    def _encode_reply(self, prompt_ids: list[int], reply: Reply) -> list[int]:
        """Token ids of a reply: those that the policy generated, as they are.

        Ids of another vocabulary (a champion of an older tokenizer) mean nothing to this model; it
        gets the visible text in its own tokens, with an end marker only if the reply has one. A
        reply that this model's template would not write as it is, such as one with reasoning that
        it leaves out, is read as it stands.
        """
        if reply.vocabulary == self.vocabulary:
            return list(reply.token_ids)
        try:
            token_ids = encode_reply(self.tokenizer, reply.text, reply.finished)
        except UnwritableText:
            end = []
            if reply.finished:
                end = list(stop_token_ids(self.tokenizer)[:1])
            token_ids = encode_reply(self.tokenizer, reply.text, finished=False) + end
        length = len(prompt_ids) + len(token_ids)
        if self.positions is not None and length > self.positions:
            raise DataError(
                f"a prompt with its reply has {length} tokens, more than the {self.positions} positions of the model "
                f"{self.name!r}; leave out or shorten {reply.text[:40]!r}…"
            )
        return token_ids
