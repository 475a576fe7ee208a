"""Rows as the rules about the whole set see them: dialogue, text, and the parts that they are kept apart from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.splits import SPLITS, PairUser, assign, pair_user_of
from rlhf_core.data.validation.provenance import Origin, Origins
from rlhf_core.data.validation.stored_rows import StoredRows

# The most held-out part first. A row is at fault if it resembles one of an earlier part.
SPLIT_ORDER = tuple(reversed(SPLITS))
USER_ORDER = (PairUser.JUDGE, PairUser.REFEREE, PairUser.REWARD)
SPLIT_PARTS = tuple(f"split {split}" for split in SPLIT_ORDER)
USER_PARTS = ("the judge's pairs", "the referee's pairs", "the reward model's pairs")


@dataclass(frozen=True)
class SetRow:
    """A clean row.

    Attributes:
        number: Its position among the clean rows of its kind.
        split: Position of its split in ``SPLIT_ORDER``.
        user: Position in ``USER_ORDER`` of the model that the pair belongs to; None for test pairs and other kinds.
        turns: The prompt's turns without system turns, casefolded, with white space collapsed.
        text: The whole content: prompt and replies, or the text.
        origin: The record that gave the row, and perhaps others (a ranking); None for rows of no file.
    """

    kind: str
    number: int
    id: str
    split: int
    user: int | None
    turns: tuple[str, ...]
    text: str
    origin: Origin | None = None


@dataclass(frozen=True)
class SetRows:
    """The clean rows of all kinds, which can be read again and again in parts.

    ``origins`` are those of all raw rows, by kind.
    """

    clean: Mapping[str, StoredRows]
    seed: int
    split: SplitConfig
    origins: Mapping[str, Origins] = field(default_factory=dict)

    def of(self, kind: str) -> Iterator[SetRow]:
        """Yield the rows of a kind in order."""
        number = 0
        raw_numbers, origins = self.clean[kind].numbers, self.origins.get(kind)
        for part in self.clean[kind].parts(["id", "group", *CONTENT_FIELDS[kind]]):
            rows = part.to_pylist()
            groups = [row["group"] for row in rows]
            for row, group, split in zip(rows, groups, assign(groups, self.seed, self.split), strict=True):
                prompt = row.get("prompt") or []
                turns = [turn["content"] for turn in prompt if turn["role"] != "system"]
                replies = [row[name] for name in CONTENT_FIELDS[kind] if name != "prompt"]
                yield SetRow(
                    kind,
                    number,
                    row["id"],
                    SPLIT_ORDER.index(split),
                    self._user(group) if kind == "preferences" and split != "test" else None,
                    tuple(" ".join(turn.casefold().split()) for turn in turns),
                    "\n".join([*turns, *replies]),
                    origins[int(raw_numbers[number])] if origins is not None else None,
                )
                number += 1

    def with_prompts(self) -> Iterator[SetRow]:
        """Yield the rows of all kinds that have prompts."""
        for kind in self.clean:
            if "prompt" in CONTENT_FIELDS[kind]:
                yield from self.of(kind)

    def _user(self, group: str) -> int:
        return USER_ORDER.index(pair_user_of(group, self.seed, self.split))
