"""What a row says about itself: labels, flags for training, votes, stars, scores, unread parts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlhf_core.data.readers.formats import REPLY_LABELS, excerpt
from rlhf_core.data.readers.turns import Refusal, names_in

GOOD = frozenset(names_in("true t yes y on good desirable chosen accepted preferred"))
BAD = frozenset(names_in("false f no n off bad undesirable rejected"))


def _keys(names: str) -> frozenset[str]:
    return frozenset(map(key_of, names_in(names)))


@lru_cache(4096)
def key_of(name: str) -> str:
    """Return a name as the sets here spell it: ``lossWeight`` and ``loss_weight`` are one."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


# Flags that a trainer reads: a row with 0 or false is not to be learned.
LEARN = _keys(
    "train trainable is_trainable training learn learnable train_on train_on_turn for_training use_for_training "
    "train_weight weight loss_weight sample_weight example_weight loss loss_mask loss_scale loss_coef loss_coefficient "
    "compute_loss calculate_loss calc_loss apply_loss use_loss is_loss keep_loss include_in_loss output_with_loss "
    "supervise supervised is_target keep kept include included usable valid is_valid"
)
# Flags that say the opposite: a row with true is not to be learned.
SKIP = _keys(
    "ignore ignored skip skipped exclude excluded masked is_masked loss_masked no_train do_not_train dont_train "
    "skip_training ignore_loss ignore_in_loss skip_loss mask_loss no_loss deleted is_deleted discard discarded "
    "is_discarded removed is_removed is_rejected invalid is_invalid unusable was_cancelled cancelled "
    "banned is_banned blocked is_blocked corrupted is_corrupted broken is_broken is_error filtered_out thumbs_down "
    "disliked downvoted bad is_bad tie is_tie"
)
# What became of a row where it was annotated.
STATUSES = _keys("status annotation_status review review_status review_result moderation")
OUT = _keys(
    "discarded discard deleted removed rejected invalid failed failure cancelled canceled skipped tie"
)
IN = _keys(
    "submitted accepted approved completed complete validated valid published active done ok passed"
)
# Verdicts of people on a single reply: up or down, good or bad.
VERDICTS = _keys(
    "thumb thumbs thumbs_up vote feedback user_feedback reaction liked upvoted is_good is_correct correct is_accepted "
    "accepted approved is_approved desirable verdict preferred is_preferred is_chosen good passed pass "
    "success is_safe safe harmless"
)
# Stars, usually out of five: one or two of them are bad.
RATINGS = _keys("rating stars star star_rating user_rating")
# What may say how good a reply is, on an unknown scale.
UNKNOWN_SCALES = _keys(
    "score quality quality_score reward helpfulness helpful correctness upvotes downvotes likes dislikes flagged "
    "toxicity toxic mask label kto_tag is_test is_train"
)
FLAGS = LEARN | SKIP | STATUSES | VERDICTS | RATINGS | UNKNOWN_SCALES
# Words of other names that may say the same, as in input_quality, winner_tie, finish_reason and
# in_gsm8k_train.
FLAG_WORDS = _keys(
    "train training loss losses weight weights mask masks masked ignore skip exclude discarded deleted "
    "status review quality rating ratings score scores grade grades rank ranks reward rewards verdict "
    "judgement correct incorrect wrong verified accuracy acc success outcome confidence agreement agree "
    "preference preferred winner tie swapped flipped vote votes upvote label labels split holdout "
    "moderation guard safety safe unsafe harmful toxic toxicity nsfw spam refusal hallucination duplicate "
    "truncated finish error errors filter filtered"
)
# Names that have other meanings, too: a value that is no flag is left unread there.
COMMON_WORDS = _keys(
    "weight loss loss_scale train training learn supervised keep kept include included usable valid ignore skip "
    "exclude deleted removed invalid discard cancelled banned blocked broken bad tie"
)
UP = frozenset(names_in("up thumbs_up thumbsup 👍 +1 like liked upvote positive correct"))
DOWN = frozenset(
    names_in("down thumbs_down thumbsdown 👎 dislike disliked downvote negative incorrect wrong")
)
WORST_STARS = 2
LONGEST_NAME = 40
# Media, and functions that replies may call. They are refused, in a row as in a turn.
LOST_COLUMNS = _keys(
    "image images image_url audio audios input_audio video videos tools functions tool_calls function_call"
)
# Further columns that may belong to the prompt.
PROMPT_PARTS = _keys(
    "context input history system_prompt system_message sys documents document passage passages background question "
    "instruction query"
)
# The scores of two replies stand in columns such as score_chosen, chosen-rating or rewardChosen.
# Their difference is the margin. The lowest rank is the best.
SCORES = ("score", "rating", "avgrating", "reward", "rank")
HOLDS_NOTHING = frozenset({"", "[]", "{}", "null", "none", "nan"})
# The columns of replies that are learned; a rejected one is not.
REPLY_COLUMNS = names_in(
    "messages conversations chosen reply completion response output chosen_response"
)


