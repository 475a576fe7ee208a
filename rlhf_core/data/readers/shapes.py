"""The known formats: how to recognise a record of each, and how it becomes a prompt with replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.readers.turns import (
    TRANSCRIPT_TURN,
    Refusal,
    Turn,
    prompt_of,
    reply_of,
    split_reply,
    split_transcript,
    text_of,
    transcript_turns,
    turns_of,
)

PAIRS = frozenset({"preferences", "demonstrations", "prompts", "pretrain"})
REPLIES = frozenset({"demonstrations", "prompts", "pretrain"})
PROMPTS = frozenset({"prompts"})
TEXTS = frozenset({"pretrain"})
REPLY_NAMES = ("reply", "completion", "response", "output")


@dataclass(frozen=True)
class Parsed:
    """The parts of a record; those that it lacks are None."""

    prompt: list[Turn] | None = None
    chosen: str | None = None
    rejected: str | None = None
    reply: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Format:
    """A known format; ``matches`` looks at keys and types only, ``parse`` may raise :class:`Refusal`."""

    name: str
    example: str
    carries: frozenset[str]
    matches: Callable[[Any], bool]
    parse: Callable[[Any], Parsed]


def _has(record: Any, **types: type | tuple[type, ...]) -> bool:
    return isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in types.items())


def _is_hh(record: Any) -> bool:
    return (
        _has(record, chosen=str, rejected=str)
        and not {"conversations", "instruction"} & record.keys()
        and any(TRANSCRIPT_TURN.match(record[name]) for name in ("chosen", "rejected"))
    )


def _hh(record: Any) -> Parsed:
    before, chosen = split_transcript(record["chosen"], "chosen")
    other, rejected = split_transcript(record["rejected"], "rejected")
    if before != other:
        raise Refusal("the prompts of the two replies differ")
    prompt = transcript_turns(before)
    if record.get("prompt"):
        _require_same_prompt(prompt_of(record["prompt"]), prompt)
    return Parsed([*_system(record), *prompt], chosen, rejected)


def _require_same_prompt(given: list[Turn], prompt: list[Turn]) -> None:
    """Refuse a prompt beside transcripts that is neither their prompt nor its first or last turns."""
    texts, full = ([turn["content"].strip() for turn in turns] for turns in (given, prompt))
    if texts not in (full[: len(texts)], full[-len(texts) :]):
        raise Refusal("the prompt is not that of the transcripts")


def _sharegpt_ranking(record: Any) -> Parsed:
    prompt = [*_system(record), *turns_of(record["conversations"])]
    return Parsed(prompt, reply_of(record["chosen"], "chosen"), reply_of(record["rejected"], "rejected"))


def _explicit(record: Any) -> Parsed:
    prompt = [*_system(record), *prompt_of(record["prompt"])]
    return Parsed(prompt, reply_of(record["chosen"], "chosen"), reply_of(record["rejected"], "rejected"))


def _implicit(record: Any) -> Parsed:
    prompt, chosen = split_reply(turns_of(record["chosen"]))
    other, rejected = split_reply(turns_of(record["rejected"]))
    if prompt != other:
        raise Refusal("the prompts of the two replies differ")
    return Parsed([*_system(record), *prompt], chosen, rejected)


def _has_implicit_prompt(record: Any) -> bool:
    """Whether both replies are lists of turns that begin with the prompt (which a ``prompt`` string may repeat)."""
    if not _has(record, chosen=list, rejected=list) or isinstance(record.get("prompt"), list):
        return False
    return record.get("prompt") is None or len(record["chosen"]) > 1


def _alpaca_prompt(record: Any) -> list[Turn]:
    """Return instruction and input as one user turn, after the turns of ``history`` (pairs of question and answer)."""
    turns = _system(record)
    history = record.get("history") or []
    if not isinstance(history, list | tuple):
        raise Refusal("history is not a list of [question, answer]")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Refusal("history is not a list of [question, answer]")
        turns.append({"role": "user", "content": text_of(pair[0], "history")})
        turns.append({"role": "assistant", "content": text_of(pair[1], "history")})
    parts = [text_of(record.get(name) or "", name) for name in ("instruction", "input")]
    return [*turns, {"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]


def _system(record: Any) -> list[Turn]:
    system = record.get("system")
    return [{"role": "system", "content": text_of(system, "system")}] if system else []


def _alpaca_ranking(record: Any) -> Parsed:
    replies = (reply_of(record[name], name) for name in ("chosen", "rejected"))
    return Parsed(_alpaca_prompt(record), *replies)


def _alpaca(record: Any) -> Parsed:
    return Parsed(_alpaca_prompt(record), reply=reply_of(record["output"], "output"))


def _dialogue(turns: list[Turn]) -> Parsed:
    """Return a dialogue that ends with the user as a prompt, any other as a demonstration."""
    if turns[-1]["role"] == "user":
        return Parsed(turns)
    prompt, reply = split_reply(turns)
    return Parsed(prompt, reply=reply)


def _messages(record: Any) -> Parsed:
    name = "messages" if isinstance(record.get("messages"), list) else "conversations"
    return _dialogue([*_system(record), *turns_of(record[name])])


def _is_turn_list(record: Any) -> bool:
    return isinstance(record, list) and bool(record) and all(isinstance(turn, str) for turn in record)


def _turn_list(record: Any) -> Parsed:
    roles = ("user", "assistant")
    return _dialogue([{"role": roles[i % 2], "content": text_of(turn, "a turn")} for i, turn in enumerate(record)])


def _reply_name(record: Any) -> str | None:
    return next((name for name in REPLY_NAMES if record.get(name) is not None), None)


def _is_prompt_reply(record: Any) -> bool:
    return _has(record, prompt=(str, list)) and isinstance(record.get(_reply_name(record) or ""), str | list)


def _prompt_reply(record: Any) -> Parsed:
    name = str(_reply_name(record))
    return Parsed([*_system(record), *prompt_of(record["prompt"])], reply=reply_of(record[name], name))


# The first that matches is used, so formats with more fields come first.
FORMATS = (
    Format("hh-rlhf", '{"chosen": "\\n\\nHuman: … \\n\\nAssistant: …", "rejected": …}', PAIRS, _is_hh, _hh),
    Format(
        "sharegpt-ranking",
        '{"conversations": [{"from": "human", "value": …}], "chosen": {"from": "gpt", "value": …}, "rejected": …}',
        PAIRS,
        lambda r: _has(r, conversations=list, chosen=(dict, str, list), rejected=(dict, str, list)),
        _sharegpt_ranking,
    ),
    Format(
        "conversational-implicit",
        '{"chosen": [{"role": …, "content": …}, …], "rejected": […]}',
        PAIRS,
        _has_implicit_prompt,
        _implicit,
    ),
    Format(
        "conversational",
        '{"prompt": [{"role": …, "content": …}], "chosen": […], "rejected": […]}',
        PAIRS,
        lambda r: (
            _has(r, prompt=list, chosen=(list, str), rejected=(list, str))
            or _has(r, chosen=list, rejected=list, prompt=str)
        ),
        _explicit,
    ),
    Format(
        "standard",
        '{"prompt": "…", "chosen": "…", "rejected": "…"}',
        PAIRS,
        lambda r: _has(r, prompt=str, chosen=str, rejected=str) and not _is_hh(r),
        _explicit,
    ),
    Format(
        "alpaca-ranking",
        '{"instruction": "…", "input": "…", "chosen": "…", "rejected": "…"}',
        PAIRS,
        lambda r: _has(r, instruction=str, chosen=(str, dict), rejected=(str, dict)),
        _alpaca_ranking,
    ),
    Format(
        "alpaca",
        '{"instruction": "…", "input": "…", "output": "…"}',
        REPLIES,
        lambda r: _has(r, instruction=str, output=str),
        _alpaca,
    ),
    Format(
        "messages",
        '{"messages": [{"role": …, "content": …}, …]} (or "conversations": ShareGPT)',
        REPLIES,
        lambda r: _has(r, messages=list) or _has(r, conversations=list),
        _messages,
    ),
    Format("turn-list", '["user says", "assistant says", …] (MOSS-RLHF)', REPLIES, _is_turn_list, _turn_list),
    Format(
        "prompt-reply",
        '{"prompt": …, "reply": "…"} (or completion, response)',
        REPLIES,
        _is_prompt_reply,
        _prompt_reply,
    ),
    Format(
        "prompt",
        '{"prompt": …}',
        PROMPTS,
        lambda r: _has(r, prompt=(str, list)),
        lambda r: Parsed([*_system(r), *prompt_of(r["prompt"])]),
    ),
    Format(
        "text", '{"text": "…"}', TEXTS, lambda r: _has(r, text=str), lambda r: Parsed(text=text_of(r["text"], "text"))
    ),
)
