"""Published sets that show two replies and say which one is preferred: PKU-SafeRLHF, HelpSteer2 and 3, SHP, Orca."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.readers.format import (
    PAIRS,
    PROMPTS,
    REPLIES,
    Format,
    Parsed,
    Undecided,
    has,
    number_of,
    single,
    system_turns,
)
from rlhf_core.data.readers.general import is_hh
from rlhf_core.data.readers.turns import Refusal, Turn, prompt_of, reply_of, text_of, turns_of

STRONGEST_PREFERENCE = 3
TIE = "tie"
# A record with one of these has its prompt there, and is of another format.
OTHER_PROMPTS = frozenset({"prompt", "instruction", "conversations", "messages"})
# HelpSteer2 writes a dialogue of several turns as one text; its first turn is the user's and has no marker.
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def _pku(record: Any, kind: str, options: ReadOptions) -> Sequence[Parsed]:
    """Read PKU-SafeRLHF (Ji et al., 2024): one pair by the preference that ``options.dimension`` names.

    ``agreed`` takes the pairs that helpfulness and safety order alike.
    """
    prompt = prompt_of(record["prompt"])
    if kind == "prompts":
        return [Parsed(prompt)]
    replies = [reply_of(record[name], name) for name in ("response_0", "response_1")]
    helpful = _index(record["better_response_id"], "better_response_id")
    safe = _index(record["safer_response_id"], "safer_response_id")
    if options.dimension == "agreed" and helpful != safe:
        raise Undecided("the more helpful reply is not the safer one")
    best = safe if options.dimension == "safe" else helpful
    return [Parsed(prompt, replies[best], replies[1 - best], category=options.dimension)]


def _pku_single(record: Any) -> Parsed:
    """Read PKU-SafeRLHF-single-dimension, whose one preference weighs helpfulness against safety."""
    replies = [reply_of(record[name], name) for name in ("response_0", "response_1")]
    best = _index(record["better_response_id"], "better_response_id")
    return Parsed(prompt_of(record["prompt"]), replies[best], replies[1 - best])


def _index(value: Any, name: str) -> int:
    number = number_of(value, name)
    if number not in (0, 1):
        raise Refusal(f"{name} is {value!r}, not 0 or 1")
    return int(number)


def _helpsteer2(record: Any) -> Parsed:
    first, second = (reply_of(record[name], name) for name in ("response_1", "response_2"))
    return _by_strength(_helpsteer_prompt(record["prompt"]), first, second, record, "preference_strength")


def _helpsteer3(record: Any) -> Parsed:
    context = record["context"]
    prompt = turns_of(context) if isinstance(context, list) else prompt_of(context)
    first, second = (reply_of(record[name], name) for name in ("response1", "response2"))
    domain = record.get("domain")
    category = text_of(domain, "domain") if isinstance(domain, str) and domain else None
    return _by_strength(prompt, first, second, record, "overall_preference", category)


def _by_strength(
    prompt: list[Turn], first: str, second: str, record: Any, name: str, category: str | None = None
) -> Parsed:
    """Return the pair that a strength from -3 (the first reply is much better) to 3 orders; its size is the margin."""
    strength = number_of(record[name], name)
    if not abs(strength) <= STRONGEST_PREFERENCE:
        raise Refusal(f"{name} is {record[name]!r}, not from -{STRONGEST_PREFERENCE} to {STRONGEST_PREFERENCE}")
    if strength == 0:
        raise Undecided("neither reply is preferred", prompt)
    chosen, rejected = (second, first) if strength > 0 else (first, second)
    return Parsed(prompt, chosen, rejected, margin=abs(strength), category=category)


def _helpsteer_prompt(value: Any) -> list[Turn]:
    first, *others = HELPSTEER_TURN.split(text_of(value, "the prompt"))
    turns = [{"role": "user", "content": first}] if others else prompt_of(first)
    turns += [
        {"role": speaker.lower(), "content": text} for speaker, text in zip(others[::2], others[1::2], strict=True)
    ]
    return turns


def _shp(record: Any) -> Parsed:
    """Read SHP (Ethayarajh et al., 2022): ``labels`` is 1 where A is preferred."""
    replies = [reply_of(record[name], name) for name in ("human_ref_B", "human_ref_A")]
    best = _index(record["labels"], "labels")
    domain = record.get("domain")
    category = text_of(domain, "domain") if isinstance(domain, str) and domain else None
    return Parsed(prompt_of(record["history"]), replies[best], replies[1 - best], category=category)


def _question(record: Any) -> str:
    return "question" if isinstance(record.get("question"), str) else "input"


def _is_orca_pair(record: Any) -> bool:
    if not has(record, chosen=str, rejected=str) or is_hh(record):
        return False
    return isinstance(record.get(_question(record)), str) and not OTHER_PROMPTS & record.keys()


def _orca_pair(record: Any) -> Parsed:
    """Read a pair; in distilabel's edition ``status`` is ``tie`` where its judge rated both replies alike."""
    prompt = prompt_of(record[_question(record)])
    if record.get("status") == TIE:
        raise Undecided("neither reply is preferred", prompt)
    return Parsed(prompt, reply_of(record["chosen"], "chosen"), reply_of(record["rejected"], "rejected"))


