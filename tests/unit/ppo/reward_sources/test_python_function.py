"""Rule-based rewards: python functions found by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.reward_sources.functions import PythonFunction
from rlhf_core.ppo.reward_sources.source import SIGNATURE
from rlhf_core.runtime.user_function import load_function

from .conftest import Place

RULES = """
from helper_of_rules import WORTH

def words(prompts, replies):
    prompts[0].clear()
    return [WORTH * len(reply.split()) for reply in replies]

def asks(prompts, replies):
    return [float(prompt[-1]["role"] == "user") + len(prompt) for prompt in prompts]

def breaks(prompts, replies):
    return [1.0 / len(reply.split()) for reply in replies]

def leaves(prompts, replies):
    raise SystemExit(0)

def generator(prompts, replies):
    return (1.0 for _ in replies)

NUMBER = 3
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace with a module of its own; neither path nor modules stay behind."""
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "helper_of_rules.py").write_text("WORTH = 2\n")
    (tmp_path / "broken_rules.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def function(workspace: Path, name: str) -> PythonFunction:
    target = f"my_rules:{name}"
    return PythonFunction(
        load_function(target, workspace, "source 'f'", SIGNATURE), f"source 'f' ({target})"
    )


def test_a_function_of_the_workspace_scores_replies(place: Place, rules: Path) -> None:
    replies = place.replies(["red blue", "", "a b c"])
    assert function(rules, "words").rewards(replies).tolist() == [4.0, 0.0, 6.0]
    assert replies.prompts == [row.prompt for row in place.rows[:3]]


def test_a_function_sees_whole_dialogues(place: Place, rules: Path) -> None:
    assert function(rules, "asks").rewards(place.replies(["x"] * 4)).tolist() == [
        2.0,
        2.0,
        3.0,
        4.0,
    ]


def test_what_the_function_raises_names_type_and_line(place: Place, rules: Path) -> None:
    with pytest.raises(
        DataError, match=r"my_rules:breaks\) raised ZeroDivisionError: .*\(my_rules.py, line 12\)"
    ):
        function(rules, "breaks").rewards(place.replies(["red", ""]))


def test_a_function_that_ends_the_program_ends_no_stage(place: Place, rules: Path) -> None:
    with pytest.raises(DataError, match=r"my_rules:leaves\) raised SystemExit: 0 \(my_rules.py"):
        function(rules, "leaves").rewards(place.replies(["red"]))


def test_what_it_returns_is_checked(place: Place, rules: Path) -> None:
    with pytest.raises(DataError, match=r"my_rules:generator\) gave generator for scores; a list"):
        function(rules, "generator").rewards(place.replies(["red"]))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "no_rules_here:words",
            r"cannot import no_rules_here \(ModuleNotFoundError: .* on PYTHONPATH or in",
        ),
        ("broken_rules:words", r"cannot import broken_rules \(ZeroDivisionError"),
        ("my_rules:sentences", "sentences is nothing in my_rules"),
        ("my_rules:NUMBER", "NUMBER is a int in my_rules"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(rules: Path, target: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"source 'f': {expected}"):
        load_function(target, rules, "source 'f'", SIGNATURE)


def test_a_file_of_the_workspace_never_replaces_an_installed_module(rules: Path) -> None:
    (rules / "json.py").write_text("def dumps(prompts, replies): return 'mine'\n")
    assert load_function("json:dumps", rules, "f", SIGNATURE)([]) == "[]"
