"""Trainings on fixed rows take fewer steps where rows are few, whatever their settings ask for."""

from __future__ import annotations

from typing import Any

import pytest

import rlhf_core as rlhf
from rlhf_core.config.base import BaseConfig, SftConfig
from rlhf_core.config.model import EpochLimit
from rlhf_core.config.policy import DpoConfig
from rlhf_core.models.causal_lm import new_model, train_tokenizer

PAIRS = [
    {"prompt": f"what is {i}?", "chosen": f"it is {i}.", "rejected": "i do not know."}
    for i in range(10)
]
DEMONSTRATIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
SHAPE = BaseConfig(hidden_size=16, intermediate_size=16, layers=1, heads=2, max_positions=64)


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    texts = [f"{row['prompt']} {row['chosen']} {row['rejected']}" for row in PAIRS]
    tokenizer = train_tokenizer(texts, 300, 64)
    return new_model(SHAPE, tokenizer, seed=1), tokenizer


@pytest.mark.parametrize(
    ("steps", "most", "batches", "taken"),
    [(50, None, 3, 50), (50, 2, 3, 6), (5, 2, 3, 5), (0, 2, 3, 0), (50, 1, 1, 1)],
)
def test_steps_are_the_most_and_epochs_may_make_them_fewer(
    steps: int, most: int | None, batches: int, taken: int
) -> None:
    settings = EpochLimit(steps=steps, max_epochs=most)
    assert settings.within_epochs(batches).steps == taken


@pytest.mark.parametrize(("most", "taken"), [(None, 7), (2, 6)])
def test_sft_and_dpo_count_the_batches_of_their_rows_and_say_so(
    model: tuple[Any, Any], most: int | None, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten rows, four a batch, are three batches."""
    sizes: dict[str, Any] = {"steps": 7, "max_epochs": most, "batch_size": 4, "max_tokens": 64}
    sft = rlhf.train_sft(
        *model,
        DEMONSTRATIONS,
        validation=DEMONSTRATIONS[:2],
        config=SftConfig(**sizes),
        allow_high_learning_rates=True,
    )
    dpo = rlhf.train_dpo(
        *model,
        PAIRS,
        validation=PAIRS[:2],
        config=DpoConfig(**sizes),
        allow_high_learning_rates=True,
    )
    assert sft.history[-1]["step"] == dpo.history[-1]["step"] == taken
    said = [record.getMessage() for record in caplog.records if "max_epochs" in record.getMessage()]
    assert len(said) == (0 if most is None else 2)
