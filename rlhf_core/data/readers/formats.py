"""The known formats: how a record of each is recognised, and which prompts and replies it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.readers.turns import (
    Refusal,
    Turn,
    is_missing,
    prompt_of,
    reply_after,
    reply_of,
    require_no_dialogue,
    split_reply,
    split_transcript,
    text_of,
    transcript_in,
    transcript_turns,
    turns_of,
)
from rlhf_core.data.row_counts import Record

# The kinds of rows that a format can serve as, best first.
PAIRS = ("preferences", "demonstrations", "prompts", "pretrain")
REPLIES = ("demonstrations", "prompts", "pretrain")
PROMPTS = ("prompts",)
TEXTS = ("pretrain",)
# Read in every format, for one kind of rows or another.
LABELS = frozenset({"system", "source", "category", "margin", "preference_margin"})
# TRL's name and LLaMA-Factory's of KTO's label.
REPLY_LABELS = ("label", "kto_tag")
REPLY_NAMES = ("reply", "completion", "response", "output")
# Texts beside a pair that are no part of its prompt.
NO_PROMPTS = frozenset({"chosen", "rejected", "system", "source", "category", "id", "prompt_id"})
# A record with one of these has its prompt there.
OTHER_PROMPTS = frozenset({"prompt", "instruction", "conversations", "messages"})
STRONGEST_PREFERENCE = 3
# HelpSteer2 writes a dialogue of several turns as one text; its first turn is the user's and has no marker.
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
# White space, and Chinese characters and punctuation, of which each is a word of its own.
WORD_BORDER = re.compile(r"[\s\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")
NUMBER_EXCERPT = 40
# What messages show of each.
EXAMPLES = {
    "pku-saferlhf": '{"prompt": …, "response_0": …, "response_1": …, "better_response_id": 0, "safer_response_id": 1}',
    "pku-saferlhf-single": '{"prompt": …, "response_0": …, "response_1": …, "better_response_id": 0}',
    "helpsteer2-preference": '{"prompt": "…", "response_1": "…", "response_2": "…", "preference_strength": -3 to 3}',
    "helpsteer3-preference": '{"context": […], "response1": …, "response2": …, "overall_preference": -3 to 3}',
    "helpsteer-ratings": '{"prompt": "…", "response": "…", "helpfulness": 0 to 4, "correctness": …}',
    "shp": '{"history": "…", "human_ref_A": "…", "human_ref_B": "…", "labels": 1 where A is preferred, else 0}',
    "orca-dpo": '{"system": "…", "question": "…", "chosen": "…", "rejected": "…"} (or "input" for "question")',
    "open-orca": '{"system_prompt": "…", "question": "…", "response": "…"}',
    "ultrafeedback-ratings": '{"instruction": …, "chosen_response": …, "rejected_response": …, "chosen_avg_rating": 5}',
    "hh-rlhf": '{"chosen": "\\n\\nHuman: … \\n\\nAssistant: …", "rejected": …}',
    "sharegpt-ranking": '{"conversations": [{"from": "human", …}], "chosen": {"from": "gpt", …}, "rejected": …}',
    "turn-list-pair": '{"chosen": ["user says", "assistant says"], "rejected": […]} (MOSS-RLHF reward data)',
    "conversational-implicit": '{"chosen": [{"role": …, "content": …}, …], "rejected": […]}',
    "conversational": '{"prompt": [{"role": …, "content": …}], "chosen": […], "rejected": […]}',
    "standard": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
    "standard-implicit": '{"chosen": "The sky is blue.", "rejected": "The sky is green."}',
    "alpaca-ranking": '{"instruction": "…", "input": "…", "chosen": "…", "rejected": "…"}',
    "alpaca": '{"instruction": "…", "input": "…", "output": "…"}',
    "messages": '{"messages": [{"role": …, "content": …}, …]} (or "conversations": ShareGPT)',
    "turn-list": '["user says", "assistant says", …] (MOSS-RLHF)',
    "prompt-reply": '{"prompt": …, "reply": "…"} (or completion, response)',
    "prompt": '{"prompt": …}',
    "text": '{"text": "…"}',
    "ultrafeedback": '{"instruction": "…", "completions": [{"response": "…", "overall_score": 7.5}, …]}',
    "nectar": '{"prompt": "…", "answers": [{"answer": "…", "rank": 1}, …]} (the best has the lowest rank)',
    "ranking": '{"prompt": …, "responses": ["…", …], "scores": [7, …]} (or "ranks": the best has the lowest)',
    "stepwise": '{"prompt": "…", "completions": ["a step", …], "labels": [true, …]}',
    "oasst-trees": '{"message_tree_id": …, "prompt": {"role": "prompter", "text": …, "replies": [{…, "rank": 0}, …]}}',
    "oasst-messages": '{"message_id": …, "parent_id": …, "message_tree_id": …, "role": "prompter", "text": …}',
}


class Undecided(Exception):
    """A record prefers no reply, for the reason in the message: it is dropped and counted, without being at fault.

    ``prompt`` is its prompt, which can be used nevertheless.
    """

    def __init__(self, reason: str, prompt: list[Turn] | None = None) -> None:
        super().__init__(reason)
        self.prompt = prompt


class LabelledFalse(Undecided):
    """The only reply of a record is labelled as a bad one: nothing is learned from it, its prompt can be used."""


@dataclass(frozen=True)
class Parsed:
    """A prompt with its replies, or a text; parts that the record lacks are None.

    ``margin`` and ``category`` are those that a format derives itself; columns of these names need not be repeated.
    """

    prompt: list[Turn] | None = None
    chosen: str | None = None
    rejected: str | None = None
    reply: str | None = None
    text: str | None = None
    margin: float | None = None
    category: str | None = None


Parse = Callable[[Any, str, ReadOptions], Parsed | Sequence[Parsed]]


@dataclass(frozen=True)
class Format:
    """A known format.

    Attributes:
        kinds: The kinds of rows that it can serve as, best first.
        matches: Whether a record is of this format; looks at keys and types only.
        parse: Returns what a record holds as rows of a kind, one or several. Raises :class:`Refusal` for a record that
            cannot be used, and :class:`Undecided` for one that prefers no reply.
        columns: Those that are read, besides ``LABELS``, scores and those that ``matches`` needs.
        dimensions: The preferences that a record states side by side, of which a source names one.
        note: What to do where the format does not serve as the kind that is asked for.
        join: Makes one record of format ``oasst-trees`` of all rows that belong together.
    """

    name: str
    kinds: tuple[str, ...]
    matches: Callable[[Any], bool]
    parse: Parse
    columns: str = ""
    dimensions: tuple[str, ...] = ()
    note: str = ""
    join: Callable[[Sequence[Record]], list[Record]] | None = None

    @property
    def is_single(self) -> bool:
        """Whether a record has one reply, which may be labelled as good or bad."""
        return self.kinds == REPLIES

    @cached_property
    def read(self) -> frozenset[str]:
        """All columns that are read, but for scores of two replies."""
        needed = self.matches.types if isinstance(self.matches, Needs) else ()
        return LABELS.union(needed, self.columns.split(), REPLY_LABELS if self.is_single else ())


class Needs:
    """Recognises objects that have these keys, and values of these types under those."""

    def __init__(self, *present: str, **types: type | tuple[type, ...]) -> None:
        self.types = dict.fromkeys(present, object) | types

    def __call__(self, record: Any) -> bool:
        return isinstance(record, dict) and all(
            name in record and isinstance(record[name], kind) for name, kind in self.types.items()
        )


def has(record: Any, *present: str, **types: type | tuple[type, ...]) -> bool:
    """Whether a record has these keys, and values of these types under those."""
    return Needs(*present, **types)(record)


def number_of(value: Any, name: str) -> float:
    """Return a finite number, also from its text as in csv; otherwise raise :class:`Refusal`."""
    try:
        python_only = isinstance(value, bool) or (isinstance(value, str) and "_" in value)  # "1_000"
        number = math.nan if python_only else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Refusal(f"{name} is not a number: {excerpt(value)}")
    return number


def excerpt(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    try:
        return repr(value)[:NUMBER_EXCERPT]
    except ValueError:  # an integer of thousands of digits
        return f"a long {type(value).__name__}"


def example_of(shape: Format) -> str:
    """Return what messages show of a format; that of a plugin has no example."""
    return EXAMPLES.get(shape.name, f"what the reader {shape.name} of a plugin takes")


def system_turns(record: Any, name: str = "system") -> list[Turn]:
    """Return the text under ``name`` as a system turn; no turn where it is missing or empty."""
    system = record.get(name)
    return [{"role": "system", "content": text_of(system, name)}] if system else []


def pair(prompt: Callable[[Any], list[Turn]], chosen: str = "chosen", rejected: str = "rejected") -> Parse:
    """Return the ``parse`` of records with a better and a worse reply in two columns."""

    def parse(record: Any, kind: str, options: ReadOptions) -> Parsed:
        turns = prompt(record)
        better, worse = (reply_after(turns, record[name], name) for name in (chosen, rejected))
        return Parsed(turns, better, worse)

    return parse


def single(prompt: Callable[[Any], list[Turn]], name: str) -> Parse:
    """Return the ``parse`` of records with one reply, in the column ``name``."""

    def parse(record: Any, kind: str, options: ReadOptions) -> Parsed:
        turns = prompt(record)
        return Parsed(turns, reply=reply_after(turns, record[name], name))

    return parse


def prompt_in(name: str) -> Callable[[Any], list[Turn]]:
    return lambda record: prompt_of(record[name])


def compared(record: Any, prompt: list[Turn], names: tuple[str, str], best: int, **more: Any) -> Parsed:
    """Return the pair of the replies in two columns, of which number ``best`` is the better one."""
    replies = [reply_of(record[name], name) for name in names]
    return Parsed(prompt, replies[best], replies[1 - best], **more)


def _index(record: Any, name: str) -> int:
    number = number_of(record[name], name)
    if number not in (0, 1):
        raise Refusal(f"{name} is {record[name]!r}, not 0 or 1")
    return int(number)


def _pku(record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read PKU-SafeRLHF (Ji et al., 2024): one pair by the preference that ``options.dimension`` names.

    ``agreed`` takes the pairs that helpfulness and safety order alike.
    """
    prompt = prompt_of(record["prompt"])
    if kind == "prompts":
        return Parsed(prompt)
    helpful, safe = _index(record, "better_response_id"), _index(record, "safer_response_id")
    if options.dimension == "agreed" and helpful != safe:
        raise Undecided("the more helpful reply is not the safer one")
    best = safe if options.dimension == "safe" else helpful
    return compared(record, prompt, ("response_0", "response_1"), best, category=options.dimension)


