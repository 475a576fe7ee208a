"""Replies as metrics and judges see them, sampled by a policy or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.batches import gather_passes, whole_passes
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Message
from rlhf_core.data.text import mean, reply_statistics, split_words
from rlhf_core.data.tokens import (
    decode_reply,
    encode_prompt,
    encode_prompts,
    reply_length,
    special_token_ids,
    vocabulary_id,
)
from rlhf_core.errors import DataError
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import fitting_length
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling, TokenDistribution
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, Sampler
from rlhf_core.training.examples import by_length
from rlhf_core.training.rng import derive_seed

BATCH = 64


@dataclass(frozen=True)
class Reply:
    """A reply to one prompt, as the policy wrote it.

    Attributes:
        text: The reply without its end marker. Special tokens inside it are visible, such as
            ``<|user|>``.
        finished: Whether the reply ended by itself.
        token_ids: The generated ids, end marker included; empty for a reply that is known as text
            only.
        special_tokens: How many of ``token_ids`` are padding, role or other special tokens: defects
            of the reply.
        vocabulary: The vocabulary that ``token_ids`` belong to; see
            :func:`~rlhf_core.data.tokens.vocabulary_id`.
    """

    text: str
    finished: bool
    token_ids: tuple[int, ...] = ()
    special_tokens: int = 0
    vocabulary: str = ""


def rows_of_file(file: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield each row of a file of records: its place for messages, its position, its fields.

    Raises:
        DataError: The file cannot be read, or a row has no fields.
    """
    for record in stream_records(file):
        where = f"{file}, line {record.position}"
        if record.problem or not isinstance(record.value, dict):
            raise DataError(f"{where}: {record.problem or 'no object with fields'}")
        yield where, record.position, record.value


def prompt_of(value: Any) -> list[Message] | None:
    """Return the prompt that a file gives as a text or as a list of messages; else None."""
    turns = value
    if isinstance(value, str):
        turns = [{"role": "user", "content": value}]
    if not isinstance(turns, list) or not turns:
        return None
    prompt = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        role = turn.get("role")
        content = turn.get("content")
        if role not in ROLES or not isinstance(content, str):
            return None
        prompt.append(Message(role, content))
    return prompt


def measure_text(replies: Sequence[Reply]) -> dict[str, float]:
    """Return statistics of a set of replies, all 0 for none; docs/metrics.md gives healthy ranges.

    Returns:
        Those of :func:`~rlhf_core.data.text.reply_statistics`; ``words``, mean number of words and
        punctuation marks; ``special_tokens``, share of replies with padding, role or other special
        tokens inside.
    """
    texts = [reply.text for reply in replies]
    lengths = [len(reply.token_ids) for reply in replies]
    finished = [reply.finished for reply in replies]
    words = [len(split_words(text)) for text in texts]
    defects = [reply.special_tokens > 0 for reply in replies]
    statistics = reply_statistics(texts, lengths, finished)
    return statistics | {"words": mean(words), "special_tokens": mean(defects)}


@dataclass(frozen=True)
class OnPolicyReplies:
    """Replies sampled from the training distribution, whose tokens can be scored again.

    Attributes:
        replies: One reply per prompt, on every rank.
        rollouts: One rollout per batch; of several ranks each has those of its own prompts.
        weights: One per rollout; 0 for a rollout that only keeps this rank in step with the others.
        sampling: The distribution that was sampled from.
    """

    replies: list[Reply]
    rollouts: list[Rollout]
    weights: list[float]
    sampling: Sampling


