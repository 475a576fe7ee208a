"""How long sequences are, which activations, logits and caches grow with: by the settings' limits,
or as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_core.api.ppo import PTX_KINDS
from rlhf_core.config.params import Params
from rlhf_core.data.schema import Demonstration, Preference, PretrainText, Prompt
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.stages.row_tokens import (
    CLEAN,
    OWN_DATA,
    Lengths,
    RowLengths,
    RowTokens,
    trained_kinds,
)
from rlhf_core.stages.token_lengths import BASE

# English text in a byte-pair vocabulary has about four characters per token; three is on the safe
# side.
CHARACTERS_PER_TOKEN = 3
# How many of the longest sequences are kept.
LONGEST = 2000


@dataclass(frozen=True)
class BatchShape:
    """One pass of a model: ``rows`` padded to ``width``, with logits computed at ``scored``
    positions in all.
    """

    rows: int
    width: int
    scored: int = 0

    @property
    def tokens(self) -> int:
        """Positions, padding included."""
        return self.rows * self.width


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequences of a dataset as ``(all tokens, reply tokens)``, longest first; the last
    one stands for all that are shorter."""

    rows: Sequence[tuple[int, int]]

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return self.rows[0][0]

    def batch(self, size: int, start: int = 0) -> BatchShape:
        """The heaviest batch of ``size`` sequences, the first ``start`` left out."""
        replies = [reply for _, reply in self.rows[start : start + size]]
        missing = size - len(replies)
        return BatchShape(size, self.rows[start][0], sum(replies) + missing * self.rows[-1][1])

    def pairs(self, budget: int, min_pairs: int, max_pairs: int) -> BatchShape:
        """The heaviest batch of preference pairs under a token budget.

        A batch of b pairs has 2b rows and at most
        ``max(min_pairs, min(max_pairs, budget // 2 width))`` pairs. The reply tokens are those of
        the chosen replies, the only ones with logits.
        """
        batches = []
        for start, (width, _) in enumerate(self.rows):
            pairs = max(min(budget // (2 * width), max_pairs), min_pairs)
            batches.append(BatchShape(2 * pairs, width, self.batch(pairs, start).scored))
        return max(batches, key=lambda batch: (batch.tokens, batch.scored))


@dataclass(frozen=True)
class SequenceLengths:
    """Longest sequences in tokens: ``prompt`` of rollouts, and of each dataset.

    ``source`` says how they are known, ``is_bound`` whether some are only limits of the settings.
    """

    prompt: int
    demonstrations: LongestSequences
    pairs: LongestSequences
    ptx: LongestSequences
    source: str
    is_bound: bool = False


def lengths_from_limits(params: Params, positions: int | None) -> SequenceLengths:
    """Upper bounds by the settings alone: every sequence as long as it may be, every token of it a
    reply's.

    Where ``plan`` says how long prompts and texts of ptx are, they are as long as that.

    Args:
        params: The settings.
        positions: The longest sequence that the model takes, None where it has no limit.
    """
    most, checks, plan = positions or 1 << 30, params.validate_, params.plan
    prompt = min(checks.max_prompt_chars // CHARACTERS_PER_TOKEN, most - params.ppo.max_new_tokens)
    text = min((checks.max_prompt_chars + checks.max_reply_chars) // CHARACTERS_PER_TOKEN, most)
    given = [
        f"plan.{name}"
        for name in ("prompt_tokens", "ptx_tokens")
        if getattr(plan, name) is not None
    ]

    def longest(tokens: int) -> LongestSequences:
        return LongestSequences(((tokens, tokens),))

    return SequenceLengths(
        prompt=max(plan.prompt_tokens or prompt, 1),
        demonstrations=longest(min(params.sft.max_tokens, text)),
        pairs=longest(min(_longest_pair(params), text)),
        ptx=longest(min(plan.ptx_tokens or text, most)),
        source=f"{', '.join(given)} and the limits of the settings"
        if given
        else f"the limits of the settings, at {CHARACTERS_PER_TOKEN} characters per token",
        is_bound=True,
    )


def lengths_of_rows(
    rows: RowLengths, params: Params, positions: int | None = None
) -> SequenceLengths:
    """The longest rows of data that were read; of what was not, the limits of the settings.

    Args:
        rows: Tokens of the rows by kind.
        params: The settings, whose ``max_tokens`` leave rows out.
        positions: The longest sequence that the model takes: ptx leaves longer texts out.
    """
    limits = lengths_from_limits(params, positions)
    found = dict(rows.by_kind)
    source = rows.source
    if rows.unread:
        source += f"; {', '.join(sorted(rows.unread))} from {limits.source}"
    prompt, demonstrations = limits.prompt, limits.demonstrations
    pairs, ptx = limits.pairs, limits.ptx
    if Prompt.KIND in found:
        prompt = max(int(found[Prompt.KIND][:, 0].max(initial=0)), 1)
    if Demonstration.KIND in found:
        demonstrations = _longest(found[Demonstration.KIND], params.sft.max_tokens)
    if Preference.KIND in found:
        pairs = _longest(found[Preference.KIND], _longest_pair(params))
    kinds = PTX_KINDS[params.ppo.ptx.data]
    texts = [found[kind] for kind in kinds if kind in found]
    if texts and not rows.unread.intersection(kinds):
        ptx = _longest(np.concatenate(texts), positions)
    return SequenceLengths(prompt, demonstrations, pairs, ptx, source, bool(rows.unread))


def lengths_of_workspace(
    root: Path, params: Params, positions: int | None = None
) -> SequenceLengths | None:
    """The longest rows of the clean data in ``root``: of the very tokens that training reads.

    Args:
        root: The workspace, whose token cache is used and added to.
        params: The settings, whose ``max_tokens`` leave rows out.
        positions: The longest sequence that the model takes: ptx leaves longer texts out.

    Returns:
        None where the data or the tokenizer has not been made yet.
    """
    clean, tokenizer_folder = root / CLEAN, root / BASE
    needed = [Prompt.KIND]
    if params.collect.pairs:
        needed += [Demonstration.KIND, Preference.KIND]
    if params.ppo.ptx.weight > 0 and params.ppo.ptx.data == PretrainText.KIND:
        needed.append(PretrainText.KIND)
    files = [clean / kind / "train.parquet" for kind in needed]
    if not all(path.is_file() for path in (tokenizer_folder / "config.json", *files)):
        return None
    counting = RowTokens(load_tokenizer(tokenizer_folder), positions, params, root / TOKENS)
    rows = counting.training_rows(clean, trained_kinds(params), OWN_DATA)
    return lengths_of_rows(rows, params, positions)


def _longest_pair(params: Params) -> int:
    longest = max(config.max_tokens for config in (params.reward, params.referee, params.judge))
    return max(longest, params.policy.dpo.max_tokens) if params.policy.method == "dpo" else longest


def _longest(rows: Lengths, limit: int | None) -> LongestSequences:
    """Longest first, those over ``limit`` left out as training leaves them out."""
    kept = rows if limit is None else rows[rows[:, 0] <= limit]
    order = np.lexsort((kept[:, 1], kept[:, 0]))[::-1]
    found = [(whole, reply) for whole, reply in kept[order[:LONGEST]].tolist()]
    return LongestSequences(tuple(found) or ((limit or 1, limit or 1),))
