"""Pairs and adapters that a reward model or its gate would refuse after SFT are refused before
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from base_stage import run_base
from clean_files import write_rows
from real_templates import REAL_TEMPLATES, small_tokenizer
from unit.models.test_stop_tokens import tiny_model

from flows.pipeline.preflight import pairs_refusal
from rlhf_core.config.loading import check_params, load_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.data.schema import (
    SPLITS,
    Message,
    PairUser,
    Preference,
    pair_user_of,
    split_of,
)
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_core.models.causal_lm import save_policy
from rlhf_core.stages import collect, validate
from rlhf_core.stages.pair_supply import require_pairs, supply_of_files
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext

MEASURE = "test_accuracy_length_balanced"
FILES = "collect: {source: files, files: {preferences: [pairs.jsonl]}}\n"
GATE = f"gates: {{reward: [{{metric: {MEASURE}, at_least: 0.6, why: a test}}]}}\n"


COUNT = 700


def pairs(shorter: int) -> list[Preference]:
    """Pairs of which ``shorter`` in a hundred prefer the shorter reply, the others the longer one."""
    rows = []
    for number in range(COUNT):
        chosen, rejected = "yes, this is the one " * (2 + number % 3), "no"
        if number % 100 < shorter:
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
    """A workspace after validation and its starting model, with pairs as they are split."""
    (folder / "models").mkdir()
    (folder / "models" / "base").symlink_to(base)
    (folder / "params.yaml").write_text(params)
    (folder / "dvc.yaml").write_text("stages: {}\n")
    checks = load_params(folder).validate_
    parts: dict[tuple[str, str], list[Preference]] = {}
    for user in PairUser:
        for split in SPLITS:
            parts[user, split] = []
    for row in pairs(shorter):
        split = split_of(row.group, 1, checks.split)
        users = [pair_user_of(row.group, 1, checks.split)] if split != "test" else [*PairUser]
        for user in users:
            parts[user, split].append(row)
    for (user, split), rows in parts.items():
        write_rows(folder / "data" / "clean" / user / f"{split}.parquet", rows)
    return folder


@pytest.mark.parametrize(
    ("mode", "shorter", "metric"),
    [("enforce", 50, MEASURE), ("report", 5, MEASURE), ("enforce", 50, "probes.other_question")],
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
            5,
            rf"the reward gate asks for {MEASURE}, but \d+ test pairs leave \d+ when lengths are balanced",
        ),
        (
            GATE.replace(MEASURE, "probes.values_swapped"),
            50,
            r"probes.values_swapped, but 0 of \d+ held-out replies have a n",
        ),
        (
            GATE.replace(MEASURE, "judge.probes.sentences_shuffled_low95"),
            50,
            "asks for judge.probes.sentences_shuffled_low95",
        ),
        (
            "judge: {length_balance: sampling}\n",
            0,
            r"judge.length_balance: sampling leaves 0 of \d+ training pairs",
        ),
        (
            "referee: {max_tokens: 8}\n",
            50,
            r"the referee model has no train pair, for all \d+ exceed referee.max_tokens 8",
        ),
        (
            "judge: {lora: {targets: [query]}}\n",
            50,
            "judge.lora: LlamaForCausalLM has no linear layer query",
        ),
        ("critic: {lora: {upper_layers: 99}}\n", 50, "critic.lora: lora.upper_layers is 99"),
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
    folder = workspace(tmp_path, base, FILES + GATE, shorter=5)
    refused = pairs_refusal(folder, "sft")
    assert refused is not None and refused.exit_code == EXIT_USER_ERROR
    assert MEASURE in refused.message and "\n" not in refused.message
    assert pairs_refusal(folder, "reward") is None
    (folder / "params.yaml").write_text(GATE)  # the world has pairs enough
    assert pairs_refusal(folder, "sft") is None
    (folder / "params.yaml").write_text("reward: {lora: {targets: [query]}}\n")
    refused = pairs_refusal(folder, "sft")
    assert refused is not None and "reward.lora" in refused.message


# Of nearly the same length in words, and of different lengths in characters.
WORDS = ("it", "is", "a", "house", "beautiful", "tree", "of", "mountains", "no", "answer")
OWN = {
    "validate": {"split": {"fewest_balanced": 60}},
    "gates": {"reward": [{"metric": MEASURE, "at_least": 0.6, "why": "a test"}]},
    "reward": {"length_balance": "sampling"},
}


def write_pairs(
    file: Path, prompts: int, longer: float, replies: int, seed: int, copies: int = 0
) -> None:
    """Write a user's file.

    Args:
        longer: Share of pairs whose longer reply is preferred.
        replies: Pairs of each prompt.
        copies: So many pairs are given twice.
    """
    generator = np.random.default_rng(seed)
    lines = []
    for number in range(prompts):
        for _ in range(replies):
            texts = []
            for _ in range(2):
                words = generator.choice(WORDS, generator.integers(3, 8))
                texts.append(" ".join(words.tolist()))
            texts.sort(key=len)
            is_longer = generator.random() < longer
            row = {"chosen": texts[is_longer], "rejected": texts[not is_longer]}
            lines.append(json.dumps(row | {"prompt": f"what is number {number}?"}))
    file.write_text("\n".join([*lines, *lines[:copies]]) + "\n")


def own_document(source: str) -> dict[str, Any]:
    """Settings by which the file's pairs train a starting model."""
    files = {"source": "files", "files": {"preferences": ["pairs.jsonl"]}}
    base = {"source": source, "allow_high_learning_rates": True}
    return {**OWN, "collect": files, "base": base}


