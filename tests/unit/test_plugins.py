"""The doors for other packages: what they give is found, and what is broken is one line that stops
nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from commands import ROOT, run
from plugin_distributions import Install
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.machine_checks import plugin_checks
from flows.registry.policies import KEY_VARIABLE, active_policies
from rlhf_core.commands.plugged import EXTRAS
from rlhf_core.config.operations import RegistryConfig, SignatureConfig
from rlhf_core.plugins import (
    COMMANDS,
    DISTRIBUTION,
    FUNCTIONS,
    REGISTRY_POLICIES,
    PluginError,
    load_plugin,
    origin,
    plugins_of,
)
from rlhf_core.plugins import EXTRAS as OWN

GREETING = """
import typer
app = typer.Typer(add_completion=False)

@app.command()
def greet(name: str) -> None:
    "Greet a person by name."
    typer.echo(f"hello {name}")
"""


def output(*words: str) -> str:
    """What a command prints, or the message that it fails with."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words])
    return (
        result.output
        if result.exception is None or isinstance(result.exception, SystemExit)
        else str(result.exception)
    )


def test_every_extra_comes_by_an_entry_point_of_this_distribution() -> None:
    entries = plugins_of(COMMANDS)
    assert {name for name, (entry,) in entries.items() if origin(entry) == DISTRIBUTION} == set(
        EXTRAS
    )


def test_a_package_adds_a_command_and_one_to_a_group(install: Install) -> None:
    entries = {"greet": "greeting_plugin:app", "data.greet": "greeting_plugin:app"}
    install("greeting", COMMANDS, entries, greeting_plugin=GREETING)
    assert output("greet", "Ada") == output("data", "greet", "Ada") == "hello Ada\n"
    for words in ((), ("data",)):
        assert "From the package greeting" in output(*words, "--help")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemError('two\\nlines')", "two"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import sys; sys.exit()", "SystemExit"),
        ("app = 3", "typer.Typer"),
        ("", "has no attribute 'app'"),
    ],
)
def test_a_broken_command_is_one_line_and_the_others_work(
    install: Install, module: str, said: str
) -> None:
    install("broken", COMMANDS, {"fix": "broken_plugin:app"}, broken_plugin=module)
    sys.modules.pop("broken_plugin", None)
    message = output("fix", "--any", "thing")
    assert said in message and "package broken" in message and len(message.splitlines()) == 1
    assert "Run the whole pipeline" in output("--help")
    assert output("--version").startswith(DISTRIBUTION)
    assert [check.finding for check in plugin_checks()] == [message]


def test_a_command_of_the_pipeline_is_not_replaced_by_a_plugin(install: Install) -> None:
    install("impostor", COMMANDS, {"run": "impostor_plugin:app"}, impostor_plugin=GREETING)
    assert "Run the whole pipeline" in output("run", "--help")


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    for distribution in ("first", "second"):
        install(distribution, COMMANDS, {"greet": "greeting_plugin:app"}, greeting_plugin=GREETING)
    assert "first and second" in output("greet", "Ada")


@pytest.mark.parametrize("path", EXTRAS)
def test_without_the_package_of_extras_its_commands_say_so_in_a_line(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rlhf_extras"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rlhf_extras", None)  # as if it were not there
    message = output(*path.split("."), "--anything")
    assert DISTRIBUTION in message and "install" in message and len(message.splitlines()) == 1
    assert "Run the whole pipeline" in output("--help")


@pytest.mark.parametrize("path", EXTRAS)
def test_an_installation_from_before_an_extra_says_to_install_again(
    path: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        DISTRIBUTION.replace("-", "_"), "other.group", {"a": "b"}
    )  # found first: its entry points alone count
    message = output(*path.split("."), "--anything")
    assert f"`rlhf {path.replace('.', ' ')}`" in message and "make setup" in message


