"""The token distributions that replies are sampled from.

The training distribution and the filtered evaluation one.

The training distribution consists of the temperature, the forbidden tokens and the minimum length.
The sampler draws from it, and every later scoring (policy, reference, update) uses the same one;
top-p and the repetition penalty exist for evaluation only (algorithms.md §9, trap 1). Shapes: B
sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.data.tokens import pad_id, special_token_ids, stop_token_ids

# Finite, because -inf minus -inf would turn an exact KL into NaN; exp of it is exactly zero all the
# same.
FORBIDDEN = -1e9
# Tokens of a vocabulary that is drawn from in one step, and of a chunk of a larger one.
LARGEST_IN_ONE_STEP = 1 << 16
CHUNK = 1024
# Its product with a sum is less than the sum, so that no token behind the last likely one is drawn.
BELOW_ONE = 1.0 - 2.0**-40
# Stands for a token after the last one of a reply in the making.
NOT_DRAWN = torch.iinfo(torch.long).max


@dataclass(frozen=True)
class Sampling:
    """The training distribution, and the token ids that a reply needs.

    A reply ends at ``eos_id``, the token that closes a turn, or at one of ``other_stop_ids``; all
    of these have probability zero before ``min_new_tokens``. ``forbidden_ids`` have probability
    zero at every position; of a tokenizer they are all special tokens but those that end a reply.
    So have ids from ``vocabulary_size`` on, which the model may have but the tokenizer cannot
    write.
    """

    eos_id: int
    pad_id: int
    max_new_tokens: int
    temperature: float = 1.0
    min_new_tokens: int = 0
    forbidden_ids: tuple[int, ...] = ()
    vocabulary_size: int | None = None
    other_stop_ids: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """All tokens that end a reply."""
        return (self.eos_id, *self.other_stop_ids)

    @property
    def base(self) -> Sampling:
        """Itself: there are no filters."""
        return self

    def next_token(self, logits: Tensor, drawn: Tensor, position: Tensor) -> Tensor:
        """Log-probabilities of the reply's token at ``position`` (1,): (B, V) -> (B, V).

        ``drawn`` (B, t) are the reply's tokens so far; ids that the vocabulary does not have are
        none.
        """
        of_one_position = logits.unsqueeze(1)
        return log_distribution_at(of_one_position, position, self).squeeze(1)

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        temperature: float = 1.0,
        min_new_tokens: int = 0,
    ) -> Sampling:
        """The distribution over what ``tokenizer`` can write, and the tokens that end a reply.

        PPO, critic pre-training, checkpoint selection and evaluation all build theirs here.
        """
        closing_id, *other_stop_ids = stop_token_ids(tokenizer)
        return cls(
            eos_id=closing_id,
            pad_id=pad_id(tokenizer),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            min_new_tokens=min_new_tokens,
            forbidden_ids=tuple(sorted(special_token_ids(tokenizer))),
            vocabulary_size=max(tokenizer.get_vocab().values()) + 1,
            other_stop_ids=tuple(other_stop_ids),
        )

    @classmethod
    def for_rollouts(cls, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> Sampling:
        """The distribution of critic pre-training and PPO."""
        return cls.for_tokenizer(
            tokenizer, config.max_new_tokens, config.temperature, config.min_new_tokens
        )


@dataclass(frozen=True)
class EvaluationSampling:
    """The distribution of judged replies.

    ``base`` with a repetition penalty before it and top-p after it.
    """

    base: Sampling
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def for_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, config: SamplingConfig
    ) -> EvaluationSampling:
        """The filters of ``config`` over what ``tokenizer`` can write, with its end tokens."""
        base = Sampling.for_tokenizer(tokenizer, config.max_new_tokens, config.temperature)
        return cls(base, config.top_p, config.repetition_penalty)

    def next_token(self, logits: Tensor, drawn: Tensor, position: Tensor) -> Tensor:
        """Filtered log-probabilities (B, V) at ``position`` (1,).

        The repetition penalty comes first, then ``base``, then top-p.

        ``drawn`` (B, t) are the reply's tokens so far, and :data:`NOT_DRAWN` after them: the
        penalty divides positive and multiplies negative logits of tokens that were generated
        before, not of those in the prompt (Keskar et al. 2019; paper, section 6.1). Top-p keeps the
        smallest set of tokens whose probability reaches ``top_p`` (Holtzman et al. 2020).
        """
        logits = logits.float()
        if self.repetition_penalty != 1.0:
            penalty = self.repetition_penalty
            vocabulary = logits.shape[1]  # one more column takes what was not drawn
            occurred = logits.new_zeros(len(logits), vocabulary + 1, dtype=torch.bool)
            columns = drawn.clamp(max=vocabulary)
            occurred = occurred.scatter_(1, columns, True)
            occurred = occurred[:, :vocabulary]
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(occurred, penalised, logits)
        of_one_position = logits.unsqueeze(1)
        logits = _constrained_logits(of_one_position, position, self.base).squeeze(1)
        if self.top_p < 1.0:
            ordered, order = logits.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(dim=-1)
            likelier = probabilities.cumsum(dim=-1) - probabilities
            outside = likelier >= self.top_p
            outside[..., 0] = False  # the likeliest stays, however close to 0 the share is
            dropped = torch.zeros_like(outside).scatter(1, order, outside)
            logits = logits.masked_fill(dropped, FORBIDDEN)
        return torch.log_softmax(logits, dim=-1)


TokenDistribution = Sampling | EvaluationSampling


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of the first T response positions.

    Shapes: logits (B, T, V) -> (B, T, V).

    They are float32, or float64 where the logits are.
    """
    positions = torch.arange(logits.shape[-2], device=logits.device)
    return log_distribution_at(logits, positions, sampling)


