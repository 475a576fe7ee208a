"""The starting model is opened before other stages take their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.pipeline.preflight import open_starting_model
from rlhf_core.config.loading import load_params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError


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
