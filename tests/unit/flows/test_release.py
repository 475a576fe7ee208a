"""The model card says what speaks for and against a model, and transformers 4 computes the same
with an export.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from flows.registry.evidence import TrainingSource
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.probe_table import probe_table
from rlhf_core.gates import GateDecision
from rlhf_core.models.adapters import ADAPTER_FOLDER
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.models.folder_check import ADAPTER_CONFIG
from rlhf_extras.release.export import copy_adapter, earlier_rope, export, write_earlier_names
from rlhf_extras.release.model_card import ReleaseEvidence, card_data, card_text

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
    "sft": {
        "length": 19.2,
        "missing_eos": None,
        "safety": {"refuses_harmful": 0.9},
        "perplexity_preferred": 5.25,
    },
    "policy": {
        "length": 23.6,
        "missing_eos": 0.0,
        "safety": {"refuses_harmful": 0.85},
        "perplexity_preferred": 5.31,
    },
    "regression_sft": {"refuses_harmful": 0.3125},
    "regression": {"refuses_harmful": 0.28125},
}
POLICY_GATE = {
    "passed": False,
    "mode": "report",
    "conditions": [
        {"metric": "kl", "value": 2.0, "bound": "<= 6", "sign": "<=", "limit": 6.0, "passed": True},
        {
            "metric": "gold",
            "value": 0.1,
            "bound": ">= 0.2",
            "sign": ">=",
            "limit": 0.2,
            "passed": False,
        },
    ],
}


def evidence(base: str = "owner/base") -> ReleaseEvidence:
    source = TrainingSource("files", base, "pairs.jsonl", 5998)
    lineage = {"data": "f00.dir"}
    name = "rlhf-policy version 3"
    gate = GateDecision.of("policy", POLICY_GATE)
    return ReleaseEvidence(name, "abc", [gate], EVALUATION, SAMPLING, source, lineage, "")


def test_judges_gates_and_lineage_are_told_with_their_numbers() -> None:
    text = card_text(evidence(), "my-model", None)
    assert text.startswith("# my-model\n")
    assert "5,998 preference pairs from pairs.jsonl; base: owner/base" in text
    assert "| judge | 67.0 % | 63.0 % to 71.0 % | 65.1 % | 320 | 103 |" in text
    # The reward model is no judge of what was optimised against it, nor the referee of what it
    # selected.
    assert "0.99" not in text and "0.98" not in text and "(`referee`)" in text
    assert "KL from SFT: 2.07 nats per reply (95 %: 1.70 to 2.40)." in text
    assert (
        "| tokens per reply | 19.2 | 23.6 |" in text
        and "| harmful prompts refused | 0.312 | 0.281 |" in text
    )
    assert "| harmful safety prompts refused | 0.9 | 0.85 |" in text
    assert "| perplexity of held-out preferred replies | 5.25 | 5.31 |" in text
    assert "replies that did not end" not in text  # SFT's is unknown
    assert "**policy** failed, mode report" in text
    assert text.index("| `gold` | 0.1 | ≥ 0.2 | **no** |") < text.index("| `kl` | 2 | ≤ 6 | yes |")
    assert "| registered as | `rlhf-policy version 3` |" in text and "| data | `f00.dir` |" in text
    assert "temperature 0.8, top_p 0.9" in text
    assert "by force" not in text and "synthetic" not in text
    assert (
        "**Better than SFT: wins 67.0 % (95 % interval 63.0 to 71.0 %) by judge; the policy gate failed"
        in text
    )


def test_a_card_tells_what_reward_model_and_judges_read() -> None:
    assert "## What reward model and judges read" not in card_text(evidence(), "m", None)
    rate = {
        "world_fact": 0.55,
        "world_fact_low95": 0.47,
        "world_fact_high95": 0.63,
        "world_fact_pairs": 200.0,
    }
    absent = {"absent": {"values_swapped": "2 of 60 held-out replies have a <number>"}}
    probes = probe_table(
        {"reward": {"probes": rate}, "judge": {"probes": {**rate, **absent}}, "sft": {}}
    )
    text = card_text(replace(evidence(), probes=probes), "m", None)
    assert "| the copy | reward model | judge | pairs |" in text
    assert "| wrong fact | 0.55 (0.47 to 0.63) | 0.55 (0.47 to 0.63) | 200 |" in text
    assert "- a value swapped: 2 of 60 held-out replies have a" in text


@pytest.mark.parametrize(
    ("changes", "forced", "said", "unsaid"),
    [
        ({"obstacle": "ungated (kl >= 6)"}, "a *study*", "Against it stood: ungated (kl ≥ 6). Reason given: a \\*study",
         "DATA_CARD.md"),
        ({"data_card": "# Data card"}, None, "The [data card](DATA_CARD.md) has", "by force"),
        ({"source": TrainingSource("world", "scratch", "", 5)}, None, "synthetic world of lamps", "pairs.jsonl"),
        ({"evaluation": {"sft": {"missing_eos": 0.0}, "policy": {"missing_eos": 0.2}}}, None,
         "What alarms:\n\n- replies without an end 0.20 (SFT 0.00)\n", "Better"),
        ({"evaluation": {"sft": {"missing_eos": 0.3}, "policy": {"missing_eos": None}}}, None,
         "Not compared", "What alarms"),
        ({"evaluation": {}}, None, "No comparison with the SFT model was recorded.", "| judge |"),
        ({}, None, "Fine-tuned with supervision, then trained by PPO", "Trained without"),
        ({"fine_tuned": False}, None, "Trained without fine-tuning before it, by PPO against", "with supervision"),
        ({"method": "dpo"}, None, "by DPO", "PPO"),
    ],
)  # fmt: skip
def test_what_a_card_says_of_a_version(
    changes: dict[str, Any], forced: str | None, said: str, unsaid: str
) -> None:
    text = card_text(replace(evidence(), **changes), "m", forced)
    assert said in text and unsaid not in text


BASES = {
    "owner/base": True,
    "scratch": False,
    "./models/x": False,
    "models/x.gguf": False,
    "/a/b": False,
    "/a/b.gguf": False,
}


@pytest.mark.parametrize(("base", "named"), BASES.items())
def test_an_adapter_names_the_base_that_others_can_load(
    base: str, named: bool, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    (policy / ADAPTER_FOLDER).mkdir(parents=True)
    file = policy / ADAPTER_FOLDER / ADAPTER_CONFIG
    file.write_text('{"base_model_name_or_path": null}')
    (policy / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    for fine_tuned in (False, True):
        exported = tmp_path / f"exported {fine_tuned}"
        copy_adapter(policy, exported, replace(evidence(base), fine_tuned=fine_tuned))
        settings = json.loads((exported / ADAPTER_CONFIG).read_text())
        # Where SFT has trained it, its base is a model of the workspace alone.
        loadable = base if named and not fine_tuned else None
        assert settings["base_model_name_or_path"] == loadable
        tokenizer = json.loads((exported / "tokenizer_config.json").read_text())
        assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(("base", "named"), BASES.items())
def test_a_base_on_a_hub_is_named_in_the_metadata(base: str, named: bool) -> None:
    data = card_data(evidence(base), "apache-2.0")
    assert data.get("base_model") == (base if named else None)
    assert data["license"] == "apache-2.0" and data["pipeline_tag"] == "text-generation"
    assert "license" not in card_data(evidence(base), None)


def test_language_and_method_are_in_the_metadata_where_they_are_known() -> None:
    assert "language" not in card_data(evidence(), None)
    judged = replace(
        evidence(), evaluation=EVALUATION | {"languages": {"ja": 0.05, "zh": 0.9}}, method="dpo"
    )
    data = card_data(judged, None)
    assert (data["language"], data["tags"]) == (["zh"], ["rlhf", "dpo"])


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


# The values were computed with in transformers 4.57.1: the logits are those of 5.23.0.
@pytest.mark.parametrize(
    ("model_type", "parameters", "earlier"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 1e5}),
        ("qwen3", {"rope_theta": 1e6}, {"rope_theta": 1e6}),
        ("llama", {"rope_theta": 5e5, **SCALED}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
        (
            "phi",
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            "gpt_neox",
            {"rope_theta": 5e4, "partial_rotary_factor": 0.5},
            {"rotary_emb_base": 5e4, "rotary_pct": 0.5},
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_theta": 1e6, **SCALED},
                "sliding_attention": {"rope_theta": 2e4},
            },
            {"rope_theta": 1e6, "rope_scaling": SCALED, "rope_local_base_freq": 2e4},
        ),
        ("llama", {}, {}),
        (
            "new",
            {"full_attention": {"rope_theta": 1e6}, "compressed_attention": {"rope_theta": 1e4}},
            None,
        ),
        (
            "new",
            {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4, **SCALED},
            },
            None,
        ),
    ],
)
def test_earlier_names(
    model_type: str, parameters: dict[str, Any], earlier: dict[str, Any] | None
) -> None:
    assert earlier_rope(model_type, parameters) == earlier


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e5}, {"rope_theta": 5e5, **SCALED}]
)
def test_the_folder_has_both_forms_and_computes_as_before(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    config = tiny_config(tokenizer, max_position_embeddings=256, rope_parameters=dict(rope))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(1, 60)[None]
    assert write_earlier_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in written) == ("factor" in rope)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # Version 4 adds token_type_ids by default, which the generation of most models refuses.
    assert settings["model_input_names"] == tokenizer.model_input_names
    after, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    with torch.inference_mode():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert again.all_special_tokens == tokenizer.all_special_tokens
    text = "what<|user|> colour<|assistant|>"
    assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("below", ["model", "models/mine"])
def test_a_folder_below_a_file_is_refused_before_anything_is_read(
    tmp_path: Path, below: str
) -> None:
    file = tmp_path / "notes"
    file.touch()
    with pytest.raises(
        RlhfError,
        match=f"{file} is a file, so nothing can be written below it; name another folder",
    ):
        export(tmp_path, file / below)
