"""Prompts whose replies a program can check."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jsonschema import Draft202012Validator, SchemaError
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rlhf_core.config.evaluation import VerifiableConfig
from rlhf_core.config.model import Strict
from rlhf_core.data.schema import Message
from rlhf_core.data.statistics import cluster_codes
from rlhf_core.data.text import comparable, split_words
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare_outcomes
from rlhf_core.evaluation.replies import Reply
from rlhf_core.runtime.user_function import (
    TimeLimitExceeded,
    describe_failure,
    load_function,
    time_limit,
)
from rlhf_core.storage.files import split_json_lines

CheckFunction = Callable[[list[dict[str, str]], str], object]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Pattern = Annotated[str, AfterValidator(_pattern)]
Texts = Annotated[
    tuple[str, ...], Field(strict=False, min_length=1), BeforeValidator(_one_or_several)
]


class Requirements(Strict):
    """Properties of a reply, all of which it must have.

    White space around the reply does not count.

    Attributes:
        equals: The reply is this text, or one of several.
        contains: All of these are in the reply.
        excludes: None of these is.
        regex: The expression matches somewhere; ``(?i)`` ignores case, ``^`` and ``$`` are the
            reply's ends.
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

    @model_validator(mode="after")
    def _something_is_required(self) -> Requirements:
        if not self.given():
            raise ValueError("nothing is required of the reply")
        if self.json_schema is not None:
            _require_usable(self.json_schema)
        return self

    def given(self) -> dict[str, Any]:
        """Return the properties that are required, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}


def has_property(name: str, required: Any, reply: str) -> bool:
    """Return whether a reply has a property that its text alone shows."""
    match name:
        case "equals":
            return reply in required
        case "contains":
            return all(text in reply for text in required)
        case "excludes":
            return not any(text in reply for text in required)
        case "regex":
            return re.search(required, reply) is not None
        case "not_regex":
            return re.search(required, reply) is None
        case "min_words":
            return len(split_words(reply)) >= required
        case "max_words":
            return len(split_words(reply)) <= required
        case "min_characters":
            return len(reply) >= required
        case "max_characters":
            return len(reply) <= required
        case "json_schema":
            return _is_valid_json(required, reply)
        case _:
            raise ValueError(f"no property is called {name}")


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
                    results[name] = has_property(name, value, text.strip())
        except TimeLimitExceeded as error:
            raise DataError(
                f"evaluate.verifiable: {name} {value!r:.80} did not end within {seconds:g} s on a reply of {len(text)} "
                "characters; correct it, or raise evaluate.verifiable.timeout_seconds"
            ) from error
    return results


def _function_says(
    function: CheckFunction, name: str, prompt: Sequence[Message], text: str
) -> bool:
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt]
    try:
        return bool(function(turns, text))
    except (Exception, SystemExit) as error:
        raise DataError(
            f"the function {name} of evaluate.verifiable {describe_failure(error)}"
        ) from error


def _require_usable(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a schema that cannot be applied to every reply."""
    references = list(_references(schema))
    foreign = [ref for ref in references if not ref.startswith("#")]
    if foreign:
        raise ValueError(
            f"json_schema refers to {foreign[0]}, outside of itself; nothing is fetched"
        )
    try:
        Draft202012Validator.check_schema(schema)
        resource = DRAFT202012.create_resource(schema)
        address = resource.id() or ""
        resolver = Registry().with_resource(address, resource).resolver(address)
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
    """Yield all ``$ref`` and ``$dynamicRef`` of a schema."""
    values: Iterable[Any] = ()
    if isinstance(schema, dict):
        values = schema.values()
        for key in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(key), str):
                yield schema[key]
    elif isinstance(schema, list):
        values = schema
    for value in values:
        yield from _references(value)


def _is_valid_json(schema: Mapping[str, Any], reply: str) -> bool:
    try:
        value = json.loads(reply, parse_constant=_refuse)
        return bool(Draft202012Validator(schema).is_valid(value))
    # OverflowError: a number that is too large for a float.
    except (ValueError, RecursionError, OverflowError):
        return False


def _refuse(constant: str) -> None:
    # Python reads and writes NaN and Infinity all the same.
    raise ValueError(f"{constant} is not JSON")


SIGNATURE = "f(prompt, reply) -> bool"


