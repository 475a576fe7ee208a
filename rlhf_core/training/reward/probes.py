"""Probes of whether a reward model reads: held-out replies beside copies that are worse.

A copy is worse for one known reason. What counts is how often the original scores higher.

A reward model can be right about most pairs because it knows lengths, manners or favourite words.
Here the two replies differ in one thing alone, so the share of pairs in which the original scores
higher tells what the model reads. Words and sentences are found in alphabets and ideographs alike,
and what is put into a copy comes from the set itself where that has it, so that no copy stands out
by its language or style.

Sources: Liu et al., 2024, "RM-Bench: Benchmarking Reward Models of Language Models with Subtlety
and Style" (small errors of content beside differences of style); Wu et al., 2025, "reWordBench:
Benchmarking and Improving the Robustness of Reward Models with Transformed Inputs"; Singhal et al.,
2023, "A Long Way to Go: Investigating Length Correlations in RLHF". docs/train.md says what each
kind cannot show.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.gates import ABSENT, PROBES, WORLD_PROBES
from rlhf_core.data.batches import TokenisedPair, generator_of, usable_pairs
from rlhf_core.data.schema import Preference
from rlhf_core.data.statistics import (
    cluster_of,
    clusters_of,
    design_effect,
    is_of_world,
    wilson_bounds,
)
from rlhf_core.data.text import IDEOGRAPHS, is_refusal, language_tag
from rlhf_core.data.tokens import TokenTable, pad_id
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.reward.evaluation import accuracy
from rlhf_core.training.reward.trainer import PairScores, score_pairs
from rlhf_core.training.rng import derive_seed
from rlhf_core.world.questions import parse_prompt
from rlhf_core.world.replies import Draws, answer_beside_refusal, right_beside_wrong

T = TypeVar("T")
MOST_READ = 1000  # replies that pairs are made of
MOST_PAIRS = 200  # of each kind: a rate of 0.8 is then known to within 0.06

# What a reply needs, or the set, so that a copy of each kind can be made.
NEEDS = {
    "other_question": "can be exchanged for a reply to another question",
    "values_swapped": "have a number, name or value in whose place others of the set can stand",
    "cut_in_half": "have six words",
    "sentence_repeated": "have a whole sentence of three words",
    "pleasantry_appended": "end with a sentence and lack two of the pleasantries",
    "sentences_shuffled": "have three sentences",
}


def drawn_rows(rows: Sequence[Preference], seed: int) -> list[Preference]:
    """Draw at most :data:`MOST_READ` rows, of each question one before a second of any."""
    order = generator_of(seed, len(PROBES)).permutation(len(rows))
    seen: Counter[str] = Counter()
    ranked = []
    for row in order[:MOST_READ].tolist():
        cluster = cluster_of(rows[row])
        ranked.append((seen[cluster], rows[row]))
        seen[cluster] += 1
    ranked.sort(key=lambda ranked_row: ranked_row[0])
    return [row for _, row in ranked]


def counterfactuals(rows: Sequence[Preference], seed: int) -> dict[str, list[Preference]]:
    """Return pairs of every kind of :data:`PROBES`, their ``rejected`` reply being the copy.

    Args:
        rows: Held-out pairs, of which the preferred replies are read, in the order in which they
            are used.
        seed: The same seed makes the same pairs of the same rows.

    Returns:
        At most :data:`MOST_PAIRS` of each kind; none of a kind for which no reply has what it
        needs.
    """
    replies = ReplySet(rows)
    pairs: dict[str, list[Preference]] = {}
    for number, kind in enumerate(PROBES):
        rng = generator_of(seed, number)
        pairs[kind] = []
        for position, row in enumerate(replies.rows):
            copy = MAKERS[kind](replies, position, rng)
            if copy is not None and copy != row.chosen:
                pairs[kind].append(replace(row, rejected=copy, margin=None))
            if len(pairs[kind]) == MOST_PAIRS:
                break
    return pairs


def world_contrasts(rows: Sequence[Preference], seed: int) -> dict[str, list[Preference]]:
    """Return right beside wrong replies to questions of the synthetic world, by kind of probe.

    Both are written anew, with the same manners: the preferred replies of people are not always
    right. Nothing is returned for rows of other data.
    """
    pairs: dict[str, list[Preference]] = {}
    for number, row in enumerate(rows):
        if not is_of_world(row.source):
            continue
        question = parse_prompt(row.prompt[-1].content)
        if question is None:
            continue
        draws = Draws(seed, "probes", number)
        made = {"world_refusal": answer_beside_refusal(question, draws)}
        if question.category in WORLD_KINDS:
            made[WORLD_KINDS[question.category]] = right_beside_wrong(question, draws)
        for kind, (right, wrong) in made.items():
            of_kind = pairs.setdefault(kind, [])
            if len(of_kind) < MOST_PAIRS:
                of_kind.append(replace(row, chosen=right, rejected=wrong, margin=None))
    return {kind: pairs[kind] for kind in WORLD_PROBES if kind in pairs}


WORLD_KINDS = {"fact": "world_fact", "context": "world_story", "howto": "world_howto"}


@dataclass(frozen=True)
class Sentence:
    """A sentence and what separates it from the next one: white space, or nothing in Chinese."""

    text: str
    separator: str

    @property
    def whole(self) -> bool:
        """Whether it is ended by a mark or a line, and long enough to say something, unlike "Yes."."""
        ended = self.text[-1] in SENTENCE_MARKS or "\n" in self.separator
        return ended and len(words_of(self.text)) >= FEWEST_WORDS


SENTENCE_MARKS = ".!?…。！？"
FEWEST_WORDS = 3
# A sentence ends with its mark, which white space follows unless it is a full-width one, or with
# its line.
_SENTENCE_END = re.compile(r"((?<=[.!?…])\s+|(?<=[。！？])\s*|\n+)")
# What ends like a sentence and is the number of an item, an initial, or a rule between paragraphs.
_MARKER = re.compile(r"\W{0,9}(\d{1,3}|[^\W\d_])?[.)]?")
# Letters and digits that make longer words, in any alphabet.
_LETTER = re.compile(rf"[^\W{IDEOGRAPHS}]")
_WORD = re.compile(rf"[{IDEOGRAPHS}]|{_LETTER.pattern}+")
# Digits inside a name such as GPT4 are no number.
_NUMBER = re.compile(rf"(?<!{_LETTER.pattern})\d+(?:[.,:/]\d+)*")


def sentences_of(text: str) -> list[Sentence]:
    """Split a text into sentences, which with their separators are the whole text.

    Markers of lists stay with their items.
    """
    parts = [*_SENTENCE_END.split(text.strip()), ""]
    sentences: list[Sentence] = []
    begun = ""
    for part, separator in zip(parts[::2], parts[1::2], strict=True):
        begun += part
        if _MARKER.fullmatch(begun):
            begun += separator
            continue
        sentences.append(Sentence(begun, separator))
        begun = ""
    return [*sentences, Sentence(begun, "")] if begun else sentences


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are written; ideographs are words by themselves."""
    return _WORD.findall(text)


