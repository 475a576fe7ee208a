"""What is said before a run: the next step of a new workspace, what a judge lacks, a model that cannot be opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.commands.doctor import FAIL, OK, WARN, workspace_checks
from flows.commands.init import next_step
from flows.pipeline.preflight import open_starting_model
from rlhf_core.config.loading import load_params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError


@pytest.mark.parametrize(
    ("collect", "expected"),
    [
        ("source: world", "my-run is ready; next: rlhf run --workspace my-run"),
        ("source: files", "its data are missing: name files with pairs of replies under collect.files.preferences in"),
        ("{source: files, files: {preferences: [here.jsonl]}}", "my-run is ready"),
        ('{source: files, files: {preferences: ["hub:a/b", "s3://c/d"]}}', "my-run is ready"),
        ("{source: files, files: {preferences: [here.jsonl, gone.jsonl]}}", "but no file matches gone.jsonl, seen"),
        ("{source: files, files: {demonstrations: [here.jsonl]}}", "its data are missing"),
    ],
)
def test_the_next_step_names_what_is_missing(
    collect: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "here.jsonl").touch()
    text = collect if collect.startswith("{") else f"{{{collect}}}"
    (folder / "params.yaml").write_text(f"collect: {text}\n")
    said = next_step(folder)
    assert expected in said and said.endswith("rlhf run --workspace my-run")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("./gone", "there is no starting model at ./gone, seen from there"), ("x.gguf", "no starting model"), ("a/b", "")],
)
def test_a_starting_model_that_is_not_there_is_named(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "params.yaml").write_text(f"base: {{source: {source}}}\n")
    message = next_step(folder)
    assert expected in message and message.endswith("rlhf run --workspace my-run")
    assert bool(expected) != ("is ready" in message)


def levels(workspace: Path) -> dict[str, str]:
    return {check.name: check.level for check in workspace_checks(workspace)}


def test_a_missing_key_and_a_missing_file_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text(
        "evaluate:\n  llm_judge: {base_url: 'http://127.0.0.1:9/v1', model: m, token_env: JUDGE_KEY_OF_TEST}\n"
        "  verifiable: {path: checks.jsonl}\n"
    )
    assert levels(tmp_path)["llm judge"] == WARN and levels(tmp_path)["verifiable prompts"] == FAIL
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "x")
    (tmp_path / "checks.jsonl").touch()
    assert levels(tmp_path)["llm judge"] == levels(tmp_path)["verifiable prompts"] == OK


def opened(workspace: Path, params: str) -> str:
    (workspace / "params.yaml").write_text(params)
    return open_starting_model(workspace, load_params(workspace))


@pytest.mark.slow
def test_a_model_that_base_would_refuse_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(RlhfError, match=r"cut\.gguf is cut off: it ends within its header, after 8 bytes") as refused:
        opened(tmp_path, "base: {source: cut.gguf, allow_high_learning_rates: true}\n")
    assert refused.value.exit_code == EXIT_USER_ERROR and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "params",
    [
        "seed: 1\n",
        "base: {source: ./gone, allow_high_learning_rates: true}\npools: {base: {pool: away, shared: false}}\n",
    ],
    ids=["from-nothing", "on-another-host"],
)
def test_what_is_not_loaded_here_is_not_opened(params: str, tmp_path: Path) -> None:
    assert opened(tmp_path, params) == ""
