"""The SFT gate stops a run whose model got worse."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.gates import GatesConfig
from rlhf_core.errors import GateFailed
from rlhf_core.stages.gates import GATE_SFT as STAGE
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext


@pytest.mark.parametrize(
    ("after", "settings", "passed", "stopped"),
    [
        (15.9, {}, True, False),
        (16.0, {}, True, False),
        (16.1, {}, False, True),
        (17.0, {"mode": "report"}, False, False),
    ],
)
def test_a_model_that_got_worse_is_stopped_unless_the_gate_only_reports(
    after: float, settings: dict[str, Any], passed: bool, stopped: bool, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics/sft.json"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps({"perplexity_before": 16.0, "perplexity": after}))
    outputs = Paths({key: tmp_path / path for key, path in STAGE.outputs.items()})
    with pytest.raises(GateFailed, match="perplexity") if stopped else nullcontext():
        found = STAGE.run(
            GatesConfig(**settings),
            Paths({"metrics": metrics}),
            outputs,
            RunContext(tmp_path / "work"),
        )
        assert found == {"passed": float(passed), "conditions": 1.0}
    assert json.loads((tmp_path / "gates/sft.json").read_text())["passed"] == passed
    assert (tmp_path / "gates/sft.pass").exists() != stopped
