"""The clean data as `datasets.load_dataset` reads them: what TRL's trainers take as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.data.dataset import file_names, write_readme
from rlhf_core.data.schema import Demonstration, Message, Preference, PretrainText, Prompt, write_rows

TURNS = [Message("user", "what color is the lamp?")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder with a row in each file, whose texts are the file's name."""
    folder = tmp_path_factory.mktemp("clean")
    for name in file_names():
        labels = ("", "", "")
        rows = {
            "preferences": Preference("1", TURNS, name, name, None, *labels),
            "demonstrations": Demonstration("1", TURNS, name, *labels),
            "prompts": Prompt("1", TURNS, *labels),
            "pretrain": PretrainText("1", name, *labels),
        }
        write_rows(folder / f"{name}.parquet", [rows[name.split("/")[0].partition("_")[0]]])
    write_readme(folder)
    return folder


def test_every_kind_is_a_config_of_conversations_and_pairs_are_the_default(clean: Path, tmp_path: Path) -> None:
    from datasets import get_dataset_config_names, load_dataset

    def reply(name: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": name}]

    prompt = [{"role": "user", "content": TURNS[0].content}]
    assert set(get_dataset_config_names(str(clean))) == {name.split("/")[0] for name in file_names()}
    pairs = load_dataset(str(clean), cache_dir=str(tmp_path))
    assert set(pairs) == {"train", "validation", "test"}
    expected = {name: reply("preferences/test") for name in ("chosen", "rejected")} | {"prompt": prompt}
    assert pairs["test"].select_columns([*expected])[0] == expected
    assert "margin" not in pairs["test"].column_names, "RewardTrainer would take it, and stop where one is null"
    judge = load_dataset(str(clean), "preferences_judge", cache_dir=str(tmp_path))
    assert set(judge) == {"train", "validation"} and judge["train"][0]["prompt"] == prompt
    imitated = load_dataset(str(clean), "demonstrations", cache_dir=str(tmp_path))
    assert imitated["train"][0]["completion"] == reply("demonstrations/train")
