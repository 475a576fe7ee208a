"""The profiles of the paper take nothing from the demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import merge, profile_text

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("paper-7b", "paper-13b")
SECTIONS = ("sft", "reward", "referee", "judge", "critic", "ppo", "evaluate")


def leaves(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every parameter; the seed comes from the top of params.yaml."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}.{name}")
        elif name != "seed":
            yield f"{prefix}.{name}", value


def stated(overlay: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Paths of a profile, of mappings and of what is in them."""
    inner = [
        stated(value, f"{prefix}{key}.")
        for key, value in overlay.items()
        if isinstance(value, Mapping)
    ]
    return {f"{prefix}{key}" for key in overlay}.union(*inner)


def resolved(profile: str) -> Params:
    text = merge(
        (ROOT / "params.yaml").read_text(), [(profile, profile_text(ROOT / "profiles", profile))]
    )
    return check_params(yaml_text.parse(text, profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_states_every_parameter_itself(profile: str) -> None:
    overlay = yaml_text.plain(yaml_text.parse(profile_text(ROOT / "profiles", profile), profile))
    params = resolved(profile)
    for section in SECTIONS:
        missing = {name for name, _ in leaves(getattr(params, section), section)} - stated(overlay)
        assert not missing, f"{profile} leaves {sorted(missing)} to params.yaml"


@pytest.mark.parametrize("profile", PROFILES)
def test_the_paper_punishes_no_missing_end(profile: str) -> None:
    reward = resolved(profile).ppo.reward
    assert (
        reward.missing_eos_penalty == reward.length_penalty == 0.0
        and reward.transform == "normalize"
    )
