"""One reply to one prompt, whose text can be followed while it is sampled.

A chat and a server have this in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.tokens import decode_reply
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
        finish_reason: ``stop`` where an end marker or a stop string ended it, ``length`` where it
            was cut off.
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
    written: list[int] = []
    so_far = ""

    def on_tokens(tokens: Tensor) -> None:
        nonlocal so_far
        written.extend(tokens.tolist())
        if check is not None:
            check()
        if on_text is None and not stop:
            return
        so_far, _ = decode_reply(tokenizer, written)
        end = _first_occurrence(so_far, stop)
        so_far = so_far[:end]
        if on_text is not None:
            on_text(so_far)
        if end is not None:
            raise _StopStringReached

    is_followed = on_text is not None or stop or check is not None
    follow = on_tokens if is_followed else None
    try:
        rollout = generate(model, [prompt_ids], uniforms, sampling, follow)
    except _StopStringReached:
        return SampledReply(so_far, tuple(written), "stop")
    token_ids = rollout.replies()[0]
    text, finished = decode_reply(tokenizer, token_ids)
    end = _first_occurrence(text, stop)  # the end marker may complete the decoding of a stop string
    has_ended = finished or end is not None
    reason: Literal["stop", "length"] = "stop" if has_ended else "length"
    return SampledReply(text[:end], tuple(token_ids), reason)


class _StopStringReached(Exception):
    """Ends the sampling of a reply that contains a stop string."""


def _first_occurrence(text: str, strings: Sequence[str]) -> int | None:
    """Return where the first of ``strings`` begins in ``text``, None if it has none of them."""
    positions = [text.find(string) for string in strings]
    found = [position for position in positions if position >= 0]
    return min(found, default=None)


class ReplyPieces:
    """Splits a growing text into pieces whose concatenation is the whole reply.

    Args:
        lead: What the chat template writes in front of a reply. A text that is its beginning is
            held back.
        endings: Strings that a reply ends before. What could be the beginning of one is held back.
    """

    def __init__(self, lead: str = "", endings: Sequence[str] = ()) -> None:
        self.lead = lead
        self.endings = [ending for ending in endings if ending]
        self.sent = ""

    def next(self, text: str) -> str:
        """The next piece of the reply, whose ``text`` so far is longer than it was.

        Empty if there is none yet.
        """
        if text and self.lead.startswith(text):
            return ""
        # A beginning longer than the text cannot end it: a request's stop string may have millions
        # of characters.
        held_back = 0
        for ending in self.endings:
            longest = min(len(ending), len(text))
            for length in range(1, longest + 1):
                if text.endswith(ending[:length]):
                    held_back = max(held_back, length)
        return self.rest(text[: len(text) - held_back])

    def rest(self, text: str) -> str:
        """The last piece of the whole reply, or the piece up to where ``text`` ends."""
        # A tokenizer may decode a beginning otherwise when it knows more; the text goes on where
        # both agree again.
        if not text.startswith(self.sent):
            return ""
        piece = text[len(self.sent) :]
        self.sent = text
        return piece
