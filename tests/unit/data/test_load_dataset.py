"""The clean data as `datasets.load_dataset` reads them, and as TRL's trainers want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data.dataset import file_names, write_readme
from rlhf_core.data.schema import arrow_schema

TURNS = [{"role": "user", "content": "what color is the lamp?"}]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder with a row in each file."""
    folder = tmp_path_factory.mktemp("clean")
    for name in file_names():
        (folder / name).parent.mkdir(exist_ok=True)
        schema = arrow_schema(name.split("/")[0].partition("_")[0])
        row = {field: name for field in schema.names if pa.types.is_string(schema.field(field).type)}
        row |= {"prompt": TURNS} if "prompt" in schema.names else {}
        pq.write_table(pa.Table.from_pylist([row], schema=schema), folder / f"{name}.parquet")
    write_readme(folder)
    return folder


def test_every_kind_is_a_config_and_pairs_are_the_default(clean: Path, tmp_path: Path) -> None:
    from datasets import get_dataset_config_names, load_dataset

    assert set(get_dataset_config_names(str(clean))) == {name.split("/")[0] for name in file_names()}
    pairs = load_dataset(str(clean), cache_dir=str(tmp_path))
    assert set(pairs) == {"train", "validation", "test"} and pairs["test"][0]["chosen"] == "preferences/test"
    judge = load_dataset(str(clean), "preferences_judge", cache_dir=str(tmp_path))
    assert set(judge) == {"train", "validation"} and judge["train"][0]["prompt"] == TURNS


def test_the_lines_of_the_readme_make_rows_for_trl(clean: Path, tmp_path: Path) -> None:
    page = (clean / "README.md").read_text()
    code = "\n".join(line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ") or not line)
    code = code.replace('"data/clean", "preferences")', f'{str(clean)!r}, "preferences", cache_dir={str(tmp_path)!r})')
    names: dict[str, Any] = {}
    exec(code, names)
    row = names["pairs"]["train"][0]
    assert row == {
        "prompt": TURNS,
        "chosen": [{"role": "assistant", "content": "preferences/train"}],
        "rejected": [{"role": "assistant", "content": "preferences/train"}],
    }
