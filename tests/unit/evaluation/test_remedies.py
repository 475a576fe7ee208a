"""What to do about a condition that fails: every condition of every profile has an answer that
exists.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_core.config.data import ValidateConfig
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.evaluation.remedies import REMEDIES, remedy_for
from rlhf_core.stages.validate import gate_conditions

ROOT = Path(__file__).parents[3]
RECIPES = [recipe_folder() / "params.yaml", *sorted(profiles_of(recipe_folder()).glob("*.yaml"))]
SETTING = re.compile(rf"\b(?:{'|'.join(Params.model_fields)})\.[a-z_]+(?:\.[a-z_]+)*")
ANSWERS = [
    *((gate, str(remedy)) for gate, remedies in REMEDIES.items() for remedy in remedies),
    ("own", str(remedy_for("own", "x"))),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_condition_of_a_profile_has_an_answer_of_its_own(recipe: Path) -> None:
    gates = plain(read(recipe)).get("gates") or {}
    for gate in ("sft", "reward", "policy"):
        for condition in gates.get(gate) or ():
            assert remedy_for(gate, condition["metric"]).pattern, (gate, condition["metric"])


def test_every_condition_of_the_data_gate_has_an_answer_of_its_own() -> None:
    metrics = [condition.metric for condition in gate_conditions(ValidateConfig())]
    assert all(
        remedy_for("data", metric).pattern
        for metric in [*metrics, "preferences.failed_not_duplicate"]
    )


@pytest.mark.parametrize(("gate", "answer"), ANSWERS)
def test_settings_and_pages_that_an_answer_names_exist(gate: str, answer: str) -> None:
    (page,) = re.findall(r"docs/[\w-]+\.md", answer)
    assert (ROOT / page).is_file()
    settings = check_params({}).model_dump()
    for name in SETTING.findall(answer.format(stage="reward", rule="x")):
        if name.startswith("gates.own"):
            continue
        found = settings
        for part in name.split("."):
            assert part in found, f"{name} is no setting"
            found = found[part]


def test_an_answer_names_the_model_and_the_rule_that_the_metric_is_of() -> None:
    assert "referee.steps" in str(remedy_for("reward", "referee.accuracy"))
    assert "judge.steps" in str(remedy_for("policy", "judge.accuracy"))
    assert "judge.steps" in str(remedy_for("policy", "judge.probes.world_fact"))
    assert "validate.split.judge" in str(remedy_for("policy", "agreement.judge_share"))
    assert "gates.reward" in str(remedy_for("policy", "judge.loss"))
    assert "reward.length_balance: sampling" in str(remedy_for("reward", "length_correlation"))
    assert "{not_duplicate: warn}" in str(remedy_for("data", "preferences.failed_not_duplicate"))
    assert "ppo.ptx.weight" in str(remedy_for("policy", "policy.perplexity_pretrain"))
