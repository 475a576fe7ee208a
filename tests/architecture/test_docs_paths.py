"""Paths, commands and tests that the Markdown pages name exist, and their lists are complete."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import app
from rlhf_core.commands.data import SHORT_FORM
from rlhf_core.stages.runtime.runner import STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A path in prose may start at the root or in a package.
STARTS = ("", "rlhf_core", "flows", "tests", "tests/unit", "docs")
# Written by a run, or names of a reader's own.
MADE = ("data/", "models/", "metrics/", "gates/", "plots/", "history/", "samples/", "work/", "workspaces/")
MADE += ("ablation/", ".rlhf/", ".fingerprints/", "site/", "htmlcov/", "mlartifacts/", "my-run/", "extra/", "exports/")
MADE += (".venv", "../", "/")
SUFFIXES = r"py|yaml|yml|md|toml|json|sh|sbatch|lock|svg|png|cff"
FILE = re.compile(rf"(?<![\w/.~:*-])((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))(?![\w/*])")
PACKAGE = re.compile(r"`((?:rlhf_core|flows|tests|infra|docs|benchmarks|profiles)/[\w./-]*/)`")
# Pages say what could be: the change log names files that are gone, how-tos name files that a reader will write.
GONE = {"CHANGELOG.md": {"ppo/objectives.py", "ppo/value.py"}}
YOURS = {"CONTRIBUTING.md": {"rlhf_core/config/diversity.py", "rlhf_core/stages/diversity.py"}}
EXAMPLE_STAGE = "diversity"  # of CONTRIBUTING.md
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def exists(path: str) -> bool:
    return any((ROOT / start / path).exists() for start in STARTS)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in FILE.findall(text) if not path.startswith(MADE)} | set(PACKAGE.findall(text))
    named = {path for path in named if not re.search(r"\b[A-Z]+\.", path)}  # NAME.py stands for any
    exempt = GONE.get(page_id(page), set()) | YOURS.get(page_id(page), set())
    relative = {path for path in named if (page.parent / path).exists()}
    assert not {path for path in named - exempt - relative if not exists(path)}
    assert not {path for path in YOURS.get(page_id(page), set()) if exists(path)}, "this example exists by now"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_files_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tables_and_lists_begin_a_block(page: Path) -> None:
    """Within a paragraph the site shows them as its text."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    pairs = re.findall(r"^(?![-*|#<!] ?|\d+\. | )(.+)\n(\| .*|[-*] .*)$", text, flags=re.MULTILINE)
    assert not pairs


def rlhf_commands(text: str) -> Iterator[list[str]]:
    """The words of each ``rlhf …`` command in code blocks and in code within a line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`(rlhf [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans]:
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line):
            if part.startswith("rlhf "):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # prose within the code, such as an apostrophe
                    words = part.split()
                yield words[1:]


def command_of(words: list[str]) -> Any:
    """The command that the words run: of a group the one that is named next, or that of its short form."""
    command = COMMANDS[words[0]]
    members: dict[str, Any] = getattr(command, "commands", {})
    return members.get(words[1]) or members[SHORT_FORM] if members and len(words) > 1 else command


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in rlhf_commands(page.read_text(encoding="utf-8")):
        names = [word for word in words if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--debug")
            continue
        assert names and words[0] in COMMANDS, words
        parameters = command_of(words).params
        options = {option for parameter in parameters for option in [*parameter.opts, *parameter.secondary_opts]}
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options | {"--help", "--debug"}, words
        if words[0] == "stage" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in (*STAGES, EXAMPLE_STAGE), words


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/images/architecture.svg"])
def test_the_layout_names_every_package(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    packages = {path.parent.name for top in ("rlhf_core", "flows") for path in (ROOT / top).glob("*/__init__.py")}
    assert not {name for name in packages if not re.search(rf"\b{name}\b", text)}


def test_the_api_reference_has_every_package_of_flows() -> None:
    text = (ROOT / "docs" / "api" / "flows.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: flows\.(\w+)$", text, flags=re.MULTILINE)
    places = {path.parent.name for path in (ROOT / "flows").glob("*/__init__.py")}
    places |= {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__", "cli"}
    assert sorted(listed) == sorted(places)


def test_every_page_of_the_navigation_exists() -> None:
    pages = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert pages and not [page for page in pages if not (ROOT / "docs" / page).is_file()]
    missing = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - set(pages)
    assert not missing, "pages without an entry in mkdocs.yml"


def test_the_make_targets_that_the_workflow_and_the_guide_call_exist() -> None:
    text = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", ".github/workflows/ci.yml", ".ci/run"))
    targets = set(re.findall(r"^(?:make|.*run: make) ([a-z-]+)", text, flags=re.MULTILINE))
    assert targets >= {"setup", "test", "lint", "docs", "coverage"}
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets <= set(known)


TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("## 9. Traps")[1]
TRAPS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| trap ")]


def test_there_are_ten_traps() -> None:
    assert len(TRAPS) == 10


@pytest.mark.parametrize("trap", TRAPS, ids=lambda line: line[2:40])
def test_the_tests_of_a_trap_exist(trap: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", trap)
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / "unit" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"
