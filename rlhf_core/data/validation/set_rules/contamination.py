"""Contamination: rows of training whose prompt is one of an evaluation set, or holds a part of one.

As for GPT-3 (Brown et al., 2020, appendix C), a run of 13 words in common counts. Evaluation prompts that are shorter
count where a turn is the same text, and prompts of any length where they are nearly the same by MinHash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlhf_core.config.data import NearDuplicatesConfig
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.text.text_statistics import split_words
from rlhf_core.data.validation.set_rules.minhash import SimilarTexts, shingle_hashes
from rlhf_core.data.validation.set_rules.set_rows import SPLIT_ORDER, SetRows

RULE = "no_contamination"
RUN_OF_WORDS = 13
TEST = SPLIT_ORDER.index("test")


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt of an evaluation file: the file as params.yaml spells it, its line or number there, and its turns."""

    source: str
    position: int
    turns: tuple[str, ...]


@dataclass
class EvaluationOverlap:
    """One evaluation file: how many prompts were read, refused, and met by a row of training."""

    source: str
    prompts: int
    refused: int
    met: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Contamination:
    """Rows of training that overlap with evaluation prompts, and the evaluation files."""

    breaches: list[RowFinding]
    files: list[EvaluationOverlap]


@dataclass(frozen=True)
class Overlap:
    """What a prompt has in common with the evaluation prompt of this number."""

    number: int
    reason: str
    similarity: float | None = None


class EvaluationIndex:
    """Evaluation prompts, looked up by runs of words, by whole texts and by similarity."""

    def __init__(self, prompts: Sequence[EvaluationPrompt], config: NearDuplicatesConfig) -> None:
        self._similar = SimilarTexts(config)
        self._short: dict[int, int] = {}
        runs, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for number, prompt in enumerate(prompts):
            text = "\n".join(prompt.turns)
            words = split_words(text)
            hashes = shingle_hashes(words, RUN_OF_WORDS)
            if len(words) < RUN_OF_WORDS:
                self._short |= {int(value): number for value in hashes if int(value) not in self._short}
            else:
                runs.append(hashes)
                owners.append(np.full(len(hashes), number))
            self._similar.add(number, self._similar.signature(text))
        order = np.argsort(np.concatenate(runs), kind="stable")
        self._runs: npt.NDArray[np.uint64] = np.concatenate(runs)[order]
        self._owners: npt.NDArray[np.int64] = np.concatenate(owners)[order]

    def shared_words(self, turns: Sequence[str]) -> int | None:
        """Return the number of an evaluation prompt with a run of words, or a whole short prompt, in these turns."""
        for text in dict.fromkeys(["\n".join(turns), *turns]):
            words = split_words(text)
            hashes = shingle_hashes(words, RUN_OF_WORDS)
            if len(words) < RUN_OF_WORDS:
                numbers = [self._short[int(value)] for value in hashes if int(value) in self._short]
            else:
                left, right = (np.searchsorted(self._runs, hashes, side) for side in ("left", "right"))
                numbers = self._owners[left[left < right]].tolist()
            if numbers:
                return min(numbers)
        return None

    def overlap(self, turns: Sequence[str]) -> Overlap | None:
        """Return what these turns have in common with an evaluation prompt."""
        shared = self.shared_words(turns)
        if shared is not None:
            return Overlap(shared, f"the same text as an evaluation prompt, or {RUN_OF_WORDS} words in a row of one")
        similar = self._similar.most_similar(self._similar.signature("\n".join(turns)))
        if similar is None:
            return None
        return Overlap(similar.key, "nearly the same as an evaluation prompt", similar.similarity)


def contamination(rows: SetRows, files: Sequence[FileRows], config: NearDuplicatesConfig) -> Contamination:
    """Look up the prompts (of pretraining text: the texts) of all rows that are not of split test.

    Args:
        files: The evaluation files, read as prompts.
    """
    prompts = [
        EvaluationPrompt(
            file.counts.source, position, tuple(t["content"] for t in row["prompt"] if t["role"] != "system")
        )
        for file in files
        for row, position in zip(file.rows, file.positions, strict=True)
    ]
    index = EvaluationIndex(prompts, config)
    overlaps = {f.counts.source: EvaluationOverlap(f.counts.source, f.counts.kept, f.counts.refused) for f in files}
    overlap_of: dict[int, Overlap | None] = {}  # by the hash of the turns: most prompts occur in several rows
    breaches = []
    for kind in rows.clean:
        for row in rows.of(kind):
            if row.split == TEST:
                continue
            turns = row.turns or (row.text,)
            key = hash(turns)
            if key not in overlap_of:
                overlap_of[key] = index.overlap(turns)
            overlap = overlap_of[key]
            if overlap is not None:
                prompt = prompts[overlap.number]
                overlaps[prompt.source].met.add(prompt.position)
                other = f"{prompt.source}:{prompt.position}"
                breaches.append(
                    RowFinding(
                        RULE, kind, overlap.reason, number=row.number, other=other, similarity=overlap.similarity
                    )
                )
    return Contamination(breaches, list(overlaps.values()))
