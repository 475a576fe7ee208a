"""Lengths of the workspace's own data, in tokens of its own model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rlhf_core.config.loading.load import Params
from rlhf_core.memory.lengths import Lengths, Longest

Row = TypeVar("Row")
# The longest sequences in tokens are among the longest in characters; the rest of the data is not tokenised.
TOKENISED = 2000


def lengths_of_workspace(root: Path, params: Params, positions: int | None = None) -> Lengths | None:
    """What the clean data of ``root`` holds; None where it, or the tokenizer, has not been made yet. ``positions`` are
    the model's: ptx leaves longer texts out."""
    clean, tokenizer_folder = root / "data" / "clean", root / "models" / "base"
    from_pretrain = params.ppo.ptx.weight > 0 and params.ppo.ptx.data == "pretrain"
    kinds = ("demonstrations", "preferences", "prompts", *(["pretrain"] if from_pretrain else []))
    needed = [tokenizer_folder / "config.json", *(clean / kind / "train.parquet" for kind in kinds)]
    if not all(path.is_file() for path in needed):
        return None
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.data.chat import encode_dialogue, encode_prompt, encode_reply
    from rlhf_core.data.schema import Demonstration, Preference, PretrainText, Prompt, read_rows
    from rlhf_core.models.base import load_tokenizer

    tokenizer: PreTrainedTokenizerBase = load_tokenizer(tokenizer_folder)

    def question(row: Prompt | Demonstration | Preference) -> int:
        return sum(len(message.content) for message in row.prompt)

    def characters(row: Preference) -> int:
        return question(row) + max(len(row.chosen), len(row.rejected))

    def dialogue(row: Demonstration) -> tuple[int, int]:
        prompt, reply = encode_dialogue(tokenizer, row.prompt, row.reply)
        return len(prompt) + len(reply), len(reply)

    def pair(row: Preference) -> tuple[int, int]:
        prompt, chosen = encode_dialogue(tokenizer, row.prompt, row.chosen)
        rejected = encode_reply(tokenizer, row.rejected)
        return len(prompt) + max(len(chosen), len(rejected)), len(chosen)

    demonstrations = read_rows(clean / "demonstrations" / "train.parquet", Demonstration)
    parts = [clean / kind / "train.parquet" for kind in ("preferences", "preferences_referee")]
    preferences = [row for part in parts if part.is_file() for row in read_rows(part, Preference)]
    prompts = read_rows(clean / "prompts" / "train.parquet", Prompt)
    spoken = [dialogue(row) for row in _longest(demonstrations, lambda row: question(row) + len(row.reply))]
    written = [pair(row) for row in _longest(preferences, characters)]
    asked = [len(encode_prompt(tokenizer, row.prompt)) for row in _longest(prompts, question)]
    ptx = spoken
    if from_pretrain:
        texts = read_rows(clean / "pretrain" / "train.parquet", PretrainText)
        lengths = [len(encode_reply(tokenizer, row.text)) for row in _longest(texts, lambda row: len(row.text))]
        ptx = [(length, length) for length in lengths]
    return Lengths(
        prompt=params.plan.prompt_tokens or max(asked),
        demonstrations=_sorted(spoken, params.sft.max_tokens),
        pairs=_sorted(written, max(params.reward.max_tokens, params.referee.max_tokens)),
        ptx=_sorted(ptx, positions),
        source="the workspace's own data",
    )


def _longest(rows: Sequence[Row], characters: Callable[[Row], int]) -> list[Row]:
    return sorted(rows, key=characters, reverse=True)[:TOKENISED]


def _sorted(lengths: Iterable[tuple[int, int]], limit: int | None) -> Longest:
    """Longest first, those over ``limit`` left out as training leaves them out."""
    kept = sorted((pair for pair in lengths if limit is None or pair[0] <= limit), reverse=True)
    return Longest(tuple(kept) or ((limit or 1, limit or 1),))
