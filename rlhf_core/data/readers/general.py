"""General formats: records that name a prompt and its replies, as strings or as turns of a dialogue."""

from __future__ import annotations

import re
from typing import Any

from rlhf_core.data.readers.dialogue_in_text import transcript_in
from rlhf_core.data.readers.format import PAIRS, PROMPTS, REPLIES, TEXTS, Format, Parsed, has, single
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
    transcript_turns,
    turns_of,
)

REPLY_NAMES = ("reply", "completion", "response", "output")
# Texts beside a pair that are no part of its prompt.
LABELS = frozenset({"chosen", "rejected", "system", "source", "category", "id", "prompt_id"})
# White space, and Chinese characters and punctuation, of which each is a word of its own.
WORD_BORDER = re.compile(r"[\s\u3000-\u303f\u3400-\u9fff\uff00-\uffef]")


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


def _hh(record: Any) -> Parsed:
    before, chosen = split_transcript(record["chosen"], "chosen")
    other, rejected = split_transcript(record["rejected"], "rejected")
    if before != other:
        raise Refusal("the prompts of the two replies differ")
    prompt = transcript_turns(before)
    if record.get("prompt"):
        _require_same_prompt(record["prompt"], prompt)
    return Parsed(prompt, chosen, rejected)


def _require_same_prompt(given: Any, prompt: list[Turn]) -> None:
    """Refuse a prompt beside dialogues that is neither their prompt nor its first or last turns."""
    full = [turn["content"].strip() for turn in prompt]
    if isinstance(given, str) and [given.strip()] in (full[:1], full[-1:]):
        return
    texts = [turn["content"].strip() for turn in prompt_of(given)]
    if texts not in (full[: len(texts)], full[-len(texts) :]):
        raise Refusal("the prompt is not that of the transcripts")


def _sharegpt_ranking(record: Any) -> Parsed:
    prompt = turns_of(record["conversations"])
    return Parsed(prompt, reply_of(record["chosen"], "chosen"), reply_of(record["rejected"], "rejected"))


def _explicit(record: Any) -> Parsed:
    prompt = prompt_of(record["prompt"])
    chosen, rejected = (reply_after(prompt, record[name], name) for name in ("chosen", "rejected"))
    return Parsed(prompt, chosen, rejected)


def _implicit(record: Any) -> Parsed:
    prompt, chosen = split_reply(turns_of(record["chosen"]))
    other, rejected = split_reply(turns_of(record["rejected"]))
    if prompt != other:
        raise Refusal("the prompts of the two replies differ")
    if record.get("prompt"):
        _require_same_prompt(record["prompt"], [turn for turn in prompt if turn["role"] != "system"])
    return Parsed(prompt, chosen, rejected)


def _has_implicit_prompt(record: Any) -> bool:
    """Whether both replies are lists of turns that begin with the prompt (which a ``prompt`` string may repeat)."""
    if not has(record, chosen=list, rejected=list) or isinstance(record.get("prompt"), list):
        return False
    return record.get("prompt") is None or len(record["chosen"]) > 1


def _is_turn_list_pair(record: Any) -> bool:
    return (
        has(record, chosen=list, rejected=list)
        and not record.get("prompt")
        and all(is_turn_list(record[name]) for name in ("chosen", "rejected"))
    )


def _turn_list_pair(record: Any) -> Parsed:
    """Read MOSS-RLHF's reward data: the last turn of each list is the reply, the turns before are the same in both.

    Roles alternate backwards from the reply, so a history whose beginning was cut off keeps its roles.
    """
    chosen, rejected = record["chosen"], record["rejected"]
    if chosen[:-1] != rejected[:-1]:
        raise Refusal("the prompts of the two replies differ")
    if len(chosen) == 1:
        raise Refusal("the dialogue has a reply but no prompt")
    roles = ("assistant", "user")
    prompt = [
        {"role": roles[(len(chosen) - 1 - i) % 2], "content": text_of(turn, "a turn")}
        for i, turn in enumerate(chosen[:-1])
    ]
    better, worse = ({"role": "assistant", "content": turns[-1]} for turns in (chosen, rejected))
    return Parsed(prompt, reply_of(better, "chosen"), reply_of(worse, "rejected"))


def _is_standard(record: Any) -> bool:
    """Whether a prompt has two replies beside it, of which one may be missing or no text: then the row is refused."""
    if not has(record, prompt=(str, list)) or not {"chosen", "rejected"} <= record.keys() or is_hh(record):
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
        and not any(isinstance(value, str | list | dict) and name not in LABELS for name, value in record.items())
    )


def _standard_implicit(record: Any) -> Parsed:
    """Read TRL's implicit prompts of strings: the prompt is the longest beginning that both texts share.

    TRL may cut inside a word; here the prompt ends before the first word that differs, and before one space there.
    """
    chosen, rejected = (text_of(record[name], name) for name in ("chosen", "rejected"))
    require_no_dialogue(chosen, "chosen", answered=True)
    if chosen == rejected:
        raise Refusal("both texts are the same")
    length = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    shared = min(chosen, rejected, key=len) if length is None else chosen[:length]
    rests = [text[len(shared) :] for text in (chosen, rejected)]
    end = len(shared)
    if not all(not rest or WORD_BORDER.match(rest) for rest in rests):
        while end and not WORD_BORDER.match(shared[end - 1]):
            end -= 1
    prompt = shared[:end].removesuffix(" ")  # as in "The sky is" and " blue."
    if not prompt.strip():
        raise Refusal("there is no prompt: the two texts do not begin with the same words")
    require_no_dialogue(prompt, "what both texts begin with")
    turns = [{"role": "user", "content": prompt}]
    return Parsed(turns, chosen[len(prompt) :], rejected[len(prompt) :])


