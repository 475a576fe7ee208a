"""Profiles: one is chosen for a pretrained model, settings that would wreck one are refused, and
params.yaml is in the style in which DVC writes it: `dvc exp run -S` changes the line that it is
asked to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT
from dvc.utils.hydra import apply_overrides

from flows.dvc_repo.recipe import merged_params, with_profile_header
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import merge, overlaid, overlays_of, profiles, workspace_name
from rlhf_core.errors import ConfigError

RECIPE = (ROOT / "params.yaml").read_text(encoding="utf-8")
PROFILES = ROOT / "profiles"
SOURCE = "base.source=HuggingFaceTB/SmolLM2-135M-Instruct"


def settings(profile: str | None, *sets: str, base: str = RECIPE) -> Params:
    return check_params(
        yaml_text.parse(
            merge(base, overlays_of(base, PROFILES, profile, sets), sets), "params.yaml"
        )
    )


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
    assert (
        settings(None, SOURCE, "sft.optimizer.lr=2e-5", "compute.threads=1").sft.optimizer.lr
        == 2e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smollm2-360m", "paper-7b", "paper-13b", "pretrained"])
def test_a_profile_with_a_model_of_its_own_stands_alone(profile: str) -> None:
    assert settings(profile, SOURCE).sft == settings(profile).sft
    assert [name for name, _ in overlays_of(RECIPE, PROFILES, profile, [SOURCE])] == [
        f"profile {profile}"
    ]


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
    "ppo": {
        "policy_optimizer": {"lr": 1e-6},
        "critic_optimizer": {"lr": 5e-6},
        "warmup_iterations": 0,
    },
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
    assert (
        f"{section}." in message
        and "the profile pretrained" in message
        and len(message.splitlines()) == 1
    )
    check_params(document | {"base": {"source": "some/model", "allow_high_learning_rates": True}})
    check_params(document | {"base": {"source": "scratch"}})


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"optimizer": {"lr": 1e-3}, "lora": {"rank": 4}}},
        {
            "ppo": {
                "policy_optimizer": {"lr": 1e-4},
                "policy_lora": {},
                "critic_optimizer": {"lr": 2e-4},
            }
        },
        {
            "ppo": {
                "policy_optimizer": {"lr": 1e-5},
                "critic_mode": "shared",
                "critic_optimizer": None,
            },
            "critic": {"optimizer": {"lr": 1e-2}},
        },
    ],
)
def test_adapters_and_new_heads_may_learn_faster(change: dict) -> None:
    check_params(
        PRETRAINED | {name: PRETRAINED[name] | section for name, section in change.items()}
    )


def test_profiles_stack_a_later_one_over_those_before_it() -> None:
    both = settings("own-data,8x80gb", "collect.files.preferences=[pairs.jsonl]")
    assert both.collect.source == "files" and both.ppo.ptx.data == "demonstrations"
    assert both.compute.launch["ppo"].processes == 8 and both.plan.gpu_memory_gb == 80
    assert workspace_name("own-data,8x80gb", []) == "own-data-8x80gb"
    with pytest.raises(ConfigError, match="no profile '9x80gb'"):
        overlays_of(RECIPE, PROFILES, "own-data,9x80gb")


NAMES = sorted(profiles(ROOT / "profiles"))


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *NAMES])
def test_dvc_changes_one_line(profile: str | None, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = merged_params(ROOT, profile, [], tmp_path)
    path.write_text(before)
    apply_overrides(str(path), ["seed=77"])
    assert path.read_text() == before.replace("seed: 1\n", "seed: 77\n", 1) != before


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *NAMES])
def test_no_line_ends_in_a_space(profile: str | None) -> None:
    # Beside the repository, where paths are short: DVC's style moves a long path to a line of its
    # own, after a space.
    lines = merged_params(ROOT, profile, [], ROOT).splitlines()
    assert [line for line in lines if line.endswith(" ")] == []


def test_dvc_changes_one_line_beside_a_long_path(tmp_path: Path) -> None:
    path, source = tmp_path / "params.yaml", "/data/" + "long/" * 30 + "pairs.jsonl"
    before = merged_params(
        ROOT,
        "smoke",
        [f"collect.files.preferences=[{{path: {source}, category: harmless}}]"],
        tmp_path,
    )
    assert f"{source}\n" in before
    path.write_text(before)
    apply_overrides(str(path), ["seed=77"])
    assert path.read_text() == before.replace("seed: 1\n", "seed: 77\n", 1) != before


@pytest.mark.parametrize("profile", NAMES)
def test_sections_stay_apart_whatever_a_profile_adds(profile: str) -> None:
    own = (ROOT / "params.yaml").read_text()
    merged = merged_params(ROOT, profile, [], ROOT)
    assert merged.count("\n\n") == own.count("\n\n") and "\n\n\n" not in merged


def test_a_comment_goes_with_the_value_that_it_is_about() -> None:
    """A reason for the demo's value would be untrue of another's."""
    overlay = (
        "# Mine.\nsft: {steps: 7}\nreward:\n  steps: 8\n  pooling: last  # as published\n"
        "  max_tokens: 64  # short ones\nbase:\n  pretraining: null\n"
    )
    base = (
        "sft:\n  steps: 5  # enough\n\nreward:\n  pooling: sum  # finds a word\n  steps: 6  # many\n\n"
        "base:\n  heads: 8  # several\n  pretraining:  # on texts\n    steps: 3\n\nseed: 1  # of all\n"
    )
    assert overlaid(base, [("mine", overlay)], ["seed=2"]).splitlines() == [
        "sft:", "  steps: 7", "",
        "reward:", "  pooling: last # as published", "  steps: 8", "  max_tokens: 64 # short ones", "",
        "base:", "  heads: 8  # several", "  pretraining:", "", "seed: 2  # of all",
    ]  # fmt: skip


def test_the_file_in_the_repository_is_what_is_written() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert merged_params(ROOT, None, [], ROOT) == text


def test_every_profile_has_a_header_of_its_own(tmp_path: Path) -> None:
    smoke = merged_params(ROOT, "smoke", ["seed=3"], tmp_path).splitlines()
    assert smoke[2].startswith("# Profile smoke: The whole pipeline") and "demo" not in smoke[2]
    assert "seed: 3" in smoke and any(line.startswith("profile: smoke ") for line in smoke)
    assert (ROOT / "params.yaml").read_text().splitlines()[:2] == smoke[:2]
    long = with_profile_header(
        "# General.\n# Profile demo: one\n# two\nseed: 1\n", "x", "word " * 60
    )
    first, second, *others = long.splitlines()
    assert (
        first == "# General." and second.startswith("# Profile x: word") and others[-1] == "seed: 1"
    )
    assert max(map(len, long.splitlines())) <= 120 and "two" not in long
    assert with_profile_header("seed: 1\n", "x", "about.") == "# Profile x: about.\nseed: 1\n"


def test_the_profile_of_a_workspace_is_that_of_its_own_params(tmp_path: Path) -> None:
    """A trial of a workspace that was made with a profile names the profile of the trial alone."""
    (tmp_path / "params.yaml").write_text(merged_params(ROOT, "smoke", [], tmp_path))
    trial = merged_params(tmp_path, "vanilla", [], tmp_path)
    assert "# Profile vanilla: " in trial and "Profile smoke" not in trial


def test_an_override_may_allow_what_a_profile_sets(tmp_path: Path) -> None:
    pretrained = "base.source=owner/model"
    with pytest.raises(ConfigError, match="allow_high_learning_rates"):
        merged_params(ROOT, "smoke", [pretrained], tmp_path)
    merged_params(ROOT, "smoke", [pretrained, "base.allow_high_learning_rates=true"], tmp_path)
