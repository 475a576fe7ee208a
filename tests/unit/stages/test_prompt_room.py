"""Prompts that leave no room for a reply within the model's positions, and what is left out as too
long for a reward model: the forecast says of both what the stages do.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml
from real_templates import REAL_TEMPLATES, small_tokenizer
from transformers import PreTrainedTokenizerBase, tokenization_utils_base
from unit.models.test_stop_tokens import tiny_model

from flows.commands.doctor import forecast_checks
from flows.commands.machine_checks import FAIL
from rlhf_core.config.base import BaseStageConfig
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import merge
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.data.pair_counts import READERS
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_prompt, encode_reply, encode_text
from rlhf_core.errors import DataError
from rlhf_core.forecast import as_text
from rlhf_core.models.causal_lm import save_policy
from rlhf_core.ppo.rollout import require_room
from rlhf_core.stages import base, collect, validate
from rlhf_core.stages.pair_supply import (
    require_pairs,
    supply_of_files,
    supply_of_workspace,
)
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext
from rlhf_extras.data_files.validate_command import _checking_params
from rlhf_extras.memory.command import PlanRequest

# The settings of a workspace of prompts and a function that rewards replies.
WITHOUT_PAIRS = (
    "collect.files={preferences: [], prompts: [sums.jsonl]}",
    "ppo.reward.sources=[{kind: function, target: 'rules:score'}]",
    "collect.pairs=false",
    "critic.init=sft",
    "ppo.selection.method=last",
    "gates.reward=null",
    "gates.policy=[{metric: comparison.checker.win_rate_low95, at_least: 0.5, why: right}]",
    "ppo.ptx.weight=0",
)

POSITIONS = 256
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def text(seed: int, words: int) -> str:
    """So many words of a few, in an order that no vocabulary knows."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write_pairs(file: Path, count: int, *, long_prompts: int = 0, long_replies: int = 0) -> None:
    """Pairs of short texts, of which the first have a long prompt, and the last a long reply."""
    lines = []
    for number in range(count):
        prompt = f"{number}: {text(number, 300 if number < long_prompts else 6)}?"
        long = text(number, 9 if number < count - long_replies else 400)
        short = f"{text(number + 1, 3)}."
        chosen, rejected = (long, short) if number % 2 else (short, long)
        lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}))
    file.write_text("\n".join(lines) + "\n")


def save_model(folder: Path, positions: int = POSITIONS) -> None:
    """A model of few positions."""
    tokenizer = small_tokenizer(REAL_TEMPLATES[1], tuple(WORDS) * 50)
    model = tiny_model(tokenizer)
    model.config.max_position_embeddings = positions
    save_policy(folder, model, tokenizer)


