"""A registered model stands by itself: what its requirements name is enough, and none of it can be
somebody else's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from champion import champion_folder
from integration.registry.conftest import policy_name, reward_name
from mlflow.artifacts import download_artifacts
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from flows.registry.client import connect, fluent, versions
from flows.registry.model_package import CODE_FOLDER, INDEX_PACKAGES, own_wheel, requirements
from flows.registry.promote import promote
from flows.registry.register import register

# Loads policy and reward model from argv[1:], and asks each.
ASK = """
import json, sys
import mlflow
policy, reward = (mlflow.pyfunc.load_model(folder) for folder in sys.argv[1:])
asked = [{"role": "user", "content": "what colour is the sky?"}]
answered = [*asked, {"role": "assistant", "content": "blue."}]
print(json.dumps([policy.predict({"messages": asked})[0], reward.predict({"messages": answered})[0]]))
"""


def model_folder(workspace: Path, name: str) -> Path:
    client = connect(workspace)
    newest = versions(client, name)[0]
    source = client.get_logged_model(newest.source.removeprefix("models:/"))
    return Path(source.artifact_location.removeprefix("file://").replace("%20", " "))


def link_packages(names: list[str], site: Path) -> None:
    """Make ``site`` what installing ``names`` would make it: links to these packages and those that
    they require.
    """
    done: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in done:
            continue
        done.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        for entry in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(package.locate_file(entry))
        needed = [Requirement(line) for line in package.requires or ()]
        waiting += [
            one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})
        ]


def test_pip_installs_the_wheel_from_whatever_folder_it_runs_in(tmp_path: Path) -> None:
    """Images of ``mlflow models generate-dockerfile`` run it in a folder that is not the model's."""
    name, content = own_wheel()
    own_wheel.cache_clear()
    assert own_wheel() == (name, content), "the same sources are the same wheel"
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (model / CODE_FOLDER, elsewhere):
        folder.mkdir(parents=True)
    wheel = model / CODE_FOLDER / name
    wheel.write_bytes(content)
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names)) and not [name for name in names if "__pycache__" in name]
    own = [line for line in requirements() if line.partition("==")[0] not in INDEX_PACKAGES]
    (model / "requirements.txt").write_text("\n".join(own))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--target", str(tmp_path / "site"), "-r", str(model / "requirements.txt")]
    subprocess.run(command, check=True, cwd=elsewhere)
    assert (tmp_path / "site" / "rlhf_core" / "serving" / "policy.py").is_file()


def test_no_file_of_a_model_names_a_folder_of_the_machine_that_registered_it(
    workspace: Path, tmp_path: Path
) -> None:
    """Neither the workspace nor the package, nor where MLflow has put it, is there elsewhere."""
    register(workspace)
    client = connect(workspace)
    places = {str(workspace), str(Path(__file__).parents[3]), str(Path.home()), sys.prefix}
    places |= {place.replace(" ", "%20") for place in places}
    for name in (policy_name(workspace), reward_name(workspace)):
        version = versions(client, name)[0]
        copy = tmp_path / name
        with fluent(workspace):
            download_artifacts(f"models:/{name}/{version.version}", dst_path=str(copy))
        files = [path for path in copy.rglob("*") if path.is_file() and path.suffix != ".whl"]
        assert copy / "MLmodel" in files
        found = {}
        for path in files:
            content = path.read_bytes()
            named = [place for place in places if place.encode() in content]
            if named:
                found[path.name] = named
        assert found == {}


@pytest.mark.dear("loads both registered models in a process that has their requirements alone")
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_models_answer_with_their_requirements_alone(workspace: Path, tmp_path: Path) -> None:
    register(workspace)
    folders = [
        model_folder(workspace, name) for name in (policy_name(workspace), reward_name(workspace))
    ]
    links, own, *pinned = (folders[0] / "requirements.txt").read_text().splitlines()
    assert links == f"--find-links {CODE_FOLDER}"
    (file,) = (folders[0] / CODE_FOLDER).iterdir()
    name, number, _, _ = parse_wheel_filename(file.name)
    # An index cannot have a version with a local label, so that nobody's package is taken for ours.
    assert Requirement(own) == Requirement(f"{name}=={number}") and number.local
    pins = [Requirement(line) for line in pinned]
    for pin in pins:
        assert pin.name in INDEX_PACKAGES
        assert pin.specifier.contains(version(pin.name).partition("+")[0])
    site = tmp_path / "site"
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(site)
    link_packages([pin.name for pin in pins], site)
    result = subprocess.run(
        [sys.executable, "-S", "-c", ASK, *map(str, folders)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(tmp_path)},
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