def _pku_single(record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read PKU-SafeRLHF-single-dimension, whose one preference weighs helpfulness against safety."""
    best = _index(record, "better_response_id")
    return compared(record, prompt_of(record["prompt"]), ("response_0", "response_1"), best)


def _shp(record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read SHP (Ethayarajh et al., 2022): ``labels`` is 1 where A is preferred."""
    prompt, best = prompt_of(record["history"]), _index(record, "labels")
    return compared(record, prompt, ("human_ref_B", "human_ref_A"), best, category=_domain(record))


def _domain(record: Any) -> str | None:
    domain = record.get("domain")
    return text_of(domain, "domain") if isinstance(domain, str) and domain else None


def _by_strength(
    prompt: Callable[[Any], list[Turn]], names: tuple[str, str], column: str
) -> Callable[[Any, str, ReadOptions], Parsed]:
    """Return the ``parse`` of a strength from -3 (the first reply is much better) to 3, whose size is the margin."""

    def parse(record: Any, kind: str, options: ReadOptions) -> Parsed:
        turns, strength = prompt(record), number_of(record[column], column)
        if not abs(strength) <= STRONGEST_PREFERENCE:
            raise Refusal(f"{column} is {record[column]!r}, not from -{STRONGEST_PREFERENCE} to {STRONGEST_PREFERENCE}")
        if strength == 0:
            raise Undecided("neither reply is preferred", turns)
        return compared(record, turns, names, int(strength > 0), margin=abs(strength), category=_domain(record))

    return parse


def _helpsteer_prompt(record: Any) -> list[Turn]:
    first, *others = HELPSTEER_TURN.split(text_of(record["prompt"], "the prompt"))
    turns = [{"role": "user", "content": first}] if others else prompt_of(first)
    return turns + [
        {"role": speaker.lower(), "content": text} for speaker, text in zip(others[::2], others[1::2], strict=True)
    ]


def _question(record: Any) -> str:
    return "question" if isinstance(record.get("question"), str) else "input"


def _is_orca(record: Any) -> bool:
    return (
        has(record, chosen=str, rejected=str)
        and isinstance(record.get(_question(record)), str)
        and not OTHER_PROMPTS & record.keys()
        and not is_hh(record)
    )


def _is_open_orca(record: Any) -> bool:
    return has(record, question=str, response=str) and not OTHER_PROMPTS & record.keys()


def _open_orca(record: Any, kind: str, options: ReadOptions) -> Parsed:
    prompt = [*system_turns(record, "system_prompt"), *prompt_of(record["question"])]
    return Parsed(prompt, reply=reply_of(record["response"], "response"))


def is_hh(record: Any) -> bool:
    """Whether two texts are transcripts. Where one is damaged, the other tells, unless a prompt is no transcript.

    A reply may hold a dialogue that its prompt asks for.
    """
    if not has(record, chosen=str, rejected=str) or {"conversations", "instruction"} & record.keys():
        return False
    transcripts = [transcript_in(record[name]) is not None for name in ("chosen", "rejected")]
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt and transcript_in(prompt) is None:
        return all(transcripts)
    return any(transcripts)


def _hh(record: Any, kind: str, options: ReadOptions) -> Parsed:
    before, chosen = split_transcript(record["chosen"], "chosen")
    other, rejected = split_transcript(record["rejected"], "rejected")
    _require_equal_prompts(before, other)
    prompt = transcript_turns(before)
    if record.get("prompt"):
        _require_same_prompt(record["prompt"], prompt)
    return Parsed(prompt, chosen, rejected)


def _require_equal_prompts(first: Any, second: Any) -> None:
    if first != second:
        raise Refusal("the prompts of the two replies differ")


def _require_same_prompt(given: Any, prompt: list[Turn]) -> None:
    """Refuse a prompt beside dialogues that is neither their prompt nor its first or last turns."""
    full = [turn["content"].strip() for turn in prompt]
    if isinstance(given, str) and [given.strip()] in (full[:1], full[-1:]):
        return
    texts = [turn["content"].strip() for turn in prompt_of(given)]
    if texts not in (full[: len(texts)], full[-len(texts) :]):
        raise Refusal("the prompt is not that of the transcripts")


def _has_implicit_prompt(record: Any) -> bool:
    """Whether both replies are lists of turns that begin with the prompt (which a ``prompt`` string may repeat)."""
    if not has(record, chosen=list, rejected=list) or isinstance(record.get("prompt"), list):
        return False
    return record.get("prompt") is None or len(record["chosen"]) > 1


def _implicit(record: Any, kind: str, options: ReadOptions) -> Parsed:
    prompt, chosen = split_reply(turns_of(record["chosen"]))
    other, rejected = split_reply(turns_of(record["rejected"]))
    _require_equal_prompts(prompt, other)
    if record.get("prompt"):
        _require_same_prompt(record["prompt"], [turn for turn in prompt if turn["role"] != "system"])
    return Parsed(prompt, chosen, rejected)


def _is_turn_list_pair(record: Any) -> bool:
    return has(record) and not record.get("prompt") and all(map(is_turn_list, map(record.get, ("chosen", "rejected"))))


def _turn_list_pair(record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read MOSS-RLHF's reward data: the last turn of each list is the reply, the turns before are the same in both.

    Roles alternate backwards from the reply, so a history whose beginning was cut off keeps its roles.
    """
    *before, chosen = record["chosen"]
    *other, rejected = record["rejected"]
    _require_equal_prompts(before, other)
    if not before:
        raise Refusal("the dialogue has a reply but no prompt")
    prompt = _alternating(before, ("user", "assistant") if len(before) % 2 else ("assistant", "user"))
    better, worse = ({"role": "assistant", "content": reply} for reply in (chosen, rejected))
    return Parsed(prompt, reply_of(better, "chosen"), reply_of(worse, "rejected"))


def is_turn_list(record: Any) -> bool:
    return isinstance(record, list) and bool(record) and all(isinstance(turn, str) for turn in record)


def _alternating(texts: Sequence[str], roles: tuple[str, str] = ("user", "assistant")) -> list[Turn]:
    return [{"role": roles[number % 2], "content": text_of(text, "a turn")} for number, text in enumerate(texts)]


def _is_conversational(record: Any) -> bool:
    return has(record, prompt=list, chosen=(list, str), rejected=(list, str)) or has(
        record, prompt=str, chosen=list, rejected=list
    )


def _is_standard(record: Any) -> bool:
    """Whether a prompt has two replies beside it, of which one may be missing or no text: then the row is refused."""
    if not has(record, "chosen", "rejected", prompt=(str, list)) or is_hh(record):
        return False
    replies = record["chosen"], record["rejected"]
    if isinstance(record["prompt"], list) and all(isinstance(reply, str | list) for reply in replies):
        return False  # turns, which are conversational
    return not all(map(is_missing, replies))


def _is_standard_implicit(record: Any) -> bool:
    """Whether there are two texts and nothing else that could be the prompt; one that is null is missing."""
    return (
        has(record, chosen=str, rejected=str)
        and "prompt" not in record
        and not is_hh(record)
        and not any(isinstance(value, str | list | dict) and name not in NO_PROMPTS for name, value in record.items())
    )


def _standard_implicit(record: Any, kind: str, options: ReadOptions) -> Parsed:
    """Read TRL's implicit prompts of strings: the prompt is the longest beginning that both texts share.

    TRL may cut inside a word; here the prompt ends before the first word that differs, and before one space there.
    """
    chosen, rejected = (text_of(record[name], name) for name in ("chosen", "rejected"))
    require_no_dialogue(chosen, "chosen", answered=True)
    if chosen == rejected:
        raise Refusal("both texts are the same")
    shorter = min(len(chosen), len(rejected))
    end = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), shorter)
    if not all(not rest or WORD_BORDER.match(rest) for rest in (chosen[end:], rejected[end:])):
        while end and not WORD_BORDER.match(chosen[end - 1]):
            end -= 1
    prompt = chosen[:end].removesuffix(" ")  # as in "The sky is" and " blue."
    if not prompt.strip():
        raise Refusal("there is no prompt: the two texts do not begin with the same words")
    require_no_dialogue(prompt, "what both texts begin with")
    return Parsed([{"role": "user", "content": prompt}], chosen[len(prompt) :], rejected[len(prompt) :])


def _alpaca_prompt(record: Any) -> list[Turn]:
    """Return instruction and input as one user turn, after the turns of ``history`` (pairs of question and answer).

    Without a history they may be an HH-RLHF transcript.
    """
    history = record.get("history") or []
    if not isinstance(history, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in history):
        raise Refusal("history is not a list of [question, answer]")
    turns = [
        {"role": role, "content": text_of(text, "history")}
        for asked in history
        for role, text in zip(("user", "assistant"), asked, strict=True)
    ]
    parts = [text_of(record.get(name) or "", name) for name in ("instruction", "input")]
    text = "\n\n".join(part for part in parts if part.strip())
    return [*turns, {"role": "user", "content": text}] if turns else prompt_of(text, "the instruction")


def _dialogue(turns: list[Turn]) -> Parsed:
    """Return a dialogue that ends with the user as a prompt, any other as a demonstration."""
    if turns[-1]["role"] == "user":
        return Parsed(turns)
    prompt, reply = split_reply(turns)
    return Parsed(prompt, reply=reply)


def _is_messages(record: Any) -> bool:
    return has(record, messages=list) or has(record, conversations=list)


def _messages(record: Any, kind: str, options: ReadOptions) -> Parsed:
    return _dialogue(turns_of(record["messages" if isinstance(record.get("messages"), list) else "conversations"]))


def _is_prompt_reply(record: Any) -> bool:
    return has(record, prompt=(str, list)) and any(not is_missing(record.get(name)) for name in REPLY_NAMES)


def _prompt_reply(record: Any, kind: str, options: ReadOptions) -> Parsed | Sequence[Parsed]:
    given = [name for name in REPLY_NAMES if isinstance(record.get(name), str | list)]
    if any(record[name] != record[given[0]] for name in given):
        raise Refusal(f"there are several replies: {', '.join(given)}; name one as reply in columns")
    name = next(name for name in REPLY_NAMES if not is_missing(record.get(name)))
    return single(prompt_in("prompt"), name)(record, kind, options)


COMPARISONS = (
    Format(
        "pku-saferlhf",
        PAIRS,
        Needs("better_response_id", "safer_response_id", prompt=str, response_0=str, response_1=str),
        _pku,
        dimensions=("helpful", "safe", "agreed"),
    ),
    Format(
        "pku-saferlhf-single",
        PAIRS,
        Needs("better_response_id", prompt=str, response_0=str, response_1=str),
        _pku_single,
    ),
    Format(
        "helpsteer2-preference",
        PAIRS,
        Needs("preference_strength", prompt=str, response_1=str, response_2=str),
        _by_strength(_helpsteer_prompt, ("response_1", "response_2"), "preference_strength"),
    ),
    Format(
        "helpsteer3-preference",
        PAIRS,
        Needs("overall_preference", context=(list, str), response1=str, response2=str),
        _by_strength(prompt_in("context"), ("response1", "response2"), "overall_preference"),
        "domain",
    ),
    Format(
        "helpsteer-ratings",
        PROMPTS,
        lambda record: has(record, "helpfulness", "correctness", prompt=str, response=str),
        lambda record, kind, options: Parsed(_helpsteer_prompt(record)),
        "prompt",
        note="its replies are rated, the worst of them too; HelpSteer2's comparisons are in its folder preference",
    ),
    Format("shp", PAIRS, Needs("labels", history=str, human_ref_A=str, human_ref_B=str), _shp, "domain"),
    Format(
        "orca-dpo",
        PAIRS,
        _is_orca,
        pair(lambda record: prompt_of(record[_question(record)])),
        "question input status chosen rejected",
    ),
    Format("open-orca", REPLIES, _is_open_orca, _open_orca, "system_prompt question response"),
    Format(
        "ultrafeedback-ratings",
        PAIRS,
        Needs(instruction=str, chosen_response=str, rejected_response=str),
        pair(prompt_in("instruction"), "chosen_response", "rejected_response"),
    ),
)
GENERAL = (
    Format("hh-rlhf", PAIRS, is_hh, _hh, "prompt chosen rejected"),
    Format(
        "sharegpt-ranking",
        PAIRS,
        Needs(conversations=list, chosen=(dict, str, list), rejected=(dict, str, list)),
        pair(lambda record: turns_of(record["conversations"])),
    ),
    Format("turn-list-pair", PAIRS, _is_turn_list_pair, _turn_list_pair, "prompt chosen rejected"),
    Format("conversational-implicit", PAIRS, _has_implicit_prompt, _implicit, "prompt chosen rejected"),
    Format("conversational", PAIRS, _is_conversational, pair(prompt_in("prompt")), "prompt chosen rejected"),
    Format("standard", PAIRS, _is_standard, pair(prompt_in("prompt")), "prompt chosen rejected"),
    Format("standard-implicit", PAIRS, _is_standard_implicit, _standard_implicit, "chosen rejected"),
    Format(
        "alpaca-ranking",
        PAIRS,
        Needs(instruction=str, chosen=(str, dict), rejected=(str, dict)),
        pair(_alpaca_prompt),
        "input history",
    ),
    Format("alpaca", REPLIES, Needs(instruction=str, output=str), single(_alpaca_prompt, "output"), "input history"),
    Format("messages", REPLIES, _is_messages, _messages, "messages conversations"),
    Format("turn-list", REPLIES, is_turn_list, lambda record, kind, options: _dialogue(_alternating(record))),
    Format(
        "prompt-reply",
        REPLIES,
        _is_prompt_reply,
        _prompt_reply,
        "prompt reply completion response output",
        note="a reply that is labelled by itself is no pair: put a better or worse reply to its prompt beside it",
    ),
    Format("prompt", PROMPTS, Needs(prompt=(str, list)), lambda r, kind, options: Parsed(prompt_of(r["prompt"]))),
    Format("text", TEXTS, Needs(text=str), lambda r, kind, options: Parsed(text=text_of(r["text"], "text"))),
)
