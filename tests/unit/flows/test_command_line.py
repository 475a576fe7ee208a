"""The command line: its help, what it says before it loads libraries, and names that it refuses at
once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from commands import ROOT, command_environment, command_tree, run
from typer.testing import CliRunner

from flows import cli
from flows.cli import app
from flows.commands import init, registry_commands
from flows.commands.options import PANELS, joined_lines, profile_list, profile_names
from flows.commands.text import last_lines
from flows.dvc_repo import inputs
from rlhf_core import __version__
from rlhf_core import cli as core
from rlhf_core.config.recipe import profile_headers
from rlhf_core.errors import RlhfError
from rlhf_extras.annotation import command as annotate
from rlhf_extras.benchmarks import command as benchmarks
from rlhf_extras.chat import command as chat
from rlhf_extras.data_files import convert_command, diff_command, inspect_command, validate_command
from rlhf_extras.memory import command_line as plan
from rlhf_extras.release import command as export
from rlhf_extras.retention import command as retention
from rlhf_extras.retention import workspace_command
from rlhf_extras.run_comparison import command as compare
from rlhf_extras.serving import command as serving

TREE = command_tree()
COMMANDS = [
    (name,) for name in TREE.commands if name != "ablate"
]  # its help is that of benchmarks/ablation
COMMANDS += [
    (name, member)
    for name, group in TREE.commands.items()
    for member in getattr(group, "commands", ())
]


def shown(*words: str) -> str:
    """What the command prints on a terminal of 80 columns."""
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERMINAL_WIDTH": "80"}).invoke(
        app, [*words]
    )
    return result.output


def test_a_paragraph_is_joined_and_examples_keep_their_lines() -> None:
    text = "One\ntwo.\n\nThree\nfour.\n\nExamples:\n$ a b\n$ c"
    assert joined_lines(text) == "One two.\n\nThree four.\n\nExamples:\n$ a b\n$ c"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_help_fills_its_lines_and_shows_flags_without_type(command: tuple[str, ...]) -> None:
    screen = shown(*command, "--help")
    assert screen == shown(*command, "-h")
    assert "<bool>" not in screen and not re.search(r"Usage: .*\{", screen)
    assert not re.search(r"--\S*…", screen), "a flag is cut"
    prose = screen.partition("╭")[0]
    assert max(map(len, prose.splitlines())) <= 80
    for line, following in zip(prose.splitlines(), prose.splitlines()[1:], strict=False):
        example = line.startswith(" $ ") or line.strip() == "Examples:"
        if line.strip() and following.strip() and not example:
            # The first word of the next line would not have fitted.
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 79, line


# What a command can end with besides 0, 1, 2 and 130, which the help of the whole says of all.
CODES = {
    "run": (3, 4, 75),
    "stage": (3, 4, 75),
    "data validate": (3,),
    "gate": (3,),
    "export": (3,),
    "promote": (5,),
}


def named_codes(help_text: str) -> set[int]:
    """The numbers that the sentence on exit codes names."""
    sentence = re.search(r"Exit codes[^:]*:(.*?)(\n\n|\Z)", help_text, re.DOTALL)
    return (
        {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", sentence[1])}
        if sentence
        else set()
    )


def test_a_help_names_every_exit_code_of_its_command() -> None:
    assert {0, 1, 2, 130} <= named_codes(TREE.help)
    for words, codes in CODES.items():
        command = TREE
        for word in words.split():
            command = command.commands[word]
        assert {0, *codes} <= named_codes(command.help), words


def test_every_command_of_a_panel_is_shown_and_old_names_still_work() -> None:
    screen = shown("--help")
    listed = [name for names in PANELS.values() for name in names]
    assert all(re.search(rf"^│ {name} ", screen, re.MULTILINE) for name in listed)
    assert [*TREE.commands][: len(listed)] == listed
    for name in ("match", "terms"):
        assert not re.search(rf"^│ {name} ", screen, re.MULTILINE)
        assert f" {name} [OPTIONS]" in shown(name, "--help")


@pytest.mark.parametrize("words", [("--help",), ("init",), ("run", "-h")])
def test_the_profiles_are_listed_with_a_line_each(words: tuple[str, ...]) -> None:
    lines = [line.strip() for line in shown(*words).splitlines()]
    for name in profile_headers(ROOT / "profiles"):
        (line,) = (line for line in lines if re.match(rf"{name}\s{{2,}}\w", line))
        assert 20 < len(line) <= 78


@pytest.mark.parametrize("module", ["benchmarks.size", "flows.cli"])
def test_a_reader_that_leaves_is_no_crash(module: str) -> None:
    words = [sys.executable, "-m", module, *(["config", "ppo"] if module == "flows.cli" else [])]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_profiles_that_are_named_one_by_one_stack_as_in_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takers = [
        command
        for command in TREE.commands.values()
        if any(p.name == "profiles" for p in command.params)
    ]
    assert {command.name for command in takers} == {"init", "run", "plan"}
    given: list[str | None] = []
    monkeypatch.setattr(
        init, "initialise", lambda _, profile, *__, **___: given.append(profile) or tmp_path
    )
    monkeypatch.setattr(init, "next_step", lambda _: ("", True))
    monkeypatch.setattr(inputs, "refresh_inputs", lambda _: None)
    for words in (["--profile", "own-data", "-p", "smoke"], ["--profile", "own-data,smoke"], []):
        CliRunner().invoke(app, ["init", "x", *words], catch_exceptions=False)
    assert given == ["own-data,smoke", "own-data,smoke", None]


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "pears.jsonl"],
        ["--data", "pairs.jsonl", "--data", "more/*.jsonl"],
        ["--data", "pairs.jsonl", "--model", "~/no/such/model"],
        ["--model", "./mine"],
        ["--model", "/no/such/model"],
        ["--model", "mine.gguf"],
    ],
)
def test_what_init_is_told_of_and_is_not_there_makes_no_workspace(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    monkeypatch.setattr(init, "initialise", lambda *_, **__: pytest.fail("it was made"))
    with pytest.raises(RlhfError, match="nothing was made") as refused:
        CliRunner().invoke(app, ["init", "run", *words], catch_exceptions=False)
    assert words[-1] in str(refused.value)


def test_a_log_is_shown_without_what_dvc_advises(tmp_path: Path) -> None:
    logs = tmp_path / ".rlhf" / "logs"
    logs.mkdir(parents=True)
    advice = "Updating lock file 'dvc.lock'\n\nTo track the changes with git, run:\n\n\tgit add dvc.lock\n"
    (logs / "sft.log").write_text(f"> rlhf stage sft\nsft: 3/3 1 s\n{advice}")
    assert last_lines(tmp_path, "sft", 1) == "sft: 3/3 1 s"


def test_a_workspace_with_profiles_of_its_own_lists_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text(
        "# My own. And more.\n# Of it.\nseed: 2\n# not this\n"
    )
    monkeypatch.chdir(tmp_path)
    assert profile_list().splitlines()[1:] == ["  mine  My own"]
    assert profile_names("m") == ["mine"] and profile_names("x") == []


def test_the_version_is_printed() -> None:
    assert shown("--version") == f"rlhf-pipeline {__version__}\n"


def test_a_shell_completes_commands_and_profiles() -> None:
    script = f"{sys.executable} -m flows.cli"
    for words, count, expected in (("rlhf ru", 1, "run"), ("rlhf run --profile smo", 3, "smoke")):
        completion = {
            "_RLHF_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(count),
        }
        done = run(*script.split(), cwd=ROOT, **completion)
        assert expected in done.stdout.split(), done.stdout + done.stderr


def loaded_by(code: str) -> str:
    """Heavy libraries that are loaded after ``code`` has run."""
    heavy = (
        "torch",
        "transformers",
        "prefect",
        "dvc",
        "mlflow",
        "pandas",
        "numpy",
        "pydantic",
        "ruamel",
    )
    code += f"\nprint(); print(*[name for name in {heavy} if name in sys.modules])"
    words, environment = [sys.executable, "-c", f"import sys\n{code}"], command_environment()
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_the_help_loads_no_heavy_library() -> None:
    assert (
        loaded_by("from flows.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass") == ""
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        *(
            f"flows.commands.{name}"
            for name in ("run", "status", "run_state", "registry_output", "init")
        ),
        "rlhf_extras.run_comparison.compare",
    ],
)
def test_commands_that_train_nothing_load_no_torch(module: str) -> None:
    loaded = set(loaded_by(f"import {module}").split())
    assert not loaded & {"torch", "transformers", "prefect", "dvc"}


EXTRAS = (
    annotate,
    benchmarks,
    chat,
    compare,
    convert_command,
    diff_command,
    export,
    inspect_command,
    plan,
    retention,
    serving,
    validate_command,
    workspace_command,
)


class Announced(Exception):
    """Raised in place of what a command would go on to do."""


@pytest.mark.parametrize(
    "command",
    [
        "init my-run", "run", "run --profile smoke", "status", "doctor", "compare .", "report", "export there", "chat",
        "serve", "promote", "approve", "decline --reason no", "rollback --reason no", "history", "registry terms",
        "registry gc", "gc", "stage sft", "plan", "evaluate match --champion a --challenger b --output c",
        "evaluate benchmark a", "evaluate lm-eval --task a", "annotate export there", "annotate import a", "data a",
        "data diff a b", "data validate a", "data convert a --to b.jsonl", "deploy",
    ],
)  # fmt: skip
def test_a_command_says_first_what_it_does(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(what: str) -> NoReturn:
        raise Announced(what)

    for module in (cli, registry_commands, core, *EXTRAS):
        monkeypatch.setattr(module, "busy", announce)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(CliRunner().invoke(cli.app, command.split()).exception, Announced)


REPORT = """
import sys
sys.argv = ["rlhf", *sys.argv[1:]]
from flows.cli import main
try:
    main()
except SystemExit as end:
    slow = sorted({"torch", "transformers", "datasets", "mlflow", "prefect", "pyarrow", "pandas"} & sys.modules.keys())
    print(end.code, slow)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("chat", "/nowhere"),
            "no model at /nowhere (it has no config.json); name a model folder such as models/sft",
        ),
        (("data", "/nowhere"), "no file matches '/nowhere'; correct it in the command"),
        (("data", "pairs/*.jsonl"), "no file matches 'pairs/*.jsonl' (looked in "),
        (("data", "hub:a/b/c/d"), "'hub:a/b/c/d' is not a hub id; write hub:owner/name"),
        (("data", "."), "the folder . holds no file of data; correct it in the command"),
    ],
)
def test_wrong_names_are_refused_before_slow_imports(
    command: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *command], cwd=tmp_path, capture_output=True, text=True
    )
    slow = (
        ["pyarrow"] if command[0] == "data" else []
    )  # a fifth of a second, for what holds the rows
    assert done.stdout == f"2 {slow}\n", done.stdout + done.stderr
    assert (
        message in done.stderr
        and len(done.stderr.splitlines()) == 1
        and "collect.files" not in done.stderr
    )
