"""What the stage that trains the policy writes, whatever the method."""

from __future__ import annotations

POLICY_OUTPUTS = {
    "model": "models/policy",
    "metrics": "metrics/ppo.json",
    "history": "history/ppo.jsonl",
    "abandoned": "history/ppo_abandoned.jsonl",
    "samples": "samples/ppo.jsonl",
}
