"""Every command, flag, path and name that the files of infra/ and the operations page use does exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError
from dvc.cli import DvcParserError
from unit.infra import places

from flows.prefect_server.pools import GPU_POOL, PIPELINES_POOL
from rlhf_core.errors import EXIT_PREEMPTED

COMMANDS = [pytest.param(words, id=where[:80]) for where, words in places.command_lines()]
TEXTS = [path for path in sorted(places.INFRA.rglob("*")) if path.is_file() and "deepspeed" not in path.parts]


def check_rlhf(words: list[str]) -> None:
    import typer

    from flows.cli import app

    options = [word for word in words if word.startswith("--")]
    names = [word for word in words if not word.startswith("-")]
    group: Any = typer.main.get_command(app)
    known = {"--help"}
    if names:
        known |= {option for parameter in group.commands[names[0]].params for option in parameter.opts}
    assert set(options) <= known


def check_prefect(words: list[str]) -> None:
    from prefect.cli._app import _app

    ours = [word for word in words if word != "--no-prompt"]  # belongs to the outermost command
    if ours != ["worker", "start"]:
        _app.parse_args(ours, exit_on_error=False, print_error=False)


def check_mlflow(words: list[str]) -> None:
    import mlflow.cli

    command: Any = mlflow.cli.cli
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def check_dvc(words: list[str]) -> None:
    from dvc.cli.parser import get_main_parser

    get_main_parser().parse_args(words)


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    arguments = get_args_parser().parse_args(words)
    check(arguments.training_script, arguments.training_script_args)


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "<command>", "exec")
        return
    assert words[0] == "-m"
    spec = find_spec(words[1])
    assert spec is not None and spec.origin
    end = words.index("--") if "--" in words else len(words)
    source = Path(spec.origin).read_text()
    assert all(f'"{word}"' in source for word in words[2:end] if word.startswith("--"))
    if words[end + 1 : end + 2] == ["prefect"]:
        check_prefect(words[end + 2 :])


def check(program: str, words: list[str]) -> None:
    checks = {
        "rlhf": check_rlhf,
        "prefect": check_prefect,
        "mlflow": check_mlflow,
        "dvc": check_dvc,
        "torchrun": check_torchrun,
        "python": check_python,
    }
    checks[program](words)


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_and_its_flags_exist(words: list[str]) -> None:
    check(words[0], words[1:])


def test_commands_were_found_in_every_place() -> None:
    where = {place.split(":")[0].split(" ")[0] for place, _ in places.command_lines()}
    assert {"Dockerfile", "run-stage.sh", "worker.sbatch", "operations.md"} <= where


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("rlhf run --fast", AssertionError),
        ("mlflow server --fast", AssertionError),
        ("prefect worker start --fast", CycloptsError),
        ("dvc repro --fast", DvcParserError),
        ("torchrun --fast rlhf stage ppo", SystemExit),
        ("torchrun --no-python rlhf stage --fast", AssertionError),
        ("python -m flows.supervision.supervisor --fast -- true", AssertionError),
    ],
)
def test_an_unknown_flag_would_be_found(line: str, complaint: type[BaseException]) -> None:
    program, *words = line.split()
    with pytest.raises(complaint):
        check(program, words)


@pytest.mark.parametrize("path", [*TEXTS, places.OPERATIONS], ids=lambda path: path.name)
def test_paths_exist(path: Path) -> None:
    pattern = r"(?<![\w/.-])/?(?:opt/rlhf/)?((?:infra|docs|tests|flows|rlhf_core)/[\w./-]+\w)"
    mentioned = set(re.findall(pattern, path.read_text()))
    assert not [name for name in sorted(mentioned) if not (places.ROOT / name).exists()]


def test_work_pools_are_those_of_the_code() -> None:
    named = {words[words.index("--pool") + 1] for _, words in places.command_lines() if "--pool" in words} - {"1"}
    assert (
        {GPU_POOL, "far"} <= named <= {GPU_POOL, PIPELINES_POOL, "far"}
    )  # the last is the example of a pool that users name themselves
    assert "pool=${1:-" + GPU_POOL + "}" in (places.INFRA / "slurm" / "worker.sbatch").read_text()


def test_the_status_of_a_stopped_stage_is_that_of_the_code() -> None:
    assert f"STOPPED_STATUS:-{EXIT_PREEMPTED}}}" in (places.INFRA / "launch" / "run-stage.sh").read_text()
