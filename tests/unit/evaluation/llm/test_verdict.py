"""What counts as a verdict of a language model, and what is junk."""

from __future__ import annotations

import pytest

from rlhf_core.config.evaluation import LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.evaluation.judges.llm.judge import Verdict, built_in_template, question_text, read_verdict, request_body


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
    verdict = read_verdict(text)
    assert verdict is not None and verdict.preferred == preferred


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "Reply A is better.",
        "我认为第一个回答更好。",
        '{"reason": "clear", "verdict": "A',
        '{"reason": "clear"}',
        '{"verdict": "C"}',
        '{"verdict": ["A"]}',
        '{"verdict": "A or B"}',
        '{"verdict": "A"} no: {"verdict": "B"}',
        '{"verdict": "A"} {"verdict": 1}',
        '"A"',
        "[" * 5000 + "{" * 5000,
        '{"a":' * 20000,
        '{"verdict": "A", "verdict": "B"}',
        '{"verdict": "A", "n": ' + "1" * 5000 + "}",
        '{"a' * 300_000 + '{"verdict": "A"}',
    ],
)
def test_anything_else_is_junk(text: str) -> None:
    assert read_verdict(text) is None


def test_a_reason_that_is_no_text_is_left_out() -> None:
    assert read_verdict('{"reason": 1, "verdict": "A"}') == Verdict("A", "")


def test_a_reply_with_a_field_in_it_stays_what_it_is() -> None:
    prompt = [Message("system", "be brief"), Message("user", "{reply_b}?")]
    text = question_text("{conversation}|{reply_a}|{reply_b}", prompt, "{reply_b} {conversation}", "no")
    assert text == "system: be brief\n\nuser: {reply_b}?|{reply_b} {conversation}|no"


def test_the_built_in_question_shows_everything_and_is_asked_without_chance() -> None:
    text = question_text(built_in_template(), [Message("user", "why?")], "first!", "second!")
    assert text.index("user: why?") < text.index("first!") < text.index("second!")
    config = LlmJudgeConfig(base_url="http://127.0.0.1/v1", model="m", response_format="json_schema")
    body = request_body(config, text)
    assert body["temperature"] == 0 and body["response_format"]["json_schema"]["schema"]["required"]
    plain = config.model_copy(update={"response_format": "text"})
    assert "response_format" not in request_body(plain, text)