def _alpaca_prompt(record: Any) -> list[Turn]:
    """Return instruction and input as one user turn, after the turns of ``history`` (pairs of question and answer).

    Without a history they may be an HH-RLHF transcript.
    """
    turns: list[Turn] = []
    history = record.get("history") or []
    if not isinstance(history, list | tuple):
        raise Refusal("history is not a list of [question, answer]")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Refusal("history is not a list of [question, answer]")
        turns.append({"role": "user", "content": text_of(pair[0], "history")})
        turns.append({"role": "assistant", "content": text_of(pair[1], "history")})
    parts = [text_of(record.get(name) or "", name) for name in ("instruction", "input")]
    text = "\n\n".join(part for part in parts if part.strip())
    return [*turns, {"role": "user", "content": text}] if turns else prompt_of(text, "the instruction")


def _alpaca_ranking(record: Any) -> Parsed:
    chosen, rejected = (reply_of(record[name], name) for name in ("chosen", "rejected"))
    return Parsed(_alpaca_prompt(record), chosen, rejected)


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
    return _dialogue(turns_of(record[name]))


def is_turn_list(record: Any) -> bool:
    return isinstance(record, list) and bool(record) and all(isinstance(turn, str) for turn in record)


def _turn_list(record: Any) -> Parsed:
    roles = ("user", "assistant")
    return _dialogue([{"role": roles[i % 2], "content": text_of(turn, "a turn")} for i, turn in enumerate(record)])


def _reply_name(record: Any) -> str | None:
    return next((name for name in REPLY_NAMES if not is_missing(record.get(name))), None)


def _is_prompt_reply(record: Any) -> bool:
    return has(record, prompt=(str, list)) and _reply_name(record) is not None


def _prompt_reply(record: Any) -> Parsed:
    given = [name for name in REPLY_NAMES if isinstance(record.get(name), str | list)]
    if any(record[name] != record[given[0]] for name in given):
        raise Refusal(f"there are several replies: {', '.join(given)}; name one as reply in columns")
    name, prompt = str(_reply_name(record)), prompt_of(record["prompt"])
    return Parsed(prompt, reply=reply_after(prompt, record[name], name))


def _text(record: Any) -> Parsed:
    return Parsed(text=text_of(record["text"], "text"))


GENERAL = (
    Format("hh-rlhf", '{"chosen": "\\n\\nHuman: … \\n\\nAssistant: …", "rejected": …}', PAIRS, is_hh, single(_hh)),
    Format(
        "sharegpt-ranking",
        '{"conversations": [{"from": "human", "value": …}], "chosen": {"from": "gpt", "value": …}, "rejected": …}',
        PAIRS,
        lambda r: has(r, conversations=list, chosen=(dict, str, list), rejected=(dict, str, list)),
        single(_sharegpt_ranking),
    ),
    Format(
        "turn-list-pair",
        '{"chosen": ["user says", "assistant says"], "rejected": […]} (MOSS-RLHF reward data)',
        PAIRS,
        _is_turn_list_pair,
        single(_turn_list_pair),
    ),
    Format(
        "conversational-implicit",
        '{"chosen": [{"role": …, "content": …}, …], "rejected": […]}',
        PAIRS,
        _has_implicit_prompt,
        single(_implicit),
    ),
    Format(
        "conversational",
        '{"prompt": [{"role": …, "content": …}], "chosen": […], "rejected": […]}',
        PAIRS,
        lambda r: (
            has(r, prompt=list, chosen=(list, str), rejected=(list, str))
            or has(r, chosen=list, rejected=list, prompt=str)
        ),
        single(_explicit),
    ),
    Format(
        "standard",
        '{"prompt": "…", "chosen": "…", "rejected": "…"}',
        PAIRS,
        _is_standard,
        single(_explicit),
    ),
    Format(
        "standard-implicit",
        '{"chosen": "The sky is blue.", "rejected": "The sky is green."}',
        PAIRS,
        _is_standard_implicit,
        single(_standard_implicit),
    ),
    Format(
        "alpaca-ranking",
        '{"instruction": "…", "input": "…", "chosen": "…", "rejected": "…"}',
        PAIRS,
        lambda r: has(r, instruction=str, chosen=(str, dict), rejected=(str, dict)),
        single(_alpaca_ranking),
    ),
    Format(
        "alpaca",
        '{"instruction": "…", "input": "…", "output": "…"}',
        REPLIES,
        lambda r: has(r, instruction=str, output=str),
        single(_alpaca),
    ),
    Format(
        "messages",
        '{"messages": [{"role": …, "content": …}, …]} (or "conversations": ShareGPT)',
        REPLIES,
        lambda r: has(r, messages=list) or has(r, conversations=list),
        single(_messages),
    ),
    Format("turn-list", '["user says", "assistant says", …] (MOSS-RLHF)', REPLIES, is_turn_list, single(_turn_list)),
    Format(
        "prompt-reply",
        '{"prompt": …, "reply": "…"} (or completion, response)',
        REPLIES,
        _is_prompt_reply,
        single(_prompt_reply),
        note="a reply that is labelled by itself is no pair: put a better or worse reply to its prompt beside it",
    ),
    Format(
        "prompt",
        '{"prompt": …}',
        PROMPTS,
        lambda r: has(r, prompt=(str, list)),
        single(lambda r: Parsed(prompt_of(r["prompt"]))),
    ),
    Format(
        "text",
        '{"text": "…"}',
        TEXTS,
        lambda r: has(r, text=str),
        single(_text),
    ),
)
