"""Columns of a record that its format does not read: further ones, and those whose name is misspelt."""

from __future__ import annotations

from typing import Any

REPLIES = "chosen rejected"
# Read in every format, for one kind of rows or another.
LABELS = (
    "system source category margin label kto_tag score_chosen score_rejected chosen_score rejected_score "
    "chosen-rating rejected-rating chosen_rating rejected_rating chosen_avg_rating rejected_avg_rating"
)
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
    "orca-dpo": f"question input {REPLIES}",
    "open-orca": "system_prompt question response",
    "ultrafeedback-ratings": "instruction chosen_response rejected_response",
    "ultrafeedback": "instruction completions",
    "nectar": "prompt answers",
    "ranking": "prompt instruction question responses completions generations scores ratings ranks",
    "stepwise": "prompt",
    "oasst-trees": "message_tree_id prompt",
    "oasst-messages": "",
}
READ = {name: frozenset(f"{columns} {LABELS}".split()) for name, columns in BY_FORMAT.items()}


def unused_columns(value: Any, format_name: str) -> list[str]:
    """Return the columns of a record that hold something and are not read."""
    if not isinstance(value, dict):
        return []
    return [str(name) for name in value.keys() - READ[format_name] if value[name] not in (None, "", [], {})]
