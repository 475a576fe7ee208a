"""Pages, workflow, citation, hooks and version agree with the code, with each other and with their
schemas.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from commands import command_tree
from distribution import LONGEST, TOGETHER

import rlhf_core
from rlhf_core.commands.data import SHORT_FORM
from rlhf_core.config import yaml_text
from rlhf_core.config.formats import SHAPES
from rlhf_core.stages.runtime.runner import STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A path in prose may start at the root or in a package.
STARTS = ("", "rlhf_core", "flows", "rlhf_extras", "tests", "tests/unit", "docs")
# Written by a run, or names of a reader's own.
MADE = (
    "data/",
    "models/",
    "metrics/",
    "gates/",
    "plots/",
    "history/",
    "samples/",
    "work/",
    "workspaces/",
)
MADE += (
    "ablation/",
    ".rlhf/",
    ".fingerprints/",
    "site/",
    "htmlcov/",
    "mlartifacts/",
    "my-run/",
    "extra/",
    "exports/",
)
MADE += (".venv", "../", "/")
SUFFIXES = r"py|yaml|yml|md|toml|json|sh|sbatch|lock|svg|png|cff"
FILE = re.compile(rf"(?<![\w/.~:*-])((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))(?![\w/*])")
PACKAGE = re.compile(
    r"`((?:rlhf_core|flows|rlhf_extras|tests|infra|docs|benchmarks|profiles)/[\w./-]*/)`"
)
# Pages say what could be: the change log names files that are gone, how-tos name files that a
# reader will write.
GONE = {"CHANGELOG.md": {"ppo/objectives.py", "ppo/value.py"}}
YOURS = {
    "CONTRIBUTING.md": {"rlhf_core/config/diversity.py", "rlhf_core/stages/diversity.py"},
    "docs/serving.md": {"llama.cpp/convert_hf_to_gguf.py"},
}
EXAMPLE_STAGE = "diversity"  # of CONTRIBUTING.md
COMMANDS: dict[str, Any] = command_tree().commands


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def exists(path: str) -> bool:
    return any((ROOT / start / path).exists() for start in STARTS)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in FILE.findall(text) if not path.startswith(MADE)} | set(
        PACKAGE.findall(text)
    )
    named = {path for path in named if not re.search(r"\b[A-Z]+\.", path)}  # NAME.py stands for any
    exempt = GONE.get(page_id(page), set()) | YOURS.get(page_id(page), set())
    relative = {path for path in named if (page.parent / path).exists()}
    assert not {path for path in named - exempt - relative if not exists(path)}
    assert not {path for path in YOURS.get(page_id(page), set()) if exists(path)}, (
        "this example exists by now"
    )


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_files_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tables_and_lists_begin_a_block(page: Path) -> None:
    """Within a paragraph the site shows them as its text."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    pairs = re.findall(r"^(?![-*|#<!] ?|\d+\. | )(.+)\n(\| .*|[-*] .*)$", text, flags=re.MULTILINE)
    assert not pairs


def rlhf_commands(text: str) -> Iterator[list[str]]:
    """The words of each ``rlhf …`` command in code blocks and in code within a line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(
        r"`(rlhf [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *spans]:
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line):
            if part.startswith("rlhf "):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # prose within the code, such as an apostrophe
                    words = part.split()
                yield words[1:]


def command_of(words: list[str]) -> Any:
    """The command that the words run: of a group the one that is named next, or that of its short
    form.
    """
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
        options = {
            option
            for parameter in parameters
            for option in [*parameter.opts, *parameter.secondary_opts]
        }
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options | {"--help", "--debug"}, words
        if words[0] == "stage" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in (*STAGES, EXAMPLE_STAGE), words


def test_the_page_of_data_formats_lists_them_all() -> None:
    tables = (
        (ROOT / "docs/data-formats.md")
        .read_text()
        .partition("## Formats")[2]
        .partition("A row without")[0]
    )
    listed = re.findall(r"^\| ([a-z0-9-]+)(?: \([^|]*\))? \|", tables, re.MULTILINE)
    assert sorted(listed) == sorted(
        ["format", *(shape.name for shape in SHAPES)]
    )  # "format" heads a table


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/images/architecture.svg"])
def test_the_layout_names_every_package(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    tops = ("rlhf_core", "flows", "rlhf_extras")
    packages = {path.parent.name for top in tops for path in (ROOT / top).glob("*/__init__.py")}
    assert not {name for name in packages if not re.search(rf"\b{name}\b", text)}


def test_the_api_reference_has_every_package_of_flows() -> None:
    text = (ROOT / "docs" / "api" / "flows.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: flows\.(\w+)$", text, flags=re.MULTILINE)
    places = {path.parent.name for path in (ROOT / "flows").glob("*/__init__.py")}
    places |= {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__", "cli"}
    assert sorted(listed) == sorted(places)


def test_every_page_of_the_navigation_exists() -> None:
    pages = re.findall(
        r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert pages and not [page for page in pages if not (ROOT / "docs" / page).is_file()]
    missing = {
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    } - set(pages)
    assert not missing, "pages without an entry in mkdocs.yml"


def test_the_make_targets_that_the_workflow_and_the_guide_call_exist() -> None:
    text = "".join(
        (ROOT / name).read_text()
        for name in ("CONTRIBUTING.md", ".github/workflows/ci.yml", ".ci/run")
    )
    targets = set(re.findall(r"^(?:make|.*run: make) ([a-z-]+)", text, flags=re.MULTILINE))
    assert targets >= {"setup", "test", "lint", "docs", "coverage"}
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets <= set(known)


TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("## 9. Traps")[1]
TRAPS = [
    line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| trap ")
]


def test_there_are_ten_traps() -> None:
    assert len(TRAPS) == 10


@pytest.mark.parametrize("trap", TRAPS, ids=lambda line: line[2:40])
def test_the_tests_of_a_trap_exist(trap: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", trap)
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / "unit" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{file}::{test}"
        )


WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def load(path: Path) -> Any:
    return yaml_text.plain(yaml_text.read(path))


@pytest.mark.parametrize(
    ("schema", "file"),
    [("vendor.github-workflows", WORKFLOW), ("vendor.citation-file-format", ROOT / "CITATION.cff")],
    ids=["workflow", "citation"],
)
def test_files_satisfy_their_schemas(schema: str, file: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(
    shutil.which("actionlint") is None,
    reason="actionlint is not on PATH; the workflow itself runs it",
)
def test_actionlint_has_nothing_to_say() -> None:
    result = subprocess.run(
        ["actionlint", str(WORKFLOW)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_workflow_tests_each_python_that_the_package_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()  # type: ignore[union-attr]
    tested = load(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == [f"3.{minor}" for minor in range(int(low), int(high))]


def test_the_workflow_may_only_read_and_pins_its_actions() -> None:
    workflow = load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job and job["timeout-minutes"] <= 180
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_hooks_download_nothing() -> None:
    for repository in load(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        assert {hook["language"] for hook in repository["hooks"]} == {"system"}


def test_the_version_is_said_once_and_quoted_right() -> None:
    assert load(ROOT / "CITATION.cff")["version"] == rlhf_core.__version__
    newest = re.search(
        r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    assert newest and newest.group(1) == rlhf_core.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rlhf_core.__version__"}


def test_no_test_file_takes_the_name_of_a_standard_module() -> None:
    """A script of the tests has its own folder first on its path, so `numbers.py` beside it hides
    Python's.
    """
    files = (ROOT / "tests").rglob("*.py")
    assert [str(path) for path in files if path.stem in sys.stdlib_module_names] == []


@pytest.mark.parametrize(
    "name", [*chain(*TOGETHER.values()), *sorted(set(LONGEST) - set(TOGETHER))]
)
def test_the_tests_that_are_begun_first_or_kept_together_exist(name: str) -> None:
    assert (ROOT / name).exists()
