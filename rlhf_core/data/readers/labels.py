"""What a row or a turn says of itself: labels, flags of training, votes, stars, and parts that are no text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlhf_core.data.readers.formats import Parsed, excerpt
from rlhf_core.data.readers.turns import Refusal

# TRL's name and LLaMA-Factory's of KTO's label.
COLUMNS = ("label", "kto_tag")
GOOD = frozenset({"true", "t", "yes", "y", "on", "good", "desirable", "chosen", "accepted", "preferred"})
BAD = frozenset({"false", "f", "no", "n", "off", "bad", "undesirable", "rejected"})


def _words(text: str) -> list[str]:
    return text.split()


def _keys(names: str) -> frozenset[str]:
    return frozenset(map(key_of, names.split()))


@lru_cache(4096)
def key_of(name: str) -> str:
    """Return a name as the sets here spell it: ``lossWeight`` and ``loss_weight`` are one."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


# Flags that a trainer reads: 0 or false is not to be learned.
LEARN = _keys(
    "train trainable is_trainable training learn train_on train_on_turn for_training use_for_training train_weight "
    "weight loss_weight sample_weight example_weight loss loss_mask compute_loss calculate_loss apply_loss use_loss"
)
# Those that say the opposite: true is not to be learned.
SKIP = _keys(
    "ignore ignored skip skipped exclude excluded masked no_train do_not_train dont_train ignore_loss mask_loss "
    "no_loss deleted is_deleted thumbs_down disliked downvoted is_bad"
)
# Verdicts of people on a single reply: up or down, good or bad.
VERDICTS = _keys(
    "thumb thumbs thumbs_up vote feedback user_feedback reaction liked upvoted is_good is_correct correct is_accepted "
    "accepted approved is_approved desirable verdict"
)
# Stars, of five as a rule: the two lowest are bad.
RATINGS = _keys("rating stars star star_rating user_rating")
# What may say how good a reply is, on a scale that nobody knows.
UNKNOWN_SCALES = _keys(
    "score quality quality_score reward helpfulness helpful correctness upvotes downvotes likes dislikes flagged "
    "toxicity toxic mask label kto_tag"
)
FLAGS = LEARN | SKIP | VERDICTS | RATINGS | UNKNOWN_SCALES
# Names that have other meanings too: a value that is no flag is left unread there.
COMMON_WORDS = _keys("weight loss train training learn ignore skip deleted")
UP = frozenset({"up", "thumbs_up", "thumbsup", "👍", "+1", "like", "liked", "upvote", "positive", "correct"})
DOWN = frozenset(
    {"down", "thumbs_down", "thumbsdown", "👎", "dislike", "disliked", "downvote", "negative", "incorrect", "wrong"}
)
WORST_STARS = 2
# Parts of a row that are no text, and functions that its replies may call: the same beside a turn is refused.
LOST_COLUMNS = _keys(
    "image images image_url audio audios input_audio video videos tools functions tool_calls function_call"
)
HOLDS_NOTHING = frozenset({"", "[]", "{}", "null", "none", "nan"})
# Of the replies that are to be learned; a rejected one need not be.
REPLY_COLUMNS = ("messages", "conversations", "chosen", "reply", "completion", "response", "output", "chosen_response")
# What chat templates end a reply with. As text it would be learned as characters that come before the real end.
END_MARKERS = _words(
    "</s> <eos> <end_of_turn> <turn|> <|im_end|> <|endoftext|> <|eot_id|> <|eot|> <|eom_id|> <|end|> <|return|> "
    "<|end_of_text|> <|endofturn|> <|end_of_turn|> <|END_OF_TURN_TOKEN|> <|EOT|> <｜end▁of▁sentence｜> <|user_end|> "
    "<|assistant_end|> <|end_of_sentence|> [EOS] <|eos|> <eod> <|eod|> <|EOS|> [e~["
)
AT_END = re.compile(rf"(?:({'|'.join(map(re.escape, END_MARKERS))})\s*)+\Z")
# What programs write for a missing value.
MISSING = frozenset({"nan", "none", "null", "n/a", "<na>", "nat", "undefined"})
# What stands in a text for a picture, a film or a sound.
PLACEHOLDER = re.compile(r"<\|?(image|video|audio)(?:_?\d+|_pad)?\|?>")