def refusal_of_stages(folder: Path, params: Params, base: Path) -> bool:
    """Whether data stages or the check before SFT refuse the file."""
    try:
        collect.collect(params.collect, folder, folder / "data" / "raw")
        outputs = {name: folder / path for name, path in validate.STAGE.outputs.items()}
        inputs = Paths(
            {"raw": folder / "data" / "raw", "expectations": recipe_folder() / "expectations"}
        )
        validate.run(params.validate_, inputs, Paths(outputs), RunContext(folder / "work"))
        (folder / "models").mkdir()
        (folder / "models" / "base").symlink_to(base)
        require_pairs(folder)
    except RlhfError:
        return True
    return False


SHAPES = [
    pytest.param(
        "words", 200, 0.5, 1, 0, marks=pytest.mark.dear("two forecasts and two data stages")
    ),
    *[
        pytest.param(*shape, marks=pytest.mark.slow)
        for shape in (
            ("characters", 200, 0.5, 1, 0),
            ("words", 300, 0.8, 1, 30),
            ("characters", 300, 0.8, 1, 30),
            ("words", 40, 0.5, 6, 0),
            ("words", 80, 0.5, 6, 0),
            ("characters", 120, 0.8, 5, 0),
        )
    ],
]


@pytest.mark.parametrize(("kind", "prompts", "longer", "replies", "copies"), SHAPES)
def test_what_the_forecast_says_of_files_is_what_the_stages_find(
    kind: str, prompts: int, longer: float, replies: int, copies: int, tmp_path: Path
) -> None:
    """With the pairs that a refusal names, none is refused."""
    texts = tuple(WORDS) * 50 if kind == "words" else ("a",)
    tokenizer = small_tokenizer(REAL_TEMPLATES[1], texts)
    save_policy(tmp_path / "model", tiny_model(tokenizer), tokenizer)
    run_base(tmp_path / "model", tmp_path)
    params = check_params(own_document("../model"))
    more = 0
    for attempt in ("first", "second"):
        folder = tmp_path / attempt
        folder.mkdir()
        (folder / "params.yaml").write_text(yaml.safe_dump(own_document("../model")))
        (folder / "dvc.yaml").write_text("stages: {}\n")
        count = prompts + -(-more // replies)
        write_pairs(folder / "pairs.jsonl", count, longer, replies, 1, copies)
        found = supply_of_files(folder, params).pairs
        assert found is not None and not found.is_estimate
        assert bool(found.refusal) == refusal_of_stages(folder, params, tmp_path / "base")
        if not found.refusal:
            return
        assert found.more_pairs is not None
        more = found.more_pairs[1]
    pytest.fail(f"refused again after {more} more pairs: {found.refusal}")
