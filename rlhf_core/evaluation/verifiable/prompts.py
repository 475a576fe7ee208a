"""The user's verifiable prompts: read from a file, and measured by what two models reply to them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, field_validator

from rlhf_core.config.evaluation import VerifiableConfig
from rlhf_core.config.model import Strict
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import Comparison, compare_outcomes
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.evaluation.verifiable.requirements import CheckFunction, Requirements, check_reply
from rlhf_core.runtime.user_function import load_function
from rlhf_core.storage.files import split_json_lines

SIGNATURE = "f(prompt, reply) -> bool"


class Turn(Strict):
    """One turn of a prompt that is given as messages."""

    role: str = Field(pattern="^(system|user|assistant)$")
    content: str = Field(min_length=1)


class VerifiableLine(Strict):
    """One line of the file: a text or messages, what the reply must be, and a category for the metrics."""

    prompt: tuple[Turn, ...] = Field(strict=False, min_length=1)
    require: Requirements
    category: str = Field(default="", pattern=r"^[\w -]*$")

    @field_validator("prompt")
    @classmethod
    def _a_reply_is_due(cls, prompt: tuple[Turn, ...]) -> tuple[Turn, ...]:
        if prompt[-1].role != "user":
            raise ValueError("a prompt must end with a user turn")
        return prompt

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_is_the_users(cls, prompt: Any) -> Any:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def messages(self) -> list[Message]:
        """The prompt as messages."""
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
        by_category, by_property = defaultdict(list), defaultdict(list)
        for category, result in zip(categories, self.results, strict=True):
            by_category[category].append(all(result.values()))
            for name, holds in result.items():
                by_property[name].append(holds)
        return {
            "passed": float(self.passed.mean()),
            "property": {name: float(np.mean(values)) for name, values in sorted(by_property.items())},
            "category": {name: float(np.mean(values)) for name, values in sorted(by_category.items()) if name},
        }


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
        functions = {
            name: load_function(target, workspace, f"evaluate.verifiable.functions.{name}", SIGNATURE)
            for name, target in config.functions.items()
        }
        return cls(read_lines(workspace / config.path, functions), functions, config.timeout_seconds)

    @property
    def prompts(self) -> list[list[Message]]:
        """The prompts as messages."""
        return [line.messages() for line in self.lines]

    def check(self, replies: Sequence[Reply]) -> CheckedReplies:
        """Check one reply per prompt.

        Raises:
            DataError: A function raised, or a check did not end in time.
        """
        results = [
            check_reply(
                line.require,
                line.messages(),
                reply.text,
                reply.finished,
                self.functions or {},
                self.timeout_seconds,
            )
            for line, reply in zip(self.lines, replies, strict=True)
        ]
        return CheckedReplies(replies, results)

    def metrics(self, sft: CheckedReplies, policy: CheckedReplies, bootstrap: int, seed: int) -> dict[str, Any]:
        """Return ``verifiable`` of ``metrics/evaluation.json``; see docs/judges.md."""
        categories = [line.category for line in self.lines]
        return {
            "prompts": len(self.lines),
            "sft": sft.metrics(categories),
            "policy": policy.metrics(categories),
            "comparison": self._comparison(sft, policy, bootstrap, seed).as_dict(),
        }

    def _comparison(self, sft: CheckedReplies, policy: CheckedReplies, bootstrap: int, seed: int) -> Comparison:
        """The policy wins where it alone passes."""
        outcomes = 0.5 + (policy.passed.astype(float) - sft.passed.astype(float)) / 2
        return compare_outcomes(outcomes.tolist(), bootstrap, seed)

    def rows(self, sft: CheckedReplies, policy: CheckedReplies) -> list[dict[str, Any]]:
        """Return one row per prompt with both replies, and the properties that each lacks."""
        rows = []
        for i, line in enumerate(self.lines):
            row: dict[str, Any] = {"prompt": [vars(turn) for turn in line.messages()], "category": line.category}
            for name, side in (("sft", sft), ("policy", policy)):
                lacks = [key for key, holds in side.results[i].items() if not holds]
                row |= {f"{name}_reply": side.replies[i].text, f"{name}_lacks": lacks}
            rows.append(row)
        return rows


def read_lines(path: Path, functions: Mapping[str, CheckFunction]) -> list[VerifiableLine]:
    """Read the lines of a file of verifiable prompts.

    Raises:
        DataError: It is missing or empty, or a line is no verifiable prompt; the message names the first.
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
            raise DataError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error})") from error
        if line.require.function is not None and line.require.function not in functions:
            raise DataError(
                f"{where}: the function {line.require.function!r} is not named in evaluate.verifiable.functions"
            )
        lines.append(line)
    if not lines:
        raise DataError(f"{path} has no prompts; give it lines, or take evaluate.verifiable out")
    return lines
