"""The SFT gate stops a run whose model got worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config.gates import GatesConfig
from rlhf_core.errors import GateFailed
from rlhf_core.stages.gate_sft import STAGE
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext


def judge(root: Path, before: float, after: float, config: GatesConfig) -> dict[str, float]:
    metrics = root / "metrics/sft.json"
    metrics.parent.mkdir(exist_ok=True)
    metrics.write_text(json.dumps({"perplexity_before": before, "perplexity": after}))
    outputs = Paths({key: root / path for key, path in STAGE.outputs.items()})
    return STAGE.run(config, Paths({"metrics": metrics}), outputs, RunContext(root / "work"))


def test_a_model_that_got_worse_is_stopped_by_default(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="perplexity"):
        judge(tmp_path, 16.0, 2843.0, GatesConfig())
    assert not json.loads((tmp_path / "gates/sft.json").read_text())["passed"]
    assert not (tmp_path / "gates/sft.pass").exists()


@pytest.mark.parametrize("after", [15.9, 16.0])
def test_a_model_that_did_not_get_worse_passes(tmp_path: Path, after: float) -> None:
    assert judge(tmp_path, 16.0, after, GatesConfig()) == {"passed": 1.0, "conditions": 1.0}
    assert (tmp_path / "gates/sft.pass").read_text() == "passed\n"


def test_a_gate_that_only_reports_lets_the_run_go_on(tmp_path: Path) -> None:
    assert judge(tmp_path, 16.0, 17.0, GatesConfig(mode="report"))["passed"] == 0.0
    assert (tmp_path / "gates/sft.pass").exists()
