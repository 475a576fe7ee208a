"""Rankings: several replies to a prompt, with scores or ranks, read as pairs of a better and a worse reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from rlhf_core.config.stages.collect import PairChoice, ReadOptions
from rlhf_core.data.readers.formats.format import PAIRS, PROMPTS, Format, Parsed, Undecided, has, number_of
from rlhf_core.data.readers.formats.turns import Refusal, Turn, prompt_of, reply_of, text_of

REPLY_LISTS = ("responses", "completions", "generations")
VALUE_LISTS = ("scores", "ratings", "ranks")
PROMPT_NAMES = ("prompt", "instruction", "question")


@dataclass(frozen=True)
class RankedReply:
    """A reply and what it is ordered by: more is better."""

    text: str
    value: float


def ranked_pairs(replies: Sequence[RankedReply], choice: PairChoice) -> list[tuple[RankedReply, RankedReply]]:
    """Return pairs of a better and a worse reply; replies of equal value are never paired.

    Args:
        replies: In any order.
        choice: ``all`` pairs, K(K-1)/2 of K replies; ``adjacent``: each reply and the next worse; ``best_worst``.
    """
    ordered = sorted(replies, key=lambda reply: -reply.value)
    if choice == "all":
        candidates = list(combinations(ordered, 2))
    elif choice == "adjacent":
        candidates = list(pairwise(ordered))
    else:
        candidates = [(ordered[0], ordered[-1])] if ordered else []
    return [(better, worse) for better, worse in candidates if better.value > worse.value]


def parsed_ranking(
    prompt: list[Turn], replies: Sequence[RankedReply], kind: str, choice: PairChoice, *, values_are_scores: bool
) -> list[Parsed]:
    """Return a ranking as rows of ``kind``: as pairs, as the best reply alone, or as its prompt.

    A pair's margin is the difference of its scores; a difference of ranks says nothing of how much better a reply is.

    Raises:
        Undecided: No reply is better than another.
    """
    if kind == "prompts":
        return [Parsed(prompt)]
    pairs = ranked_pairs(replies, choice)
    if not pairs:
        raise Undecided("no reply is better than another")
    if kind != "preferences":
        return [Parsed(prompt, reply=max(replies, key=lambda reply: reply.value).text)]
    return [
        Parsed(prompt, better.text, worse.text, margin=better.value - worse.value if values_are_scores else None)
        for better, worse in pairs
    ]


def _are_objects(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _ultrafeedback(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    """Read UltraFeedback (Cui et al., 2023), whose completions may each have been asked for by a system prompt."""
    prompt = prompt_of(record["instruction"])
    by_system: dict[str, list[RankedReply]] = {}
    for number, completion in enumerate(record["completions"], 1):
        if not has(completion, response=str):
            raise Refusal(f"completion {number} has no response")
        score = number_of(completion.get("overall_score"), f"overall_score of completion {number}")
        system = (completion.get("custom_system_prompt") or "") if options.system_prompts else ""
        reply = RankedReply(reply_of(completion["response"], f"completion {number}"), score)
        by_system.setdefault(text_of(system, f"custom_system_prompt of completion {number}"), []).append(reply)
    if not options.system_prompts or kind == "prompts":
        replies = [reply for group in by_system.values() for reply in group]
        return parsed_ranking(prompt, replies, kind, options.pairs, values_are_scores=True)
    return _under_system_prompts(prompt, by_system, kind, options.pairs)


def _under_system_prompts(
    prompt: list[Turn], by_system: dict[str, list[RankedReply]], kind: str, choice: PairChoice
) -> list[Parsed]:
    """Return the pairs of replies to one system prompt, which is a turn of theirs; or the best reply with its own.

    Raises:
        Undecided: No two replies, or of preferences none to one system prompt, differ in value.
    """
    values = {reply.value for replies in by_system.values() for reply in replies}
    if len(values) < 2:
        raise Undecided("no reply is better than another")
    parsed: list[Parsed] = []
    best = max(values)
    for system, replies in by_system.items():
        whole = [*([{"role": "system", "content": system}] if system else []), *prompt]
        if kind == "preferences":
            parsed += [
                Parsed(whole, better.text, worse.text, margin=better.value - worse.value)
                for better, worse in ranked_pairs(replies, choice)
            ]
        elif not parsed:
            parsed = [Parsed(whole, reply=reply.text) for reply in replies if reply.value == best][:1]
    if not parsed:
        raise Undecided("no reply is better than another to the same system prompt")
    return parsed


def _nectar(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    replies = []
    for number, answer in enumerate(record["answers"], 1):
        if not has(answer, answer=str):
            raise Refusal(f"answer {number} has no text")
        rank = number_of(answer.get("rank"), f"rank of answer {number}")
        replies.append(RankedReply(reply_of(answer["answer"], f"answer {number}"), -rank))
    return parsed_ranking(prompt_of(record["prompt"]), replies, kind, options.pairs, values_are_scores=False)


def _first(record: Any, names: Sequence[str], kind: type | tuple[type, ...]) -> str | None:
    return next((name for name in names if isinstance(record.get(name), kind)), None)


def _is_ranking(record: Any) -> bool:
    if not isinstance(record, dict) or not _first(record, PROMPT_NAMES, (str, list)) or "chosen" in record:
        return False
    return bool(_first(record, REPLY_LISTS, list) and _first(record, VALUE_LISTS, list))


def _ranking(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    prompt_name, list_name, value_name = (
        str(_first(record, names, kinds))
        for names, kinds in ((PROMPT_NAMES, (str, list)), (REPLY_LISTS, list), (VALUE_LISTS, list))
    )
    texts, values = record[list_name], record[value_name]
    if len(texts) != len(values):
        raise Refusal(f"there are {len(texts)} {list_name} but {len(values)} {value_name}")
    sign = -1.0 if value_name == "ranks" else 1.0
    replies = [
        RankedReply(reply_of(text, f"reply {number}"), sign * number_of(value, f"{value_name[:-1]} of reply {number}"))
        for number, (text, value) in enumerate(zip(texts, values, strict=True), 1)
    ]
    return parsed_ranking(
        prompt_of(record[prompt_name]), replies, kind, options.pairs, values_are_scores=value_name != "ranks"
    )


def _is_stepwise(record: Any) -> bool:
    return has(record, prompt=(str, list), completions=list, labels=list)


RANKINGS = (
    Format(
        "ultrafeedback",
        '{"instruction": "…", "completions": [{"response": "…", "overall_score": 7.5}, …]}',
        PAIRS,
        lambda r: has(r, instruction=str, completions=list) and _are_objects(r["completions"]),
        _ultrafeedback,
    ),
    Format(
        "nectar",
        '{"prompt": "…", "answers": [{"answer": "…", "rank": 1}, …]} (the best has the lowest rank)',
        PAIRS,
        lambda r: has(r, prompt=(str, list), answers=list) and _are_objects(r["answers"]),
        _nectar,
    ),
    Format(
        "ranking",
        '{"prompt": …, "responses": ["…", …], "scores": [7, …]} (or "ranks": the best has the lowest)',
        PAIRS,
        _is_ranking,
        _ranking,
    ),
    Format(
        "stepwise",
        '{"prompt": "…", "completions": ["a step", …], "labels": [true, …]}',
        PROMPTS,
        _is_stepwise,
        lambda record, kind, options: [Parsed(prompt_of(record["prompt"]))],
        note="reward models here judge whole replies, not steps",
    ),
)
