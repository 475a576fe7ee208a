"""The notebook of the documentation runs from its first cell to its last, on a small model in place
of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.api.conftest import LanguageModel

import rlhf_core as rlhf
from rlhf_core.models.causal_lm import save_policy

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs/notebooks/own_reward.ipynb"
NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def test_all_cells_run(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 10 and not any(cell.get("outputs") for cell in cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    save_policy(tmp_path / "base", *llama)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in code:
        exec(source.replace(NAME, repr(str(tmp_path / "base"))), names)
    assert isinstance(names["policy"], rlhf.TrainedPolicy) and names["policy"].history
    assert (
        0
        <= names["compared"].metrics["win_rate_low95"]
        <= names["compared"].metrics["win_rate_high95"]
        <= 1
    )
    assert (tmp_path / "policy/config.json").is_file()


def test_the_functions_of_the_page_on_rewards_are_functions() -> None:
    page = NOTEBOOK.parents[1].joinpath("rewards.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    names: dict[str, Any] = {"rlhf": rlhf}
    for block in blocks:
        exec(block, names)
    assert names["short"]([], ["a b", ""]) == [-0.2, 0.0]
    assert names["correct"]([], ["5", "5"], ["5", "8"]) == [1.0, 0.0]
    assert names["reward"].call == "single"
