"""The passes that the stages make, each run on shapes alone: the code that trains, with full-length
rows of zeros.

Losses are differentiated where a model is trained. Terms of them that are of the size of a batch,
without vocabulary or hidden size, are left out. Passes are remembered, since advice tries many
settings that change few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.architecture import cache_sizes
from rlhf_core.models.forward import LOGITS_BYTES, LazyLogits, lazy_logits
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling.block_cache import BlockCache
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling, inverse_cdf
from rlhf_core.sampling.token_scoring import (
    Tokens,
    response_logits,
    response_values,
    token_statistics,
)
from rlhf_core.training.losses import chunked_cross_entropy, pairwise_loss
from rlhf_extras.memory.dry_run import (
    ModelVariant,
    Moments,
    TensorMemory,
    repeated_layers,
    run_pass,
)
from rlhf_extras.memory.sequence_lengths import BatchShape


@cache
def reply_loss(
    model: ModelVariant,
    batch: BatchShape,
    accumulated: bool = False,
    logits_bytes: int = LOGITS_BYTES,
) -> Moments:
    """Cross-entropy at ``batch.scored`` positions, the only ones that are unembedded,
    ``logits_bytes`` at a time.

    ``accumulated`` says that the gradients of an earlier micro-batch exist already.
    """

    def run(memory: TensorMemory, policy: PreTrainedModel) -> Tensor:
        ids, mask = _full_rows(batch.rows, batch.width)
        logits = lazy_logits(policy, ids, mask, ids, batch.width)
        scored = LazyLogits(
            _scored_positions(logits.states, batch.scored), logits.head, logits.vocabulary
        )
        targets = torch.zeros(batch.scored, dtype=torch.long)
        return chunked_cross_entropy(scored, targets, batch.scored, logits_bytes)

    return run_pass(run, [model], accumulated)


@cache
def pair_loss(model: ModelVariant, batch: BatchShape, logits_bytes: int = LOGITS_BYTES) -> Moments:
    """The reward model's loss on ``batch.rows / 2`` pairs, with imitation at ``batch.scored``
    positions if any.
    """

    def run(memory: TensorMemory, reward: ScalarModel) -> Tensor:
        pairs, (ids, mask) = batch.rows // 2, _full_rows(batch.rows, batch.width)
        hidden = reward.hidden(ids, mask)
        chosen, rejected = reward.scores(reward.pool(hidden, mask, mask)).chunk(2)
        loss = pairwise_loss(chosen, rejected, None, pairs)
        if batch.scored:
            logits = reward.lm_logits(_scored_positions(hidden[:pairs], batch.scored))
            targets = torch.zeros(batch.scored, dtype=torch.long)
            loss = loss + chunked_cross_entropy(logits, targets, batch.scored, logits_bytes)
        return loss

    return run_pass(run, [model])


@cache
def reply_scores(model: ModelVariant, batch: BatchShape) -> Moments:
    """Scores of a reward model, without gradient."""

    def run(memory: TensorMemory, scorer: ScalarModel) -> Tensor:
        ids, mask = _full_rows(batch.rows, batch.width)
        return scorer.reply_scores(ids, mask, mask)

    return run_pass(run, [model.in_inference])


@cache
def value_loss(
    model: ModelVariant, batch: BatchShape, sampling: Sampling, accumulated: bool
) -> Moments:
    """A critic's loss on full-length replies."""

    def run(memory: TensorMemory, critic: ScalarModel) -> Tensor:
        return response_values(critic, _rollout_tokens(batch, sampling)).square().sum()

    return run_pass(run, [model], accumulated)


@cache
def reply_statistics(
    model: ModelVariant,
    batch: BatchShape,
    sampling: Sampling,
    entropies: bool = False,
    reference: Literal["none", "own", "frozen"] = "none",
    exact_kl: bool = True,
    critic: ModelVariant | None = None,
    accumulated: bool = False,
    logits_bytes: int = LOGITS_BYTES,
) -> Moments:
    """Log-probabilities of full-length replies and what is computed with them; their sum is a
    trained policy's loss.

    Args:
        model: The policy.
        batch: The replies with their prompts.
        sampling: The distribution that they come from.
        entropies: Whether to compute entropies.
        reference: What a KL is measured to: nothing, the policy itself, or the model that it
            started as.
        exact_kl: Whether that is over the whole vocabulary.
        critic: What gives values at the same positions, without gradient.
        accumulated: Whether the gradients of an earlier micro-batch exist already.
        logits_bytes: Most bytes of the logits of one chunk.
    """
    started_as = (
        [ModelVariant(model.architecture, "causal_lm", model.precision, on_gpu=model.on_gpu)]
        if reference == "frozen"
        else []
    )

    def run(memory: TensorMemory, policy: PreTrainedModel, *others: Any) -> Tensor:
        tokens = _rollout_tokens(batch, sampling)
        logits = response_logits(policy, tokens)
        other = logits if reference == "own" else None
        with torch.no_grad():
            if critic is not None:
                response_values(others[-1], tokens)
            if reference == "frozen":
                other = response_logits(others[0], tokens)
        statistics = token_statistics(
            logits,
            tokens,
            sampling,
            logits_bytes,
            entropies=entropies,
            reference=other,
            exact_kl=exact_kl,
        )
        needed = [values for name, values in statistics.items() if name != "ref_logprobs"]
        return torch.stack([one.sum() for one in needed]).sum()

    return run_pass(
        run,
        [model, *started_as, *([critic.in_inference] if critic is not None else [])],
        accumulated,
    )


