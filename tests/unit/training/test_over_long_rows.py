"""Rows that are too long for the settings or the model are left out, counted and reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from unit.training.tiny import SHAPE

from rlhf_core.api.sft import fine_tune
from rlhf_core.config.base import SftConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.data.schema import Demonstration, Message
from rlhf_core.data.token_tables import TokenTable
from rlhf_core.models.causal_lm import fitting_length, load_policy
from rlhf_core.training.run_context import RunContext


def test_the_models_positions_bound_what_is_trained_on(
    workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load_policy(workspace / "models/base")
    assert fitting_length(1024, model) == fitting_length(1024, workspace / "models/base") == SHAPE.max_positions
    assert fitting_length(100, model) == 100
    rows = [
        Demonstration(str(i), [Message("user", "the sky")], "very big " * words, "fact", "test", str(i))
        for i, words in enumerate((3, 4, 200, 5, 300))
    ]
    config = SftConfig(steps=1, batch_size=2, max_tokens=1024, optimizer=OptimizerConfig(lr=1e-3))
    with caplog.at_level(logging.WARNING):
        tokens, checks = (TokenTable.of_rows(tokenizer, Demonstration.KIND, part) for part in (rows, rows[:1]))
        trained = fine_tune(model, tokenizer, tokens, checks, config, RunContext(tmp_path / "work"))
    assert trained.metrics["dropped_over_long"] == 2 and trained.metrics["train_rows"] == 3
    assert f"2 of 5 demonstrations are longer than {SHAPE.max_positions} tokens" in caplog.text
