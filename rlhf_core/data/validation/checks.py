"""Checks of a row as columns of a frame: numbers with bounds, and flags that are 1 where a row passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.stages.validate import ValidateConfig
from rlhf_core.config.validation_rules import Severity
from rlhf_core.data.schema import ROLES
from rlhf_core.data.text.visible_text import comparable, has_visible_text

REPLIES = {"preferences": ("chosen", "rejected"), "demonstrations": ("reply",), "prompts": (), "pretrain": ("text",)}
LABELS = ("category", "source")
FLAG = np.int8
DIGEST_BYTES = 16
DUPLICATE = "not_duplicate"
REPEATED_CHARS = 20  # a shorter prompt, as a greeting, is what a reply may well begin with
SOURCE_PASSED = "source_passed"  # a column that check_frame does not fill: see validate
NOT_DERIVED = "derived only from rows that were refused"
# Control characters other than tab, newlines and form feed, the C1 block (UTF-8 read as Latin-1), and the replacement
# character.
CONTROL = r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x{9f}\x{fffd}\x{fffe}\x{ffff}]"
# UTF-8 read as Windows-1252: the lead byte of a two-, three- or four-byte character, seen with what follows it; two
# replacement characters read as GBK.
MOJIBAKE = r"Ã[\x{a0}-\x{bf}\x{192}\x{201a}\x{201e}\x{2020}\x{2030}]|Â[\x{a0}-\x{bf}]|â€|ï¿½|ðŸ|锟斤拷"
SECRETS = "|".join(
    (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
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
        checks.append(RowCheck(SOURCE_PASSED, NOT_DERIVED))
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
            RowCheck("prompt_not_repeated", "both replies begin with the text of the prompt's last turn"),
            RowCheck("margin_finite", "the margin is not a finite number"),
        ]
    checks += [
        RowCheck(DUPLICATE, "the same texts as an earlier row"),
        RowCheck("no_control_characters", "control or replacement characters"),
        RowCheck("no_mojibake", "text decoded with the wrong encoding (mojibake)"),
    ]
    if config.secrets:
        checks.append(RowCheck("no_secrets", "looks like an access key or a private key"))
    return [replace(check, severity=config.severity(check.column)) for check in checks]


def check_frame(kind: str, tables: Iterable[pa.Table], config: ValidateConfig) -> pd.DataFrame:
    """Return a frame with ``row_id`` (a row's number), ``id`` and every column that :func:`checks_for` names.

    Rows are compared with each other by hashes of their texts, so that a part is not needed after it was read. The
    first row of its texts that passes the other checks is no duplicate: what a refused row repeats is not lost.

    Args:
        tables: The rows of the kind, in parts.
    """
    frames, digests = [], []
    for table in tables:
        texts = row_texts(kind, table)
        frames.append(_row_columns(kind, table, texts, config))
        digests.append(row_digests(kind, texts))
    frame = pd.concat(frames, ignore_index=True)
    frame.insert(0, "row_id", np.arange(len(frame)))
    hashed = pa.concat_tables(digests)
    if kind == "preferences":
        swapped = pc.is_in(hashed.column("swapped"), value_set=hashed.column("labelled").combine_chunks())
        # Of a pair with equal replies the swapped one is the pair itself.
        equal = frame["replies_differ"].to_numpy() == 0
        frame["not_contradicted"] = (equal | ~swapped.to_numpy()).astype(FLAG)
    contents = hashed.column("content").to_pandas()
    copies = contents.duplicated().to_numpy(copy=True)
    accepted = passing(frame, [check for check in checks_for(kind, config) if check.column != DUPLICATE])
    copies[accepted] = contents[accepted].duplicated()
    frame[DUPLICATE] = (~copies).astype(FLAG)
    return frame


def row_texts(kind: str, table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the texts of rows, which checks and hashes are of: the prompt as one, replies, or the text."""
    texts = {name: pc.fill_null(table.column(name), "") for name in REPLIES[kind]}
    if kind != "pretrain":
        texts["prompt"] = pa.chunked_array([_prompt_texts(prompt_turns(table))])
    return texts


def prompt_turns(table: pa.Table) -> list[list[tuple[str, str]]]:
    """Return the role and text of each turn of each prompt."""
    prompts: list[list[dict[str, str | None]] | None] = table.column("prompt").to_pylist()
    return [[(turn["role"] or "", turn["content"] or "") for turn in prompt or [] if turn] for prompt in prompts]


def _row_columns(
    kind: str, table: pa.Table, texts: Mapping[str, pa.ChunkedArray], config: ValidateConfig
) -> pd.DataFrame:
    """Return the columns that say something of each row by itself."""
    frame = pd.DataFrame({"id": table.column("id").to_pylist()})
    complete = np.ones(table.num_rows, dtype=bool)
    for name in table.column_names:
        if name != "margin":
            complete &= ~table.column(name).is_null().to_numpy()
    frame["complete"] = complete.astype(FLAG)
    if kind != "pretrain":
        prompts = prompt_turns(table)
        _prompt_columns(frame, prompts)
    for name in REPLIES[kind]:
        frame[f"{name}_not_empty"] = _flags(has_visible_text(text) for text in texts[name].to_pylist())
        frame[f"{name}_chars"] = pc.utf8_length(texts[name]).to_numpy()
    if kind == "preferences":
        chosen, rejected = (texts[name].to_pylist() for name in REPLIES[kind])
        frame["replies_differ"] = _flags(comparable(a) != comparable(b) for a, b in zip(chosen, rejected, strict=True))
        last = [turns[-1][1] if turns else "" for turns in prompts]
        frame["prompt_not_repeated"] = _flags(
            len(turn) < REPEATED_CHARS or not (a.startswith(turn) and b.startswith(turn))
            for turn, a, b in zip(last, chosen, rejected, strict=True)
        )
        margin = table.column("margin").to_pandas().astype(float).to_numpy()
        frame["margin_finite"] = (table.column("margin").is_null().to_numpy() | np.isfinite(margin)).astype(FLAG)
    labels = [pc.fill_null(table.column(name), "") for name in LABELS]
    _text_flags(frame, list(texts.values()), labels, config)
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


def _prompt_columns(frame: pd.DataFrame, prompts: list[list[tuple[str, str]]]) -> None:
    """Add the prompt's columns to ``frame``."""
    frame["turns"] = [len(prompt) for prompt in prompts]
    frame["prompt_chars"] = [sum(len(content) for _, content in prompt) for prompt in prompts]
    frame["prompt_not_empty"] = _flags(
        bool(p) and all(role == "system" or has_visible_text(content) for role, content in p) for p in prompts
    )
    frame["roles"] = _flags(roles_in_order([role for role, _ in prompt]) for prompt in prompts)


def _prompt_texts(prompts: list[list[tuple[str, str]]]) -> pa.Array:
    """Return each prompt as one text. An array of ordinary strings can hold only 2 GiB, which they may exceed."""
    joined = ["\n\n".join(f"{role}: {content}" for role, content in prompt) for prompt in prompts]
    return pa.array(joined, pa.large_string())


def _flags(passed: Iterable[bool]) -> npt.NDArray[np.int8]:
    return np.fromiter(passed, FLAG)


def roles_in_order(roles: list[str]) -> bool:
    """Return whether an optional system turn comes first, then user and assistant alternate, the user last."""
    dialogue = roles[1:] if roles[:1] == ["system"] else roles
    known = all(role in ROLES and role != "system" for role in dialogue)
    alternating = all(a != b for a, b in pairwise(dialogue))
    return known and alternating and dialogue[:1] == ["user"] and dialogue[-1:] == ["user"]


def _text_flags(
    frame: pd.DataFrame, texts: Sequence[pa.ChunkedArray], labels: Sequence[pa.ChunkedArray], config: ValidateConfig
) -> None:
    """Add flags for the patterns that no text of a row may match, nor its category and source, which are printed."""
    searches = [("no_control_characters", CONTROL, [*texts, *labels]), ("no_mojibake", MOJIBAKE, texts)]
    if config.secrets:
        searches.append(("no_secrets", SECRETS, [*texts, *labels]))
    for column, pattern, searched in searches:
        matches = np.zeros(len(frame), dtype=bool)
        for text in searched:
            matches |= pc.match_substring_regex(text, pattern).to_numpy().astype(bool)
        frame[column] = (~matches).astype(FLAG)


def row_digests(kind: str, texts: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """Return 128-bit hashes of the content of rows; of pairs also as they are labelled, and the other way round.

    For the label, texts that differ in white space or invisible characters alone count as equal. Two of a billion
    contents have the same hash with a probability of about 1e-21.
    """
    names = REPLIES[kind] if kind == "pretrain" else ("prompt", *REPLIES[kind])
    contents = list(zip(*(texts[name].to_pylist() for name in names), strict=True))
    columns = {"content": [_digest(map(str.encode, content)) for content in contents]}
    if kind == "preferences":
        parts = [[_digest([comparable(text).encode()]) for text in content] for content in contents]
        columns["labelled"] = [_digest((prompt, chosen, rejected)) for prompt, chosen, rejected in parts]
        columns["swapped"] = [_digest((prompt, rejected, chosen)) for prompt, chosen, rejected in parts]
    return pa.table({name: pa.array(hashes, pa.binary(DIGEST_BYTES)) for name, hashes in columns.items()})


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
