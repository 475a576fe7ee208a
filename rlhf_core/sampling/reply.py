"""One reply to one prompt, whose text can be followed while it is sampled: what a chat and a server have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.encoding import decode_reply
from rlhf_core.sampling.distribution import EvaluationSampling
from rlhf_core.sampling.generation import generate

OnText = Callable[[str], None]
Check = Callable[[], None]


@dataclass(frozen=True)
class SampledReply:
    """A reply as it was sampled.

    Attributes:
        text: The reply without its end marker, and without the stop string that ended it.
        token_ids: The sampled tokens, end marker included.
        finish_reason: ``stop`` where an end marker or a stop string ended it, ``length`` where it was cut off.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


def sample_reply(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    sampling: EvaluationSampling,
    uniforms: Tensor,
    on_text: OnText | None = None,
    stop: Sequence[str] = (),
    check: Check | None = None,
) -> SampledReply:
    """Sample one reply from the evaluation distribution.

    Args:
        uniforms: The random numbers of the draws (1, max_new_tokens), from ``philox_uniforms``.
        on_text: Called after each token with the text so far, in which the last character is whole.
        stop: Strings that end the reply where they first occur.
        check: Called at each token. An error that it raises ends the sampling.
    """
    partial = _PartialReply(tokenizer, on_text, stop, check)
    on_tokens = partial.add if on_text is not None or stop or check is not None else None
    try:
        rollout = generate(model, [prompt_ids], uniforms, sampling, on_tokens)
    except _StopStringReached:
        return SampledReply(partial.text, tuple(partial.token_ids), "stop")
    token_ids = rollout.replies()[0]
    text, finished = decode_reply(tokenizer, token_ids)
    end = _first_occurrence(text, stop)  # the end marker may complete the decoding of a stop string
    if end is not None:
        return SampledReply(text[:end], tuple(token_ids), "stop")
    return SampledReply(text, tuple(token_ids), "stop" if finished else "length")


class _StopStringReached(Exception):
    """Ends the sampling of a reply that contains a stop string."""


class _PartialReply:
    """The tokens of a reply so far and their text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_text: OnText | None, stop: Sequence[str], check: Check | None
    ) -> None:
        self.tokenizer, self.on_text, self.stop, self.check = tokenizer, on_text, stop, check
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, tokens: Tensor) -> None:
        """Take the next token of the reply, the only row of ``tokens`` (1,)."""
        self.token_ids += tokens.tolist()
        if self.check is not None:
            self.check()
        if self.on_text is None and not self.stop:
            return
        self.text, _ = decode_reply(self.tokenizer, self.token_ids)
        end = _first_occurrence(self.text, self.stop)
        if end is not None:
            self.text = self.text[:end]
        if self.on_text is not None:
            self.on_text(self.text)
        if end is not None:
            raise _StopStringReached


def _first_occurrence(text: str, strings: Sequence[str]) -> int | None:
    """Return where the first of ``strings`` begins in ``text``, None if it has none of them."""
    return min((position for string in strings if (position := text.find(string)) >= 0), default=None)
