"""docs/switches.md has a row for every setting of PPO and critic pre-training, with the default that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architecture.glossary import PAGE as GLOSSARY
from architecture.glossary import documented
from pydantic import BaseModel

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params, rules_for
from rlhf_core.config.policy import CriticConfig
from rlhf_core.config.ppo import PpoConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "switches.md"
PATH = re.compile(r"`((?:ppo|critic)\.[\w.]+)`")


def settings(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    """Path and default of every setting; the seed comes from the top of params.yaml."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from settings(value, f"{prefix}.{name}")
        elif name != "seed":
            yield f"{prefix}.{name}", value


SETTINGS = dict([*settings(PpoConfig(), "ppo"), *settings(CriticConfig(), "critic")])


def rows() -> list[list[str]]:
    """Cells of the rows of all tables whose first column names parameters; an escaped bar is no border."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


SWITCHES = [row for row in rows() if len(row) == 5]


@pytest.mark.parametrize("path", SETTINGS)
def test_every_setting_has_one_row_with_its_default(path: str) -> None:
    found = [row for row in SWITCHES if path in PATH.findall(row[0])]
    assert len(found) == 1, f"docs/switches.md has {len(found)} rows for {path}"
    _, default, what, paper, _ = found[0]
    assert what
    expected = SETTINGS[path]
    if path != "ppo.reward.sources":
        expected = list(expected) if isinstance(expected, tuple) else expected
        assert yaml_text.plain(yaml_text.parse_scalar(default)) == expected, path
        # What is about files and evaluations alone is not the paper's subject.
        assert paper or path.split(".")[1] in ("selection", "health", "checkpoint"), path


def test_every_path_on_the_page_exists() -> None:
    known = {path.rsplit(".", depth)[0] for path in SETTINGS for depth in range(path.count("."))}
    assert set(PATH.findall(PAGE.read_text(encoding="utf-8"))) <= known


def test_the_metrics_it_names_are_in_the_glossary() -> None:
    named = {name for row in SWITCHES for name in re.findall(r"`([\w]+)`", row[4])}
    assert named and named <= documented()


def test_the_example_of_changed_health_rules_is_accepted() -> None:
    (example,) = re.findall(r"```yaml\n(ppo:\n  health:.*?)```", GLOSSARY.read_text(encoding="utf-8"), flags=re.DOTALL)
    rules = {rule.name: rule for rule in rules_for(check_params(yaml_text.parse(example, "the example")).ppo)}
    assert rules["kl_runaway"].action == "rollback" and "one_opening" not in rules