def _open_orca(record: Any) -> Parsed:
    prompt = [*system_turns(record, "system_prompt"), *prompt_of(record["question"])]
    return Parsed(prompt, reply=reply_of(record["response"], "response"))


def _argilla_pair(record: Any) -> Parsed:
    chosen, rejected = (reply_of(record[name], name) for name in ("chosen_response", "rejected_response"))
    return Parsed(prompt_of(record["instruction"]), chosen, rejected)


COMPARISONS = (
    Format(
        "pku-saferlhf",
        '{"prompt": "…", "response_0": "…", "response_1": "…", "better_response_id": 0, "safer_response_id": 1}',
        PAIRS,
        lambda r: (
            has(r, prompt=str, response_0=str, response_1=str)
            and {"better_response_id", "safer_response_id"} <= r.keys()
        ),
        _pku,
        dimensions=("helpful", "safe", "agreed"),
    ),
    Format(
        "pku-saferlhf-single",
        '{"prompt": "…", "response_0": "…", "response_1": "…", "better_response_id": 0}',
        PAIRS,
        lambda r: has(r, prompt=str, response_0=str, response_1=str) and "better_response_id" in r,
        single(_pku_single),
    ),
    Format(
        "helpsteer2-preference",
        '{"prompt": "…", "response_1": "…", "response_2": "…", "preference_strength": -3 to 3}',
        PAIRS,
        lambda r: has(r, prompt=str, response_1=str, response_2=str) and "preference_strength" in r,
        single(_helpsteer2),
    ),
    Format(
        "helpsteer3-preference",
        '{"context": [{"role": …, "content": …}], "response1": "…", "response2": "…", "overall_preference": -3 to 3}',
        PAIRS,
        lambda r: has(r, context=(list, str), response1=str, response2=str) and "overall_preference" in r,
        single(_helpsteer3),
    ),
    Format(
        "helpsteer-ratings",
        '{"prompt": "…", "response": "…", "helpfulness": 0 to 4, "correctness": …}',
        PROMPTS,
        lambda r: has(r, prompt=str, response=str) and {"helpfulness", "correctness"} <= r.keys(),
        single(lambda r: Parsed(_helpsteer_prompt(r["prompt"]))),
        note="its replies are rated, the worst of them too; HelpSteer2's comparisons are in its folder preference",
    ),
    Format(
        "shp",
        '{"history": "…", "human_ref_A": "…", "human_ref_B": "…", "labels": 1 where A is preferred, else 0}',
        PAIRS,
        lambda r: has(r, history=str, human_ref_A=str, human_ref_B=str) and "labels" in r,
        single(_shp),
    ),
    Format(
        "orca-dpo",
        '{"system": "…", "question": "…", "chosen": "…", "rejected": "…"} (or "input" for "question")',
        PAIRS,
        _is_orca_pair,
        single(_orca_pair),
    ),
    Format(
        "open-orca",
        '{"system_prompt": "…", "question": "…", "response": "…"}',
        REPLIES,
        lambda r: has(r, question=str, response=str) and not OTHER_PROMPTS & r.keys(),
        single(_open_orca),
    ),
    Format(
        "ultrafeedback-ratings",
        '{"instruction": "…", "chosen_response": "…", "rejected_response": "…", "chosen_avg_rating": 4.5, …}',
        PAIRS,
        lambda r: has(r, instruction=str, chosen_response=str, rejected_response=str),
        single(_argilla_pair),
    ),
)
