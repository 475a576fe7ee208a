"""The model card says who judged, how each gate went, where the model comes from and what speaks against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flows.registry.evidence import TrainingSource
from flows.release.model_card import ReleaseEvidence, card_data, card_text

SAMPLING = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 64}
JUDGED = {"win_rate": 0.67, "win_rate_low95": 0.63, "win_rate_high95": 0.71, "lc_win_rate": 0.6512,
          "prompts": 320, "clusters": 103}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "comparison": {
        "judge": JUDGED,
        "referee": {**JUDGED, "win_rate": 0.98},
        "reward": {**JUDGED, "win_rate": 0.99},
    },
    "kl": 2.071,
    "kl_low95": 1.7,
    "kl_high95": 2.4,
    "sft": {"length": 19.2, "missing_eos": None, "safety": {"refuses_harmful": 0.9}, "perplexity_preferred": 5.25},
    "policy": {"length": 23.6, "missing_eos": 0.0, "safety": {"refuses_harmful": 0.85}, "perplexity_preferred": 5.31},
    "regression_sft": {"refuses_harmful": 0.3125},
    "regression": {"refuses_harmful": 0.28125},
}
POLICY_GATE = {
    "passed": False,
    "mode": "report",
    "conditions": [
        {"metric": "kl", "value": 2.0, "bound": "<= 6", "limit": 6.0, "passed": True},
        {"metric": "gold", "value": 0.1, "bound": ">= 0.2", "limit": 0.2, "passed": False},
    ],
}


def evidence(base: str = "owner/base", collect: str = "files", obstacle: str = "") -> ReleaseEvidence:
    source = TrainingSource(collect, base, "pairs.jsonl", 5998)
    lineage = {"data": "f00.dir"}
    name = "rlhf-policy version 3"
    return ReleaseEvidence(name, "abc", {"policy": POLICY_GATE}, EVALUATION, SAMPLING, source, lineage, obstacle)


def test_judges_gates_and_lineage_are_told_with_their_numbers() -> None:
    text = card_text(evidence(), "my-model", None)
    assert text.startswith("# my-model\n")
    assert "5,998 preference pairs from pairs.jsonl; base: owner/base" in text
    assert "| judge | 0.670 | 0.630 to 0.710 | 0.651 | 320 | 103 |" in text
    # The reward model is no judge of what was optimised against it, nor the referee of what it selected.
    assert "0.99" not in text and "0.98" not in text and "(`referee`)" in text
    assert "KL from SFT: 2.07 nats per reply (95 %: 1.70 to 2.40)." in text
    assert "| tokens per reply | 19.2 | 23.6 |" in text and "| harmful prompts refused | 0.312 | 0.281 |" in text
    assert "| harmful safety prompts refused | 0.9 | 0.85 |" in text
    assert "| perplexity of held-out preferred replies | 5.25 | 5.31 |" in text
    assert "replies that did not end" not in text  # SFT's is unknown
    assert "**policy** did not pass (mode report)" in text
    assert text.index("| `gold` | 0.1 | ≥ 0.2 | **no** |") < text.index("| `kl` | 2 | ≤ 6 | yes |")
    assert "| registered as | `rlhf-policy version 3` |" in text and "| data | `f00.dir` |" in text
    assert "temperature 0.8, top_p 0.9" in text
    assert "by force" not in text and "synthetic" not in text


def test_a_forced_release_says_what_stood_against_it_and_why() -> None:
    text = card_text(evidence(obstacle="version 3 is ungated (kl >= 6)"), "m", "needed for a *study*")
    assert "**Released by force.** Against it stood: version 3 is ungated (kl ≥ 6)." in text
    assert "Reason given: needed for a \\*study\\*" in text


def test_the_data_card_is_linked_where_there_is_one() -> None:
    assert "DATA_CARD.md" not in card_text(evidence(), "m", None)
    assert "The [data card](DATA_CARD.md) has" in card_text(replace(evidence(), data_card="# Data card"), "m", None)


def test_a_toy_is_called_one() -> None:
    assert "synthetic world of lamps" in card_text(evidence(collect="world", base="scratch"), "m", None)


@pytest.mark.parametrize(
    ("base", "named"),
    [("owner/base", True), ("scratch", False), ("./models/x", False), ("models/x.gguf", False), ("/a/b", False)],
)
def test_a_base_on_a_hub_is_named_in_the_metadata(base: str, named: bool) -> None:
    data = card_data(evidence(base), "apache-2.0")
    assert data.get("base_model") == (base if named else None)
    assert data["license"] == "apache-2.0" and data["pipeline_tag"] == "text-generation"
    assert "license" not in card_data(evidence(base), None)


def test_what_was_not_compared_is_said() -> None:
    bare = ReleaseEvidence("p version 1", "abc", {}, {}, SAMPLING, None, {}, "")
    assert "No comparison with the SFT model was recorded." in card_text(bare, "m", None)


def test_the_language_of_the_prompts_is_named_where_their_script_tells_it() -> None:
    assert "language" not in card_data(evidence(), None)
    judged = replace(evidence(), evaluation=EVALUATION | {"languages": {"ja": 0.05, "zh": 0.9}})
    assert card_data(judged, None)["language"] == ["zh"]


def test_a_policy_whose_sft_took_no_step_is_not_said_to_be_fine_tuned() -> None:
    assert "Fine-tuned with supervision, then trained by PPO" in card_text(evidence(), "m", None)
    text = card_text(replace(evidence(), fine_tuned=False), "m", None)
    assert "Trained without fine-tuning before it, by PPO against a reward model" in text
    assert "with supervision" not in text


def test_a_policy_of_dpo_is_not_said_to_be_trained_by_ppo() -> None:
    by_dpo = replace(evidence(), method="dpo")
    text = card_text(by_dpo, "m", None)
    assert "by DPO" in text and "PPO" not in text and "(`referee`)" not in text
    assert card_data(by_dpo, None)["tags"] == ["rlhf", "dpo"]
