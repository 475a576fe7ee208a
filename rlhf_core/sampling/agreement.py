"""Whether replies are scored as they were sampled.

There are limits of how far both may differ, and a trial on a few tokens.

Architectures differ in what they keep between tokens (keys and values, a window of them, states of
recurrent layers), in how they count positions, and in whether padding changes a result. A few
tokens tell, before anything is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError, first_line, is_exhausted
from rlhf_core.models.forward import arguments_of, probe_ids
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


PROMPT_TOKENS, REPLY_TOKENS = (8, 5, 6), 6


@torch.no_grad()
def require_replies_as_scored(model: PreTrainedModel, source: str) -> None:
    """Sample a few tokens behind prompts of several lengths, and score them.

    One of the replies ends early.

    The sampler's log-probabilities and the trainer's have to be those of plain passes over each
    sequence alone.

    Args:
        source: Names the model in the message.

    Raises:
        ModelError: A pass is impossible, or they are not.
    """
    refused = (
        f"{source} is a {type(model).__name__}, whose replies cannot be sampled and trained on here"
    )
    other = "give a model of another architecture, such as Llama, Qwen, Gemma or Mistral"
    training = model.training
    try:
        difference = _largest_difference(model.eval())
    except Exception as error:  # whatever an architecture does with arguments that others take
        if is_exhausted(error):
            raise
        raise ModelError(
            f"{refused} ({type(error).__name__}: {first_line(error)}); {other}"
        ) from error
    finally:
        model.train(training)
    if not difference <= LIMITS[matmul_precision(model)].token:
        raise ModelError(
            f"{refused}: with a cache, with padding, or after a reply beside it has ended it computes other "
            f"log-probabilities (by {difference:.2g} nats) than in a plain pass over one sequence; {other}"
        )


def _largest_difference(model: PreTrainedModel) -> float:
    """The largest difference of sampling and scoring from a plain pass, as log-probabilities."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = probe_ids(vocabulary, len(PROMPT_TOKENS), max(PROMPT_TOKENS)).tolist()
    prompts = [row[:length] for row, length in zip(ids, PROMPT_TOKENS, strict=True)]
    uniforms = philox_uniforms(0, range(len(prompts)), REPLY_TOKENS)
    # No token ends a reply at first; then the second one of the first reply does.
    endless = Sampling(eos_id=-1, pad_id=0, max_new_tokens=REPLY_TOKENS)
    stop = generate(model, prompts, uniforms, endless).replies()[0][1]
    sampling = Sampling(eos_id=stop, pad_id=0, max_new_tokens=REPLY_TOKENS)
    rollout = generate(model, prompts, uniforms, sampling)
    batch = Tokens(
        rollout.tokens.clone(), rollout.attention_mask.clone(), rollout.response_mask.clone()
    )
    scored = gather_logprobs(
        log_distribution(response_logits(model, batch).whole()[:, :-1], sampling), batch.response
    )
    expected = _plain_logprobs(model, prompts, rollout, sampling)
    mask = rollout.response_mask
    return max(
        float((each[mask] - expected[mask]).abs().max()) for each in (rollout.logprobs, scored)
    )


def _plain_logprobs(
    model: PreTrainedModel, prompts: list[list[int]], rollout: Rollout, sampling: Sampling
) -> Tensor:
    """Log-probabilities (B, T) of the replies, each from a pass of its own without padding."""
    expected = torch.zeros_like(rollout.logprobs)
    for row, (prompt, reply) in enumerate(zip(prompts, rollout.replies(), strict=True)):
        tokens = torch.tensor([[*prompt, *reply]], device=model.device)
        logits = model(
            **arguments_of(model, input_ids=tokens, attention_mask=torch.ones_like(tokens))
        ).logits
        policy = log_distribution(logits[:, len(prompt) - 1 : -1], sampling)
        expected[row, : len(reply)] = gather_logprobs(policy, tokens[:, len(prompt) :])[0]
    return expected
