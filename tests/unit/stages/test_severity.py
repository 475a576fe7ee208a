"""Severity of rules: refused rows go to the quarantine, warned ones stay and are counted, and fail shuts the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from validation_rows import good_rows, make_row, run_validate

from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import check_params
from rlhf_core.config.validate import ValidateConfig
from rlhf_core.config.validation_rules import ROW_RULES
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.checks import checks_for
from rlhf_core.errors import ConfigError, DataError


def rows_with_copies() -> dict[str, list[dict[str, Any]]]:
    """120 pairs, a copy of the first, and a copy of the second with an access key."""
    rows = good_rows()
    secret = "ghp_" + "a" * 36
    rows["preferences"] += [make_row("preferences", 0), *[make_row("preferences", 500, chosen=secret)] * 2]
    return rows


def test_by_default_every_rule_of_rows_refuses(tmp_path: Path) -> None:
    metrics, outputs = run_validate(rows_with_copies(), tmp_path)
    assert metrics["preferences"]["clean"] == 120
    assert metrics["preferences"]["failed_not_duplicate"] == 2
    assert not [name for name in metrics["preferences"] if name.startswith("warned_")]
    assert pq.read_table(outputs.quarantine).num_rows == 3


def test_a_warning_keeps_the_row_unless_another_rule_refuses_it(tmp_path: Path) -> None:
    metrics, outputs = run_validate(rows_with_copies(), tmp_path, rules={"not_duplicate": "warn"})
    numbers = metrics["preferences"]
    # The copy of row 0 stays; both rows with a key are refused for the key alone.
    assert (numbers["clean"], numbers["warned_not_duplicate"], numbers["failed_no_secrets"]) == (121, 1, 2)
    assert "failed_not_duplicate" not in numbers
    reasons = [row["reasons"] for row in pq.read_table(outputs.quarantine).to_pylist()]
    assert reasons == [["looks like an access key or a private key"]] * 2


def test_a_single_row_shuts_the_gate_where_the_rule_fails_the_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"preferences.failed_no_secrets is 2, must be <= 0"):
        run_validate(rows_with_copies(), tmp_path, rules={"no_secrets": "fail"})
    gate = json.loads((tmp_path / "gates/data.json").read_text())
    assert [c["metric"] for c in gate["conditions"] if not c["passed"]] == ["preferences.failed_no_secrets"]
    assert pq.read_table(tmp_path / "data/quarantine.parquet").num_rows == 3


def test_a_set_without_such_rows_passes_and_says_what_was_required(tmp_path: Path) -> None:
    metrics, outputs = run_validate(good_rows(), tmp_path, rules={"no_secrets": "fail", "prompt_chars": "fail"})
    conditions = {c["metric"]: c["value"] for c in json.loads(outputs.gate.read_text())["conditions"]}
    assert {f"{kind}.failed_no_secrets" for kind in ROW_TYPES} <= conditions.keys()
    assert conditions["preferences.failed_prompt_chars"] == metrics["preferences"]["failed_prompt_chars"] == 0
    assert "pretrain.failed_prompt_chars" not in conditions, "the rule is not about this kind"


def test_derived_rows_stay_where_their_source_is_only_warned_about(tmp_path: Path) -> None:
    rows = good_rows()
    rows["preferences"] += [make_row("preferences", 2, chosen="bad 2", rejected="good 2")]
    rows["demonstrations"] = [
        make_row("demonstrations", i, id=f"d{i}", reply=row["chosen"], prompt=row["prompt"])
        for i, row in enumerate(rows["preferences"])
    ]
    refused, _ = run_validate(rows, tmp_path / "a", derived=["demonstrations"])
    warned, _ = run_validate(rows, tmp_path / "b", derived=["demonstrations"], rules={"not_contradicted": "warn"})
    assert refused["demonstrations"]["clean"] == 119 and warned["demonstrations"]["clean"] == 121
    assert warned["preferences"]["warned_not_contradicted"] == 2


def test_the_rules_are_those_that_are_checked() -> None:
    checked = {check.column for kind in ROW_TYPES for check in checks_for(kind, ValidateConfig())}
    assert checked == set(ROW_RULES)


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
