"""The files around the code: workflow, citation, hooks and version agree with each other and with their schemas."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from distribution import LONGEST, TOGETHER

import rlhf_core
from rlhf_core.config import yaml_text

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not on PATH; the workflow itself runs it")
def test_actionlint_has_nothing_to_say() -> None:
    result = subprocess.run(["actionlint", str(WORKFLOW)], cwd=ROOT, capture_output=True, text=True, check=False)
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
        assert "permissions" not in job and job["timeout-minutes"] <= 90
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
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest and newest.group(1) == rlhf_core.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rlhf_core.__version__"}


def test_no_test_file_takes_the_name_of_a_standard_module() -> None:
    """A script of the tests has its own folder first on its path, so `numbers.py` beside it hides Python's."""
    files = (ROOT / "tests").rglob("*.py")
    assert [str(path) for path in files if path.stem in sys.stdlib_module_names] == []


@pytest.mark.parametrize("name", [*chain(*TOGETHER.values()), *sorted(set(LONGEST) - set(TOGETHER))])
def test_the_tests_that_are_begun_first_or_kept_together_exist(name: str) -> None:
    assert (ROOT / name).exists()
