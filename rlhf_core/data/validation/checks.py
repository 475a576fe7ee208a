"""Checks of a row as columns of a frame: numbers with bounds, and flags that are 1 where a row passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.validate import ValidateConfig
from rlhf_core.config.validation_rules import Severity
from rlhf_core.data.schema import ROLES
from rlhf_core.data.visible_text import has_visible_text

REPLIES = {"preferences": ("chosen", "rejected"), "demonstrations": ("reply",), "prompts": (), "pretrain": ("text",)}
SOURCE_PASSED = "source_passed"  # a column that check_frame does not fill: see validate
# Control characters other than tab, newlines and form feed, the C1 block (UTF-8 read as Latin-1), and the replacement
# character.
CONTROL = r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x{9f}\x{fffd}\x{fffe}\x{ffff}]"
# UTF-8 read as Windows-1252: the lead byte of a two-, three- or four-byte character, seen with what follows it.
MOJIBAKE = r"Ã[\x{a0}-\x{bf}\x{192}\x{201a}\x{201e}\x{2020}\x{2030}]|Â[\x{a0}-\x{bf}]|â€|ï¿½|ðŸ"
SECRETS = "|".join(
    (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----",
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\bsk-(?:[A-Za-z0-9_]+-)*[A-Za-z0-9]{20,}",
        r"\bgh[pousr]_[A-Za-z0-9]{36,}",
        r"\bgithub_pat_[A-Za-z0-9_]{50,}",
        r"\bglpat-[A-Za-z0-9_-]{20,}",
        r"\bhf_[A-Za-z0-9]{30,}",
        r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
        r"\bAIza[0-9A-Za-z_-]{35}",
        r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    )
)


@dataclass(frozen=True)
class RowCheck:
    """One expectation of a column, and the reason for which a row is refused; without bounds the column is a flag.

    ``severity`` is what becomes of rows that fail it.
    """

    column: str
    reason: str
    low: float | None = None
    high: float | None = None
    severity: Severity = "refuse"

    @property
    def is_flag(self) -> bool:
        """Whether the column holds 1 for rows that pass and 0 for others."""
        return self.low is None and self.high is None

    @property
    def is_fault(self) -> bool:
        """Whether a row that fails is a bad one: not over a length limit, nor only derived from a row that failed."""
        return self.is_flag and self.column != SOURCE_PASSED


def checks_for(kind: str, config: ValidateConfig, derived: bool = False) -> list[RowCheck]:
    """Return the checks of a kind, in the order in which reasons are listed.

    A ``derived`` row must come from a row that passed.
    """
    checks = [RowCheck("complete", "a required column is null")]
    if derived:
        checks.append(RowCheck(SOURCE_PASSED, "derived only from rows that were refused"))
    if kind != "pretrain":
        checks += [
            RowCheck("prompt_not_empty", "a turn of the user or the assistant is empty"),
            RowCheck("roles", "roles do not alternate between user and assistant, or the last turn is not the user's"),
            RowCheck("turns", f"more than {config.max_turns} turns", 1, config.max_turns),
            RowCheck(
                "prompt_chars", f"the prompt is over {config.max_prompt_chars} characters", 0, config.max_prompt_chars
            ),
        ]
    for name in REPLIES[kind]:
        checks.append(RowCheck(f"{name}_not_empty", f"{name} is empty"))
        if kind != "pretrain":
            limit = config.max_reply_chars
            checks.append(RowCheck(f"{name}_chars", f"{name} is over {limit} characters", 0, limit))
    if kind == "preferences":
        checks += [
            RowCheck("replies_differ", "chosen and rejected are the same text"),
            RowCheck("not_contradicted", "the same pair is also labelled the other way round"),
            RowCheck("margin_finite", "the margin is not a finite number"),
        ]
    checks += [
        RowCheck("not_duplicate", "an exact copy of an earlier row"),
        RowCheck("no_control_characters", "control or replacement characters"),
        RowCheck("no_mojibake", "text decoded with the wrong encoding (mojibake)"),
    ]
    if config.secrets:
        checks.append(RowCheck("no_secrets", "looks like an access key or a private key"))
    return [replace(check, severity=config.severity(check.column)) for check in checks]


def check_frame(kind: str, table: pa.Table, config: ValidateConfig) -> pd.DataFrame:
    """Return a frame with ``row_id`` (position in ``table``), ``id`` and every column that :func:`checks_for` names."""
    frame = pd.DataFrame({"row_id": np.arange(table.num_rows), "id": table.column("id").to_pylist()})
    required = [name for name in table.column_names if name != "margin"]
    complete = np.ones(table.num_rows, dtype=bool)
    for name in required:
        complete &= ~table.column(name).is_null().to_numpy()
    frame["complete"] = complete.astype(int)
    texts = {name: pc.fill_null(table.column(name), "") for name in REPLIES[kind]}
    keys: list[list[Any]] = [text.to_pylist() for text in texts.values()]
    if kind != "pretrain":
        prompts = table.column("prompt").to_pylist()
        texts["prompt"] = pa.chunked_array([_prompt_columns(frame, prompts)])
        keys.insert(0, texts["prompt"].to_pylist())
    for name in REPLIES[kind]:
        frame[f"{name}_not_empty"] = [int(has_visible_text(text)) for text in texts[name].to_pylist()]
        frame[f"{name}_chars"] = pc.utf8_length(texts[name]).to_numpy()
    _text_flags(frame, texts, config)
    frame["not_duplicate"] = (~pd.DataFrame(dict(enumerate(keys))).duplicated()).astype(int).to_numpy()
    if kind == "preferences":
        _pair_flags(frame, table, keys)
    return frame


def passing(frame: pd.DataFrame, checks: Sequence[RowCheck]) -> npt.NDArray[np.bool_]:
    """Return by row whether it stays: whether it passes all checks that do more than warn."""
    passed = np.ones(len(frame), dtype=bool)
    for check in checks:
        if check.severity == "warn":
            continue
        values = frame[check.column].to_numpy()
        passed &= values == 1 if check.is_flag else (values >= check.low) & (values <= check.high)
    return passed


def _prompt_columns(frame: pd.DataFrame, prompts: list[list[dict[str, str | None]] | None]) -> pa.Array:
    """Add the prompt's columns to ``frame``; return each prompt as one text, the key of equal prompts.

    Together they may exceed 2 GiB, which an array of ordinary strings cannot hold.
    """
    turns = [[(turn["role"] or "", turn["content"] or "") for turn in prompt or [] if turn] for prompt in prompts]
    frame["turns"] = [len(prompt) for prompt in turns]
    frame["prompt_chars"] = [sum(len(content) for _, content in prompt) for prompt in turns]
    frame["prompt_not_empty"] = [
        int(bool(p) and all(role == "system" or has_visible_text(content) for role, content in p)) for p in turns
    ]
    frame["roles"] = [int(roles_in_order([role for role, _ in prompt])) for prompt in turns]
    return pa.array(
        ["\n\n".join(f"{role}: {content}" for role, content in prompt) for prompt in turns], pa.large_string()
    )


def roles_in_order(roles: list[str]) -> bool:
    """Return whether an optional system turn comes first, then user and assistant alternate, the user last."""
    dialogue = roles[1:] if roles[:1] == ["system"] else roles
    known = all(role in ROLES and role != "system" for role in dialogue)
    alternating = all(a != b for a, b in pairwise(dialogue))
    return known and alternating and dialogue[:1] == ["user"] and dialogue[-1:] == ["user"]


def _text_flags(frame: pd.DataFrame, texts: dict[str, pa.ChunkedArray], config: ValidateConfig) -> None:
    """Add flags for the patterns that no text of a row may match."""
    patterns = {"no_control_characters": CONTROL, "no_mojibake": MOJIBAKE}
    if config.secrets:
        patterns["no_secrets"] = SECRETS
    for column, pattern in patterns.items():
        matches = np.zeros(len(frame), dtype=bool)
        for text in texts.values():
            matches |= pc.match_substring_regex(text, pattern).to_numpy().astype(bool)
        frame[column] = (~matches).astype(int)


def _pair_flags(frame: pd.DataFrame, table: pa.Table, keys: list[list[Any]]) -> None:
    """Add flags on the two replies of a pair together; a pair labelled both ways is refused on both sides.

    Texts that differ in white space alone count as equal.
    """
    prompts, chosen, rejected = ([" ".join(text.split()) for text in texts] for texts in keys)
    frame["replies_differ"] = [int(a != b) for a, b in zip(chosen, rejected, strict=True)]
    labelled = set(zip(prompts, chosen, rejected, strict=True))
    swapped = zip(prompts, rejected, chosen, strict=True)
    same = (a == b for a, b in zip(chosen, rejected, strict=True))
    frame["not_contradicted"] = [int(equal or pair not in labelled) for equal, pair in zip(same, swapped, strict=True)]
    margin = table.column("margin").to_pandas().astype(float)
    frame["margin_finite"] = (table.column("margin").is_null().to_numpy() | np.isfinite(margin.to_numpy())).astype(int)
