"""Many answers to a pair as one: what repeats counts once, contradictions count for nobody, the majority decides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.evaluation.judges.human.answers import LISTED, Answer


@dataclass(frozen=True)
class Votes:
    """The usable answers.

    Attributes:
        choices: By annotator, the choice on each pair.
        contradictions: (annotator, pair) with more than one choice, which count for nothing.
    """

    choices: dict[str, dict[str, str]]
    contradictions: list[tuple[str, str]]

    def of(self, pair: str) -> list[str]:
        """The choices on a pair, by all annotators."""
        return [choices[pair] for choices in self.choices.values() if pair in choices]

    def majority(self, pair: str) -> str | None:
        """The choice that more annotators made than any other; None where two lead, or nobody answered."""
        ranked = Counter(self.of(pair)).most_common(2)
        if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
            return None
        return ranked[0][0]

    def contradiction_lines(self) -> list[str]:
        """One line for each annotator who contradicts themself."""
        by_annotator: dict[str, list[str]] = defaultdict(list)
        for annotator, pair in self.contradictions:
            by_annotator[annotator].append(pair)
        return [
            f"{annotator}: {len(pairs)} left out, answered in two ways ({', '.join(pairs[:LISTED])}"
            f"{' …' if len(pairs) > LISTED else ''}); import the right file with --replace"
            for annotator, pairs in sorted(by_annotator.items())
        ]


def count_votes(answers: Sequence[Answer]) -> Votes:
    """Sort answers by annotator and pair."""
    options_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in answers:
        options_of[answer.annotator, answer.pair].add(answer.choice)
    choices: dict[str, dict[str, str]] = defaultdict(dict)
    for (annotator, pair), options in options_of.items():
        if len(options) == 1:
            choices[annotator][pair] = next(iter(options))
    return Votes(dict(choices), sorted(key for key, options in options_of.items() if len(options) > 1))


def without_repeats(answers: Sequence[Answer]) -> list[Answer]:
    """Return each (pair, annotator, choice) once, the first of them; its comment is the first that is not empty."""
    kept: dict[tuple[str, str, str], Answer] = {}
    for answer in answers:
        key = answer.pair, answer.annotator, answer.choice
        if key not in kept or not kept[key].comment:
            kept[key] = answer
    return list(kept.values())