@cache
def generation(
    model: ModelVariant, rows: int, prompt: int, sampling: Sampling | EvaluationSampling
) -> Moments:
    """Sampling ``rows`` replies at once: the pass over the prompts, then the last token of
    full-length replies.

    With :class:`EvaluationSampling` the evaluation's filters apply.
    """
    reply = sampling.base.max_new_tokens
    # Layers in 4 bits are not merged, and the model at hand stands for them with layers that would
    # be.
    packed = model.lora is not None and model.lora.quantize is not None

    def run(memory: TensorMemory, policy: PreTrainedModel) -> tuple[Tensor, ...]:
        response, logprobs = torch.zeros(rows, reply, dtype=torch.long), torch.zeros(rows, reply)
        uniforms = torch.zeros(rows, reply, dtype=torch.float64)
        with nullcontext() if packed else _counted_decoding_layers(memory, policy):
            tokens, mask = _full_rows(rows, prompt)
            _decode(policy, tokens, mask, CountedCache(memory, policy.config))
            tokens, mask = _full_rows(rows, prompt + reply - 1)
            cache = CountedCache(memory, policy.config)
            cache.fill(policy, rows, prompt + reply - 1)
            logits = _decode(policy, tokens[:, -1:], mask, cache)
            inverse_cdf(
                sampling.next_token(logits, tokens[:, prompt:], torch.tensor([reply - 1])),
                uniforms[:, -1],
            )
        return response, logprobs

    return run_pass(run, [model.in_inference])


@contextmanager
def _counted_decoding_layers(memory: TensorMemory, policy: PreTrainedModel) -> Iterator[None]:
    """Decode with the layers of a GPU: merged adapters and a float32 head, whose weights count as
    ``other``.
    """
    own = {id(parameter) for parameter in policy.parameters()}
    with decoding_layers(policy, rows=0, steps=0):
        for part, repeat in [(policy, 1), *repeated_layers(policy)]:
            for parameter in part.parameters():
                if id(parameter) not in own:
                    memory.recount(parameter, "other", repeat)
        memory.restart()
        yield


class CountedCache(BlockCache):
    """A key-value cache that ``memory`` counts as such."""

    def __init__(self, memory: TensorMemory, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.memory = memory

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of a layer."""
        keys, values = super().update(*args, **kwargs)
        for tensor in (keys, values):
            self.memory.recount(tensor, "kv_cache")
        return keys, values

    def fill(self, policy: PreTrainedModel, rows: int, width: int) -> None:
        """Hold ``width`` tokens of ``rows`` sequences; how they came there is not counted."""
        heads, head_dim = cache_sizes(policy.config)
        for number, (_, repeat) in enumerate(repeated_layers(policy)):
            keys = torch.zeros(rows, heads, width, head_dim, dtype=policy.dtype)
            for tensor in self.update(keys, torch.zeros_like(keys), number):
                self.memory.recount(tensor, repeat=repeat)
        del keys, tensor
        self.memory.restart()


def _decode(policy: PreTrainedModel, ids: Tensor, mask: Tensor, cache: BlockCache) -> Tensor:
    """Logits (B, V) after the last of ``ids``, whose positions may as well be the ids themselves
    here.
    """
    logits: Tensor = policy(
        input_ids=ids,
        attention_mask=mask,
        position_ids=ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def _scored_positions(values: Tensor, count: int) -> Tensor:
    """``count`` of all positions, (B, L, ...) -> (count, ...). Which ones makes no difference to
    memory.
    """
    return values.flatten(0, 1)[torch.zeros(count, dtype=torch.long)]


def _full_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask without padding, which is treated as if there were some."""
    ids = torch.zeros(rows, width, dtype=torch.long)
    return ids, torch.ones_like(ids)


class FullTokens(Tokens):
    """Replies of full length, which is known without looking at their mask."""

    @property
    def real_positions(self) -> Tensor:
        """Numbers of all response positions (B * T,)."""
        return torch.arange(self.response_mask.numel())


def _rollout_tokens(batch: BatchShape, sampling: Sampling) -> Tokens:
    ids, mask = _full_rows(batch.rows, batch.width)
    return FullTokens(ids, mask, torch.ones(batch.rows, sampling.max_new_tokens, dtype=torch.bool))
