"""Tables in place of lists of records: read as rows, or refused by name; never read as their column
names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from unit.api.conftest import PPO, QUESTIONS, LanguageModel, by_length

import rlhf_core as rlhf
from rlhf_core.api.inputs import rows_of
from rlhf_core.data.schema import Demonstration, Preference, PretrainText, Prompt
from rlhf_core.errors import DataError, ModelError

TURNS = [{"role": "user", "content": "Name a colour."}]
ROWS: dict[type, list[dict[str, Any]]] = {
    Prompt: [{"prompt": "Name a colour."}, {"prompt": "And a number."}],
    Preference: [{"prompt": TURNS, "chosen": "Red.", "rejected": "No."}] * 3,
    Demonstration: [{"prompt": "Name a colour.", "completion": f"{n}."} for n in range(3)],
    PretrainText: [{"text": "A text."}, {"text": "Another one."}],
}


class PolarsLike:
    """What is used of a Polars DataFrame: its iterator gives columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns = rows, list(rows[0])

    def to_dicts(self) -> list[dict[str, Any]]:
        return self.rows

    def __iter__(self) -> Iterator[Any]:
        return iter([row[self.columns[0]] for row in self.rows])


class Columns:
    """A table that only tells its columns, as a lazy or remote one does."""

    columns = ("prompt", "chosen")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class DictLike:
    """A mapping that does not say so, such as an HDF5 group or a TensorDict."""

    def keys(self) -> list[str]:
        return ["prompt"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


def in_arrays(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """As pandas reads a Parquet file: lists are arrays of NumPy."""
    return pd.DataFrame(
        [{k: np.array(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    )


READ: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "pandas": pd.DataFrame,
    "pandas with an index": lambda rows: pd.DataFrame(
        rows, index=[f"i{n}" for n in range(len(rows))]
    ),
    "pandas of Parquet": in_arrays,
    "pandas on Arrow": lambda rows: pa.Table.from_pylist(rows).to_pandas(
        types_mapper=pd.ArrowDtype
    ),
    "pyarrow table": pa.Table.from_pylist,
    "pyarrow batch": pa.RecordBatch.from_pylist,
    "polars": PolarsLike,
    "datasets": datasets.Dataset.from_list,
    "datasets stream": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "generator": lambda rows: (row for row in rows),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("table", READ)
def test_a_table_is_read_as_its_rows(table: str, kind: type) -> None:
    assert rows_of(kind, READ[table](ROWS[kind]), "rows") == rows_of(kind, ROWS[kind], "rows")


@pytest.mark.parametrize(
    "column",
    [pd.Series, np.array, pa.array, tuple, pa.chunked_array],
    ids=lambda column: column.__name__,
)
def test_a_column_of_texts_is_read_as_prompts(column: Callable[[Any], Any]) -> None:
    given = column([QUESTIONS]) if column is pa.chunked_array else column(QUESTIONS)
    assert rows_of(Prompt, given, "prompts") == rows_of(Prompt, QUESTIONS, "prompts")


def test_what_is_missing_in_a_table_is_no_text() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Name a colour.", "system": "Be kind."},
        {"prompt": "And a number.", "system": None},
    ]
    table: Any = pd.DataFrame(rows)
    assert rows_of(Prompt, table, "prompts") == rows_of(Prompt, rows, "prompts")
    table = pd.DataFrame({"prompt": ["a", np.nan]})
    with pytest.raises(DataError, match=r"prompts, record 2|prompts: 1 of the records"):
        rows_of(Prompt, table, "prompts")


NO_ROWS: dict[str, Any] = {
    "columns alone": Columns(),
    "like a dict": DictLike(),
    "a dict of columns": {"prompt": QUESTIONS},
    "all splits": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[Prompt])),
    "a structured array": np.array([("a", "b")], dtype=[("prompt", "U9"), ("chosen", "U9")]),
    "rows of a table with their index": pd.DataFrame(ROWS[Prompt]).iterrows(),
    "named tuples": list(pd.DataFrame(ROWS[Prompt]).itertuples()),
    "tables": [pd.DataFrame(ROWS[Prompt])],
    "numbers": [1, 2],
    "numbers of a tensor": torch.tensor([1, 2]),
    "bytes": b"prompt",
    "nothing": None,
    "a number": 3,
    "a function": by_length,
}


@pytest.mark.parametrize("given", NO_ROWS)
@pytest.mark.parametrize("kind", [Prompt, PretrainText])
def test_what_holds_no_rows_is_refused_in_one_line(given: str, kind: type) -> None:
    with pytest.raises(DataError, match=r"^rows[ ,][^\n]*$"):
        rows_of(kind, NO_ROWS[given], "rows")


Call = Callable[[Any, Any, Any], Any]
DEMONSTRATIONS, PAIRS = ROWS[Demonstration], ROWS[Preference]
CALLS: dict[str, Call] = {
    "demonstrations": lambda m, t, given: rlhf.train_sft(m, t, given),
    "validation": lambda m, t, given: rlhf.train_sft(m, t, DEMONSTRATIONS, validation=given),
    "preferences": lambda m, t, given: rlhf.train_reward_model(m, t, given),
    "validation ": lambda m, t, given: rlhf.train_reward_model(m, t, PAIRS, validation=given),
    "prompts": lambda m, t, given: rlhf.train_critic(m, t, given, by_length),
    "prompts ": lambda m, t, given: rlhf.train_ppo(
        m, t, given, by_length, config=rlhf.PpoConfig(**PPO)
    ),
    "validation_prompts": lambda m, t, given: rlhf.train_ppo(
        m, t, QUESTIONS, by_length, validation_prompts=given
    ),
    "demonstrations ": lambda m, t, given: rlhf.train_ppo(
        m, t, QUESTIONS, by_length, demonstrations=given
    ),
    "pretrain": lambda m, t, given: rlhf.train_ppo(m, t, QUESTIONS, by_length, pretrain=given),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_refuses_column_names(name: str, llama: LanguageModel) -> None:
    for given in (Columns(), DictLike()):
        with pytest.raises(DataError, match=f"^{name.strip()} is a "):
            CALLS[name](*llama, given)


def test_ppo_asks_for_the_rows_of_a_table(llama: LanguageModel) -> None:
    asked: set[str] = set()

    def reward(prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
        asked.update(prompt[-1]["content"] for prompt in prompts)
        return [float(len(reply)) for reply in replies]

    prompts: Any = pd.DataFrame({"prompt": QUESTIONS, "source": "mine"})
    rollout = rlhf.PpoConfig(**PPO).rollout
    rlhf.train_critic(
        *llama, prompts, reward, rollout=rollout, config=rlhf.CriticConfig(max_rollouts=1)
    )
    assert asked and asked <= set(QUESTIONS)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, t: rlhf.train_sft(m, t, DEMONSTRATIONS),
        lambda m, t: rlhf.train_reward_model(m, t, PAIRS),
        lambda m, t: rlhf.train_critic(m, t, QUESTIONS, by_length),
        lambda m, t: rlhf.train_ppo(m, t, QUESTIONS, by_length, config=rlhf.PpoConfig(**PPO)),
    ],
    ids=["sft", "reward", "critic", "ppo"],
)
def test_every_function_refuses_a_rounded_model_before_it_trains(
    call: Callable[[Any, Any], Any], llama: LanguageModel
) -> None:
    with pytest.raises(ModelError, match="was rounded by a change of precision"):
        call(copy.deepcopy(llama[0]).bfloat16(), llama[1])
