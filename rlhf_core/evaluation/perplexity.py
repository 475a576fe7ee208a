"""How likely a model finds replies: log-likelihoods, perplexities, and a policy's drift.

Perplexity of held-out text that people wrote or preferred: what PPO costs in language modelling
(alignment tax).

Unlike the perplexity of a policy's own replies it rises when the policy forgets (paper, section
6.4; Ouyang et al. 2022, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.evaluation import HeldOutPerplexityConfig
from rlhf_core.data.batches import gather_passes, whole_passes
from rlhf_core.data.schema import Preference, PretrainText, read_rows
from rlhf_core.data.statistics import one_each, standard_error
from rlhf_core.data.tokens import encode_dialogue, encode_text, pad_id, right_pad
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.evaluation.replies import OnPolicyReplies
from rlhf_core.models.causal_lm import fitting_length
from rlhf_core.models.forward import lazy_logits, right_padded
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import response_logits, token_statistics
from rlhf_core.training.examples import Example, by_length

# They bound memory: rows of one pass, and positions whose logits exist at once.
ROWS_PER_PASS = 4
POSITIONS_PER_CHUNK = 256

Row = TypeVar("Row", Preference, PretrainText)


HeldOutText = tuple[list[Preference], list[PretrainText]]


def read_held_out(clean: Path, rows: int) -> HeldOutText:
    """Read what no stage trained on: test pairs and plain text of the validation split.

    Of pairs the chosen replies count. There is nothing for 0 ``rows``.
    """
    if not rows:
        return [], []
    return (
        read_rows(clean / "preferences" / "test.parquet", Preference),
        read_rows(clean / "pretrain" / "validation.parquet", PretrainText),
    )


def score_held_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: HeldOutText,
    config: HeldOutPerplexityConfig,
) -> list[dict[str, Any]]:
    """Score ``preferred`` replies given their prompts, and ``pretrain`` text, teacher-forced.

    Pairs longer than ``config.max_tokens`` are left out, since a reply is never cut; plain text is
    cut.

    Returns:
        By row its ``kind`` and ``id``, the number of its ``tokens`` and their ``log_likelihood``.
    """
    longest = fitting_length(config.max_tokens, model)

    def preferred(row: Preference) -> Example:
        return Example(*encode_dialogue(tokenizer, row.prompt, row.chosen))

    def pretrain(row: PretrainText) -> Example:
        ids = encode_text(tokenizer, row.text)[:longest]
        return Example(ids[:1], ids[1:])  # nothing comes before the first token to predict it from

    chosen = {
        "preferred": _chosen_examples(text[0], preferred, config, longest),
        "pretrain": _chosen_examples(text[1], pretrain, config, longest),
    }
    pad = pad_id(tokenizer)
    scored: list[dict[str, Any]] = []
    for kind, examples in chosen.items():
        if not examples:
            continue
        replies = [example for _, example in examples]
        values = reply_log_likelihoods(model, replies, pad, ROWS_PER_PASS)
        for (row, example), value in zip(examples, values, strict=True):
            about = {"kind": kind, "id": row, "tokens": len(example.reply)}
            scored.append(about | {"log_likelihood": value})
    return scored


def held_out_perplexities(scored: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return exp of the mean negative log-probability per token, by kind.

    A kind without usable rows is left out.
    """
    sums: dict[str, tuple[float, int]] = {}
    for row in scored:
        nats, tokens = sums.get(row["kind"], (0.0, 0))
        sums[row["kind"]] = (nats - row["log_likelihood"], tokens + row["tokens"])
    # The exponent is bounded so that a ruined model gives a huge finite number, which JSON and
    # gates can hold.
    return {kind: math.exp(min(nats / tokens, 700.0)) for kind, (nats, tokens) in sums.items()}


def _chosen_examples(
    rows: Sequence[Row],
    encode: Callable[[Row], Example],
    config: HeldOutPerplexityConfig,
    longest: int,
) -> list[tuple[str, Example]]:
    """Encode the first rows that have a reply and are not longer than ``longest``, with their ids.

    They are in the order of their hashes.
    """
    chosen: list[tuple[str, Example]] = []
    tokens = 0
    for row in fixed_subset(rows, len(rows), "perplexity"):
        if len(chosen) == config.rows or tokens >= config.total_tokens:
            break
        example = encode(row)
        if example.reply and example.length <= longest:
            chosen.append((row.id, example))
            tokens += example.length
    return chosen


