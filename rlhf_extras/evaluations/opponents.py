"""Third parties as opponents: their replies, read from files, are compared with those of both models.

They are the evaluation ``opponents`` of ``rlhf.evaluations``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import OpponentConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.text import HALF_PAIR, comparable, is_encodable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.rivals import Rival
from rlhf_core.evaluation.plugged import AddedEvaluation
from rlhf_core.evaluation.replies import Reply, prompt_of, rows_of_file
from rlhf_core.storage.data_files import expand

REMEDY = "correct evaluate.opponents"
Turns = tuple[tuple[str, str], ...]


def read_opponent(
    config: OpponentConfig, prompts: Sequence[Prompt], workspace: Path
) -> tuple[list[Reply | None], int]:
    """Read an opponent's file and match it with ``prompts`` by content.

    White space and line ends do not count.

    The replies count as finished, since the file does not say.

    Returns:
        Its reply to each prompt, None where it has none, and how many replies to other prompts it
        has.

    Raises:
        DataError: The file cannot be read, a row has no prompt and reply, two replies to a prompt
            differ, or no prompt of the evaluation is in it.
    """
    replies: dict[Turns, tuple[str, int]] = {}
    (file, *others) = expand(config.path, workspace, REMEDY)
    if others:
        raise DataError(
            f"{config.path} matches {len(others) + 1} files; {REMEDY}: name one for each opponent"
        )
    for where, position, row in rows_of_file(file):
        turns, reply = _row(row, where)
        earlier = replies.setdefault(turns, (reply, position))
        if earlier[0] != reply:
            raise DataError(
                f"{where}: another reply to the prompt of line {earlier[1]}; leave one of them"
            )
    keys = [_content(row.prompt) for row in prompts]
    matched = [replies.get(key) for key in keys]
    if not any(matched):
        raise DataError(
            f"{file} has replies to none of the {len(prompts)} prompts of the evaluation, which are from the column "
            "prompt of data/clean/prompts/test.parquet"
        )
    matched_replies = [match and Reply(match[0], finished=True) for match in matched]
    return matched_replies, len(replies.keys() - set(keys))


def _row(row: Mapping[str, Any], where: str) -> tuple[Turns, str]:
    prompt, reply = prompt_of(row.get("prompt") or None), row.get("reply")
    if prompt is None:
        raise DataError(f"{where}, prompt: neither a text nor a list of messages")
    if not isinstance(reply, str):
        raise DataError(f"{where}, reply: {'missing' if reply is None else 'not a text'}")
    if not is_encodable(reply):
        raise DataError(f"{where}: reply {HALF_PAIR}")
    return _content(prompt), reply


def _content(turns: Sequence[Message]) -> Turns:
    return tuple((turn.role, comparable(turn.content)) for turn in turns)


class Opponents(AddedEvaluation):
    """Replies of third parties, as ``evaluate.opponents`` lists them."""

    def __init__(
        self, settings: Sequence[OpponentConfig], prompts: Sequence[Prompt], workspace: Path
    ) -> None:
        super().__init__(settings, prompts, workspace)
        self.read = {one.name: read_opponent(one, prompts, workspace) for one in settings}

    def replies(self) -> dict[str, Sequence[Reply | None]]:
        """Return the replies of each opponent, by what its columns begin with."""
        return {f"opponent_{name}": replies for name, (replies, _) in self.read.items()}

    def metrics(self, rivals: Mapping[str, Rival], groups: Sequence[str]) -> dict[str, Any]:
        """Return ``opponents`` of ``metrics/evaluation.json``; see docs/judges.md."""
        opponents: dict[str, Any] = {}
        for name, (replies, unused) in self.read.items():
            rival = rivals[f"opponent_{name}"]
            opponents[name] = {
                "prompts": len(rival.answered),
                "missing": len(replies) - len(rival.answered),
                "unused": unused,
                **rival.means(),
            }
            for side in rival.versus:
                opponents[name][side] = rival.metrics_of_side(side, groups)
        return {"opponents": opponents}