def test_a_policy_that_settings_name_must_be_there(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert active_policies(RegistryConfig()) == []
    with pytest.raises(
        PluginError, match=r"no installed package gives 'two-eyes' in rlhf\.registry_policies"
    ):
        active_policies(RegistryConfig(policies=("two-eyes",)))
    install(
        "eyes",
        REGISTRY_POLICIES,
        {"two-eyes": "eyes_plugin"},
        eyes_plugin="".join(f"def {name}(*_): ...\n" for name in FUNCTIONS[REGISTRY_POLICIES]),
    )
    assert [
        module.__name__ for module in active_policies(RegistryConfig(policies=("two-eyes",)))
    ] == ["eyes_plugin"]


@pytest.mark.parametrize("asks", ["settings", "environment"])
def test_signatures_are_never_left_out_where_they_are_asked_for(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = SignatureConfig(public_key="key.pub") if asks == "settings" else SignatureConfig()
    monkeypatch.setenv(KEY_VARIABLE, "key.pem" if asks == "environment" else "")
    assert [policy.__name__ for policy in active_policies(RegistryConfig(signature=wanted))] == [
        "rlhf_extras.signing"
    ]
    monkeypatch.setattr("flows.registry.policies.SIGNATURE", "gone")
    with pytest.raises(PluginError, match="'gone'"):
        active_policies(RegistryConfig(signature=wanted))


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in OWN.items() for name in names]
)
def test_every_extra_is_entered_and_without_it_a_line_says_how_to_get_it(
    group: str, name: str, install: Install
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert project["entry-points"][group][name].startswith("rlhf_extras.")
    install(DISTRIBUTION.replace("-", "_"), "other.group", {"a": "b"})  # found first, and alone
    with pytest.raises(PluginError, match="make setup") as caught:
        load_plugin(group, name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_an_entry_that_nobody_gives_names_those_that_exist() -> None:
    with pytest.raises(PluginError, match=r"known: .*plan"):
        load_plugin(COMMANDS, "plant")


def blocks(language: str) -> list[str]:
    """The code of docs/plugins.md that is in a language."""
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.dear("makes an environment and installs a package into it")
def test_the_example_of_the_docs_is_installed_and_used(tmp_path: Path) -> None:
    """In an environment of its own, which sees the packages of this one."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    package, environment, workspace = tmp_path / "boards", tmp_path / "venv", tmp_path / "workspace"
    package.mkdir()
    workspace.mkdir()
    (package / "boards.py").write_text(blocks("python")[0])
    (package / "pyproject.toml").write_text(blocks("toml")[0])
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(
        "\n".join(path for path in sys.path if path and Path(path).is_dir())
    )
    python = environment / "bin" / "python"
    options = ("--no-deps", "--no-build-isolation", "--quiet")
    run(python, "-m", "pip", "install", *options, package, cwd=tmp_path).check_returncode()

    rows = [
        {"question": f"What is {n} and {n}?", "verdict": f"It is {n + n}. > {n}"} for n in range(40)
    ]
    lines = [json.dumps(row) for row in [*rows, {"question": "Why?", "verdict": "no arrow"}]]
    (workspace / "verdicts.jsonl").write_text("\n".join(lines))
    words = ["data", "inspect", "verdicts.jsonl", "--format", "verdicts", "--json"]
    (described,) = json.loads(run(python, "-m", "flows.cli", *words, cwd=workspace).stdout)["files"]
    assert described["rows"] == 40 and described["refused"][0]["reason"].startswith(
        "verdict has no"
    )

    (workspace / "dvc.yaml").write_text("{}")
    (workspace / "params.yaml").write_text(
        "collect: {source: files, files: {preferences: [{path: verdicts.jsonl, format: verdicts}]}}\n"
        "tracking: {loggers: [tensorboard]}\n"
    )
    done = run(python, "-m", "flows.cli", "stage", "collect", cwd=workspace, RLHF_TRACKING="off")
    assert done.returncode == 0, done.stderr
    assert list((workspace / "tensorboard" / "collect").glob("events.out.tfevents.*"))
