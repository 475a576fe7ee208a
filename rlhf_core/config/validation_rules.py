"""The rules of the project's own suites by name; the suites say how severe a breach of each is."""

from __future__ import annotations

from typing import Literal

Severity = Literal["refuse", "warn", "fail"]

# Rules of a row, in the order in which reasons are listed.
ROW_RULES = (
    "complete",
    "prompt_not_empty",
    "roles",
    "turns",
    "prompt_chars",
    "chosen_not_empty",
    "chosen_chars",
    "rejected_not_empty",
    "rejected_chars",
    "reply_not_empty",
    "reply_chars",
    "text_not_empty",
    "replies_differ",
    "not_contradicted",
    "prompt_not_repeated",
    "margin_finite",
    "not_duplicate",
    "no_control_characters",
    "no_mojibake",
    "no_secrets",
    "no_template_tokens",
)
# Rules about the whole set.
SET_RULES = (
    "no_prefix_leakage",
    "no_shared_first_turn",
    "no_near_duplicates",
    "no_similar_held_out_prompts",
    "no_contamination",
    "expected_language",
)
RULES = ROW_RULES + SET_RULES
# No stage can train on a row that breaks one of these, so a warning is not enough.
NEEDED_FOR_TRAINING = frozenset({"complete", "prompt_not_empty", "roles", "margin_finite"})