def is_labelled_false(labels: Mapping[str, Any]) -> bool:
    """Return whether a label says that the reply is a bad one; a reply without a label is not.

    Raises:
        Refusal: A label is not a known word or number, so the reply might be a bad one.
    """
    is_bad = False
    for name in REPLY_LABELS:
        value = labels.get(name)
        if value in (None, ""):
            continue
        word = _word(value)
        number = _number(value)
        if word not in GOOD | BAD and number not in (1, 0, -1):
            raise Refusal(
                f"{name} is {excerpt(value)}, which says neither that the reply is good nor that it is bad: write true "
                "or false, or leave the column out (columns)"
            )
        is_bad |= word in BAD or number in (0, -1)
    return is_bad


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value.strip().casefold()
    return ""


def _number(value: Any) -> float:
    """Return a number, also from its text; NaN of anything else."""
    try:
        if isinstance(value, str | int | float | Decimal):
            return float(value)
        return math.nan
    except (ValueError, OverflowError):
        return math.nan


@lru_cache(16)
def score_columns(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the columns with the scores of the better and the worse reply.

    They are in the order of ``SCORES``.
    """
    by_key = {key_of(name): name for name in names}
    columns = []
    for score in SCORES:
        for form in ("{score}{reply}", "{reply}{score}"):
            chosen = form.format(score=score, reply="chosen")
            rejected = form.format(score=score, reply="rejected")
            if chosen in by_key and rejected in by_key:
                columns.append((by_key[chosen], by_key[rejected]))
    return columns


@lru_cache(4096)
def may_be_flag(name: str) -> bool:
    """Return whether a column, or the key of a turn, has a name such as flags and ratings have."""
    return key_of(name) in FLAGS or not FLAG_WORDS.isdisjoint(words_of(name))


def words_of(name: str) -> set[str]:
    """Return the words of a name: ``loss`` and ``weight`` of ``lossWeight`` or ``loss_weight``."""
    return {word.casefold() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def flag_against(record: Any, single: bool) -> str:
    """Return the flag of a row or its reply's turn that forbids learning from it; "" if none does.

    Args:
        single: Whether the row has one reply, so that a vote or a rating is about that reply.

    Raises:
        Refusal: A flag that trainers read says neither yes nor no.
    """
    for name, value in _flags(record):
        if _is_to_learn(name, value, single) is False:
            return name
    return ""


def read_flags(record: Any, single: bool) -> set[str]:
    """Return the flags of a row, or ``column[].name`` of a turn, that only say yes or no."""
    read = set()
    for name, value in _flags(record):
        number = _number(value)
        is_yes_or_no = number in (0, 1) or not math.isfinite(number) or key_of(name) in RATINGS
        if is_yes_or_no and _is_to_learn(name, value, single) is not None:
            read.add(name)
    return read


def _flags(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the flags of a row and of the turns that are its replies."""
    if not isinstance(record, dict):
        return
    columns = {str(name): value for name, value in record.items()}
    for column in REPLY_COLUMNS:
        turns = record.get(column)
        turn = turns
        if isinstance(turns, list) and turns:
            turn = turns[-1]
        if isinstance(turn, dict):
            columns |= {f"{column}[].{name}": value for name, value in turn.items()}
    for name, value in columns.items():
        own = name.rpartition("[].")[2]
        if key_of(own) in FLAGS and _holds(value):
            yield name, value


def _is_to_learn(name: str, value: Any, single: bool) -> bool | None:
    """Return whether a flag says that the reply is to be learned; None if it does not say."""
    of_turn, _, own = name.rpartition("[].")
    key = key_of(own)
    word = _word(value)
    number = _number(value)
    if key in LEARN | SKIP:
        if word not in GOOD | BAD and not math.isfinite(number):
            if key in COMMON_WORDS and not of_turn:
                return None
            raise Refusal(
                f"{name} is {excerpt(value)}, which does not say whether the reply is to be learned: write true or "
                "false, or leave the column out (columns)"
            )
        says = number > 0
        if word in GOOD | BAD:
            says = word in GOOD
        return says == (key in LEARN)
    if key in STATUSES and (word in OUT | IN or isinstance(value, bool)):
        return word in IN or value is True
    if single and key in VERDICTS:
        if word in GOOD | BAD | UP | DOWN:
            return word in GOOD | UP
        return None if math.isnan(number) else number > 0
    if single and key in RATINGS:
        return _is_rated_well(word or value)
    return None


def _is_rated_well(value: Any) -> bool | None:
    """Return whether stars speak for a reply; None for a number on an unknown scale."""
    if isinstance(value, str):
        of = re.fullmatch(r"\s*([\d.]+)\s*(?:/|of|out of)\s*([\d.]++).*", value)
        if of and _number(of[2]) > 0:
            return 2 * _number(of[1]) >= _number(of[2])
        if value in UP | DOWN | GOOD | BAD:
            return value in UP | GOOD
        stars = value.count("★") + value.count("⭐")
        value = stars or re.sub(r"stars?\Z", "", value.rstrip())
    if isinstance(value, bool):
        return value
    number = _number(value)
    if math.isnan(number) or 0 < number < 1:
        return None
    return number > WORST_STARS


def unread_prompt_parts(
    record: Any, read: Collection[str], prompt: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return the columns of a record that may belong to its ``prompt`` but are not in it.

    A format may name several columns for the prompt, of which it reads one. So texts are compared.
    """
    if not isinstance(record, dict) or not prompt:
        return []
    texts = "\n".join(turn["content"] for turn in prompt)
    last = prompt[-1]["content"]
    unread = []
    for name, value in record.items():
        if key_of(str(name)) not in PROMPT_PARTS or not _holds(value):
            continue
        if isinstance(value, str):
            is_unread = value not in texts and last not in value
        else:
            is_unread = isinstance(value, list | dict) and name not in read
        if is_unread:
            unread.append(str(name))
    return unread


def require_replies(record: Any, read: Collection[str], chosen: str, rejected: str) -> None:
    """Raise :class:`Refusal` if both replies only name columns that are not ``read``."""
    if not isinstance(record, dict) or max(len(chosen), len(rejected)) > LONGEST_NAME:
        return
    columns = []
    for name, value in record.items():
        if name not in read and value and isinstance(value, str | list):
            columns.append(str(name).casefold())
    for text in (chosen.strip().casefold(), rejected.strip().casefold()):
        before = r"(?:^|[\W_]|(?<=[a-z]))" if text.isdigit() else r"(?:^|[\W_])"
        named = re.compile(rf"{before}{re.escape(text)}\Z")
        if not text or not any(map(named.search, columns)):
            return
    raise Refusal(
        f"chosen and rejected are {chosen!r} and {rejected!r}, which name columns of the row: put the replies "
        "themselves there, or name the columns to read (--column) if these are the replies"
    )


def require_text_only(record: Any) -> None:
    """Raise :class:`Refusal` for a row with media or tools, which training would not see."""
    if not isinstance(record, dict):
        return
    lost = []
    for name, value in record.items():
        if key_of(str(name)) in LOST_COLUMNS and _holds(value):
            lost.append(str(name))
    if lost:
        raise Refusal(
            f"the row has {', '.join(lost)} beside its text, which training would not see; {TEXT_ALONE}"
        )


TEXT_ALONE = (
    "to train on the text alone, name the columns to read (--column, or columns beside the path)"
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
