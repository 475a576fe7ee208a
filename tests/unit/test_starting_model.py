"""A starting model in files of one's own: its path moves with the workspace, and DVC sees a change of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import rebase_sources
from rlhf_core.fingerprint.tracked_files import STARTING_MODEL_FILE, tokenizer_patterns, write_starting_model


def recorded(workspace: Path, source: str) -> str:
    write_starting_model(workspace, source)
    return (workspace / STARTING_MODEL_FILE).read_text()


@pytest.mark.parametrize("source", ["own/model", "own/model/weights.gguf", "own/m[1]~/weights.gguf"])
def test_a_changed_file_changes_what_dvc_compares(tmp_path: Path, source: str) -> None:
    file = tmp_path / (source if source.endswith(".gguf") else f"{source}/weights.safetensors")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"one")
    first = recorded(tmp_path, source)
    assert file.name in first and recorded(tmp_path, source) == first
    file.write_bytes(b"other")
    assert recorded(tmp_path, source) != first


@pytest.mark.parametrize("source", ["scratch", "owner/name"])
def test_what_is_no_file_is_left_to_the_parameters(tmp_path: Path, source: str) -> None:
    assert recorded(tmp_path, source).strip() == ""


@pytest.mark.parametrize(
    ("source", "moves"),
    [("own/model", True), ("own/weights.gguf", True), ("owner/name", False), ("scratch", False), ("/abs/model", False)],
)
def test_a_relative_path_moves_with_the_workspace(tmp_path: Path, source: str, moves: bool) -> None:
    origin, target = tmp_path / "here", tmp_path / "runs" / "there"
    (origin / "own" / "model").mkdir(parents=True)
    (origin / "own" / "weights.gguf").write_bytes(b"GGUF")
    (origin / "scratch").mkdir()  # a folder of this name does not make it a model
    document = yaml_text.parse(rebase_sources(f"base: {{source: {source}}}\n", origin, target), "params.yaml")
    moved = str(document["base"]["source"])
    assert (os.path.normpath(target / moved) == str(origin / source)) if moves else (moved == source)


def test_of_a_tokenizer_to_count_with_the_weights_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    assert tokenizer_patterns(tmp_path, "own") == ["own/*.json", "own/*.jinja", "own/*.model", "own/*.txt"]
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert tokenizer_patterns(tmp_path, "weights.gguf") == ["weights.gguf"]
    assert tokenizer_patterns(tmp_path, "owner/name") == [] and tokenizer_patterns(tmp_path, None) == []


def test_the_tokenizer_to_count_with_moves_with_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "here/own").mkdir(parents=True)
    text = rebase_sources("validate: {tokenizer: own}\n", tmp_path / "here", tmp_path / "there")
    assert yaml_text.parse(text, "params.yaml")["validate"]["tokenizer"] == "../here/own"
