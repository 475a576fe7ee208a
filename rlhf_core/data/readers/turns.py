"""Turns of a dialogue, which data sets spell in many ways, as ``{"role", "content"}`` dictionaries.

A whole dialogue may also stand in one text: rendered by a chat template, as a transcript, or as
JSON. A text whose role its format gives is not searched for one: there, somebody wrote the markup.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_core.data.text import has_visible_text

Turn = dict[str, str]


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a list that is written as one text."""
    return tuple(text.split())


# Parts of a turn that are not text. A turn that has one is refused, since its text alone says
# something else.
LOST_PARTS = names_in(
    "tool_calls function_call reasoning_content reasoning reasoning_details thinking "
    "image images image_url audio audios input_audio video videos file"
)
EXCERPT = 60


class Refusal(Exception):
    """A row cannot be used, for the reason in the message; it is put into the quarantine."""


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
    known = None
    if isinstance(role, str):
        known = ROLE_NAMES.get(role.lower())
    if known is None:
        raise Refusal(f"unknown role {repr(role)[:EXCERPT]}; known are {', '.join(ROLE_NAMES)}")
    speaker = value.get("from")
    content = value.get("content")
    other = value.get("value")
    if isinstance(speaker, str) and ROLE_NAMES.get(speaker.lower()) != known:
        raise Refusal(f"a turn's role is {role!r} and from is {repr(speaker)[:EXCERPT]}")
    if isinstance(content, str) and isinstance(other, str) and content != other:
        raise Refusal(f"the {known} turn has different texts as content and value")
    more = [name for name in LOST_PARTS if value.get(name)]
    if more:
        raise Refusal(
            f"the {known} turn has {', '.join(more)} beside its text, which training would not see"
        )
    given = value.get("content", value.get("value"))
    return {"role": known, "content": _content(given, f"the {known} turn")}


def _content(value: Any, name: str) -> str:
    """Return the text of a turn, which may come in parts ``{"type": "text", "text": …}``.

    The parts are joined as they are. A part of another type (image, audio) is refused, since
    training would not see it; so is a part of text with one of ``LOST_PARTS`` beside it.
    """
    if not isinstance(value, list):
        return text_of(value, name)
    texts = []
    for part in value:
        if isinstance(part, dict):
            kind = part.get("type")
        else:
            kind = type(part).__name__
        if kind != "text":
            raise Refusal(f"{name} has a part of type {kind!r}; only text can be trained on")
        more = [lost for lost in LOST_PARTS if part.get(lost)]
        if more:
            raise Refusal(
                f"{name} has {', '.join(more)} beside the text of a part, which training would not see"
            )
        texts.append(text_of(part.get("text"), f"a part of {name}"))
    if not texts:
        raise Refusal(f"{name} has no parts")
    return "".join(texts)


def turns_of(value: Any) -> list[Turn]:
    """Return a list of turns; :class:`Refusal` when it is not a list or empty."""
    if not isinstance(value, list):
        raise Refusal("the turns are not a list")
    if not value:
        raise Refusal("the list of turns is empty")
    return [turn_of(turn) for turn in value]


def prompt_of(value: Any, name: str = "the prompt") -> list[Turn]:
    """Return a prompt from a list of turns, a text of the user, or an HH-RLHF transcript."""
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
    """Refuse a text that is a whole dialogue and would be learned as one turn of the user.

    Args:
        answered: Whether the text holds the reply, too.
    """
    reason = dialogue_in(text, answered)
    if reason is not None:
        raise Refusal(f"{name} {reason}")


