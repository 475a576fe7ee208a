"""What to do about a condition that fails: every condition of every profile has an answer that
exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import ValidateConfig
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.evaluation.remedies import LENGTHS_APART, REMEDIES, Remedy, remedies, remedy_for
from rlhf_core.gates import GateDecision
from rlhf_core.stages.validate import gate_conditions

ROOT = Path(__file__).parents[3]
RECIPES = [recipe_folder() / "params.yaml", *sorted(profiles_of(recipe_folder()).glob("*.yaml"))]
SETTING = re.compile(rf"\b(?:{'|'.join(Params.model_fields)})\.[a-z_]+(?:\.[a-z_]+)*")


def failed(gate: str, *conditions: str | dict[str, Any]) -> GateDecision:
    """A gate of which these conditions failed, given whole or by their metric."""
    rows = [row if isinstance(row, dict) else {"metric": row} for row in conditions]
    return GateDecision.of(gate, {"conditions": [{"passed": False} | row for row in rows]})


def advice(gate: str, metric: str) -> Remedy:
    """What is said of a metric alone."""
    decision = failed(gate, metric)
    return remedy_for(decision, decision.failed[0])


ANSWERS = [
    ("policy", str(LENGTHS_APART)),
    *((gate, str(remedy)) for gate, known in REMEDIES.items() for remedy in known),
    ("own", str(advice("own", "x"))),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_condition_of_a_profile_has_an_answer_of_its_own(recipe: Path) -> None:
    gates = plain(read(recipe)).get("gates") or {}
    for gate in ("sft", "reward", "policy"):
        for condition in gates.get(gate) or ():
            assert advice(gate, condition["metric"]).pattern, (gate, condition["metric"])


def test_every_condition_of_the_data_gate_has_an_answer_of_its_own() -> None:
    metrics = [condition.metric for condition in gate_conditions(ValidateConfig())]
    assert all(
        advice("data", metric).pattern for metric in [*metrics, "preferences.failed_not_duplicate"]
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
    assert "referee.steps" in str(advice("reward", "referee.accuracy"))
    assert "judge.steps" in str(advice("policy", "judge.accuracy"))
    assert "judge.steps" in str(advice("policy", "judge.probes.world_fact"))
    assert "validate.split.judge" in str(advice("policy", "agreement.judge_share"))
    assert "gates.reward" in str(advice("policy", "judge.loss"))
    assert "reward.length_balance: sampling" in str(advice("reward", "length_correlation"))
    assert "{not_duplicate: warn}" in str(advice("data", "preferences.failed_not_duplicate"))
    assert "ppo.ptx.weight" in str(advice("policy", "policy.perplexity_pretrain"))


def rate(metric: str, estimate: float, low95: float, high95: float) -> dict[str, Any]:
    """A win rate whose lower bound is asked to be at least a half."""
    found = {"metric": metric, "value": low95, "limit": 0.5, "sign": ">="}
    return found | {"estimate": estimate, "low95": low95, "high95": high95}


WORSE = rate("comparison.gold.win_rate_low95", 0.09, 0.07, 0.12)
EVEN = rate("comparison.judge.win_rate_low95", 0.51, 0.48, 0.54)
UNDECIDED = rate("comparison.judge.lc_win_rate_low95", 0.5, 0.0, 1.0)
FAR = {"metric": "kl", "value": 405.0, "limit": 6.0, "sign": "<="}


@pytest.mark.parametrize("rates", [(WORSE,), (EVEN, FAR), (WORSE, EVEN, UNDECIDED, FAR)])
def test_no_advice_leads_a_policy_farther_away_that_is_worse_or_too_far_already(
    rates: tuple[dict[str, Any], ...],
) -> None:
    said = remedies(failed("policy", *rates))
    assert not [line for line in said if "lower ppo.kl.coefficient" in line]
    assert not [line for line in said if "ppo.iterations" in line]
    assert len([line for line in said if "raise ppo.kl.coefficient" in line]) == 1


def test_more_prompts_are_advised_where_the_interval_is_what_fails() -> None:
    (said,) = remedies(failed("policy", EVEN))
    assert "evaluate.prompts" in said
    (said,) = remedies(failed("policy", UNDECIDED))
    assert "evaluate.prompts" not in said
    assert "length" in said
