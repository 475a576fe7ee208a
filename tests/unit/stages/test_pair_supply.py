"""Pairs and adapters that a reward model or its gate would refuse after SFT are refused before
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from base_stage import run_base
from clean_files import write_rows
from real_templates import REAL_TEMPLATES
from unit.models.test_stop_tokens import tiny_model

from flows.pipeline.preflight import pairs_refusal
from rlhf_core.data.schema import Message, Preference
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.models.causal_lm import save_policy
from rlhf_core.stages.reward import require_pairs

MEASURE = "test_accuracy_length_balanced"
FILES = "collect: {source: files, files: {preferences: [pairs.jsonl]}}\n"
GATE = f"gates: {{reward: [{{metric: {MEASURE}, at_least: 0.6, why: a test}}]}}\n"


def pairs(count: int, shorter: int) -> list[Preference]:
    """Pairs of which ``shorter`` prefer the shorter reply, the others the longer one."""
    rows = []
    for number in range(count):
        chosen, rejected = "yes, this is the one " * (2 + number % 3), "no"
        if number < shorter:
            chosen, rejected = rejected, chosen
        prompt = [Message("user", f"question {number}?")]
        rows.append(
            Preference(str(number), prompt, chosen, rejected, None, "", "files", f"g{number}")
        )
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting model of a workspace."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = REAL_TEMPLATES[0].tokenizer
    tokenizer.chat_template = REAL_TEMPLATES[0].template
    save_policy(folder / "source", tiny_model(tokenizer), tokenizer)
    run_base(folder / "source", folder)
    return folder / "base"


def workspace(folder: Path, base: Path, params: str, shorter: int) -> Path:
    """A workspace after validation and its starting model, with 120 pairs in each file."""
    (folder / "models").mkdir()
    (folder / "models" / "base").symlink_to(base)
    (folder / "params.yaml").write_text(params)
    (folder / "dvc.yaml").write_text("stages: {}\n")
    rows = pairs(120, shorter)
    for user in ("preferences", "preferences_referee", "preferences_judge"):
        for split in ("train", "validation", "test"):
            write_rows(folder / "data" / "clean" / user / f"{split}.parquet", rows)
    return folder


@pytest.mark.parametrize(
    ("mode", "shorter", "metric"),
    [("enforce", 60, MEASURE), ("report", 6, MEASURE), ("enforce", 60, "probes.other_question")],
)
def test_enough_pairs_and_a_gate_that_only_reports_refuse_nothing(
    mode: str, shorter: int, metric: str, tmp_path: Path, base: Path
) -> None:
    gate = GATE.replace("gates: {", f"gates: {{mode: {mode}, ").replace(MEASURE, metric)
    require_pairs(workspace(tmp_path, base, FILES + gate, shorter))


@pytest.mark.parametrize(
    ("settings", "shorter", "message"),
    [
        (
            GATE,
            6,
            f"the reward gate asks for {MEASURE}, but 120 test pairs leave 12 when lengths are balanced",
        ),
        (
            GATE.replace(MEASURE, "probes.values_swapped"),
            60,
            "probes.values_swapped, but 0 of 120 held-out replies have a n",
        ),
        (
            GATE.replace(MEASURE, "judge.probes.sentences_shuffled_low95"),
            60,
            "asks for judge.probes.sentences_shuffled_low95",
        ),
        (
            "judge: {length_balance: sampling}\n",
            0,
            "judge.length_balance: sampling leaves 0 of 120 training pairs",
        ),
        ("referee: {max_tokens: 8}\n", 60, "has no usable pair: of 120, 120 exceed max_tokens 8"),
        (
            "judge: {lora: {targets: [query]}}\n",
            60,
            "judge.lora: LlamaForCausalLM has no linear layer query",
        ),
        ("critic: {lora: {upper_layers: 99}}\n", 60, "critic.lora: lora.upper_layers is 99"),
    ],
)
def test_refusals_after_sft_come_before(
    tmp_path: Path, base: Path, settings: str, shorter: int, message: str
) -> None:
    folder = workspace(tmp_path, base, FILES + settings, shorter)
    with pytest.raises(RlhfError, match=message):
        require_pairs(folder)


@pytest.mark.slow
def test_the_run_ends_there(tmp_path: Path, base: Path) -> None:
    folder = workspace(tmp_path, base, FILES + GATE, shorter=6)
    refused = pairs_refusal(folder, "sft")
    assert refused is not None and refused.exit_code == EXIT_USER_ERROR
    assert MEASURE in refused.message and "\n" not in refused.message
    assert pairs_refusal(folder, "reward") is None
    (folder / "params.yaml").write_text(GATE)  # the world has pairs enough
    assert pairs_refusal(folder, "sft") is None
    (folder / "params.yaml").write_text("reward: {lora: {targets: [query]}}\n")
    refused = pairs_refusal(folder, "sft")
    assert refused is not None and "reward.lora" in refused.message