@dataclass(frozen=True)
class Value:
    """A number, or a name with the word before it, and where it stands in a text."""

    text: str
    start: int
    before: str = ""

    @property
    def shape(self) -> str:
        """What a replacement must share with the value: the digits of a number, the words of a name."""
        if self.text[0].isdigit():
            return re.sub(r"\d", "0", self.text)
        return f"{len(self.text.split())} words"


def numbers_and_names(text: str) -> list[Value]:
    """Find the numbers of a text but for those of items of a list, and its names.

    A name is a run of capitalised words inside a sentence, behind a word that is not capitalised.
    In German that is any noun; languages without capital letters have numbers alone.
    """
    found = []
    for match in _NUMBER.finditer(text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        begins_line = not text[line_start : match.start()].strip()
        is_of_item = begins_line and text.startswith((".", ")"), match.end())
        if not is_of_item:
            found.append(Value(match[0], match.start()))
    words = list(_WORD.finditer(text))
    position = 1
    while position < len(words):
        before, first = words[position - 1 : position + 1]
        position += 1
        is_inside = _capitalised(first[0]) and before[0].islower()
        if not is_inside or text[before.end() : first.start()] not in (" ", ", "):
            continue
        end = first.end()
        for word in words[position:]:
            if not _capitalised(word[0]) or text[end : word.start()] != " ":
                break
            end = word.end()
            position += 1
        found.append(Value(text[first.start() : end], first.start(), before[0]))
    return found


def _capitalised(word: str) -> bool:
    return word[0].isupper() and len(word) > 1 and word.isalpha()


FEWEST_QUESTIONS, FEWEST_OF_QUESTIONS, MOST_COMMONPLACES = 3, 0.02, 8
FEWEST_COMMONPLACES = 4
FEWEST_EQUAL_WORDS, MOST_EQUAL_WORDS = 3, 30  # of two sentences that differ in one word
FEWEST_SLOTS = 2
FEWEST_TO_CUT = 6
MOST_REPLIES = 0.2  # a word of more of them belongs to the language, not to an answer


class ReplySet:
    """The preferred replies of a set, and their parts that can replace parts of other replies.

    Attributes:
        rows: The pairs whose preferred replies these are.
        clusters: The question of each.
        sentences: The sentences of each.
        commonplaces: Sentences that replies to several questions share and that therefore say
            nothing about any, the most common ones first: openers, closers, fillers.
    """

    def __init__(self, rows: Sequence[Preference]) -> None:
        self.rows = rows
        self.clusters = [cluster_of(row) for row in rows]
        self.sentences = [sentences_of(row.chosen) for row in rows]
        self.commonplaces = self._find_commonplaces()
        self._in_slots = self._find_slots()
        # Every number and name by its shape, and by shape and the word before it: ordered sets.
        self._alike: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for row in rows:
            for value in numbers_and_names(row.chosen):
                self._alike[value.shape, ""][value.text] = None
                self._alike[value.shape, value.before][value.text] = None

    def values_in(self, text: str) -> list[Value]:
        """Return the numbers and names of a text, and words that other sentences replace by others."""
        values = numbers_and_names(text)
        for word in _WORD.finditer(text):
            if word[0] in self._in_slots:
                values.append(Value(word[0], word.start()))
        return values

    def others(self, value: Value) -> list[str]:
        """Return what can stand in the place of a value of a text.

        For a word that is what stood in its place in other sentences; for a number, others with as
        many digits; for a name, names behind the same word, or else any of as many words.
        """
        if value.text in self._in_slots:
            return self._in_slots[value.text]
        alike = self._alike.get((value.shape, value.before), {})
        if alike.keys() <= {value.text}:
            alike = self._alike.get((value.shape, ""), {})
        return list(alike)

    def _find_commonplaces(self) -> list[str]:
        questions: dict[str, set[str]] = defaultdict(set)
        for cluster, sentences in zip(self.clusters, self.sentences, strict=True):
            for sentence in sentences:
                if sentence.whole:
                    questions[sentence.text].add(cluster)
        fewest = max(FEWEST_QUESTIONS, FEWEST_OF_QUESTIONS * len(set(self.clusters)))
        shared = []
        for text, asked in questions.items():
            # A refusal would contradict an answer, and an answer a refusal.
            if len(asked) >= fewest and not is_refusal(text):
                shared.append(text)
        shared.sort(key=lambda text: -len(questions[text]))
        return shared[:MOST_COMMONPLACES]

    def _find_slots(self) -> dict[str, list[str]]:
        """Return words in whose place others stood, more than once, in otherwise equal sentences."""
        replies_with: Counter[str] = Counter()
        for row in self.rows:
            replies_with.update(set(words_of(row.chosen)))
        distinct: dict[str, None] = {}  # in the order in which they occur
        for sentences in self.sentences:
            distinct |= dict.fromkeys(sentence.text for sentence in sentences)
        in_slot: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
        for text in distinct:
            words = words_of(text)
            if not FEWEST_EQUAL_WORDS < len(words) <= MOST_EQUAL_WORDS:
                continue
            for position, word in enumerate(words):
                if replies_with[word] <= MOST_REPLIES * len(self.rows):
                    slot = (*words[:position], "", *words[position + 1 :])
                    in_slot[slot][word] = None
        together: Counter[tuple[str, str]] = Counter()
        for fillers in in_slot.values():
            together.update(combinations(sorted(fillers), 2))
        values: dict[str, list[str]] = defaultdict(list)
        for (one, other), slots in sorted(together.items()):
            if slots >= FEWEST_SLOTS:
                values[one].append(other)
                values[other].append(one)
        return dict(values)


def another_questions_reply(
    replies: ReplySet, position: int, rng: np.random.Generator
) -> str | None:
    """Return the reply that follows in the set, to another question.

    Nearly every reply stands once on either side, so that no rule that reads replies alone is right
    in more than half.
    """
    count = len(replies.rows)
    for step in range(1, count):
        other = (position + step) % count
        if replies.clusters[other] != replies.clusters[position]:
            return replies.rows[other].chosen
    return None


def with_a_value_swapped(replies: ReplySet, position: int, rng: np.random.Generator) -> str | None:
    """Return the reply with one number, name or value replaced everywhere by another of the set.

    What the prompt names is replaced only where the reply has nothing of its own: a reply about
    something that was not asked for is easier to tell than a wrong one.
    """
    row = replies.rows[position]
    text = row.chosen
    values = replies.values_in(text)
    present = {value.text for value in values}
    asked: set[str] = set()
    for message in row.prompt:
        asked.update(words_of(message.content))
    order = rng.permutation(len(values)).tolist()
    tried = [values[number] for number in order]
    tried.sort(key=lambda value: asked.issuperset(words_of(value.text)))
    for value in tried:
        others = [other for other in replies.others(value) if other not in present]
        if others:
            other = drawn(others, rng)
            starts = {same.start for same in values if same.text == value.text}
            for start in sorted(starts, reverse=True):
                end = start + len(value.text)
                text = text[:start] + other + text[end:]
            return text
    return None


def first_half(replies: ReplySet, position: int, rng: np.random.Generator) -> str | None:
    """The first half of the reply's words."""
    text = replies.rows[position].chosen
    words = list(_WORD.finditer(text))
    if len(words) < FEWEST_TO_CUT:
        return None
    last = words[len(words) // 2 - 1]
    return text[: last.end()]


def with_a_sentence_repeated(
    replies: ReplySet, position: int, rng: np.random.Generator
) -> str | None:
    """The reply with one of its sentences said twice in a row."""
    sentences = replies.sentences[position]
    whole = [number for number, sentence in enumerate(sentences) if sentence.whole]
    if not whole:
        return None
    number = drawn(whole, rng)
    repeated = sentences[number]
    again = replace(repeated, separator=repeated.separator or _separator(repeated.text))
    return _joined([*sentences[:number], again, *sentences[number:]])


# What is appended where the set has no such sentences of its own, by the language of the reply ("":
# any alphabet).
PLEASANTRIES: Mapping[str, Sequence[str]] = {
    "": (
        "I hope this helps!",
        "Thank you for your question.",
        "Let me know if there is anything else.",
        "Have a nice day!",
    ),
    "zh": (
        "希望这对您有帮助！",
        "谢谢您的提问。",
        "如果还有其他问题，请随时告诉我。",
        "祝您生活愉快！",
    ),
}


def with_pleasantries(replies: ReplySet, position: int, rng: np.random.Generator) -> str | None:
    """The reply followed by two sentences that many other replies have and this one has not.

    A single one may be welcome: many people like a friendly end. Replies of a set that shares no
    sentences get English or Chinese ones, and those in Japanese or Korean none.
    """
    text = replies.rows[position].chosen.rstrip()
    own = {sentence.text for sentence in replies.sentences[position]}
    known: Sequence[str] = replies.commonplaces
    if len(known) < FEWEST_COMMONPLACES:
        known = PLEASANTRIES.get(language_tag(text), ())
    new = [sentence for sentence in known if sentence not in own]
    ended = "\n" in text or text.endswith(tuple(SENTENCE_MARKS))
    if len(new) < 2 or not ended:
        return None
    for number in rng.permutation(len(new))[:2].tolist():
        separator = "\n\n" if "\n" in text else _separator(text)
        text += separator + new[number]
    return text


def with_sentences_shuffled(
    replies: ReplySet, position: int, rng: np.random.Generator
) -> str | None:
    """The reply with its sentences in another order, line breaks where they were."""
    sentences = replies.sentences[position]
    texts = [sentence.text for sentence in sentences]
    if len(texts) < 3:
        return None
    order = rng.permutation(len(texts)).tolist()
    if [texts[number] for number in order] == texts:
        order = [*order[1:], order[0]]
    shuffled = []
    for place, number in zip(sentences, order, strict=True):
        shuffled.append(replace(place, text=texts[number]))
    return _joined(shuffled)


MAKERS: Mapping[str, Callable[[ReplySet, int, np.random.Generator], str | None]] = {
    "other_question": another_questions_reply,
    "values_swapped": with_a_value_swapped,
    "cut_in_half": first_half,
    "sentence_repeated": with_a_sentence_repeated,
    "pleasantry_appended": with_pleasantries,
    "sentences_shuffled": with_sentences_shuffled,
}


def drawn(options: Sequence[T], rng: np.random.Generator) -> T:
    """Draw one of the options, each equally likely."""
    return options[int(rng.integers(len(options)))]


def _joined(sentences: Sequence[Sentence]) -> str:
    return "".join(sentence.text + sentence.separator for sentence in sentences).strip()


def _separator(before: str) -> str:
    return "" if before.endswith(("。", "！", "？")) else " "


FEWEST_PAIRS = 30  # with fewer a rate of 0.5 is known to within 0.18 at best

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probes:
    """Counterfactual pairs of the kinds that a set of held-out pairs can show.

    Attributes:
        pairs: Those of all kinds; ``chosen`` is the reply that must score higher.
        kinds: The kind of each.
        clusters: The question of each, as a number.
        absent: By kind of which there are too few pairs, why.
    """

    pairs: Sequence[TokenisedPair]
    kinds: np.ndarray
    clusters: np.ndarray
    absent: dict[str, str]


def probes_of(
    rows: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int
) -> Probes:
    """Make the probes of held-out pairs.

    Rows of the synthetic world get its own probes as well.

    Args:
        rows: The held-out pairs.
        tokenizer: That of the model.
        max_tokens: Of prompt and reply together; longer pairs are left out.
        seed: Models with the same seed and tokenizer are tried on the same pairs.
    """
    seed = derive_seed(seed, "probes")
    drawn = drawn_rows(rows, seed)
    made = counterfactuals(drawn, seed) | world_contrasts(drawn, seed)
    listed: list[str] = []
    pair_rows: list[Preference] = []
    for kind, rows_of_kind in made.items():
        listed += [kind] * len(rows_of_kind)
        pair_rows += rows_of_kind
    usable, _ = usable_pairs(TokenTable.of_rows(tokenizer, Preference.KIND, pair_rows), max_tokens)
    kept = usable.rows
    kinds = np.array(listed, dtype=object)[kept]
    absent = {}
    for kind in made:
        count = int((kinds == kind).sum())
        if count < FEWEST_PAIRS:
            what = (
                f"{NEEDS[kind]} within max_tokens {max_tokens}"
                if kind in PROBES
                else "are of this kind"
            )
            absent[kind] = (
                f"{count} of {len(drawn)} held-out replies {what}, and {FEWEST_PAIRS} are needed"
            )
    shown = ~np.isin(kinds, list(absent))
    return Probes(
        usable.of(kept[shown]),
        kinds[shown],
        clusters_of([pair_rows[row] for row in kept[shown]]),
        absent,
    )


def score_probes(
    model: ScalarModel, tokenizer: PreTrainedTokenizerBase, probes: Probes, name: str
) -> PairScores:
    """Return the rewards of both replies of each pair."""
    if not len(probes.pairs):
        return PairScores(np.zeros(0), np.zeros(0))
    return score_pairs(model, probes.pairs, pad_id(tokenizer), f"{name}, probing")


def probe_metrics(probes: Probes, scores: PairScores) -> dict[str, object]:
    """Return by kind how often a model scores the better reply higher.

    A tie counts as half a success.

    Returns:
        ``KIND``, its 95 % bounds ``KIND_low95`` and ``KIND_high95`` over questions (Wilson's, for
        as many pairs as these are worth; a tie fails for the lower and succeeds for the upper one),
        and the number ``KIND_pairs``. Under ``absent`` is why a kind has none of these.
    """
    metrics: dict[str, object] = {}
    for kind in dict.fromkeys(probes.kinds.tolist()):
        of_kind = probes.kinds == kind
        metrics |= rate_with_bounds(kind, scores.margins[of_kind], probes.clusters[of_kind])
    for kind, reason in probes.absent.items():
        logger.warning("probes.%s is left out: %s", kind, reason)
    if probes.absent:
        metrics[ABSENT] = probes.absent
    return metrics


def rate_with_bounds(kind: str, margins: np.ndarray, clusters: np.ndarray) -> dict[str, object]:
    """Return the share of positive margins (B,), its bounds and B, under names of ``kind``.

    Bounds are over ``clusters`` (B,).
    """
    above = (margins > 0).astype(float)
    not_below = (margins >= 0).astype(float)
    count = len(margins)
    low, _ = wilson_bounds(float(above.mean()), count / design_effect(above, clusters))
    _, high = wilson_bounds(float(not_below.mean()), count / design_effect(not_below, clusters))
    return {
        kind: accuracy(margins),
        f"{kind}_low95": low,
        f"{kind}_high95": high,
        f"{kind}_pairs": float(len(margins)),
    }
