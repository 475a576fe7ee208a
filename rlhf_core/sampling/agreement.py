"""Whether replies are scored as they were sampled.

There are limits of how far both may differ, and a trial on a few tokens.

Architectures differ in what they keep between tokens (keys and values, a window of them, states of
recurrent layers), in how they count positions, and in whether padding changes a result. A few
tokens tell, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError, first_line, is_exhausted
from rlhf_core.models.architecture import arguments_of, evaluation_mode, probe_ids, vocabulary_of
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.precision import Precision, matmul_precision
from rlhf_core.sampling.distribution import Sampling, log_distribution, philox_uniforms
from rlhf_core.sampling.generation import Rollout, generate
from rlhf_core.sampling.token_scoring import Tokens, gather_logprobs, response_logits


@dataclass(frozen=True)
class RoundingLimits:
    """The most that rounding explains, in nats.

    Attributes:
        mean: Mean absolute difference of log-probabilities per token.
        token: Beyond it a single token differs much.
        share: Share of tokens that may.
        growth: By how much the mean of the later halves of replies may exceed that of the earlier
            halves.
    """

    mean: float
    token: float
    share: float
    growth: float


LIMITS: dict[Precision, RoundingLimits] = {
    "float64": RoundingLimits(mean=1e-7, token=1e-6, share=0.001, growth=1e-7),
    "float32": RoundingLimits(mean=2e-4, token=2e-3, share=0.001, growth=1e-4),
    "tf32": RoundingLimits(mean=0.01, token=0.1, share=0.01, growth=0.005),
    "bfloat16": RoundingLimits(mean=0.06, token=0.5, share=0.01, growth=0.03),
}


PROMPT_TOKENS = (8, 5, 6)
REPLY_TOKENS = 6
OTHER_MODEL = "give a model of another architecture, such as Llama, Qwen, Gemma or Mistral"


@contextmanager
def _trial_of(model: PreTrainedModel, refused: str) -> Iterator[None]:
    """Evaluate ``model`` in the block; a pass that fails is a ``ModelError``, after ``refused``."""
    try:
        with evaluation_mode(model):
            yield
    except Exception as error:  # whatever an architecture does with arguments that others take
        if is_exhausted(error):
            raise
        raise ModelError(
            f"{refused} ({type(error).__name__}: {first_line(error)}); {OTHER_MODEL}"
        ) from error


@torch.no_grad()
def require_next_tokens(model: PreTrainedModel, source: str) -> None:
    """Make two passes over a few tokens, to see that logits are those of the next token.

    A token changes no logits before its own, and the model's own loss is not that of labels which
    stand one position earlier already: what translates or fills in gaps has either.

    Args:
        source: Names the model in the message.

    Raises:
        ModelError: A pass is impossible, or they are not.
    """
    kind = f"{source} is a {type(model).__name__}"
    limit = LIMITS[matmul_precision(model)].token
    ids = probe_ids(vocabulary_of(model)).to(model.device)
    changed = ids.clone()
    changed[:, -1] = ids[:, 0]
    mask = torch.ones_like(ids)
    with _trial_of(model, f"{kind}, which cannot be trained here"):
        logprobs = []
        for tokens in (ids, changed):
            logits = selected_logits(model, tokens, mask, mask.bool()).whole()
            of_rows = logits.float().log_softmax(-1)
            logprobs.append(of_rows.view(*ids.shape, -1))
        arguments = arguments_of(model, input_ids=ids, attention_mask=mask, labels=ids)
        own = model(**arguments)
    first, second = logprobs
    before_the_change = (first - second)[:, :-1]
    differences = before_the_change.abs().mean(-1)
    if not float(differences.max()) <= limit:
        raise ModelError(
            f"{kind}, which reads a text in both directions: its logits change with later tokens, so that it cannot "
            f"write replies; {OTHER_MODEL}"
        )
    loss = getattr(own, "loss", None)
    if loss is None:
        return
    before_each = first[:, :-1].flatten(0, 1)
    after_each = ids[:, 1:].flatten()
    following = functional.nll_loss(before_each, after_each)
    at_each = first.flatten(0, 1)
    same = functional.nll_loss(at_each, ids.flatten())
    from_same = abs(float(loss - same))
    from_following = abs(float(loss - following))
    if from_same <= limit < from_following:
        raise ModelError(
            f"{kind}, whose own loss is not of the next token: it takes labels that are shifted already, as the decoder "
            f"of a translator or a model that fills in gaps; {OTHER_MODEL}"
        )


@torch.no_grad()
def require_replies_as_scored(model: PreTrainedModel, source: str) -> None:
    """Sample a few tokens behind prompts of several lengths, and score them.

    One of the replies ends early.

    The sampler's log-probabilities and the trainer's have to be those of plain passes over each
    sequence alone.

    Args:
        source: Names the model in the message.

    Raises:
        ModelError: A pass is impossible, or they are not, or :func:`require_next_tokens` refuses.
    """
    require_next_tokens(model, source)
    refused = (
        f"{source} is a {type(model).__name__}, whose replies cannot be sampled and trained on here"
    )
    with _trial_of(model, refused):
        difference = _largest_difference(model)
    if not difference <= LIMITS[matmul_precision(model)].token:
        raise ModelError(
            f"{refused}: with a cache, with padding, or after a reply beside it has ended it computes other "
            f"log-probabilities (by {difference:.2g} nats) than in a plain pass over one sequence; {OTHER_MODEL}"
        )


def _largest_difference(model: PreTrainedModel) -> float:
    """The largest difference of sampling and scoring from a plain pass, as log-probabilities."""
    vocabulary = vocabulary_of(model)
    ids = probe_ids(vocabulary, len(PROMPT_TOKENS), max(PROMPT_TOKENS)).tolist()
    prompts = []
    for row, length in zip(ids, PROMPT_TOKENS, strict=True):
        prompts.append(row[:length])
    uniforms = philox_uniforms(0, range(len(prompts)), REPLY_TOKENS)
    # No token ends a reply at first; then the second one of the first reply does.
    endless = Sampling(eos_id=-1, pad_id=0, max_new_tokens=REPLY_TOKENS)
    without_end = generate(model, prompts, uniforms, endless)
    first_reply = without_end.replies()[0]
    sampling = Sampling(eos_id=first_reply[1], pad_id=0, max_new_tokens=REPLY_TOKENS)
    rollout = generate(model, prompts, uniforms, sampling)
    is_token = rollout.response_mask
    tokens = rollout.tokens.clone()
    attention = rollout.attention_mask.clone()
    batch = Tokens(tokens, attention, is_token.clone())
    logits = response_logits(model, batch).whole()
    distribution = log_distribution(logits[:, :-1], sampling)
    scored = gather_logprobs(distribution, batch.response)
    expected = _plain_logprobs(model, prompts, rollout, sampling)
    largest = []
    for logprobs in (rollout.logprobs, scored):
        difference = (logprobs - expected).abs()
        largest.append(difference[is_token].max())
    return float(torch.stack(largest).max())


def _plain_logprobs(
    model: PreTrainedModel, prompts: list[list[int]], rollout: Rollout, sampling: Sampling
) -> Tensor:
    """Log-probabilities (B, T) of the replies, each from a pass of its own without padding."""
    expected = torch.zeros_like(rollout.logprobs)
    for row, reply in enumerate(rollout.replies()):
        prompt = prompts[row]
        start = len(prompt)
        sequence = [*prompt, *reply]
        tokens = torch.tensor([sequence], device=model.device)
        whole = torch.ones_like(tokens)
        arguments = arguments_of(model, input_ids=tokens, attention_mask=whole)
        output = model(**arguments)
        before_tokens = output.logits[:, start - 1 : -1]
        policy = log_distribution(before_tokens, sampling)
        logprobs = gather_logprobs(policy, tokens[:, start:])
        expected[row, : len(reply)] = logprobs[0]
    return expected
