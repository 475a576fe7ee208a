"""Chat requests and responses as OpenAI's clients write and read them, and their limits."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError

from rlhf_core.config.model import Strict
from rlhf_core.data.schema import Message
from rlhf_core.data.text import has_visible_text
from rlhf_core.runtime.untrusted_text import without_json_strings

# Characters that no token of a common vocabulary has. Messages with more of them for each token
# that fits are refused before they are tokenised, which takes a second per million characters and
# holds up other requests.
MAX_TOKEN_CHARACTERS = 256


@dataclass(frozen=True)
class ServingLimits:
    """Limits of each request and of all of them together.

    Attributes:
        max_prompt_tokens: Tokens of the messages as the chat template writes them; None: what the
            model takes.
        max_new_tokens: Tokens of a reply that a request may ask for.
        max_concurrent: Replies that are sampled at the same time. Further requests get status 429.
        timeout_seconds: After so many seconds a request ends with an error, checked at every token.
    """

    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_concurrent: int = 8
    timeout_seconds: float = 120.0


INVALID_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        status: The HTTP status.
        message: What is wrong and what to do, in one line.
        param: The parameter that is wrong, as in ``messages[0].role``.
        code: A short name of the error for programs.
        kind: OpenAI's class of errors.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = (
            status,
            message,
            param,
            code,
            kind,
        )
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


MAX_STOP_STRINGS = 4
SEEDS = 2**63  # random streams take any of them
MAX_NUMBER_CHARACTERS = 1_000  # a number of millions of digits is read for seconds
LOOKED_AT_CHARACTERS = 10_000  # of a turn, for something to be seen
ECHOED_CHARACTERS = 40
# What a request has at most: values that JSON writes apart, parameters or fields of a turn, turns,
# parts of a turn.
MAX_VALUES, MAX_FIELDS, MAX_TURNS, MAX_PARTS = 20_000, 64, 1_000, 1_000
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Parameters that change nothing here.
IGNORED = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
# Parameters that are not supported, with the values by which clients leave them off.
LEFT_OFF: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# The same of a turn: what a client has of an earlier reply, and sends back.
TURN_LEFT_OFF = ("annotations", "audio", "function_call", "refusal", "tool_calls")


def _equals(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same; for Python ``true`` is 1, too."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _joined_parts(content: Any) -> Any:
    """Return the text of a list of text parts; other contents as they are."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                "must be a text or a list of text parts; images, sounds and files are not supported"
            )
        texts.append(part["text"])
    return "".join(texts)


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class ChatTurn(Strict):
    """A turn of the conversation. ``developer`` is OpenAI's newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_parts)]
    name: str | None = None

    def message(self) -> Message:
        """The turn as the policy was trained on it."""
        return Message("system" if self.role == "developer" else self.role, self.content)


class StreamOptions(Strict):
    """``include_usage`` adds a last event with the token counts.

    ``include_obfuscation`` changes nothing here.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(Strict):
    """A conversation to be answered, and how. What is None is as the policy was judged.

    A ``temperature`` of 0 always takes the most likely token. The same ``seed`` gives the same
    reply of the same model.
    """

    messages: list[ChatTurn]
    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=10)
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    seed: int | None = Field(default=None, ge=-SEEDS, lt=SEEDS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_as_list),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def dialogue(self) -> list[Message]:
        """The turns as the policy was trained on them."""
        return [turn.message() for turn in self.messages]

    @property
    def requested_tokens(self) -> int | None:
        """How long the reply may be, None where the request leaves it open."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        ApiError: It is not JSON, or something in it is wrong or not supported; the first problem is
            named.
    """
    fields = _json_object(body)
    _require_bounded(fields)
    for name in sorted(set(fields) - set(ChatRequest.model_fields)):
        value = fields.pop(name)
        if (
            name in IGNORED
            or value is None
            or any(_equals(value, off) for off in LEFT_OFF.get(name, ()))
        ):
            continue
        known = (
            f"{name} is not supported here"
            if name in LEFT_OFF
            else f"there is no parameter {shown(name)}"
        )
        raise ApiError(
            400,
            f"{known}; leave it out",
            param=name[:ECHOED_CHARACTERS],
            code="unsupported_parameter",
        )
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from error
    _check_turns(request.messages)
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400, "stream_options is for streams; set stream to true too", param="stream_options"
        )
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        message = "max_tokens and max_completion_tokens differ; give one of them"
        raise ApiError(400, message, param="max_completion_tokens")
    return request


