"""What a row or a turn says of itself: labels, flags of training, votes, stars, and parts that are no text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from rlhf_core.data.readers.format import Parsed, excerpt
from rlhf_core.data.readers.turns import Refusal, Turn

# TRL's name and LLaMA-Factory's of KTO's label.
COLUMNS = ("label", "kto_tag")
GOOD = frozenset({"true", "t", "yes", "y", "on", "good", "desirable", "chosen", "accepted", "preferred"})
BAD = frozenset({"false", "f", "no", "n", "off", "bad", "undesirable", "rejected"})
GOOD_NUMBERS = frozenset({1.0})
BAD_NUMBERS = frozenset({0.0, -1.0})


def _keys(names: str) -> frozenset[str]:
    return frozenset(key_of(name) for name in names.split())


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
REPLY_COLUMNS = (
    *("messages", "conversations", "chosen", "reply", "completion", "response", "output", "chosen_response"),
)
# What chat templates end a reply with. As text it would be learned as characters that come before the real end.
END_MARKERS = (
    *("</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eot|>"),
    *(
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|end_of_text|>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *(
        "<|EOT|>",
        "<｜end▁of▁sentence｜>",
        "<|user_end|>",
        "<|assistant_end|>",
        "<|end_of_sentence|>",
        "[EOS]",
        "<|eos|>",
        "<eod>",
    ),
    *("<|eod|>", "<|EOS|>", "[e~["),
)
AT_END = re.compile(rf"(?:({'|'.join(map(re.escape, END_MARKERS))})\s*)+\Z")
# What programs write for a missing value.
MISSING = frozenset({"nan", "none", "null", "n/a", "<na>", "nat", "undefined"})


def is_labelled_false(labels: Mapping[str, Any]) -> bool:
    """Return whether a label says that the reply is a bad one; a reply without a label is not.

    Raises:
        Refusal: A label is none of the known words and numbers, so the reply might be a bad one.
    """
    verdicts = [_is_bad(labels[name], name) for name in COLUMNS if labels.get(name) not in (None, "")]
    return True in verdicts


def _is_bad(value: Any, name: str) -> bool:
    word = value.strip().casefold() if isinstance(value, str) else value
    if isinstance(word, str) and word in GOOD | BAD:
        return word in BAD
    number = _number(word)
    if number not in GOOD_NUMBERS | BAD_NUMBERS:
        raise Refusal(
            f"{name} is {excerpt(value)}, which says neither that the reply is good nor that it is bad: write true or "
            "false, or leave the column out (columns)"
        )
    return number in BAD_NUMBERS


def _number(value: Any) -> float:
    """Return a number, also from its text; NaN of anything else."""
    try:
        return float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def flag_against(record: Any, single: bool) -> str:
    """Return the flag of a row, or of its reply's turn, that says that it is not to be learned; empty if none does.

    Args:
        single: The row has one reply, so that a vote or a rating is of that.

    Raises:
        Refusal: A flag that a trainer reads has a value that is neither.
    """
    for name, value, of_turn in _flags(record):
        if _is_to_learn(name, value, single, of_turn) is False:
            return name
    return ""


def read_flags(record: Any, single: bool) -> frozenset[str]:
    """Return the flags of a row, ``column[].name`` of a turn, whose values say all that they may: yes or no."""
    return frozenset(
        name
        for name, value, of_turn in _flags(record)
        if _is_to_learn(name, value, single, of_turn) is not None
        and (_number(value) in (0, 1) or not math.isfinite(_number(value)) or key_of(name) in RATINGS)
    )


def _flags(record: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield the flags of a row and of the turns that are its replies, with what messages call them."""
    if not isinstance(record, dict):
        return
    for name, value in record.items():
        if key_of(str(name)) in FLAGS and _holds(value):
            yield str(name), value, False
    for column in REPLY_COLUMNS:
        turns = record.get(column)
        turn = turns[-1] if isinstance(turns, list) and turns else turns
        if isinstance(turn, dict):
            for name, value in turn.items():
                if key_of(str(name)) in FLAGS and _holds(value):
                    yield f"{column}[].{name}", value, True


def _is_to_learn(name: str, value: Any, single: bool, of_turn: bool) -> bool | None:
    """Return whether a flag says that the reply is to be learned; None where it does not say."""
    key = key_of(name.rpartition("[].")[2])
    word = value.strip().casefold() if isinstance(value, str) else value
    number = _number(word)
    if key in LEARN | SKIP:
        says = word in GOOD if isinstance(word, str) and word in GOOD | BAD else number > 0
        if not (isinstance(word, str) and word in GOOD | BAD) and not math.isfinite(number):
            if key in COMMON_WORDS and not of_turn:
                return None
            raise Refusal(
                f"{name} is {excerpt(value)}, which does not say whether the reply is to be learned: write true or "
                "false, or leave the column out (columns)"
            )
        return says if key in LEARN else not says
    if not single:
        return None
    if key in VERDICTS:
        if isinstance(word, str) and word in GOOD | BAD | UP | DOWN:
            return word in GOOD | UP
        return None if math.isnan(number) else number > 0
    if key in RATINGS:
        return _is_rated_well(word)
    return None


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
    number = _number(value)
    if isinstance(value, bool):
        return value
    if math.isnan(number) or 0 < number < 1:
        return None
    return number > WORST_STARS


def require_text_only(record: Any) -> None:
    """Raise :class:`Refusal` for a row with media or tools in a column, which training would not see."""
    if not isinstance(record, dict):
        return
    lost = [str(name) for name, value in record.items() if key_of(str(name)) in LOST_COLUMNS and _holds(value)]
    if lost:
        raise Refusal(
            f"the row has {', '.join(lost)} beside its text, which training would not see; to train on the text "
            "alone, name the columns to read (--column, or columns beside the path)"
        )


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


def without_end_marker(text: str) -> tuple[str, str]:
    """Return a text without the end markers at its end, and the first of them; empty where it has none."""
    markers = AT_END.search(text) if text.rstrip()[-1:] in {">", "]", "["} else None
    if markers is None or ("</s>" in markers[0] and "<s>" in text):  # a text struck through
        return text, ""
    return text[: markers.start()], next(marker for marker in END_MARKERS if markers[0].startswith(marker))


def cleaned(parsed: Parsed, noticed: Counter[str]) -> Parsed:
    """Return texts without end markers; what was taken off, and texts that stand for a missing value, are counted."""
    texts: dict[str, Any] = {}
    for column in ("chosen", "rejected", "reply", "text"):
        given = getattr(parsed, column)
        if given is None:
            continue
        texts[column], marker = without_end_marker(given)
        if marker:
            noticed[f"the end marker {marker} was taken off the end of {column}"] += 1
        if given.strip().casefold() in MISSING:
            noticed[f"{column} is the text {given.strip()!r}, as which a missing value may have been written"] += 1
    turns: list[Turn] | None = None
    if parsed.prompt is not None:
        turns = []
        for turn in parsed.prompt:
            marker = ""
            if turn["role"] == "assistant":
                text, marker = without_end_marker(turn["content"])
            turns.append({"role": turn["role"], "content": text} if marker else turn)
            if marker:
                noticed[f"the end marker {marker} was taken off a turn of the prompt"] += 1
        if turns and turns[-1]["content"].strip().casefold() in MISSING:
            word = turns[-1]["content"].strip()
            noticed[f"the prompt is the text {word!r}, as which a missing value may have been written"] += 1
    return Parsed(turns, margin=parsed.margin, category=parsed.category, **texts)
