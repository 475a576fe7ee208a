"""A record replayed: the same policy repeats itself, and what another one writes is compared with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from unit.serving.conftest import Served

from flows.commands.serving.replay import describe_replay, outcome_of
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.replies.replayed import FOLDER as REPLAYS
from rlhf_core.evaluation.replies.replayed import read_replays, save_replay
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.serving.recording import RequestRecorder
from rlhf_core.serving.replay import read_record, replay, write_rows

CONFIG = EvaluateConfig(bootstrap=50)


class LengthJudge:
    """Prefers the longer reply by more than one character."""

    name, absolute_tie = "length", 1.0

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        return [float(len(reply.text)) for reply in replies]


@pytest.fixture
def record(serve: Callable[..., Served], tmp_path: Path) -> tuple[Served, Path]:
    """Four requests to version 1, of which two differ from the judged sampling."""
    file = tmp_path / "prompts.jsonl"
    served = serve(recorder=RequestRecorder(file))
    for fields in ({}, {"seed": 3}, {"temperature": 0, "max_tokens": 5}, {"stop": [" "], "seed": 4}):
        assert served.post({"messages": [{"role": "user", "content": "the sky"}], **fields}).status_code == 200
    return served, file


def test_the_same_policy_gives_the_recorded_replies_again(record: tuple[Served, Path]) -> None:
    served, file = record
    done = replay(served.policy, read_record(file), LengthJudge(), CONFIG)
    assert (done.models, done.skipped, done.comparison.tie) == ({"policy:1": 4}, 0, 1.0)
    assert [row["recorded"]["reply"] for row in done.rows] == [row["replayed"]["reply"] for row in done.rows]
    assert done.recorded_text == done.replayed_text


def test_other_replies_are_compared_with_the_recorded_ones(record: tuple[Served, Path], tmp_path: Path) -> None:
    served, file = record
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[:3]:
        row["reply"] = "x"  # the policy's own replies are longer
    rows[3] |= {"model": "policy:0", "reply": "x" * 999}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = replay(served.policy, read_record(file), LengthJudge(), CONFIG)
    assert (done.comparison.win, done.comparison.lose, done.models) == (0.75, 0.25, {"policy:1": 3, "policy:0": 1})
    lines = describe_replay(done, "policy:2", "judge")
    assert lines[0] == "policy:2 answered 4 recorded requests (1 of policy:0 and 3 of policy:1)"
    assert lines[1].startswith("win rate by the judge 0.750 (") and "words 1 → " in lines[-1]
    write_rows(tmp_path / "compared.jsonl", done.rows)
    written = [json.loads(line) for line in (tmp_path / "compared.jsonl").read_text().splitlines()]
    assert written == done.rows and (tmp_path / "compared.jsonl").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RlhfError, match="name a new file"):
        write_rows(tmp_path / "compared.jsonl", done.rows)


def test_the_outcome_is_kept_for_the_report_with_or_without_a_judge(
    record: tuple[Served, Path], tmp_path: Path
) -> None:
    served, file = record
    requests = read_record(file)
    judged = outcome_of(replay(served.policy, requests, LengthJudge(), CONFIG), "policy:2", "judge", file, listed=3)
    assert judged.requests == 4 and judged.comparison["tie"] == 1.0 and len(judged.replies) == 3
    done = replay(served.policy, requests, None, CONFIG)
    assert done.comparison is None and "score" not in done.rows[0]["replayed"]
    assert "no judge compared the replies" in describe_replay(done, "policy:3", "judge")[1]
    unjudged = outcome_of(done, "policy:3", "judge", file, listed=0)
    assert (unjudged.judge, unjudged.comparison, unjudged.replies) == ("", {}, [])
    for outcome in (judged, judged, unjudged):
        save_replay(tmp_path, outcome)
    (tmp_path / REPLAYS / "damaged.json").write_text("{}")
    assert (tmp_path / REPLAYS).stat().st_mode & 0o777 == 0o700, "they are users' texts"
    assert sorted(read_replays(tmp_path), key=lambda outcome: outcome.policy) == [judged, unjudged]


def test_requests_that_do_not_fit_are_left_out_and_counted(record: tuple[Served, Path]) -> None:
    served, file = record
    policy, requests = served.policy, read_record(file)
    tokens = len(policy.encode(requests[0].messages))
    policy.context = tokens + 5
    assert replay(policy, requests, LengthJudge(), CONFIG).skipped == 3
    policy.context = tokens
    with pytest.raises(DataError, match="none of the 4 requests fits"):
        replay(policy, requests, LengthJudge(), CONFIG)


@pytest.mark.parametrize("line", ['{"model": "p"', "[]", '{"model": "p", "sampling": {"stop": []}}'])
def test_a_line_that_is_no_record_is_named(record: tuple[Served, Path], line: str) -> None:
    _, file = record
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(DataError, match="line 5 is no record"):
        read_record(file)


def test_a_record_must_be_there_and_not_be_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name, words in (("missing.jsonl", "cannot read"), ("empty.jsonl", "has no replies")):
        with pytest.raises(DataError, match=words):
            read_record(tmp_path / name)
