"""What ``rlhf init`` says at its end: run it, or what is missing first."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.commands.init import next_step


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
