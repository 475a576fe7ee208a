"""A registered model stands by itself: what its requirements name is enough, and none of it can be somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from champion import champion_folder
from integration.registry.conftest import policy_name, reward_name
from packaging.requirements import Requirement

from flows.registry.aliases import versions
from flows.registry.client import connect
from flows.registry.model_package import build_wheel
from flows.registry.promote import promote
from flows.registry.register import register

# Loads policy and reward model where only the packages in argv[2] can be imported, and this project from argv[1] alone.
ISOLATED = """
import json, sys
from importlib.abc import MetaPathFinder
from importlib.metadata import packages_distributions
site, allowed, owners = sys.argv[1], set(json.loads(sys.argv[2])), packages_distributions()
class Only(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        owner = owners.get(name)  # of top-level packages only
        if name != "rlhf_core" and owner and not allowed & {one.lower().replace("_", "-") for one in owner}:
            raise ModuleNotFoundError(f"not among the model's requirements: {name}", name=name)
sys.meta_path.insert(0, Only())
sys.path.insert(0, site)
import mlflow
policy, reward = (mlflow.pyfunc.load_model(folder) for folder in sys.argv[3:])
import rlhf_core
assert rlhf_core.__file__.startswith(site), rlhf_core.__file__
asked = [{"role": "user", "content": "what colour is the sky?"}]
answered = [*asked, {"role": "assistant", "content": "blue."}]
print(json.dumps([policy.predict({"messages": asked})[0], reward.predict({"messages": answered})[0]]))
"""


def model_folder(workspace: Path, name: str) -> Path:
    client = connect(workspace)
    newest = versions(client, name)[0]
    source = client.get_logged_model(newest.source.removeprefix("models:/"))
    return Path(source.artifact_location.removeprefix("file://").replace("%20", " "))


def with_dependencies(names: list[str]) -> set[str]:
    """The installed distributions that installing ``names`` brings, in the form of a package index."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_the_wheel_of_the_same_sources_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    wheel, again = build_wheel(tmp_path), build_wheel(tmp_path / "again")
    assert (wheel.name, wheel.read_bytes()) == (again.name, again.read_bytes())
    names = zipfile.ZipFile(wheel).namelist()
    assert "rlhf_core/serving/policy.py" in names and not [name for name in names if "__pycache__" in name]
    assert len(names) == len(set(names))


def test_pip_takes_the_wheel(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*command, "-q", str(wheel)], check=True, cwd=tmp_path)
    assert (tmp_path / "site" / "rlhf_core" / "__init__.py").is_file()


@pytest.mark.dear("loads both registered models in a process that has their requirements alone")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_models_answer_with_their_requirements_alone(workspace: Path, tmp_path: Path) -> None:
    register(workspace)
    folders = [model_folder(workspace, name) for name in (policy_name(workspace), reward_name(workspace))]
    lines = (folders[0] / "requirements.txt").read_text().split()
    files = [line for line in lines if (folders[0] / line).is_file()]
    assert [Path(file).suffix for file in files] == [".whl"]
    pins = [Requirement(line) for line in lines if line not in files]
    for pin in pins:
        assert pin.name != "rlhf-pipeline" and pin.specifier.contains(version(pin.name).partition("+")[0])
    with zipfile.ZipFile(folders[0] / files[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    allowed = json.dumps(sorted(with_dependencies([pin.name for pin in pins])))
    result = subprocess.run(
        [sys.executable, "-P", "-c", ISOLATED, str(tmp_path / "site"), allowed, *map(str, folders)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    completion, score = json.loads(result.stdout.splitlines()[-1])
    assert completion["choices"][0]["message"]["role"] == "assistant" and "score" in score
    assert "requirements" not in result.stderr  # no warning that something else is installed


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_champion_is_found_beside_the_code_of_its_model(workspace: Path) -> None:
    register(workspace)
    assert promote(workspace).promoted
    assert (champion_folder(workspace) / "config.json").is_file()