SOURCES = [
    pytest.param("scratch", marks=pytest.mark.dear("four forecasts, or the data stages as well")),
    pytest.param("model", marks=pytest.mark.slow),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace's folder, without data, and a model in it."""
    save_model(tmp_path / "model")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    return tmp_path


def settings(folder: Path, source: str, *sets: str) -> Params:
    """Settings by which the file's pairs train a model of few positions; written as params.yaml."""
    document = {
        "collect": {"source": "files", "files": {"preferences": ["pairs.jsonl"]}},
        "base": {"source": source, "max_positions": POSITIONS, "allow_high_learning_rates": True},
        "ppo": {"max_new_tokens": 32},
    }
    text = merge(yaml.safe_dump(document), sets=sets)
    (folder / "params.yaml").write_text(text)
    return check_params(yaml.safe_load(text))


def run_stages(folder: Path, params: Params) -> None:
    """The stages up to the check of the pairs."""
    collect.collect(params.collect, folder, folder / "data" / "raw")
    outputs = Paths({name: folder / path for name, path in validate.STAGE.outputs.items()})
    inputs = {"raw": folder / "data" / "raw", "expectations": recipe_folder() / "expectations"}
    context = RunContext(folder / "work", folder=folder)
    validate.run(params.validate_, Paths(inputs), outputs, context)
    sections = params.base.model_dump() | {"ppo": params.ppo.model_dump()}
    config = BaseStageConfig.model_validate(sections)
    (folder / "models").mkdir(exist_ok=True)
    model = Paths({"model": folder / "models" / "base"})
    base.run(config, Paths({"clean": folder / "data" / "clean"}), model, context)
    require_pairs(folder)


@pytest.mark.parametrize("name", ["prompt", "reply", "text", "special"])
def test_no_library_warns_of_a_text_that_is_only_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", pytest.fail)
    tokenizer: PreTrainedTokenizerBase = REAL_TEMPLATES[0].tokenizer
    tokenizer.chat_template = REAL_TEMPLATES[0].template
    tokenizer.model_max_length = 8
    long = text(1, 100)
    if name == "prompt":
        encode_prompt(tokenizer, [Message("user", long)])
    elif name == "special":
        encode_prompt(tokenizer, [Message("user", f"{long} {tokenizer.eos_token} {long}")])
    elif name == "reply":
        encode_reply(tokenizer, long)
    else:
        encode_text(tokenizer, long)


@pytest.mark.parametrize("source", SOURCES)
def test_prompts_that_base_refuses_are_foreseen_in_the_same_words_with_what_helps(
    source: str, place: Path
) -> None:
    write_pairs(place / "pairs.jsonl", 300, long_prompts=9)
    params = settings(place, source)
    found = supply_of_files(place, params).pairs
    assert found is not None and found.is_refused
    assert re.match(rf"\d of \d+ prompts leave no room .* {POSITIONS} positions", found.refusal)
    with pytest.raises(DataError) as refused:
        run_stages(place, params)
    assert str(refused.value) == found.refusal
    sections = PlanRequest(place).sections(PlanRequest(place).plans(), probe=False)
    (said,) = [document for key, _, document in sections if key == "pairs"]
    assert said["is_refused"] and said["conclusion"] == found.refusal
    (check,) = forecast_checks(place, params, probe=False)
    assert check.level == FAIL and check.finding == found.refusal
    named = re.findall(r"([a-z_]+\.[a-z_]+) to (\d+)", found.refusal)
    assert named[0][0] == "validate.max_prompt_chars"
    for setting, value in named:
        helped = settings(place, source, f"{setting}={value}")
        after = supply_of_files(place, helped).pairs
        assert after is not None and not after.no_room, setting
    run_stages(place, settings(place, source, "=".join(named[0])))


def test_a_setting_that_does_not_help_is_not_named(place: Path) -> None:
    write_pairs(place / "pairs.jsonl", 300, long_prompts=300)
    found = supply_of_files(place, settings(place, "model")).pairs
    assert found is not None and "leave no room" in found.refusal
    assert "max_prompt_chars" not in found.refusal and "max_new_tokens to" not in found.refusal
    assert "a model with more positions" in found.refusal
    for longest, helps in ((20, True), (30, False), (40, False)):
        with pytest.raises(DataError, match=rf"\({longest} tokens\)") as refused:
            require_room([[1], [1] * longest], 11, 30)
        assert ("lower max_new_tokens to 10," in str(refused.value)) == helps


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "limits", [(150, 200, 1000), pytest.param((150, 150, 150), marks=pytest.mark.slow)]
)
def test_pairs_that_a_limit_of_tokens_drops_are_not_counted(
    source: str, limits: tuple[int, int, int], place: Path
) -> None:
    write_pairs(place / "pairs.jsonl", 300, long_replies=100)
    sets = [f"{name}.max_tokens={n}" for name, n in zip(READERS, limits, strict=True)]
    params = settings(place, source, *sets)
    found = supply_of_files(place, params).pairs
    assert found is not None
    run_stages(place, params)
    (place / "data" / "raw" / "manifest.json").touch()
    assert supply_of_workspace(place, params).pairs == found, "as the stages count them"
    assert set(found.too_long.values()) == {100}
    total = sum(pairs.pairs for splits in found.counts.values() for pairs in splits.values())
    assert total < 300 - 100 + 2 * found.counts["reward"]["test"].pairs + 1
    names = " ".join(found.too_long)
    assert f"max_tokens, {limits[0]} (reward" in names
    assert (f"the model's positions, {POSITIONS} (judge)" in names) == (limits[2] > POSITIONS)
    assert "100 of them too long" in found.conclusion
    assert "100 pairs are left out, over max_tokens" in as_text(found)


def test_a_run_without_pairs_refuses_prompts_beforehand_too(place: Path) -> None:
    rows = [{"prompt": text(n, 4 + 300 * (n == 7)) + f" {n}", "answer": "1"} for n in range(100)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = settings(place, "model", *WITHOUT_PAIRS)
    refusal = supply_of_files(place, params).refusal
    assert refusal.startswith("1 of ") and "validate.max_prompt_chars" in refusal
    (check,) = forecast_checks(place, params, probe=False)
    assert check.level == FAIL and check.finding == refusal
    helped = settings(place, "model", *WITHOUT_PAIRS, "validate.max_prompt_chars=200")
    assert not supply_of_files(place, helped).refusal


def test_data_are_validated_for_a_model_by_the_settings_that_init_gives_it(place: Path) -> None:
    params = _checking_params(None, [], str(place / "model"))
    assert params.base.source == str(place / "model")
    assert params.reward.max_tokens == 1024, "the profile pretrained lies beneath"