def log_distribution_at(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities at the response positions (N,), each counted from 0.

    Shapes: logits (..., N, V) -> (..., N, V).
    """
    constrained = _constrained_logits(logits, positions, sampling)
    return torch.log_softmax(constrained, dim=-1)


def _constrained_logits(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """Logits (..., N, V) after temperature and masks."""
    changed = logits
    if logits.dtype in (torch.float16, torch.bfloat16):
        changed = logits.float()
    if sampling.temperature != 1.0:
        changed = changed / sampling.temperature
    mask = _forbidden_mask(positions, logits.shape[-1], sampling)
    if mask is None:
        return changed
    # In place where the tensor is new anyway: at a large vocabulary another copy of it is
    # gigabytes.
    if changed is logits:
        return changed.masked_fill(mask, FORBIDDEN)
    return changed.masked_fill_(mask, FORBIDDEN)


def _forbidden_mask(positions: Tensor, width: int, sampling: Sampling) -> Tensor | None:
    """Where tokens have probability zero: bool (N, V), or (1, V) where all positions are alike.

    None if nowhere.
    """
    vocabulary = sampling.vocabulary_size
    if vocabulary is None:
        vocabulary = width
    earliest_end = sampling.min_new_tokens
    if not sampling.forbidden_ids and vocabulary >= width and not earliest_end:
        return None
    # A mask of a pass on shapes alone is no mask for a pass with values, and the other way round.
    marked = _marked if detect_fake_mode() is None else _marked.__wrapped__
    never = marked(sampling.forbidden_ids, vocabulary, width, positions.device)
    if not earliest_end:
        return never
    stops = marked(sampling.stop_ids, width, width, positions.device)
    too_early = positions < earliest_end
    return never | (stops & too_early.unsqueeze(1))


@cache  # for good: a captured graph reads them where they are
def _marked(ids: tuple[int, ...], vocabulary: int, width: int, device: torch.device) -> Tensor:
    """Bool (1, ``width``): true at ``ids`` and from ``vocabulary`` on.

    Made once, since a GPU waits for indices.
    """
    with torch.inference_mode(False):  # a backward pass may keep it
        mask = torch.zeros(1, width, dtype=torch.bool)
        mask[:, list(ids)] = True
        mask[:, vocabulary:] = True
        return mask.to(device)


def inverse_cdf(log_probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution.

    Shapes: (B, V) and uniforms in [0, 1), float64 (B,) -> token ids (B,).

    A vocabulary of over 65,536 tokens is searched for the chunk first and then within it, so that
    float64 is spent on one chunk alone: at 152,000 tokens that takes two fifths of the time. The
    probability of a chunk is then rounded as float32 is; smaller vocabularies are drawn from in
    one step.
    """
    if log_probabilities.shape[-1] > LARGEST_IN_ONE_STEP:
        return _inverse_cdf_in_chunks(log_probabilities, uniforms)
    # In place: with a large vocabulary allocating another copy takes as long as a sum.
    cumulative = log_probabilities.to(torch.float64, copy=True)
    cumulative = cumulative.exp_().cumsum_(dim=-1)
    totals = cumulative[:, -1]
    thresholds = uniforms * totals
    # A token of probability zero has the same cumulative value as the one before it, so it is never
    # the first above.
    thresholds = thresholds.unsqueeze(-1)
    picked = torch.searchsorted(cumulative, thresholds, right=True)
    last = log_probabilities.shape[-1] - 1
    return picked.squeeze(-1).clamp(max=last)


def _inverse_cdf_in_chunks(log_probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """:func:`inverse_cdf` in two steps."""
    vocabulary = log_probabilities.shape[-1]
    probabilities = log_probabilities.exp()
    divided = vocabulary - vocabulary % CHUNK
    chunks = probabilities[:, :divided].unflatten(1, (-1, CHUNK))
    sums = chunks.sum(dim=2)
    if divided < vocabulary:
        remainder = probabilities[:, divided:].sum(dim=1, keepdim=True)
        sums = torch.cat((sums, remainder), dim=1)
    cumulative = sums.double().cumsum(dim=1)
    totals = cumulative[:, -1]
    thresholds = uniforms.clamp(max=BELOW_ONE) * totals
    thresholds = thresholds.unsqueeze(1)
    # The first above, which has mass. Of numbers that are NaN none is above.
    chunk = torch.searchsorted(cumulative, thresholds, right=True)
    chunk = chunk.clamp(max=sums.shape[1] - 1)
    mass = sums.gather(1, chunk).double()
    before = cumulative.gather(1, chunk) - mass
    within = (thresholds - before) / mass
    within = within.clamp(0.0, BELOW_ONE)
    first = CHUNK * chunk
    columns = first + torch.arange(CHUNK, device=chunk.device)
    last = vocabulary - 1
    own = log_probabilities.gather(1, columns.clamp(max=last))
    own = own.masked_fill(columns > last, FORBIDDEN)
    picked = inverse_cdf(own, within.squeeze(1))
    picked = first.squeeze(1) + picked
    return picked.clamp(max=last)


def philox_uniforms(seed: int, streams: Sequence[int], length: int) -> Tensor:
    """Uniform numbers (B, length) float64; row b is a function of (seed, streams[b]) alone.

    So which process or batch a prompt falls into never changes what is sampled for it.
    """
    rows = np.empty((len(streams), length))
    for row, stream in enumerate(streams):
        philox = np.random.Philox(key=[seed, stream])
        generator = np.random.Generator(philox)
        rows[row] = generator.random(length)
    return torch.from_numpy(rows)
