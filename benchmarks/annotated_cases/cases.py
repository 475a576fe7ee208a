"""The two sets of pairs that are annotated, and the simulated annotators that label them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN
from rlhf_core.evaluation.judges.human.pairs import AnnotationPair
from rlhf_core.storage.files import atomic_write_lines
from rlhf_core.world import gold
from rlhf_core.world.corpus import AnnotatorConfig, preference_probability

ANNOTATOR = "world"


def equal_cases(pairs: Sequence[AnnotationPair], cases: int) -> dict[str, list[AnnotationPair]]:
    """Return the pairs of the arms ``random`` and ``bad``: ``cases`` of each, fewer where either has fewer.

    An export is shuffled, so the first of its control are as random as all of them, and the first of its bad cases are
    a random choice of them.
    """
    control = [pair for pair in pairs if pair.control]
    bad = [pair for pair in pairs if pair.bad_case]
    count = min(cases, len(control), len(bad))
    return {"random": control[:count], "bad": bad[:count]}


def choice(pair: AnnotationPair, annotators: AnnotatorConfig, seed: int) -> str:
    """Return the label, 1 or 2, drawn by the world's P(reply 1 ≻ reply 2); a pair has the same label in both arms.

    The draw depends on the seed and on the content of the pair, which ends its id.
    """
    content = pair.id.partition("-")[2]
    draw = random.Random(f"{seed}|{content}").random()
    prompt = pair.prompt[-1]["content"]
    return "1" if draw < preference_probability(prompt, pair.reply_1, pair.reply_2, annotators) else "2"


def fill_form(path: Path, pairs: Sequence[AnnotationPair], annotators: AnnotatorConfig, seed: int) -> None:
    """Write the annotators' choices as a filled form for ``rlhf annotate import``."""
    rows = [{"id": pair.id, "choice": choice(pair, annotators, seed), "annotator": ANNOTATOR} for pair in pairs]
    atomic_write_lines(path, rows)


def gold_agreement(pairs: Sequence[AnnotationPair], annotators: AnnotatorConfig, seed: int) -> float | None:
    """Return the share of labels for the reply with the higher gold score; None if gold ties on every pair."""
    agreed = []
    for pair in pairs:
        prompt = pair.prompt[-1]["content"]
        gain = gold.score(prompt, pair.reply_1, True) - gold.score(prompt, pair.reply_2, True)
        if abs(gain) > GOLD_TIE_MARGIN:
            agreed.append((choice(pair, annotators, seed) == "1") == (gain > 0))
    return sum(agreed) / len(agreed) if agreed else None
