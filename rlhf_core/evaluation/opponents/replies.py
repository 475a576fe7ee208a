"""Read a third party's replies, and find those to the prompts of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import OpponentConfig
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Prompt
from rlhf_core.data.text import HALF_PAIR, comparable, is_encodable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.storage.file_patterns import expand

REMEDY = "correct evaluate.opponents"
Turns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Opponent:
    """A third party's replies.

    Attributes:
        name: Its name in metrics.
        replies: One for each prompt of the evaluation; None where it has none.
        unused: Replies of the file to other prompts.
    """

    name: str
    replies: Sequence[Reply | None]
    unused: int

    @property
    def answered(self) -> list[int]:
        """Positions of the prompts that it has a reply to."""
        return [i for i, reply in enumerate(self.replies) if reply is not None]

    def known_replies(self) -> list[Reply]:
        """Return its replies to those prompts, in their order."""
        return [reply for reply in self.replies if reply is not None]


def read_opponent(config: OpponentConfig, prompts: Sequence[Prompt], workspace: Path) -> Opponent:
    """Read an opponent's file and match it with ``prompts`` by content; white space and line ends do not count.

    The replies count as finished, since the file does not say.

    Raises:
        DataError: The file cannot be read, a row has no prompt and reply, two replies to a prompt differ, or no prompt
            of the evaluation is in it.
    """
    replies: dict[Turns, tuple[str, int]] = {}
    (file, *others) = expand(config.path, workspace, REMEDY)
    if others:
        raise DataError(f"{config.path} matches {len(others) + 1} files; {REMEDY}: name one for each opponent")
    for record in stream_records(file):
        turns, reply = _row(record, file)
        earlier = replies.setdefault(turns, (reply, record.position))
        if earlier[0] != reply:
            raise DataError(
                f"{file}, line {record.position}: another reply to the prompt of line {earlier[1]}; leave one of them"
            )
    keys = [_content((turn.role, turn.content) for turn in row.prompt) for row in prompts]
    matched = [replies.get(key) for key in keys]
    if not any(matched):
        raise DataError(
            f"{file} has replies to none of the {len(prompts)} prompts of the evaluation, which are from the column "
            "prompt of data/clean/prompts/test.parquet"
        )
    return Opponent(
        config.name,
        [None if match is None else Reply(match[0], finished=True) for match in matched],
        len(replies.keys() - set(keys)),
    )


def _row(record: Record, file: Path) -> tuple[Turns, str]:
    where, row = f"{file}, line {record.position}", record.value
    if record.problem or not isinstance(row, dict):
        raise DataError(f"{where}: {record.problem or 'not an object'}")
    prompt, reply = row.get("prompt"), row.get("reply")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else prompt
    if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
        raise DataError(f"{where}, prompt: neither a text nor a list of messages")
    if not isinstance(reply, str):
        raise DataError(f"{where}, reply: {'missing' if reply is None else 'not a text'}")
    if not is_encodable(reply):
        raise DataError(f"{where}: reply {HALF_PAIR}")
    return _content((turn["role"], turn["content"]) for turn in turns), reply


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)


def _content(turns: Any) -> Turns:
    return tuple((role, comparable(content)) for role, content in turns)
