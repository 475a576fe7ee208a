"""What ``rlhf init`` cannot make a workspace of is refused before anything is made, cheap things
first, and what it has made is removed where it fails.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from real_templates import REAL_TEMPLATES
from typer.testing import CliRunner
from unit.models.test_stop_tokens import tiny_model

from flows.cli import app
from flows.commands import init
from flows.dvc_repo import inputs
from rlhf_core.errors import EXIT_OK, RlhfError
from rlhf_core.models.causal_lm import save_policy

ROW = {"prompt": "Is it?", "chosen": "Yes, it is.", "rejected": "No."}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with pairs and things that are no model."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("notes.txt").write_text("a model\n")
    Path("train.py").write_text("model = None\n")
    Path("weights.gguf").write_text("no model\n")
    Path("empty").mkdir()
    Path("half").mkdir()
    Path("half/config.json").write_text("{}")
    return tmp_path


def refusal(*words: str) -> str:
    with pytest.raises(RlhfError) as refused:
        CliRunner().invoke(app, ["init", *words], catch_exceptions=False)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    "model",
    ["train.py", "./notes.txt", "pairs.jsonl", "empty", "./empty", "half", "weights.gguf"],
)
@pytest.mark.parametrize("by", ["--model", "--set"])
def test_what_is_no_model_makes_no_workspace_and_reads_no_data(
    model: str, by: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "forecast_of", lambda *_, **__: pytest.fail("data were read"))
    words = ["--model", model] if by == "--model" else ["--set", f"base.source={model}"]
    said = refusal("run", "--data", "pairs.jsonl", *words)
    assert Path(model).name in said and "nothing was made" in said
    assert not (place / "run").exists()


def make_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make workspaces without a forecast and without DVC."""
    monkeypatch.setattr(init, "forecast_of", lambda *_, **__: "")
    monkeypatch.setattr(init, "ensure_dvc", lambda *_: None)
    monkeypatch.setattr(inputs, "refresh_inputs", lambda _: None)


def test_models_that_can_be_opened_and_hub_ids_stay(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quickly(monkeypatch)
    tokenizer = REAL_TEMPLATES[0].tokenizer
    tokenizer.chat_template = REAL_TEMPLATES[0].template
    save_policy(place / "tiny", tiny_model(tokenizer), tokenizer)
    for number, model in enumerate(("tiny", "./tiny", str(place / "tiny"), "owner/name")):
        words = ["init", f"run{number}", "--data", "pairs.jsonl", "--model", model]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == EXIT_OK, model


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "--set", "rewrd.max_tokens=3"], "did you mean 'reward'"),
        (["run", "--set", "reward.max_tokns=3"], "did you mean 'reward.max_tokens'"),
        (["run", "--set", "reward.max_tokens=few"], "reward.max_tokens"),
        (["run", "--profile", "own-dat"], "did you mean 'own-data'"),
        (["notes.txt/run"], "cannot write to notes.txt/run"),
        (["notes.txt"], "cannot write to notes.txt"),
        (["run", "--cache", "notes.txt/cache"], "cannot write to notes.txt/cache"),
        (["made"], "made is already a workspace"),
    ],
)
def test_what_costs_nothing_to_see_is_said_before_data_are_read(
    words: list[str], named: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("forecast_of", "refuse_unreadable"):
        monkeypatch.setattr(init, name, lambda *_, **__: pytest.fail("data were read"))
    Path("made").mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        (place / "made" / name).touch()
    assert named in refusal(*words, "--data", "pairs.jsonl")
    assert not (place / "run").exists()


BROKEN = {
    "cut.jsonl.gz": gzip.compress((json.dumps(ROW) + "\n").encode() * 999)[:-20],
    "empty.jsonl": b"",
    "prompts.jsonl": b'{"prompt": "Is it?"}\n',
    "names.jsonl": b'{"a": "Is it?", "b": "Yes", "c": "No"}\n',
    "picture.jsonl": bytes(range(256)),
    "late.jsonl.gz": gzip.compress(
        "".join(json.dumps(ROW | {"prompt": str(n)}) + "\n" for n in range(99_999)).encode()
    )[:-20],
}


@pytest.mark.parametrize(
    "name", [*list(BROKEN)[:-1], pytest.param("late.jsonl.gz", marks=pytest.mark.slow)]
)
def test_after_a_broken_file_the_corrected_command_goes_on(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / name).write_bytes(BROKEN[name])
    said = refusal("run", "--data", name, "--no-probe")
    assert name in said and said.count("nothing was made") == 1
    assert not (place / "run").exists()
    make_quickly(monkeypatch)
    words = ["init", "run", "--data", "pairs.jsonl"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == EXIT_OK


@pytest.mark.parametrize("error", [RlhfError("no room"), KeyboardInterrupt(), OSError("full")])
@pytest.mark.parametrize("folder", ["run", "a/b/run", "empty", "kept"])
def test_what_was_made_is_removed_where_making_fails(
    folder: str, error: BaseException, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("kept/own").mkdir(parents=True)
    Path("kept/own/file").write_text("mine")
    before = sorted(place.rglob("*"))
    monkeypatch.setattr(init, "forecast_of", lambda *_, **__: "")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(init, "ensure_dvc", fail)
    with pytest.raises(type(error)):
        init.create(Path(folder), data=["pairs.jsonl"])
    assert sorted(place.rglob("*")) == before