def is_labelled_false(labels: Mapping[str, Any]) -> bool:
    """Return whether a label says that the reply is a bad one; a reply without a label is not.

    Raises:
        Refusal: A label is none of the known words and numbers, so the reply might be a bad one.
    """
    is_bad = False
    for name, value in ((name, labels.get(name)) for name in COLUMNS if labels.get(name) not in (None, "")):
        word, number = _word(value), _number(value)
        if word not in GOOD | BAD and number not in (1, 0, -1):
            raise Refusal(
                f"{name} is {excerpt(value)}, which says neither that the reply is good nor that it is bad: write true "
                "or false, or leave the column out (columns)"
            )
        is_bad |= word in BAD or number in (0, -1)
    return is_bad


def _word(value: Any) -> str:
    return value.strip().casefold() if isinstance(value, str) else ""


def _number(value: Any) -> float:
    """Return a number, also from its text; NaN of anything else."""
    try:
        return float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def flag_against(record: Any, single: bool) -> str:
    """Return the flag of a row, or of its reply's turn, that says that it is not to be learned; empty if none does.

    ``single`` says that the row has one reply, so that a vote or a rating is of that. A flag that a trainer reads and
    that says neither is a :class:`Refusal`.
    """
    return next((name for name, value in _flags(record) if _is_to_learn(name, value, single) is False), "")


def read_flags(record: Any, single: bool) -> frozenset[str]:
    """Return the flags of a row, ``column[].name`` of a turn, whose values say all that they may: yes or no."""
    return frozenset(
        name
        for name, value in _flags(record)
        if _is_to_learn(name, value, single) is not None
        and (_number(value) in (0, 1) or not math.isfinite(_number(value)) or key_of(name) in RATINGS)
    )


