"""How long sequences are, which activations, logits and caches grow with: by the settings' limits, or as measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_core.config.loading import Params
from rlhf_core.data.encoding import encode_dialogue, encode_prompt, encode_reply, encode_text
from rlhf_core.data.schema import Demonstration, Preference, PretrainText, Prompt, read_rows
from rlhf_core.data.splits import PairUser
from rlhf_core.models.starting.base import load_tokenizer

Row = TypeVar("Row")
# English text in a byte-pair vocabulary has about four characters per token; three is on the safe side.
CHARACTERS_PER_TOKEN = 3
# The longest sequences in tokens are among the longest in characters; the rest of the data is not tokenised.
TOKENISED = 2000


@dataclass(frozen=True)
class BatchShape:
    """One pass of a model: ``rows`` padded to ``width``, with logits computed at ``scored`` positions in all."""

    rows: int
    width: int
    scored: int = 0

    @property
    def tokens(self) -> int:
        """Positions, padding included."""
        return self.rows * self.width


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequences of a dataset as ``(all tokens, reply tokens)``, longest first; the last one stands for all
    that are shorter."""

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

    def pairs(self, budget: int, min_pairs: int, max_pairs: int) -> tuple[BatchShape, int]:
        """The heaviest batch of preference pairs under a token budget, and its number of pairs.

        A batch of b pairs has 2b rows and at most ``max(min_pairs, min(max_pairs, budget // 2 width))`` pairs. The
        reply tokens are those of the chosen replies, the only ones with logits.
        """
        batches = []
        for start, (width, _) in enumerate(self.rows):
            pairs = max(min(budget // (2 * width), max_pairs), min_pairs)
            batches.append((BatchShape(2 * pairs, width, self.batch(pairs, start).scored), pairs))
        return max(batches, key=lambda batch: (batch[0].tokens, batch[0].scored))


@dataclass(frozen=True)
class SequenceLengths:
    """Longest sequences in tokens: ``prompt`` of rollouts, and of each dataset. ``source`` says how they are known."""

    prompt: int
    demonstrations: LongestSequences
    pairs: LongestSequences
    ptx: LongestSequences
    source: str


def lengths_from_limits(params: Params, positions: int | None) -> SequenceLengths:
    """Upper bounds by the settings alone: every sequence as long as it may be, every token of it a reply's.

    Where ``plan`` says how long prompts and texts of ptx are, they are as long as that.

    Args:
        params: The settings.
        positions: The longest sequence that the model takes, None where it has no limit.
    """
    most, checks, plan = positions or 1 << 30, params.validate_, params.plan
    prompt = min(checks.max_prompt_chars // CHARACTERS_PER_TOKEN, most - params.ppo.max_new_tokens)
    text = min((checks.max_prompt_chars + checks.max_reply_chars) // CHARACTERS_PER_TOKEN, most)
    given = [f"plan.{name}" for name in ("prompt_tokens", "ptx_tokens") if getattr(plan, name) is not None]

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
    )


def lengths_of_workspace(root: Path, params: Params, positions: int | None = None) -> SequenceLengths | None:
    """The longest rows of the clean data in ``root``, in tokens of its own model.

    Args:
        root: The workspace.
        params: The settings, whose ``max_tokens`` leave rows out.
        positions: The longest sequence that the model takes: ptx leaves longer texts out.

    Returns:
        None where the data or the tokenizer has not been made yet.
    """
    clean, tokenizer_folder = root / "data" / "clean", root / "models" / "base"

    def file(kind: str) -> Path:
        return clean / kind / "train.parquet"

    mixed = params.ppo.ptx.data
    reads_texts = mixed == "pretrain" or (mixed == "both" and file("pretrain").is_file())
    from_pretrain = params.ppo.ptx.weight > 0 and reads_texts
    kinds = ["demonstrations", "preferences", "prompts", *(["pretrain"] if from_pretrain else [])]
    if not all(path.is_file() for path in (tokenizer_folder / "config.json", *map(file, kinds))):
        return None
    tokenizer = load_tokenizer(tokenizer_folder)

    def dialogue(row: Demonstration) -> tuple[int, int]:
        prompt, reply = encode_dialogue(tokenizer, row.prompt, row.reply)
        return len(prompt) + len(reply), len(reply)

    def pair(row: Preference) -> tuple[int, int]:
        """The prompt with the longer reply, and the chosen reply."""
        prompt, chosen = encode_dialogue(tokenizer, row.prompt, row.chosen)
        return len(prompt) + max(len(chosen), len(encode_reply(tokenizer, row.rejected))), len(chosen)

    demonstrations = _longest(
        read_rows(file("demonstrations"), Demonstration), lambda row: _prompt_characters(row) + len(row.reply), dialogue
    )
    pairs = _longest(
        [row for user in PairUser if file(user).is_file() for row in read_rows(file(user), Preference)],
        lambda row: _prompt_characters(row) + max(len(row.chosen), len(row.rejected)),
        pair,
    )
    ptx = demonstrations
    if from_pretrain:
        texts = read_rows(file("pretrain"), PretrainText)
        lengths = _longest(texts, lambda row: len(row.text), lambda row: (len(encode_text(tokenizer, row.text)),) * 2)
        ptx = [*demonstrations, *lengths] if mixed == "both" else lengths
    prompts = _longest(
        read_rows(file("prompts"), Prompt),
        _prompt_characters,
        lambda row: (len(encode_prompt(tokenizer, row.prompt)), 0),
    )
    return SequenceLengths(
        prompt=max(prompts)[0],
        demonstrations=_sorted(demonstrations, params.sft.max_tokens),
        pairs=_sorted(pairs, _longest_pair(params)),
        ptx=_sorted(ptx, positions),
        source="the workspace's own data",
    )


def _longest_pair(params: Params) -> int:
    longest = max(config.max_tokens for config in (params.reward, params.referee, params.judge))
    return max(longest, params.policy.dpo.max_tokens) if params.policy.method == "dpo" else longest


def _prompt_characters(row: Prompt | Demonstration | Preference) -> int:
    return sum(len(message.content) for message in row.prompt)


def _longest(
    rows: Sequence[Row], characters: Callable[[Row], int], tokens: Callable[[Row], tuple[int, int]]
) -> list[tuple[int, int]]:
    return [tokens(row) for row in sorted(rows, key=characters, reverse=True)[:TOKENISED]]


def _sorted(lengths: Iterable[tuple[int, int]], limit: int | None) -> LongestSequences:
    """Longest first, those over ``limit`` left out as training leaves them out."""
    kept = sorted((pair for pair in lengths if limit is None or pair[0] <= limit), reverse=True)
    return LongestSequences(tuple(kept) or ((limit or 1, limit or 1),))
