"""``rlhf init --prompts --reward``: what it makes, and what it refuses before anything is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_templates import REAL_TEMPLATES
from typer.testing import CliRunner
from unit.models.test_stop_tokens import tiny_model

from flows.cli import app
from flows.commands import init as init_command
from flows.commands.init_checker import given_function
from rlhf_core.config.loading import load_params
from rlhf_core.models.causal_lm import save_policy

CHECKS = """
from helper import same

def score(prompts, replies, answer, strict=False):
    return [float(same(reply, right)) for reply, right in zip(replies, answer)]

async def ask(prompt, reply, *, answer, extra=None): ...
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts, a starting model's folder and reward functions beside the workspace
    that is to be made.
    """
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(120)]
    Path("sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text("{}")  # what stands before the model is opened
    Path("lib").mkdir()
    Path("lib/own_checks.py").write_text(CHECKS)
    Path("lib/helper.py").write_text("def same(a, b):\n    return a == b\n")
    return tmp_path


def init(*words: str) -> tuple[int, str]:
    """Exit code and what is said; an error of the project's own is said by its text."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["init", "my", *words])
    said = (
        result.output if isinstance(result.exception, SystemExit | None) else str(result.exception)
    )
    return result.exit_code, " ".join(said.split())


GIVEN = ("--prompts", "sums.jsonl", "--reward", "lib/own_checks.py:score", "--model", "tiny")


@pytest.mark.dear("a model is opened, and a plan made")
def test_prompts_and_a_function_make_a_workspace(place: Path) -> None:
    tokenizer = REAL_TEMPLATES[0].tokenizer
    tokenizer.chat_template = REAL_TEMPLATES[0].template
    save_policy(place / "tiny", tiny_model(tokenizer), tokenizer)
    code, said = init(*GIVEN)
    assert code == 0, said
    assert "my is ready" in said and "held out to judge by" in said
    params = load_params(place / "my")
    assert not params.collect.pairs and params.profile == "checker"
    (source,) = params.collect.files.prompts
    assert (place / "my" / source.path).resolve() == place / "sums.jsonl"
    assert [one.model_dump()["target"] for one in params.ppo.reward.sources] == ["own_checks:score"]
    for name in ("own_checks.py", "helper.py"):
        assert (place / "my" / name).read_text() == (place / "lib" / name).read_text()
    recipe = (place / "my" / "dvc.yaml").read_text()
    assert (
        "rlhf stage ppo" in recipe
        and "rlhf stage reward" not in recipe
        and "models/judge" not in recipe
    )
    options = ["--no-probe", "--workspace", "my", "--set", "base.source=scratch"]
    planned = CliRunner().invoke(app, ["plan", *options])
    assert planned.exit_code == 0 and "of tensors: ppo, " in planned.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (GIVEN[:2], "go together"),
        (GIVEN[2:], "go together"),
        ((*GIVEN, "--data", "sums.jsonl"), "without --data"),
        ((*GIVEN[:-2],), "--model"),
        (("--prompts", "gone.jsonl", *GIVEN[2:]), "gone.jsonl"),
        ((*GIVEN[:2], "--reward", "gone.py:score", *GIVEN[4:]), "gone.py"),
        ((*GIVEN[:2], "--reward", "lib/own_checks.py:scor", *GIVEN[4:]), "score, ask"),
        ((*GIVEN[:2], "--reward", "nowhere.at_all:score", *GIVEN[4:]), "nowhere"),
        ((*GIVEN[:2], "--reward", "score", *GIVEN[4:]), "FILE.py:FUNCTION"),
        ((*GIVEN, "--set", "validate.min_rows=500"), "too few"),
        ((*GIVEN, "--set", "ppo.selection.method=referee"), "there is no referee"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_made(
    place: Path, words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_command, "refuse_unreadable", lambda _: None)
    code, said = init(*words)
    assert code != 0 and named in said
    assert not (place / "my").exists()


def test_few_prompts_that_leave_none_held_out_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_command, "refuse_unreadable", lambda _: None)
    (place / "sums.jsonl").write_text(
        '{"prompt": "1?", "answer": 1}\n{"prompt": "2?", "answer": 2}\n'
    )
    code, said = init(*GIVEN, "--set", "validate.min_rows=1")
    assert code != 0 and "would be held out" in said and not (place / "my").exists()


def test_a_column_that_the_function_asks_for_must_be_there(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_command, "refuse_unreadable", lambda _: None)
    (place / "sums.jsonl").write_text(
        "".join(f'{{"prompt": "{n}?", "right": {n}}}\n' for n in range(120))
    )
    code, said = init(*GIVEN)
    assert (
        code != 0 and "asks for answer" in said and "right" in said and not (place / "my").exists()
    )


def test_a_file_named_as_an_installed_module_is_refused(place: Path) -> None:
    (place / "json.py").write_text(CHECKS)
    code, said = init(*GIVEN[:2], "--reward", "json.py:score", *GIVEN[4:])
    assert code != 0 and "installed module" in said and "rename" in said


def test_parameters_without_a_default_are_the_columns_that_a_function_asks_for(place: Path) -> None:
    assert given_function("lib/own_checks.py:score").columns == ("answer",)
    assert given_function("lib/own_checks.py:ask").columns == ("answer",)