@torch.inference_mode()
def reply_log_likelihoods(
    model: PreTrainedModel, examples: Sequence[Example], pad: int, batch_size: int
) -> list[float]:
    """Return the log-probability of each reply given its prompt, in nats, summed over its tokens.

    Replies to a prompt that differ in their last token alone, as letters do, share one pass. Ranks
    share the passes.
    """
    # The last token is predicted, and never read.
    inputs = [tuple([*row.prompt, *row.reply][:-1]) for row in examples]
    users: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in enumerate(inputs):
        users.setdefault(sequence, []).append(number)
    sequences = list(users)
    log_likelihoods = torch.zeros(len(examples), dtype=torch.float64)
    for part, weight in whole_passes(
        by_length([len(sequence) for sequence in sequences]), batch_size
    ):
        rows = [sequences[number] for number in part]
        ids, mask = (tensor.to(model.device) for tensor in right_pad(rows, pad))
        logits = lazy_logits(model, ids, *right_padded(mask), ids.shape[1])
        head = logits.repeatable_head()
        owners = []
        row_numbers = []
        columns = []
        targets = []
        for row_number, row in enumerate(rows):
            for number in users[row]:
                example = examples[number]
                for offset, token in enumerate(example.reply):
                    owners.append(number)
                    row_numbers.append(row_number)
                    columns.append(len(example.prompt) + offset - 1)
                    targets.append(token)
        states = logits.states[row_numbers, columns].split(POSITIONS_PER_CHUNK)
        chunks = torch.tensor(targets, device=ids.device).split(POSITIONS_PER_CHUNK)
        values = [
            head(part).float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            for part, tokens in zip(states, chunks, strict=True)
        ]
        for _ in range(len(values), distributed.largest_of_ranks(len(values))):
            head(states[0][:0])  # where the head is sharded, all ranks gather it together
        for number, value in zip(owners, torch.cat(values).tolist(), strict=True):
            log_likelihoods[number] += weight * value
    # Each rank holds the values of its own passes and zeros elsewhere.
    return distributed.all_reduce_sum(log_likelihoods).tolist()


@dataclass(frozen=True)
class Drift:
    """Distance of a policy from the reference.

    Attributes:
        kl: Mean over sequences of the summed log-ratio (estimator k1, nats per sequence).
        kl_error: Standard error of ``kl`` over clusters of prompts; 0 where all prompts ask the
            same.
        perplexity: exp of the reference's mean negative log-probability per response token.
        replies: The replies that this was measured on, one to each of the first prompts: ``reply``,
            its ``tokens``, and their ``logprobs`` and ``reference_logprobs``.
    """

    kl: float
    kl_error: float
    perplexity: float
    replies: Sequence[dict[str, Any]] = ()

    def as_dict(self) -> dict[str, float]:
        """The KL with its 95 % interval, for ``metrics/evaluation.json``."""
        return {
            "kl": self.kl,
            "kl_low95": self.kl - 1.96 * self.kl_error,
            "kl_high95": self.kl + 1.96 * self.kl_error,
        }


def measure_drift(
    sampled: OnPolicyReplies, reference: PreTrainedModel, clusters: np.ndarray | None = None
) -> Drift:
    """Measure how far the policy that wrote ``sampled`` is from ``reference``.

    Ranks share the work.

    ``clusters`` are those of the prompts, of which the first were replied to; None: each is one of
    its own.
    """
    log_ratios: list[list[float]] = []  # by batch
    scored: list[
        list[list[Any]]
    ] = []  # tokens and both their log-probabilities, by batch and reply
    reference_nats = 0.0
    tokens = 0
    for rollout, weight in zip(sampled.rollouts, sampled.weights, strict=True):
        reference_logprobs = _score_tokens(rollout, reference, sampled.sampling)
        if not weight:
            continue
        policy_logprobs = rollout.logprobs.double().masked_fill(~rollout.response_mask, 0.0)
        log_ratios.append((policy_logprobs - reference_logprobs).sum(dim=1).tolist())
        lengths = rollout.response_mask.sum(dim=1).tolist()
        both = zip(
            rollout.replies(),
            policy_logprobs.tolist(),
            reference_logprobs.tolist(),
            lengths,
            strict=True,
        )
        scored.append([[ids, own[:length], other[:length]] for ids, own, other, length in both])
        reference_nats -= float(reference_logprobs.sum())
        tokens += int(rollout.response_mask.sum())
    of_replies = gather_passes(log_ratios)
    sums = distributed.reduce_metrics({"nats": reference_nats, "tokens": tokens})
    if clusters is not None:
        clusters = clusters[: len(of_replies)]
    error, _ = standard_error(np.array(of_replies), one_each(len(of_replies), clusters))
    if not math.isfinite(error):
        error = 0.0
    # The exponent is bounded so that a ruined policy gives a huge finite number, which JSON and
    # gates can hold.
    perplexity = math.exp(min(sums["nats"] / max(sums["tokens"], 1), 700.0))
    replies = [
        {"reply": reply.text, "tokens": ids, "logprobs": own, "reference_logprobs": other}
        for reply, (ids, own, other) in zip(sampled.replies, gather_passes(scored), strict=True)
    ]
    return Drift(float(np.mean(of_replies)), error, perplexity, replies)


@torch.inference_mode()
def _score_tokens(rollout: Rollout, model: PreTrainedModel, sampling: Sampling) -> Tensor:
    """Return log-probabilities of the sampled tokens, (B, T) float64, 0 at masked positions."""
    scored = torch.zeros(
        rollout.logprobs.shape, dtype=torch.float64, device=rollout.logprobs.device
    )
    # In one pass: the rollout fitted into memory while it was sampled.
    rows = rollout.attention_mask.sum(dim=1).argsort(stable=True)
    part = rollout.batch.part(rows)
    logprobs = token_statistics(response_logits(model, part), part, sampling)["logprobs"].double()
    scored[rows, : part.width] = logprobs.masked_fill(~part.response_mask, 0.0)
    return scored
