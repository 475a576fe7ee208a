"""A plugin that lacks a function of its door is refused where settings name it, in one line.

The line names plugin and function; without it the function would be missed hours later.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_distributions import Install, example
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.doctor import workspace_checks
from flows.commands.machine_checks import FAIL
from flows.registry.policies import RegistryPolicy
from rlhf_core import plugins
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.plugged import AddedEvaluation, plugged_judges
from rlhf_core.models.readers import ModelReader
from rlhf_core.plugins import COMMANDS, FUNCTIONS, PluginError, load_plugin
from rlhf_core.tracking.run_loggers import RunLogger

SETTINGS = example("A sampler and a reward source")
FORMAT = """
from rlhf_core.data.readers.formats import PAIRS, Format
def parse(record, kind, options): ...
mine = Format("mine", PAIRS, matches=len, parse=parse)
"""
LOGGER = "".join(f"    def {name}(self, *given): ...\n" for name in FUNCTIONS[plugins.RUN_LOGGERS])
EVALUATION = "".join(
    f"    def {name}(self, *given): ...\n" for name in FUNCTIONS[plugins.EVALUATIONS]
)
POLICY = "".join(f"def {name}(*given): ...\n" for name in FUNCTIONS[plugins.REGISTRY_POLICIES])
READER = "".join(f"def {name}(*given): ...\n" for name in FUNCTIONS[plugins.MODEL_READERS])


def params(**sections: Any) -> dict[str, Any]:
    return sections


CORRECTED = {"importance_sampling_correction": {"mode": "always"}}
FILES = {"preferences": [{"path": "rows.jsonl", "format": "mine"}]}
# By door: a plugin that is whole, its object, the settings that name it, and what is taken out.
DOORS = {
    "reader": (
        plugins.READERS,
        FORMAT,
        ":mine",
        params(collect={"source": "files", "files": FILES}),
    ),
    "model reader": (plugins.MODEL_READERS, READER, "", params(base={"source": "model.mine"})),
    "sampler": (
        plugins.SAMPLERS,
        SETTINGS.replace('"recorded"', '"mine"'),
        ":RecordedSampler",
        params(ppo={"sampler": {"kind": "mine"}} | CORRECTED),
    ),
    "reward source": (
        plugins.REWARD_SOURCES,
        SETTINGS.replace('"brevity"', '"mine"'),
        ":BrevitySource",
        params(ppo={"reward": {"sources": [{"kind": "mine"}]}}),
    ),
    "judge": (
        plugins.JUDGES,
        "class mine:\n    name = 'mine'\n    absolute_tie = 0.0\n    def __init__(self, *_): ...\n"
        "    def score(self, prompts, replies): ...\n",
        ":mine",
        params(evaluate={"judges": {"mine": {}}}),
    ),
    "evaluation": (
        plugins.EVALUATIONS,
        f"class mine:\n{EVALUATION}",
        ":mine",
        params(evaluate={"evaluations": {"mine": {}}}),
    ),
    "run logger": (
        plugins.RUN_LOGGERS,
        f"class mine:\n{LOGGER}",
        ":mine",
        params(tracking={"loggers": ["mine"]}),
    ),
    "check": (plugins.REGISTRY_POLICIES, POLICY, "", params(registry={"policies": ["mine"]})),
}
LEFT_OUT = {
    "reader": ["matches", "parse"],
    "sampler": ["make_sampler"],
    "reward source": ["make_scorer"],
    "judge": ["score"],
}


def cases() -> Iterator[tuple[str, str]]:
    for door, (group, *_) in DOORS.items():
        for function in LEFT_OUT.get(door, FUNCTIONS.get(group, ())):
            yield door, function


def failures(workspace: Path, settings: dict[str, Any]) -> list[str]:
    """What `rlhf doctor`, and so `rlhf run`, finds wrong with plugins and their settings."""
    with (workspace / "params.yaml").open("w") as file:
        YAML().dump(settings, file)
    checks = workspace_checks(workspace, opens_files=False)
    return [check.finding for check in checks if check.level == FAIL and "mine" in check.finding]


@pytest.fixture
def entered(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[str], str]], dict[str, Any]]:
    """Enters the plugin of a door, its text changed, and returns the settings that name it."""

    def enter(door: str, changed: Callable[[str], str] = str) -> dict[str, Any]:
        group, text, target, settings = DOORS[door]
        module = f"whole_{door.replace(' ', '_')}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        install("package", group, {"mine": f"{module}{target}"}, **{module: changed(text)})
        return settings

    return enter


@pytest.mark.parametrize("door", DOORS)
def test_a_whole_plugin_is_taken(door: str, entered: Any, tmp_path: Path) -> None:
    assert failures(tmp_path, entered(door)) == []


@pytest.mark.parametrize(("door", "function"), [*cases()])
def test_one_that_lacks_a_function_is_refused_where_settings_are_read(
    door: str, function: str, entered: Any, tmp_path: Path
) -> None:
    def without(text: str) -> str:
        text, renamed = re.subn(rf"\bdef {function}\b", f"def no_{function}", text)
        text, emptied = re.subn(rf"\b{function}=\w+", f"{function}=None", text)
        assert renamed + emptied
        return text

    (finding,) = failures(tmp_path, entered(door, without))
    assert "mine of the package package" in finding and "\n" not in finding
    assert re.search(rf"has no {function}\b", finding)


def test_a_command_without_a_command_is_refused(install: Install) -> None:
    install(
        "package",
        COMMANDS,
        {"empty": "empty_command:app"},
        empty_command="import typer\napp = typer.Typer()",
    )
    message = str(CliRunner().invoke(app, ["empty"]).exception)
    assert "empty of the package package" in message and "has no command" in message
    assert "\n" not in message


@pytest.mark.parametrize("group", plugins.CALLED)
def test_what_is_called_is_something_to_call(group: str, install: Install) -> None:
    install("package", group, {"mine": "not_to_call:mine"}, not_to_call="mine = 3")
    with pytest.raises(PluginError, match=r"mine of the package package .*is a int"):
        load_plugin(group, "mine")


@pytest.mark.parametrize("part", ["score", "absolute_tie", "name"])
def test_a_judge_that_a_function_makes_is_looked_at_before_it_is_used(
    part: str, install: Install, tmp_path: Path
) -> None:
    text = DOORS["judge"][1].replace(f" {part}", f" no_{part}")
    module = f"judge_without_{part}"
    made = f"{text}\ndef make(settings, workspace): return mine()"
    install("package", plugins.JUDGES, {"mine": f"{module}:make"}, **{module: made})
    with pytest.raises(RlhfError, match=rf"mine of the package package .*has no {part}"):
        plugged_judges({"mine": {}}, tmp_path)


@pytest.mark.parametrize(
    ("group", "interface"),
    [
        (plugins.EVALUATIONS, AddedEvaluation),
        (plugins.MODEL_READERS, ModelReader),
        (plugins.REGISTRY_POLICIES, RegistryPolicy),
        (plugins.RUN_LOGGERS, RunLogger),
    ],
)
def test_the_functions_of_a_group_are_those_of_its_interface(group: str, interface: type) -> None:
    defined: set[str] = set()
    for base in interface.__mro__[:-1]:
        if base.__module__.startswith(("rlhf_core", "flows")):
            defined.update(name for name, value in vars(base).items() if callable(value))
    assert {name for name in defined if not name.startswith("_")} == set(FUNCTIONS[group])
