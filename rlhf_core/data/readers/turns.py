"""Turns of a dialogue, in the spellings that data sets use, as ``{"role", "content"}`` dictionaries."""

from __future__ import annotations

from typing import Any

from rlhf_core.data.readers.dialogue_in_text import (
    OPEN_REPLY,
    ROLE_NAMES,
    TRANSCRIPT_TURN,
    dialogue_in,
    markup_in,
    transcript_in,
)
from rlhf_core.data.text import has_visible_text

Turn = dict[str, str]
# Parts of a turn that are no text of it; a turn that has one is refused, since the text alone says something else.
LOST_PARTS = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "reasoning_details", "thinking"),
    *("image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos", "file"),
)
EXCERPT = 60


class Refusal(Exception):
    """A row cannot be used, for the reason in the message; it goes to the quarantine."""


def is_missing(value: Any) -> bool:
    """Return whether a value is null, or NaN as pandas writes it."""
    return value is None or value != value


def text_of(value: Any, name: str) -> str:
    """Return ``value`` if it is text that UTF-8 can encode; otherwise raise :class:`Refusal`."""
    if is_missing(value):
        raise Refusal(f"{name} is missing")
    if not isinstance(value, str):
        raise Refusal(f"{name} is not text but {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Refusal(
                f"{name} holds half of a surrogate pair at character {error.start}: not valid Unicode"
            ) from error
    return value


def turn_of(value: Any) -> Turn:
    """Return one turn from ``{"role", "content"}`` or ``{"from", "value"}``."""
    if not isinstance(value, dict):
        raise Refusal(f"a turn is not an object but {type(value).__name__}")
    role = value.get("role", value.get("from"))
    known = ROLE_NAMES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise Refusal(f"unknown role {repr(role)[:EXCERPT]}; known are {', '.join(ROLE_NAMES)}")
    speaker, content, other = value.get("from"), value.get("content"), value.get("value")
    if isinstance(speaker, str) and ROLE_NAMES.get(speaker.lower()) != known:
        raise Refusal(f"a turn's role is {role!r} and from is {repr(speaker)[:EXCERPT]}")
    if isinstance(content, str) and isinstance(other, str) and content != other:
        raise Refusal(f"the {known} turn has different texts as content and value")
    more = [name for name in LOST_PARTS if value.get(name)]
    if more:
        raise Refusal(f"the {known} turn has {', '.join(more)} beside its text, which training would not see")
    return {"role": known, "content": _content(value.get("content", value.get("value")), f"the {known} turn")}


def _content(value: Any, name: str) -> str:
    """Return the text of a turn, which may come as parts ``{"type": "text", "text": …}``: these are joined as they are.

    A part of another type (image, audio) is refused by its name, since training would not see it; so is a part of text
    that has one of ``LOST_PARTS`` beside it.
    """
    if not isinstance(value, list):
        return text_of(value, name)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise Refusal(f"{name} has a part of type {kind!r}; only text can be trained on")
        more = [lost for lost in LOST_PARTS if part.get(lost)]
        if more:
            raise Refusal(f"{name} has {', '.join(more)} beside the text of a part, which training would not see")
        texts.append(text_of(part.get("text"), f"a part of {name}"))
    if not texts:
        raise Refusal(f"{name} has no parts")
    return "".join(texts)


def turns_of(value: Any) -> list[Turn]:
    """Return a list of turns; :class:`Refusal` when it is not a list or empty."""
    if not isinstance(value, list) or not value:
        raise Refusal("the list of turns is empty" if value == [] else "the turns are not a list")
    return [turn_of(turn) for turn in value]


def prompt_of(value: Any, name: str = "the prompt") -> list[Turn]:
    """Return a prompt from a string (one user turn, or an HH-RLHF transcript) or a list of turns."""
    if isinstance(value, list):
        return turns_of(value)
    text = text_of(value, name)
    transcript = transcript_in(text)
    if transcript is None:
        require_no_dialogue(text, name)
        return [{"role": "user", "content": text}]
    turns = transcript_turns(OPEN_REPLY.sub("", transcript))
    if len(turns) == 1:
        require_no_dialogue(f"Human: {turns[0]['content']}", name)
    return turns


def require_no_dialogue(text: str, name: str, answered: bool = False) -> None:
    """Refuse a text that is a whole dialogue, which would be learned as one turn of the user.

    Args:
        answered: The text holds the reply too.
    """
    reason = dialogue_in(text, answered)
    if reason is not None:
        raise Refusal(f"{name} {reason}")


def reply_of(value: Any, name: str) -> str:
    """Return a reply from a string, a single turn, or a list of one assistant turn; never a whole transcript.

    A string in the markup of a chat template is refused; in a turn, such a text is what the assistant wrote.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise Refusal(f"{name} has {len(value)} turns; beside an explicit prompt it is one assistant turn")
        value = value[0]
    if isinstance(value, dict):
        turn = turn_of(value)
        if turn["role"] != "assistant":
            raise Refusal(f"{name} is a turn of the {turn['role']}, not the assistant's")
        reply = turn["content"]
    else:
        reply = text_of(value, name)
        markup = markup_in(reply)
        if markup is not None:
            raise Refusal(f"{name} {markup}")
    if transcript_in(reply) is not None:
        raise Refusal(f"{name} is a whole transcript, not a reply")
    return reply


def reply_after(prompt: list[Turn], value: Any, name: str) -> str:
    """Return a reply like :func:`reply_of`, also from a whole dialogue that begins with the turns of ``prompt``."""
    if isinstance(value, list) and len(value) == len(prompt) + 1 > 1 and turns_of(value)[:-1] == prompt:
        value = value[-1:]
    return reply_of(value, name)


def split_reply(turns: list[Turn]) -> tuple[list[Turn], str]:
    """Return ``(prompt, reply)`` of a dialogue that ends with the assistant."""
    if turns[-1]["role"] != "assistant":
        raise Refusal(f"the dialogue ends with the {turns[-1]['role']}'s turn: there is no reply")
    if len(turns) == 1:
        raise Refusal("the dialogue has a reply but no prompt")
    return turns[:-1], turns[-1]["content"]


def split_transcript(text: str, name: str) -> tuple[str, str]:
    """Return ``(prompt text, reply)`` of an HH-RLHF transcript, split at the last assistant turn.

    The space after the colon belongs to the format; all other white space is the reply's.
    """
    transcript = transcript_in(text_of(text, name)) or text
    markers = list(TRANSCRIPT_TURN.finditer(transcript))
    last = next((marker for marker in reversed(markers) if marker.group(1) == "Assistant"), None)
    if last is None:
        raise Refusal(f"{name} has no assistant's turn")
    if last is not markers[-1]:
        raise Refusal(f"{name} ends with a human turn: there is no reply to judge")
    reply = transcript[last.end() :]
    if not has_visible_text(reply):
        raise Refusal(f"the final reply of {name} is empty")
    return transcript[: last.start()], reply.removeprefix(" ")


def transcript_turns(text: str) -> list[Turn]:
    """Return the turns of an HH-RLHF transcript, without the space after the colon of ``\\n\\nHuman: …``."""
    head, *parts = TRANSCRIPT_TURN.split(text)
    if head.strip():
        raise Refusal("the transcript does not begin with a marked turn")
    if not parts:
        raise Refusal("the transcript has no turns")
    names = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": names[speaker], "content": turn.removeprefix(" ")}
        for speaker, turn in zip(parts[::2], parts[1::2], strict=True)
    ]
