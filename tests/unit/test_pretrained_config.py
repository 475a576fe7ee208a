"""Settings that would wreck a pretrained model are refused, and the profile for such models is chosen by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import Params, check_params, merge, overlays_of, workspace_name
from rlhf_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "params.yaml").read_text(encoding="utf-8")
PROFILES = ROOT / "profiles"
SOURCE = "base.source=HuggingFaceTB/SmolLM2-135M-Instruct"


def settings(profile: str | None, *sets: str, base: str = RECIPE) -> Params:
    return check_params(yaml_text.parse(merge(base, overlays_of(base, PROFILES, profile, sets), sets), "params.yaml"))


@pytest.mark.parametrize("profile", [None, "own-data"])
def test_naming_a_pretrained_model_brings_settings_that_suit_it(profile: str | None) -> None:
    sets = [SOURCE] if profile is None else [SOURCE, "collect.files.preferences=[pairs.jsonl]"]
    params = settings(profile, *sets)
    assert params.base.source.endswith("SmolLM2-135M-Instruct")
    supervised = (params.sft, params.reward, params.referee, params.judge)
    assert all(config.optimizer.lr == 1e-5 for config in supervised)
    assert params.ppo.policy_optimizer.lr == 1e-6
    assert params.compute.threads is None and params.sft.max_tokens == 1024
    assert (params.collect.source == "files") == (profile == "own-data")


def test_sets_go_over_the_profile_that_was_chosen_by_itself() -> None:
    assert settings(None, SOURCE, "sft.optimizer.lr=2e-5", "compute.threads=1").sft.optimizer.lr == 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smollm2-360m", "paper-7b", "paper-13b", "pretrained"])
def test_a_profile_with_a_model_of_its_own_stands_alone(profile: str) -> None:
    assert settings(profile, SOURCE).sft == settings(profile).sft
    assert [name for name, _ in overlays_of(RECIPE, PROFILES, profile, [SOURCE])] == [f"profile {profile}"]


def test_a_recipe_with_a_model_of_its_own_keeps_its_settings() -> None:
    own = merge(RECIPE, overlays_of(RECIPE, PROFILES, "pretrained"), ["sft.optimizer.lr=3e-5"])
    assert settings(None, "base.source=models/mine", base=own).sft.optimizer.lr == 3e-5


def test_toys_keep_their_rates() -> None:
    assert settings(None, "base.source=scratch").sft.optimizer.lr == 3e-3
    assert overlays_of(RECIPE, PROFILES, None, ["seed=2"]) == []


PRETRAINED = {
    "base": {"source": "some/model"},
    "sft": {"optimizer": {"lr": 1e-5}},
    "reward": {"optimizer": {"lr": 1e-5}},
    "referee": {"optimizer": {"lr": 1e-5}},
    "judge": {"optimizer": {"lr": 1e-5}},
    "critic": {"optimizer": {"lr": 1e-5}},
    "policy": {"method": "ppo"},
    "ppo": {"policy_optimizer": {"lr": 1e-6}, "critic_optimizer": {"lr": 5e-6}, "warmup_iterations": 0},
}


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("sft", {"optimizer": {"lr": 3e-3}}),
        ("reward", {"optimizer": {"lr": 3e-4}}),
        ("judge", {"optimizer": {"lr": 3e-4}}),
        ("reward", {"optimizer": {"lr": 3e-3}, "lora": {"rank": 4}}),
        ("critic", {"optimizer": {"lr": 1e-3}}),
        ("ppo", {"policy_optimizer": {"lr": 7e-4}}),
        ("ppo", {"critic_optimizer": {"lr": 1e-3}}),
        ("policy", {"method": "dpo", "dpo": {"optimizer": {"lr": 3e-4}}}),
    ],
)
def test_rates_that_would_wreck_the_model_are_refused(section: str, change: dict) -> None:
    check_params(PRETRAINED)
    document = PRETRAINED | {section: PRETRAINED[section] | change}
    with pytest.raises(ConfigError) as caught:
        check_params(document)
    message = str(caught.value)
    assert f"{section}." in message and "the profile pretrained" in message and len(message.splitlines()) == 1
    check_params(document | {"base": {"source": "some/model", "allow_high_learning_rates": True}})
    check_params(document | {"base": {"source": "scratch"}})


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"optimizer": {"lr": 1e-3}, "lora": {"rank": 4}}},
        {"ppo": {"policy_optimizer": {"lr": 1e-4}, "policy_lora": {}, "critic_optimizer": {"lr": 2e-4}}},
        {
            "ppo": {"policy_optimizer": {"lr": 1e-5}, "critic_mode": "shared", "critic_optimizer": None},
            "critic": {"optimizer": {"lr": 1e-2}},
        },
    ],
)
def test_adapters_and_new_heads_may_learn_faster(change: dict) -> None:
    check_params(PRETRAINED | {name: PRETRAINED[name] | section for name, section in change.items()})


def test_profiles_stack_a_later_one_over_those_before_it() -> None:
    both = settings("own-data,8x80gb", "collect.files.preferences=[pairs.jsonl]")
    assert both.collect.source == "files" and both.ppo.ptx.data == "demonstrations"
    assert both.compute.launch["ppo"].processes == 8 and both.plan.gpu_memory_gb == 80
    assert workspace_name("own-data,8x80gb", []) == "own-data-8x80gb"
    with pytest.raises(ConfigError, match="no profile '9x80gb'"):
        overlays_of(RECIPE, PROFILES, "own-data,9x80gb")