def evaluation_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    config: SamplingConfig,
    seed: int,
    on_batch: Callable[[int], None] = lambda count: None,
    batch_size: int = BATCH,
    replies_per_prompt: int = 1,
    sampler: Sampler | None = None,
) -> list[Reply]:
    """Sample replies with the evaluation's filters, top-p and repetition penalty.

    Those to one prompt are in a row.

    Prompt ``i`` uses random stream ``i`` of ``seed`` for its first reply, and of seeds derived from
    it for the others, so two models get the same random numbers, and further replies change none.
    Prompts of similar length share a batch. Of several ranks each samples its share of the batches,
    and gets all replies, which have the same bits as those of one process; another batch size
    changes them by rounding, where that decides a draw. Where prompt and reply would have more
    tokens than the model has positions, the replies of the batch are cut off before.

    Args:
        on_batch: Called with the number of replies of each finished batch, of all ranks together.
        sampler: Has the weights of ``model``; None samples with the model itself.

    Raises:
        DataError: A prompt is as long as the model has positions, or longer.
    """
    sampling = EvaluationSampling.for_tokenizer(tokenizer, config)
    encoded = encode_prompts(tokenizer, prompts)
    lengths = [len(ids) for ids in encoded]
    longest = max(lengths, default=0)
    if lengths and fitting_length(longest + 1, model) <= longest:
        content = prompts[lengths.index(longest)][-1].content
        raise DataError(
            f"a prompt of {longest} tokens leaves no room for a reply within the model's positions; leave out or "
            f"shorten {content[:40]!r}…"
        )
    order = by_length(lengths)
    shared = list(whole_passes(order, batch_size))
    largest = max((len(rows) for rows, _ in shared), default=0)
    steps = replies_per_prompt * len(shared) * config.max_new_tokens
    draws: list[list[list[int]]] = []
    sampler = sampler or LocalSampler.of(model)
    with sampler.awake(sampler.version, largest, steps):
        for number in range(replies_per_prompt):
            draw_seed = derive_seed(seed, "evaluation replies", number) if number else seed
            own: list[list[list[int]]] = []  # by batch
            for done, (rows, weight) in enumerate(shared):
                if weight:
                    batch = PromptBatch([encoded[row] for row in rows], rows, draw_seed)
                    rollout = sampler.sample(batch, _within_positions(sampling, batch, model))
                    own.append(rollout.replies())
                together = batch_size * distributed.world_size()
                on_batch(min(together, len(prompts) - done * together))
            by_prompt = dict(zip(order, gather_passes(own), strict=True))
            draws.append([by_prompt[prompt] for prompt in range(len(order))])
    sequences: list[list[int]] = []
    for of_prompt in zip(*draws, strict=True):
        sequences += of_prompt
    return generated_replies(tokenizer, sequences)


def _within_positions(
    sampling: TokenDistribution, batch: PromptBatch, model: PreTrainedModel
) -> TokenDistribution:
    """Return ``sampling`` with replies that fit behind the longest prompt of the batch."""
    positions = positions_of(model.config)
    base = sampling.base
    if positions is not None:
        room = positions - max(map(len, batch.ids))
        base = replace(base, max_new_tokens=min(base.max_new_tokens, room))
    if isinstance(sampling, Sampling):
        return base
    return replace(sampling, base=base)


def on_policy_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    sampling: Sampling,
    seed: int,
    batch_size: int = BATCH,
    sampler: Sampler | None = None,
) -> OnPolicyReplies:
    """Sample one reply per prompt from the training distribution, which KL is measured under.

    Prompts use their random streams as in :func:`evaluation_replies`, and replies end at the
    model's last position; of several ranks each samples its share.
    """
    sequences: list[list[list[int]]] = []  # by batch
    rollouts = []
    weights = []
    order = list(range(len(prompts)))
    shared = list(whole_passes(order, batch_size))
    largest = max((len(rows) for rows, _ in shared), default=0)
    sampler = sampler or LocalSampler.of(model)
    with sampler.awake(sampler.version, largest, len(shared) * sampling.max_new_tokens):
        for rows, weight in shared:
            ids = [encode_prompt(tokenizer, prompts[i]) for i in rows]
            batch = PromptBatch(ids, rows, seed)
            rollout = sampler.sample(batch, _within_positions(sampling, batch, model))
            rollouts.append(rollout)
            weights.append(weight)
            if weight:
                sequences.append(rollout.replies())
    replies = generated_replies(tokenizer, gather_passes(sequences))
    return OnPolicyReplies(replies, rollouts, weights, sampling)


def generated_replies(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Sequence[int]]
) -> list[Reply]:
    """Turn sequences of generated token ids into replies, which end at their end marker."""
    special = special_token_ids(tokenizer)
    vocabulary = vocabulary_id(tokenizer)
    replies = []
    for sequence in sequences:
        text, finished = decode_reply(tokenizer, sequence)
        length, _ = reply_length(tokenizer, sequence)
        token_ids = tuple(map(int, sequence[:length]))
        special_tokens = sum(token in special for token in token_ids)
        replies.append(Reply(text, finished, token_ids, special_tokens, vocabulary))
    return replies
