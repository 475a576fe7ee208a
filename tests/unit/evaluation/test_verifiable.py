"""Verifiable prompts: each property by hand, bad files in a line, and the evaluate stage with
them.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.evaluation import VerifiableConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.verifiable import Requirements, VerifiablePrompts, check_reply
from rlhf_core.runtime.user_function import time_limit

PROMPT = [Message("user", "?")]
OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}}}
SCHEMA = OBJECT | {"$defs": {"n": {"type": "number"}}}


@pytest.mark.parametrize(
    ("require", "passes", "fails"),
    [
        ({"equals": "42"}, " 42\n", "42."),
        ({"equals": ["4", "four"]}, "four", "Four"),
        ({"contains": ["a", "b"]}, "ba", "aa"),
        ({"contains": "好"}, "你好", "您"),
        ({"excludes": ["sorry"]}, "yes", "I'm sorry"),
        ({"regex": r"^\d+$"}, "123", "12 3"),
        ({"not_regex": "(?i)as an ai"}, "hello", "As an AI"),
        ({"min_words": 3}, "one two three", "one two"),
        ({"max_words": 2}, "一二", "一二三"),
        ({"min_characters": 2, "max_characters": 3}, "abc", "abcd"),
        ({"json_schema": SCHEMA}, '{"a": 1}', '{"a": "1"}'),
        ({"json_schema": SCHEMA}, ' {"a": 1.5}\n', 'sure: {"a": 1}'),
        ({"json_schema": {"type": "array"}}, "[]", "[" * 100_000),
        ({"json_schema": {"type": "number"}}, "1", "NaN"),
        ({"json_schema": {"multipleOf": 0.5}}, "1", "1e999"),
        ({"json_schema": {"type": "integer"}}, "1", "1" * 5000),
    ],
)
def test_properties_by_hand(require: dict[str, Any], passes: str, fails: str) -> None:
    requirements = Requirements.model_validate(require)
    assert all(check_reply(requirements, PROMPT, passes, True, {}, 9).values())
    assert not all(check_reply(requirements, PROMPT, fails, True, {}, 9).values())


def test_an_end_is_required_or_forbidden() -> None:
    assert check_reply(Requirements(finished=True), PROMPT, "x", False, {}, 9) == {
        "finished": False
    }
    assert check_reply(Requirements(finished=False), PROMPT, "x", False, {}, 9) == {
        "finished": True
    }


@pytest.mark.parametrize(
    ("require", "message"),
    [
        ({}, "nothing is required"),
        ({"regex": "("}, "is no regular expression"),
        ({"json_schema": {"type": "thing"}}, "is no JSON schema"),
        (
            {"json_schema": {"$ref": "https://example.com/x.json"}},
            "refers to https://example.com/x.json, outside",
        ),
        (
            {"json_schema": {"$dynamicRef": "http://example.com/x"}},
            "refers to http://example.com/x, outside",
        ),
        (
            {"json_schema": {"properties": {"a": {"$ref": "#/none"}}}},
            "/none, which it does not define",
        ),
        ({"json_schema": {"$ref": "#"}}, "refers to itself without end"),
        ({"json_schema": {"pattern": "("}}, "is no JSON schema"),
        ({"regex": "a{99999999999999999999}"}, "is no regular expression"),
        ({"regex": "(" * 3000 + ")" * 3000}, "is no regular expression"),
        ({"max_word": 3}, "Extra inputs"),
        ({"contains": []}, "at least 1"),
        ({"min_words": "3"}, "valid integer"),
    ],
)
def test_requirements_that_make_no_sense_are_refused(require: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Requirements.model_validate(require)


def written(folder: Path, *lines: Any, functions: dict[str, str] | None = None) -> VerifiableConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checks.jsonl").write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n"
    )
    return VerifiableConfig(path="checks.jsonl", functions=functions or {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"checks.jsonl, line 2 is not JSON"),
        ("[" * 100_000, r"checks.jsonl, line 2 is not JSON"),
        ('{"prompt": "\\ud800", "require": {"equals": "x"}}', r"line 2: prompt\.0\.content: "),
        ({"prompt": "x"}, r"line 2: require: Field required"),
        ({"prompt": "x", "require": {}}, r"line 2: require: nothing is required of the reply"),
        (
            {"prompt": "", "require": {"equals": "x"}},
            r"line 2: prompt\.0\.content: String should have",
        ),
        (
            {"prompt": [{"role": "bot", "content": "x"}], "require": {"equals": "x"}},
            r"line 2: prompt\.0\.role: ",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "require": {"equals": "x"}},
            "must end with a user turn",
        ),
        (
            {"prompt": "x", "require": {"function": "f"}},
            "the function 'f' is not named in evaluate.verifiable.functi",
        ),
        ({"prompt": "x", "require": {"equals": "x"}, "category": "a.b"}, r"line 2: category"),
        ("[1]", r"line 2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    config = written(tmp_path, {"prompt": "x", "require": {"equals": "y"}}, line)
    with pytest.raises(DataError, match=message) as caught:
        VerifiablePrompts.load(config, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"correct evaluate\.verifiable\.path"):
        VerifiablePrompts.load(VerifiableConfig(path="gone.jsonl"), tmp_path)
    with pytest.raises(DataError, match="has no prompts"):
        VerifiablePrompts.load(written(tmp_path, "", ""), tmp_path)


def test_a_function_runs_only_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "rules_of_mine.py").write_text(
        "def polite(prompt, reply):\n    return prompt[-1]['role'] == 'user' and 'please' in reply\n\n\n"
        "def broken(prompt, reply):\n    raise KeyError(reply)\n"
    )
    lines = [
        {"prompt": "?", "require": {"function": "polite"}},
        {"prompt": "?", "require": {"function": "bad"}},
    ]
    functions = {"polite": "rules_of_mine:polite", "bad": "rules_of_mine:broken"}
    prompts = VerifiablePrompts.load(written(tmp_path, lines[0], functions=functions), tmp_path)
    assert prompts.check([Reply("yes, please", True)]).passed.tolist() == [True]
    assert prompts.check([Reply("yes", True)]).passed.tolist() == [False]
    broken = VerifiablePrompts.load(written(tmp_path, lines[1], functions=functions), tmp_path)
    with pytest.raises(
        DataError, match=r"the function bad .* raised KeyError: 'x' \(rules_of_mine.py, line 6\)"
    ):
        broken.check([Reply("x", True)])
    with pytest.raises(ConfigError, match=r"cannot import no_such_module"):
        VerifiablePrompts.load(
            written(tmp_path, lines[0], functions={"polite": "no_such_module:f"}), tmp_path
        )
    with pytest.raises(ValidationError, match=r"a function is written package\.module:function"):
        VerifiableConfig(path="x", functions={"f": "os.system('x')"})


def test_a_function_that_exits_or_hangs_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rules_that_end.py").write_text(
        "import time\n\n\ndef leave(prompt, reply):\n    raise SystemExit(3)\n\n\n"
        "def hang(prompt, reply):\n    try:\n        while True:\n            time.sleep(1)\n"
        "    except Exception:\n        return True\n"
    )
    (tmp_path / "module_that_exits.py").write_text("import sys\n\nsys.exit(0)\n")
    for name, message in (
        ("leave", r"leave of .* raised SystemExit: 3"),
        ("hang", r"function 'hang' did not end"),
    ):
        line = {"prompt": "?", "require": {"function": name}}
        config = written(tmp_path, line, functions={name: f"rules_that_end:{name}"})
        prompts = VerifiablePrompts.load(
            config.model_copy(update={"timeout_seconds": 0.1}), tmp_path
        )
        with pytest.raises(DataError, match=message):
            prompts.check([Reply("x", True)])
    with pytest.raises(ConfigError, match=r"cannot import module_that_exits \(SystemExit: 0\)"):
        VerifiablePrompts.load(
            written(tmp_path, line, functions={"hang": "module_that_exits:f"}), tmp_path
        )


@pytest.mark.parametrize(
    "require",
    [{"regex": "^(a+)+$"}, {"json_schema": {"pattern": "^(a+)+$"}}, {"not_regex": "(a|aa)+$"}],
)
def test_an_expression_that_backtracks_without_end_is_stopped(require: dict[str, Any]) -> None:
    text = "a" * 60 + "!"
    reply = json.dumps(text) if "json_schema" in require else text
    with pytest.raises(
        DataError,
        match=r"evaluate\.verifiable: .* did not end within 0\.1 s on a reply of 6\d char",
    ):
        check_reply(Requirements.model_validate(require), PROMPT, reply, True, {}, 0.1)


def test_a_limit_of_time_leaves_the_handler_of_the_process_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(9):
        pass
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )


def test_metrics_by_hand(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        {"prompt": "1", "require": {"equals": "1"}, "category": "sums"},
        {"prompt": "2", "require": {"equals": "2", "max_words": 1}, "category": "sums"},
        {"prompt": "3", "require": {"max_words": 1}},
        {"prompt": "4", "require": {"equals": "4"}},
    )
    prompts = VerifiablePrompts.load(config, tmp_path)
    sft = prompts.check([Reply(text, True) for text in ("1", "1", "3", "x")])
    policy = prompts.check([Reply(text, True) for text in ("1", "2", "a b", "4")])
    metrics = prompts.metrics(sft, policy, 100, 1)
    assert metrics["sft"] == {"passed": 0.5, "property": {"equals": pytest.approx(1 / 3), "max_words": 1.0},
                              "category": {"sums": 0.5}}  # fmt: skip
    assert metrics["policy"]["passed"] == 0.75 and metrics["policy"]["category"] == {"sums": 1.0}
    # One pair ties, two are won, one is lost.
    assert metrics["comparison"]["win_rate"] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert metrics["comparison"]["clusters"] == 4
    rows = prompts.rows(sft, policy)
    assert rows[2]["policy_lacks"] == ["max_words"] and rows[2]["sft_lacks"] == []


def test_lines_that_ask_the_same_are_one_question(tmp_path: Path) -> None:
    lines = [{"prompt": f"say {i % 2}", "require": {"max_words": 1 + i}} for i in range(6)]
    prompts = VerifiablePrompts.load(written(tmp_path, *lines), tmp_path)
    sft, policy = (prompts.check([Reply(text, True)] * 6) for text in (" ".join("abcdefgh"), "a"))
    comparison = prompts.metrics(sft, policy, 100, 1)["comparison"]
    assert (comparison["prompts"], comparison["clusters"], comparison["clusters_won"]) == (6, 2, 2)


def test_a_system_prompt_that_lines_share_makes_them_no_question(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    lines = [
        {
            "prompt": [system, {"role": "user", "content": f"say {i % 3}"}],
            "require": {"max_words": 1},
        }
        for i in range(6)
    ]
    other = {"role": "system", "content": "Be brief."}
    lines.append(
        {"prompt": [other, {"role": "user", "content": "say 0"}], "require": {"max_words": 1}}
    )
    prompts = VerifiablePrompts.load(written(tmp_path, *lines), tmp_path)
    assert prompts.clusters.tolist() == [0, 1, 2, 0, 1, 2, 0]