def reply_of(value: Any, name: str) -> str:
    """Return a reply from a text, a turn, or a list of one assistant turn; never from a transcript.

    A text in the markup of a chat template is refused. In a turn, the assistant wrote it.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise Refusal(
                f"{name} has {len(value)} turns; beside an explicit prompt it is one assistant turn"
            )
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
    """Return a reply like :func:`reply_of`, or of a dialogue that begins with ``prompt``."""
    may_be_whole = isinstance(value, list) and len(value) == len(prompt) + 1 > 1
    if may_be_whole and turns_of(value)[:-1] == prompt:
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
    if not any(marker[1] == "Assistant" for marker in markers):
        raise Refusal(f"{name} has no assistant's turn")
    last = markers[-1]
    if last[1] != "Assistant":
        raise Refusal(f"{name} ends with a human turn: there is no reply to judge")
    reply = transcript[last.end() :]
    if not has_visible_text(reply):
        raise Refusal(f"the final reply of {name} is empty")
    return transcript[: last.start()], reply.removeprefix(" ")


def transcript_turns(text: str) -> list[Turn]:
    """Return the turns of an HH-RLHF transcript, without the space after ``\\n\\nHuman:``."""
    head, *parts = TRANSCRIPT_TURN.split(text)
    if head.strip():
        raise Refusal("the transcript does not begin with a marked turn")
    if not parts:
        raise Refusal("the transcript has no turns")
    turns = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append({"role": ROLE_NAMES[speaker.lower()], "content": text.removeprefix(" ")})
    return turns


ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
# Byte order marks and zero-width spaces, which copied texts begin with.
INVISIBLE = "\ufeff\u200b\u2060"
LEADING = rf"[\s{INVISIBLE}]*"
EMPTY_LINE = r"(?:\r\n\r\n|\n\n)"
TRANSCRIPT_TURN = re.compile(rf"{EMPTY_LINE}(Human|Assistant):")
OPEN_REPLY = re.compile(rf"{EMPTY_LINE}Assistant:\s*\Z")
# A transcript whose empty line before the first turn was cut off or has spaces around it.
STRIPPED_TRANSCRIPT = re.compile(rf"{LEADING}(?=Human:.*?{EMPTY_LINE}Assistant:)", re.DOTALL)
# One whose turns are not set apart by empty lines.
DENSE_TRANSCRIPT = re.compile(rf"{LEADING}Human:.*?\n[ \t]*Assistant:", re.DOTALL)

# Tokens that begin a sequence. They are only written out where a chat template rendered the text.
BEGINNINGS = (
    r"<s>|<bos>|<BOS_TOKEN>|<\|begin_of_text\|>|<\|startoftext\|>|<｜begin▁of▁sentence｜>|\[gMASK\]"
)
ROLE_MARKERS = "|".join(
    (
        r"<\|(?:im_start|start_header_id|header_start|start_of_role|START_OF_TURN_TOKEN)\|>",
        r"<\|start\|>(?=\w)",
        r"<\|(?i:user|human|prompter|system|assistant|bot)\|>",
        r"<｜(?:User|Assistant|System)｜>",
        r"<start_of_turn>|<<SYS>>|\[(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]",
        r"<extra_id_[01]>(?=System|User|Assistant)|\[Round \d+\]\s+问[:：]",
    )
)
# <|endoftext|> begins the texts of some models, and ends those of others.
RENDERED = re.compile(
    rf"{LEADING}((?:{BEGINNINGS}|<sop>|<\|endoftext\|>(?=\s*<\|)|{ROLE_MARKERS}|\s)+)"
)
SPECIAL_TOKEN = r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>"
# An unknown template: the text begins with a special token, and another one follows.
FIRST_TOKEN = re.compile(rf"{LEADING}({SPECIAL_TOKEN})")
ANY_TOKEN = re.compile(SPECIAL_TOKEN)
ALPACA_TEMPLATE = re.compile(
    rf"{LEADING}(?:Below is an instruction that describes a task|### Instruction:)"
)
ALPACA_REPLY = "\n### Response:"
# The header of a reply that is still to be written, at the end of a text.
REPLY_HEADER = re.compile(
    r"(?:^|(?<=>))(<\|im_start\|>assistant|<\|assistant\|>|<\|(?:start_header_id|header_start)\|>assistant<\|\w+\|>"
    r"|<\|start_of_role\|>assistant<\|end_of_role\|>|<start_of_turn>model)\s*\Z|(<｜Assistant｜>)\s*\Z",
    re.MULTILINE,
)
LONGEST_HEADER = 80

USER_NAMES = ("human", "user", "用户", "人类")
ASSISTANT_NAMES = ("assistant", "ai", "bot", "chatbot", "chatgpt", "助手")
SPEAKER = re.compile(
    rf"(?:^[ \t{INVISIBLE}]*(?:#+[ \t]*|\*\*)?|###[ \t]*)"
    rf"((?P<user>{'|'.join(USER_NAMES)})|(?:{'|'.join(ASSISTANT_NAMES)}))[:：]",
    re.MULTILINE | re.IGNORECASE,
)

# Vicuna's transcript, which is one line, and HH-RLHF's without its line breaks.
INLINE = (
    (re.compile(r"\bUSER: "), re.compile(r"\bASSISTANT:")),
    (re.compile(rf"\A{LEADING}Human: "), re.compile(r"[.?!\s]Assistant:")),
)

# A turn or a list of turns, written out as JSON or as Python writes it into a CSV file.
TURNS_AS_TEXT = re.compile(
    rf"""{LEADING}(?:\[\s*\{{.*\}}\s*\]|\{{\s*["'](?:role|from|content|value)["']\s*:.*\}})\s*\Z""",
    re.DOTALL,
)
ROLE_AS_TEXT = re.compile(r"""["'](?:role|from)["']\s*:\s*["'](\w+)["']""")
CONTENT_AS_TEXT = re.compile(r"""["'](?:content|value)["']\s*:""")


def transcript_in(text: str) -> str | None:
    """Return an HH-RLHF transcript, with an empty line before its first turn; None for other texts.

    The published texts begin with that line; copies lack it or have other white space there.
    """
    bare = text.lstrip(INVISIBLE)
    if TRANSCRIPT_TURN.match(bare):
        return bare
    stripped = STRIPPED_TRANSCRIPT.match(text)
    if stripped is None:
        return None
    return f"\n\n{text[stripped.end() :]}"


def markup_in(text: str) -> str | None:
    """Say how ``text`` is a dialogue in a chat template's markup or in JSON; None if it is neither.

    A marker that stands alone is a text about it.
    """
    rendered = RENDERED.match(text)
    if rendered and rendered[1].strip() and text[rendered.end() :].strip():
        return _rendered_by(rendered[1])
    unknown = FIRST_TOKEN.match(text)
    if unknown and ANY_TOKEN.search(text, unknown.end()):
        return _rendered_by(unknown[1])
    if ALPACA_TEMPLATE.match(text) and ALPACA_REPLY in text:
        return _rendered_by(ALPACA_REPLY)
    return dialogue_as_json(text)


def dialogue_as_json(text: str) -> str | None:
    """Say that ``text`` is a dialogue or a turn as JSON or Python writes it; None if it is not."""
    if not TURNS_AS_TEXT.match(text) or not CONTENT_AS_TEXT.search(text):
        return None
    if not any(role.lower() in ROLE_NAMES for role in ROLE_AS_TEXT.findall(text)):
        return None
    return "is a dialogue written out as text; save the rows as JSON lines or parquet instead"


def dialogue_in(text: str, answered: bool = False) -> str | None:
    """Say how ``text`` is a dialogue and no turn of the user; None if it is an ordinary text.

    HH-RLHF's transcripts count, too. Where these are read, ask :func:`transcript_in` first.

    Args:
        answered: Whether the text holds the reply, too, so that the assistant speaks last.
    """
    reason = markup_in(text)
    if reason is not None:
        return reason
    header = REPLY_HEADER.search(text[-LONGEST_HEADER:])
    if header:
        return _rendered_by(header[1] or header[2])
    if DENSE_TRANSCRIPT.match(text):
        return "is a transcript without empty lines between its turns; give messages instead"
    speakers = _transcript_speakers(text, answered)
    if not speakers:
        return None
    return f"is a transcript of lines by {' and '.join(speakers)}; give messages instead"


def _rendered_by(markers: str) -> str:
    return f"is rendered by a chat template ({' '.join(markers.split())}); give messages instead"


def _transcript_speakers(text: str, answered: bool) -> tuple[str, ...]:
    """Return the first two speakers of a transcript; none for a text that only quotes one.

    A text is a transcript if it begins with a line of the user and has one of the assistant, or if
    it ends where the assistant is to speak. A text that begins with another line is a transcript if
    the speakers alternate, from the user to the user (or to the assistant if it is ``answered``).
    """
    for user, assistant in INLINE:
        inline = user.search(text)
        replies = []
        if inline:
            replies = list(assistant.finditer(text, inline.end()))
        if not inline or not replies:
            continue
        is_open = not text[replies[-1].end() :].strip()
        if answered or is_open:
            return inline[0].strip(), replies[-1][0].strip(".?! \n")
    lowered = text.lower().replace("：", ":")
    if not any(f"{name}:" in lowered for name in ASSISTANT_NAMES):
        return ()
    lines = list(SPEAKER.finditer(text))
    are_users = [line["user"] is not None for line in lines]
    if not any(are_users) or all(are_users):
        return ()
    is_open = not are_users[-1] and not text[lines[-1].end() :].strip("*# \t\r\n")
    before = text[: lines[0].start()].splitlines()
    preamble = sum(bool(line.strip(f"{INVISIBLE} \t")) for line in before)
    begins = are_users[0] and not preamble
    alternate = are_users == [number % 2 == 0 for number in range(len(lines))]
    if is_open or begins or (preamble == 1 and alternate and are_users[-1] != answered):
        return tuple(f"{line[1]}:" for line in lines[:2])
    return ()
