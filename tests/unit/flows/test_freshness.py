"""Evidence counts only while every stage before the gate, however far, has left its files as recorded."""

from __future__ import annotations

import pytest

from flows.dvc_repo.graph import StageNode
from flows.registry.evidence import require_recorded
from rlhf_core.errors import GateFailed

EDGES = {"collect": (), "validate": ("collect",), "ppo": ("validate",), "gate-policy": ("ppo",), "report": ("ppo",)}
GRAPH = {name: StageNode(name, after, "true", ()) for name, after in EDGES.items()}


@pytest.mark.parametrize("stale", ["gate-policy", "ppo", "validate", "collect"])
def test_a_stale_stage_anywhere_before_the_gate_is_named(stale: str) -> None:
    changes = [{"changed outs": {"data": "modified"}}]
    with pytest.raises(GateFailed, match=stale):
        require_recorded(GRAPH, {stale: changes}, "gate-policy")


def test_what_does_not_lead_to_the_gate_and_what_always_runs_does_not_matter() -> None:
    require_recorded(GRAPH, {"report": [{"changed deps": {"x": "modified"}}]}, "gate-policy")
    require_recorded(GRAPH, {"collect": ["always changed"]}, "gate-policy")
