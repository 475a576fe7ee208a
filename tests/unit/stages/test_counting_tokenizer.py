"""A tokenizer that cannot be loaded is refused in one line that says what is wrong with its name or its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from rlhf_core.commands.data import app
from rlhf_core.errors import RlhfError
from rlhf_core.stages.token_lengths import load_counting_tokenizer


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the name of the tokenizer is empty; give a model's folder, a .gguf file or a hub id"),
        ("hub:owner/name", "hub:owner/name: hub: is for data sets; name the tokenizer as owner/name"),
        ("two words", "the tokenizer 'two words' is no file here and no hub id (owner/name); give a"),
        ("owner/no-such-name", "the tokenizer owner/no-such-name is not in the cache (HF_HUB_OFFLINE is set); give a"),
        ("notes", "the folder notes has no tokenizer (tokenizer.json); give a"),
        ("config-only", "the folder config-only has no tokenizer (tokenizer.json); give a"),
        ("class-only", "the tokenizer in class-only has no vocabulary (tokenizer.json); give a complete folder"),
        ("damaged", "damaged has no readable tokenizer: "),
    ],
)
def test_a_tokenizer_that_is_none(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for folder, file, text in (
        ("notes", "notes.txt", "notes"),
        ("config-only", "config.json", '{"model_type": "llama"}'),
        ("class-only", "tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        ("damaged", "tokenizer.json", "{"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    with pytest.raises(RlhfError) as caught:
        load_counting_tokenizer(source, tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_empty_option_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = CliRunner().invoke(app, ["validate", "pairs.jsonl", "--tokenizer", ""])
    assert isinstance(result.exception, RlhfError) and str(result.exception).startswith("--tokenizer is empty; give a")
