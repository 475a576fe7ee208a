"""What exports leave in texts: end markers are removed, media is refused, the rest is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlhf_core.data.readers.formats import Parsed
from rlhf_core.data.readers.labels import TEXT_ALONE
from rlhf_core.data.readers.turns import (
    ROLE_MARKERS,
    SPECIAL_TOKEN,
    Refusal,
    dialogue_in,
    markup_in,
    names_in,
    transcript_in,
)

# What chat templates and servers end a reply with. In a text, these characters would be learned as
# a part of the reply.
END_MARKERS = names_in(
    "</s> <eos> <eot> <eoa> <eom> <eod> <end> <pad> <end_of_turn> <turn|> <|im_end|> <|endoftext|> "
    "<|eot_id|> <|eot|> <|eom_id|> <|end|> <|return|> <|end_of_text|> <|eos|> <|endofturn|> "
    "<|end_of_turn|> <|END_OF_TURN_TOKEN|> <｜end▁of▁sentence｜> <|user_end|> <|eod|> "
    "<|assistant_end|> <|end_of_sentence|> <|endofmessage|> <|message_end|> <|pad|> "
    "[EOS] [EOT] [PAD] [DONE] [e~["
)
AT_END = re.compile(rf"({'|'.join(map(re.escape, END_MARKERS))})\s*\Z", re.IGNORECASE)
# What programs write for a missing value, a deleted text, or a formula that fails.
MISSING = frozenset(
    {
        *names_in("nan none null (null) n/a <na> nat nil undefined [] {} (blank) <unknown>"),
        *names_in("#n/a #ref! #name? #value! #div/0! [deleted] [removed] [redacted]"),
        "[object object]",
    }
)
# What stands in a text for a picture, a film or a sound.
PLACEHOLDER = re.compile(
    r"<\|?(image|video|audio|speech|start_of_image|imagehere)(?:_?\d+|_pad)?\|?>", re.IGNORECASE
)
LONGEST_CELL = 32_767  # characters of a cell of Excel
DIALOGUE_BEGIN = 2000
EDGE = 60
MARKER_ENDS = frozenset({">", "]", "["})
REPEATED = 20  # characters of a prompt that no reply begins with by chance
EARLIER_REPLIES = (
    "a dialogue has several replies: the last one is learned, the others are part of its prompt"
)
AS_TEXT = ", which is read as text"


@dataclass(frozen=True)
class Residue:
    """Something that an export may have left in texts.

    Attributes:
        said: What is said about a text that has it.
        of: ``reply``, ``user`` (one of their turns), or empty for any text.
        begin, within, end: The pattern at the beginning of the text, anywhere in it, or at its end.
        needed: A text with none of these is not searched, which saves time.
    """

    said: str
    of: str
    begin: str = ""
    within: str = ""
    end: str = ""
    needed: tuple[str, ...] = ()

    def is_in(self, text: str) -> bool:
        """Return whether a text has it."""
        part = text
        if self.begin:
            part = text[:EDGE]
        elif self.end:
            part = text[-EDGE:]
        if not any(item in part for item in self.needed):
            return False
        return self._pattern.search(part) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = self.within
        if self.begin:
            pattern = rf"\A\s*(?:{self.begin})"
        elif self.end:
            pattern = rf"(?:{self.end})\s*\Z"
        return re.compile(pattern, re.IGNORECASE)


ASSISTANTS = r"assistant|ai|bot|chatbot|chatgpt|gpt(?:-\d\w*)?|claude|助手"
USERS = r"human|user|prompter|用户|人类"
COLONS = (":", "：")
MARKS = (">", "]", "###", "END", "<|", *COLONS)
FAILED = r"Error(?: code)?:? ?\d{3}\b|\[ERROR\]|Traceback \(|(?:openai|anthropic|httpx|requests)\.[\w.]*(?:Error|Timeout)"
STOPS = r"\[(?:/INST|END|SEP|STOP)\]|<(?:s|unk|sep|stop|eoh|extra_id_\d+)>|<\|\w+|#{3,}(?:\s*End)?|\bEND|\bAssistant:"
WRITTEN_LIST = r"\A\[\s*([\"']).*\1\s*\]\Z"
RESIDUES = (
    Residue(
        "begins with the name of who speaks",
        "reply",
        begin=rf"(?:[#*]+ *)?(?:(?:{ASSISTANTS})[:：]|(?:assistant|model)\n)",
        needed=(*COLONS, "t\n", "l\n"),
    ),
    Residue(
        "begins with a template's marker",
        "reply",
        begin=rf"###? (?:Response|Answer)\b|\[/INST\]|<pad>|{SPECIAL_TOKEN}",
        needed=("<", "[", "##"),
    ),
    Residue(
        "is what a program says that fails",
        "reply",
        begin=FAILED,
        needed=("rror", "ERROR", "Trace", "Timeout"),
    ),
    Residue(
        "has a turn of the user",
        "reply",
        within=rf"\n[ \t]*(?:[#*]+ *)?(?:{USERS}|(?<=# )instruction)[:：]",
        needed=COLONS,
    ),
    Residue(
        "has a template's marker of a turn",
        "reply",
        within=ROLE_MARKERS,
        needed=("<|", "<｜", "<start_of_turn>", "<<SYS>>", "[INST]"),
    ),
    Residue("ends with a marker", "reply", end=f"{SPECIAL_TOKEN}|{STOPS}", needed=MARKS),
    Residue(
        "begins with the name of who speaks",
        "user",
        begin=rf"(?:### *)?(?:{USERS})(?:[:：]|\n)",
        needed=(*COLONS, "r\n"),
    ),
    Residue(
        "ends with the name of who answers",
        "user",
        end=rf"(?:\n|\s\s)(?:### *)?(?:{ASSISTANTS}|Response)[:：]",
        needed=COLONS,
    ),
    Residue("ends with a marker", "user", end=rf"{AT_END.pattern}|#{{3,}}|->", needed=MARKS),
    Residue("is a list written out as text", "user", within=WRITTEN_LIST, needed=("[",)),
    Residue("is a list written out as text", "reply", within=WRITTEN_LIST, needed=("[",)),
    Residue(
        "points to a picture",
        "user",
        within=r"!\[[^\]\n]{0,99}\]\([^)\s]|<img(?:\s|>\w)",
        needed=("![", "<img"),
    ),
    Residue(
        "has media as base64",
        "",
        within=r"data:(?:image|audio|video)/[\w.+-]+;base64,",
        needed=(";base64,",),
    ),
    Residue(
        "has HTML's escapes, as &quot;",
        "",
        within=r"&(?:#\d{2,5}|#x[0-9a-f]{2,4}|quot|amp|lt|gt|nbsp|apos);",
        needed=("&",),
    ),
    Residue(
        "has a tokenizer's marks in place of spaces",
        "",
        within=r"(?:Ġ[^\W\d]+){3}|(?:▁[^\W\d]+){3}",
        needed=("Ġ", "▁"),
    ),
    Residue("has \\n in place of line breaks", "", within=r"\A[^\n]*\Z", needed=("\\n",)),
    Residue(
        "has escapes of Excel's files, as _x000D_",
        "",
        within=r"_x00[0-9a-f]{2}_",
        needed=("_x00", "_X00"),
    ),
    # Spreadsheets write it so that a cell is text and no formula. English words may begin so, too.
    Residue(
        "begins with the ' of a cell that is no formula",
        "",
        begin=r"'(?!(?:t(?:is|was|il)|em|cause|n|\d\ds)\b)[^\s'’][^'’]*\Z",
        needed=("'",),
    ),
    Residue(
        "is a formula of a spreadsheet that gives a text", "", begin=r"=\s*\"", needed=('="', '= "')
    ),
    Residue(
        "is code in place of a text",
        "",
        begin=r"\{+\s*\w+\s*\}+\s*\Z|b[\"']",
        needed=("}", "b'", 'b"'),
    ),
)


def _residues(text: str, of: str) -> Iterator[str]:
    """Yield what is to be said about a ``reply``, a turn of the ``user``, or a ``text`` alone."""
    begin = text[:DIALOGUE_BEGIN]
    if of == "text" and (transcript_in(begin) or dialogue_in(begin, answered=True)):
        yield "is a dialogue, and read as pretraining text: give messages to learn its replies"
    if of == "user" and markup_in(text):
        yield f"has the markup of a dialogue{AS_TEXT}"
    if len(text) == LONGEST_CELL:
        yield "is as long as a cell of Excel can be, which cuts off what is longer"
    for residue in RESIDUES:
        if residue.of in (of, "") and residue.is_in(text):
            yield residue.said + AS_TEXT


def _placeholder(text: str) -> tuple[str, bool]:
    """Return the first placeholder of a text, and whether it begins or ends a line.

    Exports write it at the beginning or end of a line. A tag that is closed again is markup that
    the text is about.
    """
    if not PLACEHOLDER.search(text):
        return "", False
    closed = {match[1] for match in re.finditer(r"</(\w+)", text)}
    within_line = ""
    for line in map(str.strip, text.split("\n")):
        for match in PLACEHOLDER.finditer(line):
            if match[1] not in closed:
                if match.start() == 0 or match.end() == len(line):
                    return match[0], True
                within_line = within_line or match[0]
    return within_line, False


def without_end_marker(text: str) -> tuple[str, str]:
    """Return a text without the end markers at its end, and the first of them ("" for none)."""
    end = len(text.rstrip())
    found = ""
    if text[end - 1 : end] not in MARKER_ENDS:
        return text, ""
    while markers := AT_END.search(text, max(end - EDGE, 0), end):
        end = markers.start()
        found = markers[1].casefold()
    is_struck_through = "</s>" in text[end:].casefold() and "<s>" in text.casefold()
    if not found or is_struck_through:
        return text, ""
    return text[:end], next(marker for marker in END_MARKERS if found == marker.casefold())


def cleaned(parsed: Parsed, noticed: Counter[str], named: bool) -> Parsed:
    """Return texts without end markers, and count in ``noticed`` what looks like an accident.

    Args:
        named: Whether the columns to read are named. Otherwise a placeholder of media is refused.

    Raises:
        Refusal: A text has a placeholder of media.
    """

    def clean(given: str, end: str) -> str:
        text, marker = without_end_marker(given)
        if marker:
            noticed[f"the end marker {marker} was taken off {end}"] += 1
        return text

    texts: dict[str, Any] = {}
    for name in ("chosen", "rejected", "reply", "text"):
        if getattr(parsed, name) is not None:
            texts[name] = getattr(parsed, name)
    turns = parsed.prompt or []
    asked = turns[-1]["content"] if turns else ""
    for name, given in (*texts.items(), ("the prompt", asked)):
        text = given.strip()
        if text.casefold() in MISSING:
            noticed[
                f"{name} is the text {text!r}, as which a missing value may have been written"
            ] += 1
    contents = [turn["content"] for turn in turns]
    for text in (*contents, *texts.values()):
        token, is_apart = _placeholder(text)
        if is_apart and not named:
            raise Refusal(
                f"the text has {token} in place of something that training would not see; {TEXT_ALONE}"
            )
        if token:
            noticed[f"a text has {token}, which is read as text: training sees nothing else"] += 1
    prompt = []
    found: set[str] = set()
    for turn in turns:
        if turn["role"] == "assistant":
            turn = turn | {"content": clean(turn["content"], "a turn of the prompt")}
        elif turn["role"] == "user":
            found.update(
                f"a user's turn {residue}" for residue in _residues(turn["content"], "user")
            )
        prompt.append(turn)
    texts = {name: clean(given, f"the end of {name}") for name, given in texts.items()}
    if "reply" in texts and any(turn["role"] == "assistant" for turn in turns):
        noticed[EARLIER_REPLIES] += 1
    asked = asked.strip()
    for name, text in texts.items():
        of = "text" if name == "text" else "reply"
        found.update(f"{name} {residue}" for residue in _residues(text, of))
        if asked and text.strip() == asked:
            found.add(f"{name} is the prompt again{AS_TEXT}")
        elif name == "reply" and len(asked) >= REPEATED and text.strip().startswith(asked):
            found.add(f"reply begins with the prompt{AS_TEXT}")
    noticed.update(sorted(found))
    return replace(parsed, prompt=parsed.prompt and prompt, **texts)
