"""What a reply must be: the properties that a line of the file may require, and whether a reply has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from jsonschema import Draft202012Validator, SchemaError
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rlhf_core.config.model import Strict
from rlhf_core.data.schema import Message
from rlhf_core.data.text import split_words
from rlhf_core.errors import DataError
from rlhf_core.runtime.user_function import TimeLimitExceeded, describe_failure, time_limit

CheckFunction = Callable[[list[dict[str, str]], str], object]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Pattern = Annotated[str, AfterValidator(_pattern)]
Texts = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Requirements(Strict):
    """Properties of a reply; all that are given must hold. White space around the reply does not count.

    Attributes:
        equals: The reply is this text, or one of several.
        contains: All of these are in the reply.
        excludes: None of these is.
        regex: The expression matches somewhere; ``(?i)`` ignores case, ``^`` and ``$`` are the reply's ends.
        not_regex: It matches nowhere.
        min_words: At least so many words, as the metric ``words`` counts them.
        max_words: At most so many.
        min_characters: At least so many characters.
        max_characters: At most so many.
        json_schema: The reply is JSON that the schema (draft 2020-12) allows.
        finished: Whether the reply must have ended by itself.
        function: The function of that name in ``evaluate.verifiable.functions`` returns true.
    """

    equals: Texts | None = None
    contains: Texts | None = None
    excludes: Texts | None = None
    regex: Pattern | None = None
    not_regex: Pattern | None = None
    min_words: PositiveInt | None = None
    max_words: NonNegativeInt | None = None
    min_characters: PositiveInt | None = None
    max_characters: NonNegativeInt | None = None
    json_schema: dict[str, Any] | None = None
    finished: bool | None = None
    function: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_text_is_a_list(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: _texts(v) if name in ("equals", "contains", "excludes") else v for name, v in values.items()}

    @model_validator(mode="after")
    def _something_is_required(self) -> Requirements:
        if not self.given():
            raise ValueError("nothing is required of the reply")
        if self.json_schema is not None:
            _require_usable(self.json_schema)
        return self

    def given(self) -> dict[str, Any]:
        """The properties that are required, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


CHECKS: Mapping[str, Callable[[Any, str], bool]] = {
    "equals": lambda texts, reply: reply in texts,
    "contains": lambda texts, reply: all(text in reply for text in texts),
    "excludes": lambda texts, reply: not any(text in reply for text in texts),
    "regex": lambda pattern, reply: re.search(pattern, reply) is not None,
    "not_regex": lambda pattern, reply: re.search(pattern, reply) is None,
    "min_words": lambda count, reply: len(split_words(reply)) >= count,
    "max_words": lambda count, reply: len(split_words(reply)) <= count,
    "min_characters": lambda count, reply: len(reply) >= count,
    "max_characters": lambda count, reply: len(reply) <= count,
    "json_schema": lambda schema, reply: _is_valid_json(schema, reply),
}


def check_reply(
    requirements: Requirements,
    prompt: Sequence[Message],
    text: str,
    finished: bool,
    functions: Mapping[str, CheckFunction],
    seconds: float,
) -> dict[str, bool]:
    """Return by required property whether the reply has it.

    Args:
        seconds: How long the check of one property may take.

    Raises:
        DataError: A function raised, or a check did not end in time.
    """
    results = {}
    for name, value in requirements.given().items():
        try:
            with time_limit(seconds):
                if name == "finished":
                    results[name] = finished == value
                elif name == "function":
                    results[name] = _function_says(functions[value], value, prompt, text)
                else:
                    results[name] = CHECKS[name](value, text.strip())
        except TimeLimitExceeded as error:
            raise DataError(
                f"evaluate.verifiable: {name} {value!r:.80} did not end within {seconds:g} s on a reply of {len(text)} "
                "characters; correct it, or raise evaluate.verifiable.timeout_seconds"
            ) from error
    return results


def _function_says(function: CheckFunction, name: str, prompt: Sequence[Message], text: str) -> bool:
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt]
    try:
        return bool(function(turns, text))
    except (Exception, SystemExit) as error:
        raise DataError(f"the function {name} of evaluate.verifiable {describe_failure(error)}") from error


def _require_usable(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a schema that cannot be applied to every reply."""
    references = list(_references(schema))
    foreign = [ref for ref in references if not ref.startswith("#")]
    if foreign:
        raise ValueError(f"json_schema refers to {foreign[0]}, outside of itself; nothing is fetched")
    try:
        Draft202012Validator.check_schema(schema)
        resource = DRAFT202012.create_resource(schema)
        resolver = Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or "")
        for reference in references:
            resolver.lookup(reference)
        Draft202012Validator(schema).is_valid(None)
    except SchemaError as error:
        raise ValueError(f"json_schema is no JSON schema: {error.message}") from error
    except Unresolvable as error:
        raise ValueError(f"json_schema refers to {error.ref}, which it does not define") from error
    except RecursionError as error:
        raise ValueError("json_schema refers to itself without end") from error


def _references(schema: Any) -> Iterator[str]:
    """All ``$ref`` and ``$dynamicRef`` of a schema."""
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for key in ("$ref", "$dynamicRef"):
        if isinstance(schema, dict) and isinstance(schema.get(key), str):
            yield schema[key]
    for value in values:
        yield from _references(value)


def _is_valid_json(schema: Mapping[str, Any], reply: str) -> bool:
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(reply, parse_constant=_refuse)))
    except (ValueError, RecursionError, OverflowError):  # OverflowError: of a number that is too large for a float
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")  # Python reads and writes NaN and Infinity all the same
