"""The LLM judge against a real server: both orders, cache, faults, budget, secrets, and what counts
as a verdict.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.evaluation import LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.judges.model import PairwiseJudgements
from rlhf_core.evaluation.replies import Reply
from rlhf_extras.evaluations import llm_judge as llm

from .conftest import ChatServer, completion

# The candidate wins, ties (equal length), loses, and says the same.
CANDIDATE = ["a long reply", "one", "short", "same"]
BASELINE = ["brief", "two", "a longer one", "same"]


class Judged:
    """Judges of one folder of answers, and how long they waited."""

    def __init__(self, server: ChatServer, folder: Path, **changes: Any) -> None:
        self.server, self.folder, self.waits = server, folder, list[float]()
        self.changes: dict[str, Any] = {"retries": 2, "concurrency": 1} | changes

    def __call__(
        self, candidate: list[str] = CANDIDATE, baseline: list[str] = BASELINE, **changes: Any
    ) -> PairwiseJudgements:
        fields = {"base_url": self.server.base_url, "model": "m"} | self.changes | changes
        judge = llm.LlmJudge(
            LlmJudgeConfig.model_validate(fields), self.folder, self.waits.append, lambda: 0.0
        )
        prompts = [[Message("user", f"question {i}")] for i in range(len(candidate))]
        return judge.judge(
            prompts, *([Reply(text, True) for text in texts] for texts in (candidate, baseline))
        )


@pytest.fixture
def judge(server: ChatServer, tmp_path: Path) -> Judged:
    return Judged(server, tmp_path / "answers")


def outcomes(judgements: PairwiseJudgements) -> list[float | None]:
    return [None if math.isnan(outcome) else outcome for outcome in judgements.outcomes.tolist()]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_both_orders_are_asked_and_equal_replies_are_not(
    judge: Judged, server: ChatServer, concurrency: int
) -> None:
    judgements = judge(concurrency=concurrency)
    assert outcomes(judgements) == [1.0, 0.5, 0.0, 0.5]
    assert judgements.reasons[0] == "A it is" and len(server.requests) == 6
    metrics = judgements.metrics
    assert metrics["identical"] == 1 and metrics["junk_share"] == metrics["order_disagreement"] == 0
    assert metrics["first_preferred"] == 0.5 and metrics["prompt_tokens"] == 600
    request = server.requests[0]
    assert (
        request["path"] == "/v1/chat/completions"
        and request["temperature"] == 0
        and request["model"] == "m"
    )


def test_a_model_that_always_prefers_the_first_reply_ties_everywhere(
    judge: Judged, server: ChatServer
) -> None:
    server.say = lambda a, b: '{"reason": "first", "verdict": "A"}'
    judgements = judge()
    assert outcomes(judgements) == [0.5] * 4
    assert (
        judgements.metrics["order_disagreement"] == 1.0
        and judgements.metrics["first_preferred"] == 1.0
    )
    server.script = [(200, completion('{"verdict": "A"}')), (200, completion('{"verdict": "tie"}'))]
    assert outcomes(judge(CANDIDATE[:1], BASELINE[:1], model="undecided in one order")) == [0.5]


def test_equal_replies_hide_no_junk(judge: Judged, server: ChatServer) -> None:
    server.say = lambda a, b: "both are fine"
    with pytest.raises(DataError, match="1 of 1 pairs of different replies have no usable answer"):
        judge([*["same"] * 20, "one"], [*["same"] * 20, "two"])
    assert judge(["same"], ["same"]).metrics["order_disagreement"] == 0.0


def test_answers_are_asked_for_once(judge: Judged, server: ChatServer) -> None:
    first = judge()
    again = judge(base_url=f"{server.base_url}/")
    assert (outcomes(again), again.reasons, again.metrics) == (
        outcomes(first),
        first.reasons,
        first.metrics,
    )
    assert len(server.requests) == 6
    stored = [
        json.loads(file.read_text())["request"]["messages"] for file in judge.folder.rglob("*.json")
    ]
    assert all("question " in messages[0]["content"] for messages in stored)
    judge(model="another")
    assert len(server.requests) == 12, "another model is another question"


def test_a_damaged_answer_is_asked_for_again(judge: Judged, server: ChatServer) -> None:
    judge()
    files = sorted(judge.folder.rglob("*.json"))
    assert len(files) == 6
    for file, content in zip(files, ["", "{}", "[" * 100_000, '{"text": 1, "prompt_tokens": 1, "completion_tokens": 1}',
                                     '{"text": "A", "prompt_tokens": "1", "completion_tokens": 1}'],
                             strict=False):  # fmt: skip
        file.write_text(content)
    assert outcomes(judge()) == [1.0, 0.5, 0.0, 0.5] and len(server.requests) == 11
    files[0].write_bytes(b"\xff")
    assert outcomes(judge()) == [1.0, 0.5, 0.0, 0.5] and len(server.requests) == 12


def test_an_endpoint_that_dies_in_the_middle_loses_no_answer(
    judge: Judged, server: ChatServer
) -> None:
    usual = [(200, completion('{"verdict": "A"}')), (200, completion('{"verdict": "B"}'))]
    server.script = [*usual, (500, "dying"), (502, "dead"), (502, "dead")]
    with pytest.raises(DataError, match=r"llm judge: failed 3 times, at last with answered 502 'dead'; the answers on "
                       r"1 of 3 pairs are kept, and the next run asks for the others alone"):  # fmt: skip
        judge()
    assert judge.waits == [0.5, 1.0]
    asked = len(server.requests)
    assert outcomes(judge()) == [1.0, 0.5, 0.0, 0.5] and len(server.requests) == asked + 4


def test_a_busy_endpoint_is_waited_for_as_long_as_it_says(
    judge: Judged, server: ChatServer
) -> None:
    year_2100 = {"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"}
    server.script = [(429, "later", {"Retry-After": "7"}), (503, "busy", year_2100)]
    assert outcomes(judge(CANDIDATE[:1], BASELINE[:1])) == [1.0]
    assert judge.waits == [7.0, 60.0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("-5", 0.5), ("1e9", 0.5), ("soon", 0.5), ("0", 0.5), ("9" * 400, 60.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.5),
     ("Fri, 31 Dec 2100 23:59:59 +99999999999999", 0.5)],
    ids=range(7),
)  # fmt: skip
def test_absurd_times_to_wait_are_not_waited_for(
    judge: Judged, server: ChatServer, value: str, seconds: float
) -> None:
    server.script = [(429, "later", {"Retry-After": value})]
    assert outcomes(judge(CANDIDATE[:1], BASELINE[:1])) == [1.0]
    assert judge.waits == [seconds]


@pytest.mark.parametrize(
    ("fault", "seconds", "problem"),
    [("drip", 0.3, "not whole after 0.3 s"), ("flood", 30.0, "more than 16 MiB")],
)
def test_an_answer_without_end_is_broken_off(
    judge: Judged, server: ChatServer, fault: str, seconds: float, problem: str
) -> None:
    server.script = [fault]
    with pytest.raises(DataError, match=problem):
        judge(CANDIDATE[:1], BASELINE[:1], timeout_seconds=seconds, retries=0)
    assert len(server.requests) == 1


def test_no_key_follows_a_redirection(
    judge: Judged, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "not-for-others")
    elsewhere = f"{server.base_url}/elsewhere".replace("127.0.0.1", "localhost")
    server.script = [(307, "", {"Location": elsewhere})]
    with pytest.raises(DataError, match="answered 307"):
        judge(token_env="KEY_OF_TEST")
    assert [request["path"] for request in server.requests] == ["/v1/chat/completions"]


def test_numbers_and_letters_that_no_file_can_hold_are_no_answer(
    judge: Judged, server: ChatServer
) -> None:
    absurd = {"prompt_tokens": 10**400, "completion_tokens": 10}
    server.script = [(200, completion('{"verdict": "A", "reason": "\\ud83d"}', absurd))] * 2
    judgements = judge(["\ud800"], ["b"])
    assert (
        judgements.metrics["prompt_tokens"] == 0
        and "?" in server.requests[0]["messages"][0]["content"]
    )
    json.dumps(judgements.reasons[0], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "fault",
    [
        "cut",
        (200, "<html>maintenance</html>"),
        (200, {"choices": []}),
        (200, 'data: {"choices": [{"delta": {}}]}\n\n'),
    ],
    ids=["half an answer", "no JSON", "no choice", "a stream"],
)
def test_what_is_no_whole_answer_is_asked_for_again(
    judge: Judged, server: ChatServer, fault: Any
) -> None:
    server.script = [fault]
    assert outcomes(judge(CANDIDATE[:1], BASELINE[:1])) == [1.0]
    assert judge.waits == [0.5] and len(server.requests) == 3


def test_a_request_that_times_out_is_repeated(judge: Judged, server: ChatServer) -> None:
    hold = threading.Event()
    server.script = [hold]
    try:
        assert outcomes(judge(CANDIDATE[:1], BASELINE[:1], timeout_seconds=0.3)) == [1.0]
    finally:
        hold.set()
    assert judge.waits == [0.5]


def test_nobody_listening_is_one_line(judge: Judged, server: ChatServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        DataError, match=r"failed 3 times, at last with ConnectError.*0 of 3 pairs"
    ) as caught:
        judge(base_url=f"http://127.0.0.1:{port}/v1", concurrency=3)
    assert "\n" not in str(caught.value)


def test_a_refused_key_stops_at_once_and_shows_nowhere(
    judge: Judged,
    server: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="variable JUDGE_KEY, named by token_env, is not set"):
        judge(token_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server.script = [(401, "Bearer s3cret is not welcome")]
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(DataError, match="check base_url, model and") as caught,
    ):
        judge(token_env="JUDGE_KEY")
    assert len(server.requests) == 1 and server.headers[0]["Authorization"] == "Bearer s3cret"
    server.say = lambda a, b: '{"verdict": "A", "reason": "you sent Bearer s3cret"}'
    assert (
        judge(token_env="JUDGE_KEY").reasons[0].startswith("the order decides: you sent Bearer ***")
    )
    files = "".join(file.read_text() for file in judge.folder.rglob("*.json"))
    assert "s3cret" not in str(caught.value) + caplog.text + files


def test_junk_is_left_out_and_counted(judge: Judged, server: ChatServer) -> None:
    server.script = [(200, completion(text)) for text in ("Reply A!", '{"verdict": "B"}')]
    judgements = judge(max_junk=0.34)
    assert outcomes(judgements) == [None, 0.5, 0.0, 0.5]
    assert judgements.judged.tolist() == [1, 2, 3]
    assert judgements.metrics["junk_share"] == pytest.approx(1 / 3), (
        "of three that were asked about"
    )
    asked = len(server.requests)
    assert judge(max_junk=0.34).metrics == judgements.metrics
    assert len(server.requests) == asked, "the same question, the same junk"


def test_too_much_junk_is_refused_in_one_line(judge: Judged, server: ChatServer) -> None:
    server.script = [
        (200, completion(text)) for text in ("我认为第一个回答更好。", None, '{"verdict": "both"}')
    ] * 2
    with pytest.raises(
        DataError,
        match=r"3 of 3 pairs of different replies have no usable answer, more than .*max_junk \(10%\)",
    ) as caught:
        judge()
    assert "\n" not in str(caught.value)


def test_an_endless_answer_takes_no_room_on_the_disk(judge: Judged, server: ChatServer) -> None:
    verdict = '{"reason": "r", "verdict": "A"}'
    server.script = [(200, completion(verdict + " " * (4 << 20)))] * 6
    with pytest.raises(DataError, match="no usable answer"):
        judge()
    kept = sum(path.stat().st_size for path in judge.folder.rglob("*.json"))
    assert 0 < kept < 1 << 20


def test_a_pair_that_is_too_long_for_the_model_counts_as_junk(
    judge: Judged, server: ChatServer
) -> None:
    server.script = [(400, "maximum context length")]
    assert outcomes(judge(max_junk=0.34))[0] is None
    server.script = [(400, "maximum context length")] * 6
    with pytest.raises(DataError, match="the first one: answered 400 'maximum context length'"):
        judge(model="another")


def test_the_budget_stops_and_a_higher_one_goes_on(judge: Judged, server: ChatServer) -> None:
    budget: dict[str, Any] = {"tokens": 300}
    for _ in range(2):
        with pytest.raises(DataError, match=r"budget of 300 tokens is spent \(330 used\); raise evaluate.llm_judge.budg"
                           r".* on 1 of 3 pairs are kept"):  # fmt: skip
            judge(budget=budget)
        assert len(server.requests) == 3, "answers of earlier runs count"
    prices = {"prompt_price": 1.0, "completion_price": 5.0}
    with pytest.raises(DataError, match=r"budget of 0.0005 is spent \(0.0006 used\)"):
        judge(budget={"money": 0.0005, **prices})
    judgements = judge(budget={"money": 1.0, **prices})
    assert judgements.metrics["cost"] == pytest.approx(6 * 150e-6) and len(server.requests) == 6


def test_a_budget_needs_an_endpoint_that_counts(judge: Judged, server: ChatServer) -> None:
    server.usage = {}
    with pytest.raises(DataError, match="does not say how many tokens"):
        judge(budget={"tokens": 1000})
    assert outcomes(judge()) == [1.0, 0.5, 0.0, 0.5]


def test_a_repeated_request_counts_for_the_rate_limit(judge: Judged, server: ChatServer) -> None:
    server.script = [(503, "busy")]
    judge(CANDIDATE[:1], BASELINE[:1], requests_per_minute=60.0)
    # The clock stands still: the second attempt and the second order begin one and two seconds
    # after the first.
    assert judge.waits == [0.5, 1.0, 2.0]


def test_requests_are_spaced_by_the_rate_limit() -> None:
    now, waits = 0.0, list[float]()
    limiter = llm.RateLimiter(30, waits.append, lambda: now)
    for _ in range(3):
        limiter.acquire()
    now = 10.0
    limiter.acquire()
    assert waits == [2.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "127.0.0.1/v1"}, "base_url must be an absolute"),
        ({"base_url": "http://user:s3cret@host/v1"}, "base_url carries credentials"),
        ({"token_env": "sk-s3cret"}, "the name of an environment variable"),
        ({"template": "{reply_a} or {reply_b}?"}, "template must contain {conversation}"),
        ({"budget": {"money": 1.0}}, "money needs prompt_price"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_wrong_settings_are_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        LlmJudgeConfig.model_validate({"base_url": "http://127.0.0.1/v1", "model": "m"} | changes)
    (error,) = caught.value.errors()
    assert message in error["msg"] and "s3cret" not in error["msg"]


@pytest.mark.parametrize(
    ("text", "preferred"),
    [
        ('{"reason": "clear", "verdict": "A"}', "A"),
        ('```json\n{"reason": "clear", "verdict": "b"}\n```', "B"),
        ('<think>A {maybe}</think> {"verdict": "TIE ", "reason": "clear"} done', "tie"),
        ('{"reason": "第一个回答更有帮助", "verdict": "A"}', "A"),
        ('{"verdict": "A", "verdict": "A"}', "A"),
        ('{"verdict": "A"} and once more {"verdict": "A"}', "A"),
    ],
)
def test_a_verdict_is_read(text: str, preferred: str) -> None:
    verdict = llm.read_verdict(text)
    assert verdict is not None and verdict.preferred == preferred


@pytest.mark.parametrize(
    "text",
    [
        "", "A", '"A"', "Reply A is better.", "我认为第一个回答更好。", '{"reason": "clear", "verdict": "A',
        '{"reason": "clear"}', '{"verdict": "C"}', '{"verdict": ["A"]}', '{"verdict": "A or B"}', '{"a":' * 20000,
        '{"verdict": "A"} no: {"verdict": "B"}', '{"verdict": "A"} {"verdict": 1}', '{"verdict": "A", "verdict": "B"}',
        "[" * 5000 + "{" * 5000, '{"verdict": "A", "n": ' + "1" * 5000 + "}", '{"a' * 300_000 + '{"verdict": "A"}',
    ],
)  # fmt: skip
def test_anything_else_is_junk(text: str) -> None:
    assert llm.read_verdict(text) is None


def test_a_reason_that_is_no_text_is_left_out() -> None:
    assert llm.read_verdict('{"reason": 1, "verdict": "A"}') == llm.Verdict("A", "")


def test_a_reply_with_a_field_in_it_stays_what_it_is() -> None:
    prompt = [Message("system", "be brief"), Message("user", "{reply_b}?")]
    text = llm.question_text(
        "{conversation}|{reply_a}|{reply_b}", prompt, "{reply_b} {conversation}", "no"
    )
    assert text == "system: be brief\n\nuser: {reply_b}?|{reply_b} {conversation}|no"


def test_the_built_in_question_shows_everything_and_is_asked_without_chance() -> None:
    text = llm.question_text(
        llm.built_in_template(), [Message("user", "why?")], "first!", "second!"
    )
    assert text.index("user: why?") < text.index("first!") < text.index("second!")
    config = LlmJudgeConfig(
        base_url="http://127.0.0.1/v1", model="m", response_format="json_schema"
    )
    body = llm.request_body(config, text)
    assert body["temperature"] == 0 and body["response_format"]["json_schema"]["schema"]["required"]
    plain = config.model_copy(update={"response_format": "text"})
    assert "response_format" not in llm.request_body(plain, text)
