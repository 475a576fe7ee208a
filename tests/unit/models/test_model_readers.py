"""Files that hold a model, read by packages: which files those are, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from base_stage import run_base
from plugin_distributions import Install

from rlhf_core.errors import ModelError
from rlhf_core.fingerprint.tracked_files import STARTING_MODEL_FILE, write_starting_model
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.foreign import open_starting_model
from rlhf_core.models.readers import is_model_file, model_reader
from rlhf_core.plugins import DISTRIBUTION, MODEL_READERS, PluginError

# A file of this kind holds the path of a folder.
TOY = """
from pathlib import Path
from transformers import AutoConfig
from rlhf_core.models.causal_lm import load_policy, load_tokenizer

def read_config(file):
    return AutoConfig.from_pretrained(file.read_text())

def read_tokenizer(file):
    return load_tokenizer(Path(file.read_text()))

def read_model(file, dtype=None):
    return load_policy(Path(file.read_text()), dtype)
"""


@pytest.fixture
def toy(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: Path) -> Path:
    monkeypatch.delitem(sys.modules, "toy_reader", raising=False)
    install("toys", MODEL_READERS, {"toy": "toy_reader"}, toy_reader=TOY)
    (tmp_path / "model.toy").write_text(str(good))
    return tmp_path / "model.toy"


def test_a_package_reads_a_starting_model(toy: Path, good: Path, tmp_path: Path) -> None:
    assert "readable" in open_starting_model(tmp_path, "model.toy").finding
    run_base(toy, tmp_path)
    ours, theirs = load_policy(tmp_path / "base")[0], load_policy(good)[0]
    for name, weight in theirs.state_dict().items():
        assert weight.equal(ours.state_dict()[name])


def test_the_base_model_is_made_again_when_its_reader_changes(toy: Path, tmp_path: Path) -> None:
    write_starting_model(tmp_path, "model.toy")
    seen = (tmp_path / STARTING_MODEL_FILE).read_text()
    assert seen.startswith("rlhf.model_readers toy: toys 1") and "model.toy" in seen
    (tmp_path / "toys/toy_reader.py").write_text(f"# explained\n{TOY}")
    write_starting_model(tmp_path, "model.toy")
    assert (tmp_path / STARTING_MODEL_FILE).read_text() == seen
    (tmp_path / "toys/toy_reader.py").write_text(f"{TOY}X = 1\n")
    write_starting_model(tmp_path, "model.toy")
    assert (tmp_path / STARTING_MODEL_FILE).read_text() != seen


def test_the_suffix_says_what_a_file_is(toy: Path) -> None:
    named = {
        "x.toy": True,
        "a/X.GGUF": True,
        "owner/name": False,
        "owner/name.v2": False,
        "x.bin": False,
    }
    assert {source: is_model_file(source) for source in named} == named
    with pytest.raises(ModelError, match=r"x\.bin is neither .*\.gguf, \.toy"):
        model_reader(Path("x.bin"))


def test_without_the_extras_a_gguf_file_says_how_to_get_them(
    install: Install, tmp_path: Path
) -> None:
    install(DISTRIBUTION.replace("-", "_"), "other.group", {"a": "b"})  # found first, and alone
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(PluginError, match=r"gguf is an extra .*make setup"):
        open_starting_model(tmp_path, "model.gguf")