class Turn(Strict):
    """One turn of a prompt that is given as messages."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: str = Field(min_length=1)


def _as_turns(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value


def _ends_with_user(prompt: tuple[Turn, ...]) -> tuple[Turn, ...]:
    if prompt[-1].role != "user":
        raise ValueError("a prompt must end with a user turn")
    return prompt


class VerifiableLine(Strict):
    """One line of the file: a prompt, what its reply must be, and a category for the metrics."""

    prompt: Annotated[
        tuple[Turn, ...],
        Field(strict=False, min_length=1),
        AfterValidator(_ends_with_user),
        BeforeValidator(_as_turns),
    ]
    require: Requirements
    category: str = Field(default="", pattern=r"^[\w -]*$")

    def messages(self) -> list[Message]:
        """Return the prompt as messages."""
        return [Message(turn.role, turn.content) for turn in self.prompt]


@dataclass(frozen=True)
class CheckedReplies:
    """Whether each reply of a model has each property that is required of it.

    Attributes:
        replies: One per prompt.
        results: By required property whether the reply has it, one per prompt.
    """

    replies: Sequence[Reply]
    results: Sequence[Mapping[str, bool]]

    @property
    def passed(self) -> np.ndarray:
        """Whether each reply has all of them (n,)."""
        return np.array([all(result.values()) for result in self.results])

    def metrics(self, categories: Sequence[str]) -> dict[str, Any]:
        """Return the share of replies that pass, in all, by category, and for each property."""
        by_category = defaultdict(list)
        by_property = defaultdict(list)
        for category, result in zip(categories, self.results, strict=True):
            by_category[category].append(all(result.values()))
            for name, holds in result.items():
                by_property[name].append(holds)
        by_category.pop("", None)
        return {
            "passed": float(self.passed.mean()),
            "property": _shares(by_property),
            "category": _shares(by_category),
        }


def _shares(groups: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    return {name: float(np.mean(groups[name])) for name in sorted(groups)}


@dataclass(frozen=True)
class VerifiablePrompts:
    """Prompts with required properties of the reply, and the functions that these name."""

    lines: Sequence[VerifiableLine] = ()
    functions: Mapping[str, CheckFunction] | None = None
    timeout_seconds: float = 60.0

    @classmethod
    def load(cls, config: VerifiableConfig | None, workspace: Path) -> VerifiablePrompts:
        """Read the file and import the functions; none without settings.

        Raises:
            DataError: The file is missing, empty, or a line of it is no verifiable prompt.
            ConfigError: A function cannot be imported.
        """
        if config is None:
            return cls()
        functions = {}
        for name, target in config.functions.items():
            setting = f"evaluate.verifiable.functions.{name}"
            functions[name] = load_function(target, workspace, setting, SIGNATURE)
        lines = read_lines(workspace / config.path, functions)
        return cls(lines, functions, config.timeout_seconds)

    @property
    def prompts(self) -> list[list[Message]]:
        """The prompts as messages."""
        return [line.messages() for line in self.lines]

    @property
    def clusters(self) -> np.ndarray:
        """The cluster of each prompt: lines with the same first turn ask the same.

        What they require does not count, nor do system turns.
        """
        questions = []
        for line in self.lines:
            first = next(turn for turn in line.prompt if turn.role != "system")
            questions.append(comparable(first.content))
        return cluster_codes(questions)

    def check(self, replies: Sequence[Reply]) -> CheckedReplies:
        """Check one reply per prompt.

        Raises:
            DataError: A function raised, or a check did not end in time.
        """
        known = self.functions or {}
        seconds = self.timeout_seconds
        results = []
        for line, reply in zip(self.lines, replies, strict=True):
            result = check_reply(
                line.require, line.messages(), reply.text, reply.finished, known, seconds
            )
            results.append(result)
        return CheckedReplies(replies, results)

    def metrics(
        self, sft: CheckedReplies, policy: CheckedReplies, bootstrap: int, seed: int
    ) -> dict[str, Any]:
        """Return ``verifiable`` of ``metrics/evaluation.json``; see docs/judges.md."""
        categories = [line.category for line in self.lines]
        # Won is where the policy alone passes.
        won = 0.5 + (policy.passed.astype(float) - sft.passed.astype(float)) / 2
        return {
            "prompts": len(self.lines),
            "sft": sft.metrics(categories),
            "policy": policy.metrics(categories),
            "comparison": compare_outcomes(won, bootstrap, seed, clusters=self.clusters),
        }

    def rows(self, sft: CheckedReplies, policy: CheckedReplies) -> list[dict[str, Any]]:
        """Return one row per prompt with both replies, and the properties that each lacks."""
        rows = []
        for i, line in enumerate(self.lines):
            turns = [vars(turn) for turn in line.messages()]
            row: dict[str, Any] = {"prompt": turns, "category": line.category}
            for name, side in (("sft", sft), ("policy", policy)):
                lacks = [key for key, holds in side.results[i].items() if not holds]
                row |= {f"{name}_reply": side.replies[i].text, f"{name}_lacks": lacks}
            rows.append(row)
        return rows


def read_lines(path: Path, functions: Mapping[str, CheckFunction]) -> list[VerifiableLine]:
    """Read the lines of a file of verifiable prompts.

    Raises:
        DataError: It is missing or empty, or a line is no verifiable prompt; the message names the
            first.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; correct evaluate.verifiable.path") from error
    lines = []
    for number, text in enumerate(split_json_lines(content), start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = VerifiableLine.model_validate(json.loads(text))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise DataError(
                f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error})") from error
        function = line.require.function
        if function is not None and function not in functions:
            raise DataError(
                f"{where}: the function {function!r} is not named in evaluate.verifiable.functions"
            )
        lines.append(line)
    if not lines:
        raise DataError(f"{path} has no prompts; give it lines, or take evaluate.verifiable out")
    return lines
