"""Who may ask, and requests as OpenAI's API has them; what is wrong is said in one line."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError
from rlhf_core.serving.protocol import ApiError, parse_chat_request
from rlhf_extras.serving.access import checked_token, require_access


def test_only_loopback_needs_no_token() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert checked_token(None, host) is None and checked_token("", host) is None
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(ConfigError, match="set RLHF_SERVE_TOKEN"):
            checked_token(None, host)
        assert checked_token("secret", host) == "secret"
    for token in ("two words", "schlüssel", "line\nbreak"):
        with pytest.raises(ConfigError, match="use letters"):
            checked_token(token, "127.0.0.1")


def test_only_the_token_opens() -> None:
    for authorization in ("Bearer secret", "bearer  secret"):
        require_access("secret", authorization, "any.example")
    for refused in (None, "", "secret", "Basic secret", "Bearer", "Bearer secreT", "Bearer é"):
        with pytest.raises(ApiError) as error:
            require_access("secret", refused, "127.0.0.1")
        assert error.value.status == 401 and error.value.headers == {"WWW-Authenticate": "Bearer"}


def test_without_a_token_only_loopback_names_open() -> None:
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        require_access(None, None, host)
    for refused in ("rebound.example:8000", "", None, "127.0.0.1.example", "10.0.0.1", "[", "[::1"):
        with pytest.raises(ApiError, match="loopback only"):
            require_access(None, None, refused)


USER = {"role": "user", "content": "why?"}
ASSISTANT = {"role": "assistant", "content": "because"}


def parse(**fields: Any) -> Any:
    return parse_chat_request(json.dumps({"messages": [USER], **fields}).encode())


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse_chat_request(body)
    assert error.value.status == 400 and "\n" not in error.value.message
    return error.value


def test_a_request_without_settings_leaves_them_open() -> None:
    request = parse()
    assert request.dialogue == [Message("user", "why?")]
    settings = (
        request.temperature,
        request.top_p,
        request.requested_tokens,
        request.seed,
        request.stop,
    )
    assert settings == (None,) * 5 and not request.stream and not request.include_usage


def test_settings_are_read() -> None:
    request = parse(
        temperature=1, top_p=0.5, max_completion_tokens=7, seed=3, stop="\n", stream=True
    )
    assert (request.temperature, request.top_p, request.requested_tokens, request.seed) == (
        1.0,
        0.5,
        7,
        3,
    )
    assert request.stop == ["\n"] and request.stream


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    request = parse(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    )
    assert request.dialogue == [Message("system", "be brief"), Message("user", "why?")]


def test_parameters_at_the_values_that_leave_them_off_are_accepted() -> None:
    parse(
        n=1,
        user="u",
        frequency_penalty=0,
        presence_penalty=0.0,
        logprobs=None,
        tools=[],
        logit_bias={},
        stop=None,
    )
    parse(functions=[], function_call="none", reasoning_effort="none", verbosity="medium", seed=-1)
    parse(stream=True, stream_options={"include_obfuscation": False, "include_usage": True})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2 (got 3)"),
        ({"temperature": "1"}, "temperature", "valid number (got '1')"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than 0"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"n": 2}, "n", "n is not supported here"),
        ({"n": True}, "n", "n is not supported here"),
        (
            {"frequency_penalty": False},
            "frequency_penalty",
            "frequency_penalty is not supported here",
        ),
        ({"logprobs": 0}, "logprobs", "logprobs is not supported here"),
        ({"tools": [{}]}, "tools", "tools is not supported here"),
        ({"functions": [{}]}, "functions", "functions is not supported here"),
        (
            {"reasoning_effort": "high"},
            "reasoning_effort",
            "reasoning_effort is not supported here",
        ),
        ({"temprature": 1}, "temprature", "there is no parameter 'temprature'"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(json.dumps({"messages": [USER], **fields}).encode())
    assert error.param == param and words in error.message


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "messages is empty; give at least one turn"),
        (None, "messages", "missing"),
        ([{"role": "user"}], "messages[0].content", "messages[0].content is missing"),
        ([{**USER, "role": "tool"}], "messages[0].role", "(got 'tool')"),
        ([{**USER, "content": None}], "messages[0].content", "missing"),
        (
            [{**USER, "content": [{"type": "image_url"}]}],
            "messages[0].content",
            "images, sounds and files are not",
        ),
        ([{**USER, "content": " \u200b"}], "messages[0].content", "messages[0].content is empty"),
        ([ASSISTANT, USER], "messages[0].role", "a conversation begins with the user"),
        ([USER, ASSISTANT], "messages", "must end with a turn of role user, not assistant"),
        ([USER, USER], "messages[1].role", "another user turn"),
        (
            [USER, {"role": "system", "content": "x"}],
            "messages[1].role",
            "only the first turn may be one",
        ),
        (
            [{"role": "system", "content": "x"}],
            "messages",
            "must end with a turn of role user, not system",
        ),
    ],
)
def test_wrong_turns_are_named(messages: Any, param: str, words: str) -> None:
    error = refused(json.dumps({"messages": messages}).encode())
    assert error.param == param and words in error.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b'{"messages": [', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (
            b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
            "a finite number",
        ),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not JSON"),
        (
            '{"messages": [{"role": "user", "content": "\ud800"}]}'.encode(
                "utf-16-le", "surrogatepass"
            ),
            "not JSON",
        ),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}'.encode("utf-16"),
            "half of a surrogate pair",
        ),
        (b'{"a": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"{}", "messages is missing"),
    ],
)
def test_bodies_that_are_no_request_are_refused_in_one_line(body: bytes, words: str) -> None:
    assert words in refused(body).message


@pytest.mark.parametrize(
    "number", [b"0." + b"9" * 3_000_000, b"1" + b"0" * 3_000_000, b"1e" + b"0" * 3_000_000]
)
def test_a_number_of_millions_of_digits_costs_no_time(number: bytes) -> None:
    began = time.thread_time()
    assert "not JSON: a number has 300000" in refused(b'{"temperature": ' + number + b"}").message
    assert time.thread_time() - began < 0.5


def test_a_turn_of_millions_of_spaces_costs_no_time() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": " " * 3_000_000}]}).encode()
    began = time.thread_time()
    parse_chat_request(body)
    assert time.thread_time() - began < 0.5
