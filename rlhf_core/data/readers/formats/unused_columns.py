"""Columns of a record that its format does not read: further ones, and those whose name is misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_core.data.readers.formats.turns import LOST_PARTS

REPLIES = "chosen rejected"
# Read in every format, for one kind of rows or another.
LABELS = (
    "system source category margin score_chosen score_rejected chosen_score rejected_score "
    "chosen-rating rejected-rating chosen_rating rejected_rating chosen_avg_rating rejected_avg_rating"
)
REPLY_LABELS = "label kto_tag"
BY_FORMAT = {
    "hh-rlhf": f"prompt {REPLIES}",
    "sharegpt-ranking": f"conversations {REPLIES}",
    "turn-list-pair": f"prompt {REPLIES}",
    "conversational-implicit": f"prompt {REPLIES}",
    "conversational": f"prompt {REPLIES}",
    "standard": f"prompt {REPLIES}",
    "standard-implicit": REPLIES,
    "alpaca-ranking": f"instruction input history {REPLIES}",
    "alpaca": "instruction input history output",
    "messages": "messages conversations",
    "turn-list": "",
    "prompt-reply": "prompt reply completion response output",
    "prompt": "prompt",
    "text": "text",
    "pku-saferlhf": "prompt response_0 response_1 better_response_id safer_response_id",
    "pku-saferlhf-single": "prompt response_0 response_1 better_response_id",
    "helpsteer2-preference": "prompt response_1 response_2 preference_strength",
    "helpsteer3-preference": "context response1 response2 overall_preference domain",
    "helpsteer-ratings": "prompt",
    "shp": "history human_ref_A human_ref_B labels domain",
    "orca-dpo": f"question input status {REPLIES}",
    "open-orca": "system_prompt question response",
    "ultrafeedback-ratings": "instruction chosen_response rejected_response",
    "ultrafeedback": "instruction completions",
    "nectar": "prompt answers",
    "ranking": "prompt instruction question responses completions generations scores ratings ranks",
    "stepwise": "prompt",
    "oasst-trees": "message_tree_id prompt",
    "oasst-messages": "",
}
# Formats of single replies, which may be labelled as good or bad.
SINGLE_REPLIES = ("alpaca", "messages", "turn-list", "prompt-reply", "open-orca")
READ = {
    name: frozenset(f"{columns} {LABELS} {REPLY_LABELS if name in SINGLE_REPLIES else ''}".split())
    for name, columns in BY_FORMAT.items()
}
TEXT_LABELS = ("category", "source")
DIALOGUES = ("prompt", "chosen", "rejected", "reply", "completion", "response", "messages", "conversations", "context")
TURN_KEYS = frozenset({"role", "from", "content", "value", *LOST_PARTS})
PART_KEYS = frozenset({"type", "text", *LOST_PARTS})
NOTHING: tuple[Any, ...] = (None, "", [], {})


def unused_columns(value: Any, format_name: str) -> list[str]:
    """Return the columns of a record that hold something and are not read.

    A key of the turns in a column is ``prompt[].name``. A category or source that is no text is not read either.
    """
    if not isinstance(value, dict):
        return []
    read = READ[format_name]
    unused = [str(name) for name in value.keys() - read if value[name] not in NOTHING]
    unused += [name for name in TEXT_LABELS if value.get(name) not in NOTHING and not isinstance(value[name], str)]
    if format_name != "oasst-trees":
        unused += {key for name in DIALOGUES if name in read for key in _unused_turn_keys(name, value.get(name))}
    return unused


def _unused_turn_keys(column: str, turns: Any) -> Iterator[str]:
    """Yield the keys of turns in a column, and of the parts of their texts, that hold something and are not read."""
    for turn in turns if isinstance(turns, list) else [turns]:
        if isinstance(turn, dict):
            yield from (f"{column}[].{key}" for key in turn.keys() - TURN_KEYS if turn[key] not in NOTHING)
            text = "content" if "content" in turn else "value"
            for part in turn[text] if isinstance(turn.get(text), list) else []:
                if isinstance(part, dict):
                    unused = (key for key in part.keys() - PART_KEYS if part[key] not in NOTHING)
                    yield from (f"{column}[].{text}[].{key}" for key in unused)
