"""The profiles of the paper are what docs/paper-settings.md says, and take nothing from the demo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import Params, check_params, merge, profile_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "paper-settings.md"
PROFILES = ("paper-7b", "paper-13b")
SECTIONS = ("sft", "reward", "referee", "judge", "critic", "ppo", "evaluate")
SOURCE = re.compile(r"(as `|code|ours|deviation: |\d(\.\d)*|C\.\d)")


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
    inner = [stated(value, f"{prefix}{key}.") for key, value in overlay.items() if isinstance(value, Mapping)]
    return {f"{prefix}{key}" for key in overlay}.union(*inner)


def resolved(profile: str) -> Params:
    text = merge((ROOT / "params.yaml").read_text(), [(profile, profile_text(ROOT / "profiles", profile))])
    return check_params(yaml_text.parse(text, profile))


def documented(profile: str) -> dict[str, Any]:
    """Every parameter of the page with its value in ``profile``; the rows of the reward model are of its twins too."""
    values: dict[str, Any] = {}
    *common, last = tables()
    for parameters, value, _ in (row for table in common for row in table):
        for name in re.findall(r"`([\w.]+)`", parameters):
            twins = [name.replace("reward.", f"{twin}.") for twin in ("referee", "judge") if name.startswith("reward.")]
            values |= dict.fromkeys([name, *twins], value)
    for parameters, *by_profile in last:
        values |= dict.fromkeys(re.findall(r"`([\w.]+)`", parameters), by_profile[PROFILES.index(profile)])
    return {name: yaml_text.plain(yaml_text.parse_scalar(value)) for name, value in values.items()}


def tables() -> Iterator[list[list[str]]]:
    """The rows of each table of the page."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| `")]
        yield [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_what_the_page_says(profile: str) -> None:
    params = resolved(profile)
    actual = dict(leaf for section in SECTIONS for leaf in leaves(getattr(params, section), section))
    set_fields = (source.model_dump(exclude_unset=True) for source in params.ppo.reward.sources)
    actual["ppo.reward.sources"] = list(set_fields)
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in actual.items()}
    said = documented(profile)
    assert len(said) > 100 and said == {name: plain.get(name) for name in said}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_states_every_parameter_itself(profile: str) -> None:
    overlay = yaml_text.plain(yaml_text.parse(profile_text(ROOT / "profiles", profile), profile))
    params = resolved(profile)
    for section in SECTIONS:
        missing = {name for name, _ in leaves(getattr(params, section), section)} - stated(overlay)
        assert not missing, f"{profile} leaves {sorted(missing)} to params.yaml"


def test_every_row_says_where_its_value_comes_from() -> None:
    *common, _ = tables()
    for table in common:
        for parameters, _, source in table:
            assert SOURCE.match(source), f"{parameters}: {source}"


@pytest.mark.parametrize("profile", PROFILES)
def test_the_paper_punishes_no_missing_end(profile: str) -> None:
    reward = resolved(profile).ppo.reward
    assert reward.missing_eos_penalty == reward.length_penalty == 0.0 and reward.transform == "normalize"
