"""How long sequences are: what activations, logits and caches are proportional to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.config.loading.load import Params

# English text in a byte-pair vocabulary has about four characters per token; three is on the safe side.
CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True)
class Batch:
    """One pass of a model: ``rows`` padded to ``width``, with logits computed at ``scored`` positions in all."""

    rows: int
    width: int
    scored: int = 0

    @property
    def tokens(self) -> int:
        """Positions, padding included."""
        return self.rows * self.width


@dataclass(frozen=True)
class Longest:
    """The longest sequences of a dataset as ``(all tokens, reply tokens)``, longest first; the last stands for the
    rest."""

    rows: Sequence[tuple[int, int]]

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return self.rows[0][0]

    def batch(self, size: int) -> Batch:
        """The heaviest batch of ``size`` sequences."""
        return self._from(0, size)

    def pairs(self, budget: int, smallest: int, largest: int) -> tuple[Batch, int]:
        """The heaviest batch of preference pairs under a token budget, and its number of pairs.

        A batch of b pairs has 2b rows and at most ``max(smallest, min(largest, budget // 2 width))`` pairs. The reply
        tokens are those of the preferred replies, the only ones with logits.
        """
        found = []
        for start, (width, _) in enumerate(self.rows):
            pairs = max(min(budget // (2 * width), largest), smallest)
            one_side = self._from(start, pairs)
            found.append((Batch(2 * pairs, width, one_side.scored), pairs))
        return max(found, key=lambda batch: (batch[0].tokens, batch[0].scored))

    def _from(self, start: int, size: int) -> Batch:
        known = [reply for _, reply in self.rows[start : start + size]]
        missing = size - len(known)
        return Batch(size, self.rows[start][0], sum(known) + missing * self.rows[-1][1])


@dataclass(frozen=True)
class Lengths:
    """``prompt``: longest prompt of rollouts, in tokens. ``source`` says where the figures come from."""

    prompt: int
    demonstrations: Longest
    pairs: Longest
    ptx: Longest
    source: str


def lengths_from_limits(params: Params, positions: int | None) -> Lengths:
    """Upper bounds by the settings alone: every sequence as long as it may be, every token of it a reply's."""
    most = positions or 1 << 30
    checks = params.validate_
    reply = params.ppo.max_new_tokens
    prompt = min(checks.max_prompt_chars // CHARACTERS_PER_TOKEN, most - reply)
    text = min((checks.max_prompt_chars + checks.max_reply_chars) // CHARACTERS_PER_TOKEN, most)
    pair = max(params.reward.max_tokens, params.referee.max_tokens)
    return Lengths(
        prompt=max(params.plan.prompt_tokens or prompt, 1),
        demonstrations=_all(min(params.sft.max_tokens, text)),
        pairs=_all(min(pair, text)),
        ptx=_all(text),
        source=f"the limits of the settings, at {CHARACTERS_PER_TOKEN} characters per token",
    )


def _all(width: int) -> Longest:
    return Longest(((width, width),))
