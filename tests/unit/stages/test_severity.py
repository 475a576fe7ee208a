"""Severity of rules: refused rows go to the quarantine, warned ones stay and are counted, and fail shuts the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from memory_rows import memory_rows
from validation_rows import good_rows, make_row, run_validate, suites_of

from rlhf_core.config import yaml_text
from rlhf_core.config.data import ROW_RULES, SET_RULES
from rlhf_core.config.loading import check_params
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.tables import RawData, Validated, validate
from rlhf_core.errors import ConfigError, GateFailed


def validated(folder: Path, derived: bool = False, **settings: Any) -> Validated:
    """Validate a pair, a copy of it, a copied pair with an access key, and a pair that is labelled both ways."""
    secret = "ghp_" + "a" * 36
    pairs = [
        *[make_row("preferences", 0)] * 2,
        *[make_row("preferences", 1, chosen=secret)] * 2,
        make_row("preferences", 2),
        make_row("preferences", 2, chosen="bad 2", rejected="good 2"),
    ]
    rows = {"preferences": pairs}
    if derived:
        rows["demonstrations"] = [make_row("demonstrations", 2, reply=row["chosen"]) for row in pairs[4:]]
    stored = {kind: memory_rows(kind, listed) for kind, listed in rows.items()}
    raw = RawData(stored, folder / "none", derived=["demonstrations"] if derived else [])
    return validate(raw, suites_of(["demonstrations"] if derived else [], **settings), folder)


def test_by_default_every_rule_of_rows_refuses(tmp_path: Path) -> None:
    result = validated(tmp_path)
    assert result.clean["preferences"].num_rows == 1 and result.quarantined_rows == {"preferences": 5}
    assert result.failed_checks["preferences"] == {"not_duplicate": 2, "no_secrets": 2, "not_contradicted": 2}
    assert not result.warned_checks["preferences"]


def test_a_warning_keeps_the_row_unless_another_rule_refuses_it(tmp_path: Path) -> None:
    rules = {"not_duplicate": "warn", "not_contradicted": "warn"}
    result = validated(tmp_path, derived=True, rules=rules)
    assert result.clean["preferences"].num_rows == 4
    # The copy of the first pair stays; both rows with a key are refused, for the key alone.
    assert result.warned_checks["preferences"] == {"not_duplicate": 1, "not_contradicted": 2}
    assert [row.reasons for rows in result.quarantine() for row in rows] == [
        ["looks like an access key or a private key"]
    ] * 2
    assert result.clean["demonstrations"].num_rows == 2, "their sources stay, so they do too"


@pytest.mark.slow
def test_a_single_row_shuts_the_gate_where_the_rule_fails_the_set(tmp_path: Path) -> None:
    rows = good_rows() | {"pretrain": [make_row("pretrain", i) for i in range(20)]}
    rows["preferences"].append(make_row("preferences", 0))
    with pytest.raises(GateFailed, match=r"preferences.failed_not_duplicate is 1, must be <= 0"):
        run_validate(rows, tmp_path, rules={"not_duplicate": "fail", "prompt_chars": "fail"})
    conditions = {c["metric"]: c for c in json.loads((tmp_path / "gates/data.json").read_text())["conditions"]}
    assert [name for name, c in conditions.items() if not c["passed"]] == ["preferences.failed_not_duplicate"]
    assert {f"{kind}.failed_not_duplicate" for kind in ROW_TYPES} <= conditions.keys()
    assert conditions["prompts.failed_prompt_chars"]["value"] == 0
    assert "pretrain.failed_prompt_chars" not in conditions, "the rule is not about this kind"
    assert pq.read_table(tmp_path / "data/quarantine.parquet").num_rows == 1


def test_the_suites_have_the_rules_that_parameters_may_name() -> None:
    suites = suites_of()
    severities = {rule.name: rule.severity for rules in suites.rules.values() for rule in rules}
    assert severities.keys() == {*ROW_RULES, *SET_RULES}
    warned = {name for name, severity in severities.items() if severity == "warn"}
    assert warned == {"prompt_not_repeated", "no_template_tokens", *SET_RULES}
    assert {severities[name] for name in severities.keys() - warned} == {"refuse"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("{no_secret: warn}", "there is no rule 'no_secret'; did you mean 'no_secrets'?"),
        ("{no_secrets: ignore}", "'refuse', 'warn' or 'fail'"),
        ("{roles: warn}", "roles cannot be warn: nothing can be trained on such rows; choose refuse or fail"),
    ],
)
def test_wrong_rules_are_refused(rules: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'validate\.rules") as error:
        check_params(yaml_text.parse(f"validate: {{rules: {rules}}}", "a file"))
    assert message in str(error.value)
