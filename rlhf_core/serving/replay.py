"""Recorded requests answered by another policy: what users would have got, compared by the workspace's judge."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.comparisons.comparison import Comparison, compare, tie_margin_of
from rlhf_core.evaluation.comparisons.length_control import length_differences
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.runtime.progress import progress
from rlhf_core.serving.loaded_policy import LoadedPolicy, ReplySettings
from rlhf_core.storage.files import split_json_lines

# Of the text metrics, those that need no tokens: a record has texts alone.
TEXT_METRICS = ("words", "repetition", "distinct_2", "missing_eos")


@dataclass(frozen=True)
class RecordedReply:
    """A line of the file that ``rlhf serve --record`` writes."""

    model: str
    messages: list[Message]
    settings: ReplySettings
    reply: Reply


@dataclass(frozen=True)
class ReplayedReply:
    """A recorded request with the other policy's reply."""

    recorded: RecordedReply
    reply: Reply


@dataclass(frozen=True)
class Replay:
    """The other policy against the recorded replies.

    Attributes:
        models: Recorded replies by the revision that wrote them.
        skipped: Requests that did not fit into the other policy's context.
        comparison: Of the replayed replies with the recorded ones, by the judge; None without one.
        recorded_text, replayed_text: Text metrics of both.
        rows: A dictionary per request, for a file: messages, both replies and, with a judge, both scores.
    """

    models: dict[str, int]
    skipped: int
    comparison: Comparison | None
    recorded_text: dict[str, float]
    replayed_text: dict[str, float]
    rows: list[dict[str, Any]]


def read_record(path: Path) -> list[RecordedReply]:
    """Read a record.

    Raises:
        DataError: It is missing or empty, or a line is none that the server wrote.
    """
    try:
        lines = split_json_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} ({error}); name a file that rlhf serve --record wrote") from error
    recorded = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not recorded:
        raise DataError(f"{path} has no replies; record some with rlhf serve --record {path}")
    return recorded


def _parse(path: Path, number: int, line: str) -> RecordedReply:
    try:
        row = json.loads(line)
        sampling = row["sampling"]
        settings = ReplySettings(**{**sampling, "stop": tuple(sampling["stop"])})
        messages = [Message(turn["role"], turn["content"]) for turn in row["messages"]]
        reply = Reply(row["reply"], row["finish_reason"] == "stop")
        return RecordedReply(row["model"], messages, settings, reply)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} line {number} is no record of rlhf serve ({reason}); take the line out") from error


def replay(
    policy: LoadedPolicy, recorded: Sequence[RecordedReply], judge: Judge | None, config: EvaluateConfig
) -> Replay:
    """Answer every recorded request with its own settings and seed, and compare the replies by ``judge``, if any.

    Raises:
        DataError: No request fits into the policy's context.
    """
    with progress(len(recorded), "replay") as bar:
        replayed = []
        for row in recorded:
            reply = _answer(policy, row)
            if reply is not None:
                replayed.append(ReplayedReply(row, reply))
            bar.advance(1)
    if not replayed:
        raise DataError(f"none of the {len(recorded)} requests fits into the context of {policy.context} tokens")
    prompts = [row.recorded.messages for row in replayed]
    old, new = [row.recorded.reply for row in replayed], [row.reply for row in replayed]
    rows: list[dict[str, Any]] = [
        {
            "messages": [asdict(message) for message in row.recorded.messages],
            "recorded": {"model": row.recorded.model, "reply": row.recorded.reply.text},
            "replayed": {"model": policy.revision.id, "reply": row.reply.text},
        }
        for row in replayed
    ]
    comparison = None
    if judge is not None:
        before, after = judge.score(prompts, old), judge.score(prompts, new)
        for row_of_file, was, becomes in zip(rows, before, after, strict=True):
            row_of_file["recorded"]["score"], row_of_file["replayed"]["score"] = was, becomes
        margin = tie_margin_of(judge, config.tie_margin, before)
        comparison = compare(after, before, margin, config.bootstrap, config.seed, length_differences(new, old))
    return Replay(
        models=dict(Counter(row.recorded.model for row in replayed)),
        skipped=len(recorded) - len(replayed),
        comparison=comparison,
        recorded_text=_text_metrics(old),
        replayed_text=_text_metrics(new),
        rows=rows,
    )


def _answer(policy: LoadedPolicy, row: RecordedReply) -> Reply | None:
    """Return the reply of ``policy``, None where the request does not fit into its context."""
    prompt_ids = policy.encode(row.messages)
    if policy.context is not None and len(prompt_ids) + row.settings.max_new_tokens > policy.context:
        return None
    sampled = policy.reply(prompt_ids, row.settings)
    return Reply(sampled.text, sampled.finish_reason == "stop")


def _text_metrics(replies: Sequence[Reply]) -> dict[str, float]:
    metrics = measure_text(replies).as_dict()
    return {name: metrics[name] for name in TEXT_METRICS}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSON line per request to a new file that only its owner may read: they are users' texts."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise RlhfError(f"cannot write {path} ({error.strerror}); name a new file with --output") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