def _flags(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a row and of the turns that are its replies, with what messages call them."""
    if not isinstance(record, dict):
        return
    columns = {str(name): value for name, value in record.items()}
    for column in REPLY_COLUMNS:
        turns = record.get(column)
        turn = turns[-1] if isinstance(turns, list) and turns else turns
        if isinstance(turn, dict):
            columns |= {f"{column}[].{name}": value for name, value in turn.items()}
    yield from ((n, value) for n, value in columns.items() if key_of(n.rpartition("[].")[2]) in FLAGS and _holds(value))


def _is_to_learn(name: str, value: Any, single: bool) -> bool | None:
    """Return whether a flag says that the reply is to be learned; None where it does not say."""
    of_turn, _, own = name.rpartition("[].")
    key, word, number = key_of(own), _word(value), _number(value)
    if key in LEARN | SKIP:
        if word not in GOOD | BAD and not math.isfinite(number):
            if key in COMMON_WORDS and not of_turn:
                return None
            raise Refusal(
                f"{name} is {excerpt(value)}, which does not say whether the reply is to be learned: write true or "
                "false, or leave the column out (columns)"
            )
        says = word in GOOD if word in GOOD | BAD else number > 0
        return says == (key in LEARN)
    if single and key in VERDICTS:
        if word in GOOD | BAD | UP | DOWN:
            return word in GOOD | UP
        return None if math.isnan(number) else number > 0
    return _is_rated_well(word or value) if single and key in RATINGS else None


def _is_rated_well(value: Any) -> bool | None:
    """Return whether stars speak for a reply; None for a share of an unknown scale."""
    if isinstance(value, str):
        of = re.fullmatch(r"\s*([\d.]+)\s*(?:/|of|out of)\s*([\d.]+).*", value)
        if of and _number(of[2]) > 0:
            return 2 * _number(of[1]) >= _number(of[2])
        if value in UP | DOWN | GOOD | BAD:
            return value in UP | GOOD
        stars = value.count("★") + value.count("⭐")
        value = stars if stars else re.sub(r"\s*stars?\s*\Z", "", value)
    if isinstance(value, bool):
        return value
    number = _number(value)
    return None if math.isnan(number) or 0 < number < 1 else number > WORST_STARS


def require_text_only(record: Any) -> None:
    """Raise :class:`Refusal` for a row with media or tools in a column, which training would not see."""
    if isinstance(record, dict):
        lost = [str(name) for name, value in record.items() if key_of(str(name)) in LOST_COLUMNS and _holds(value)]
        if lost:
            raise Refusal(f"the row has {', '.join(lost)} beside its text, which training would not see; {TEXT_ALONE}")


TEXT_ALONE = "to train on the text alone, name the columns to read (--column, or columns beside the path)"


def _holds(value: Any) -> bool:
    """Return whether a value holds something at any depth."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, str):
            if item.strip().casefold() not in HOLDS_NOTHING:
                return True
        elif item is not None and item == item:  # NaN is what pandas writes for a missing value
            return True
    return False


def _placeholder(text: str) -> tuple[str, bool]:
    """Return the first placeholder of a text and whether it begins or ends a line, as exports write it.

    What a tag closes again is markup that the text is about.
    """
    within_line = "", False
    for match in PLACEHOLDER.finditer(text):
        if f"</{match[1]}" not in text:
            before, after = text[: match.start()].rpartition("\n")[2], text[match.end() :].partition("\n")[0]
            if not PLACEHOLDER.sub("", before).strip() or not PLACEHOLDER.sub("", after).strip():
                return match[0], True
            within_line = within_line if within_line[0] else (match[0], False)
    return within_line


def without_end_marker(text: str) -> tuple[str, str]:
    """Return a text without the end markers at its end, and the first of them; empty where it has none."""
    markers = AT_END.search(text) if text.rstrip()[-1:] in {">", "]", "["} else None
    if markers is None or ("</s>" in markers[0] and "<s>" in text):  # a text struck through
        return text, ""
    return text[: markers.start()], next(marker for marker in END_MARKERS if markers[0].startswith(marker))


def cleaned(parsed: Parsed, noticed: Counter[str], named: bool) -> Parsed:
    """Return texts without end markers; what was taken off, and texts that stand for a missing value, are ``noticed``.

    A placeholder of media is a :class:`Refusal`, unless the columns to read are ``named``.
    """

    def clean(given: str, end: str) -> str:
        text, marker = without_end_marker(given)
        if marker:
            noticed[f"the end marker {marker} was taken off {end}"] += 1
        return text

    texts: dict[str, Any] = {
        name: given for name in ("chosen", "rejected", "reply", "text") if (given := getattr(parsed, name)) is not None
    }
    turns = parsed.prompt or []
    named_texts = texts | ({"the prompt": turns[-1]["content"]} if turns else {})
    for name, given in named_texts.items():
        if given.strip().casefold() in MISSING:
            noticed[f"{name} is the text {given.strip()!r}, as which a missing value may have been written"] += 1
    for text in (*(turn["content"] for turn in turns), *texts.values()):
        token, is_apart = _placeholder(text)
        if is_apart and not named:
            raise Refusal(f"the text has {token} in place of something that training would not see; {TEXT_ALONE}")
        if token:
            noticed[f"a text has {token}, which is read as text: training sees nothing else"] += 1
    prompt = parsed.prompt and [
        turn | {"content": clean(turn["content"], "a turn of the prompt")} if turn["role"] == "assistant" else turn
        for turn in turns
    ]
    texts = {name: clean(given, f"the end of {name}") for name, given in texts.items()}
    return replace(parsed, prompt=prompt, **texts)