def _json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``.

    NaN and infinities are not JSON, and half of a surrogate pair is no character.
    """
    try:
        text = body.decode(
            json.detect_encoding(body)
        )  # json itself lets halves of surrogate pairs pass
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request is not JSON: {error}", code="invalid_json") from error
    if _values(text) > MAX_VALUES and _values(without_json_strings(text)) > MAX_VALUES:
        raise ApiError(
            400, f"the request has more than {MAX_VALUES} values; shorten it", code="invalid_json"
        )
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=lambda digits: float(_number(digits)),
            parse_int=lambda digits: int(_number(digits)),
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        value = _without_nulls(value)
    except UnicodeEncodeError as error:
        message = "the request contains half of a surrogate pair, which is no character; send whole characters"
        raise ApiError(400, message, code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the request is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the request is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the request must be a JSON object with messages", code="invalid_json")
    turns = value.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        for name in set(TURN_LEFT_OFF) & set(turn if isinstance(turn, dict) else ()):
            if turn[name] in ([], ""):
                del turn[name]
    return value


def _values(text: str) -> int:
    """At least as many as the values of a JSON text, where it has no strings."""
    return text.count(",") + text.count("[") + text.count("{")


def _without_nulls(value: Any) -> Any:
    """Drop the fields that are null, on every level: some clients write null for "left out"."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _require_bounded(fields: dict[str, Any]) -> None:
    """Raise ``ApiError`` where too much is wrong to name all of it in reasonable time."""
    turns = fields.get("messages")
    turns = turns if isinstance(turns, list) else []
    if len(turns) > MAX_TURNS:
        raise ApiError(
            400, f"messages has {len(turns)} turns; this server reads {MAX_TURNS}", param="messages"
        )
    for name, value, most in [
        ("the request", fields, MAX_FIELDS),
        ("stop", fields.get("stop"), MAX_STOP_STRINGS),
    ]:
        if isinstance(value, dict | list) and len(value) > most:
            raise ApiError(
                400, f"{name} has {len(value)} entries, which may be at most {most}", param=name
            )
    for number, turn in enumerate(turns):
        path = f"messages[{number}]"
        if not isinstance(turn, dict):
            raise ApiError(
                400, f"{path} must be a turn {{role, content}}", param=path, code="invalid_value"
            )
        parts = turn.get("content")
        if len(turn) > MAX_FIELDS or (isinstance(parts, list) and len(parts) > MAX_PARTS):
            raise ApiError(
                400, f"{path} has too many fields or parts", param=path, code="invalid_value"
            )


def shown(value: object) -> str:
    """``value`` as a message quotes it: not more than the beginning of what a client has sent."""
    text = repr(value)
    return text if len(text) <= ECHOED_CHARACTERS else f"{text[: ECHOED_CHARACTERS - 1]}…"


def _number(digits: str) -> str:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"a number has {len(digits)} characters")
    return digits


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _first_problem(error: ValidationError) -> ApiError:
    """The first problem of ``error`` with the path of its parameter, as in ``messages[0].role``."""
    problem = error.errors(include_url=False)[0]
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + str(part)[:ECHOED_CHARACTERS]
    if problem["type"] == "missing":
        return ApiError(400, f"{path} is missing; add it", param=path, code="missing_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"there is no parameter {path!r}; leave it out",
            param=path,
            code="unsupported_parameter",
        )
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    echo = (
        f" (got {value!r})"
        if isinstance(value, str | int | float) and len(repr(value)) < ECHOED_CHARACTERS
        else ""
    )
    return ApiError(
        400, f"{path}: {message[0].lower()}{message[1:]}{echo}", param=path, code="invalid_value"
    )


def _check_turns(turns: list[ChatTurn]) -> None:
    """Require the order of roles that the policy was trained on.

    The system comes first if at all, then user and assistant.
    """
    if not turns:
        raise ApiError(
            400, "messages is empty; give at least one turn {role, content}", param="messages"
        )
    before = ""
    for number, turn in enumerate(turns):
        path, role = f"messages[{number}]", turn.message().role
        problem = ""
        if role == "system" and number > 0:
            problem = f"is a {turn.role} turn; only the first turn may be one"
        elif role == "assistant" and before in ("", "system"):
            problem = "is an assistant turn; a conversation begins with the user"
        elif role == before:
            problem = f"is another {role} turn; user and assistant take turns, so join the two"
        if problem:
            raise ApiError(400, f"{path} {problem}", param=f"{path}.role")
        before = role
    if before != "user":
        raise ApiError(
            400, f"messages must end with a turn of role user, not {before}", param="messages"
        )
    for number, turn in enumerate(turns):
        short = len(turn.content) <= LOOKED_AT_CHARACTERS
        if turn.role == "user" and short and not has_visible_text(turn.content):
            raise ApiError(
                400, f"messages[{number}].content is empty", param=f"messages[{number}].content"
            )


@dataclass(frozen=True)
class CompletionId:
    """What all parts of one response share.

    Attributes:
        model: The revision that answers.
        created: Seconds since 1970.
    """

    model: str
    created: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def completion(self, text: str, finish_reason: str, usage: Mapping[str, int]) -> dict[str, Any]:
        """The whole response."""
        said = {"message": {"role": "assistant", "content": text}}
        return self.response("chat.completion", said, finish_reason) | {"usage": usage}

    def response(
        self, kind: str, said: Mapping[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        """An object of OpenAI's, of the whole response or of a part that is streamed."""
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def token_usage(prompt: int, reply: int) -> dict[str, int]:
    """Token counts of a request. The end marker of the reply counts."""
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
