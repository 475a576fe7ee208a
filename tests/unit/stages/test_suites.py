"""Suites of expectations as files: own ones are picked up, wrong ones give one line, the data docs show rows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from validation_rows import SUITES, good_rows, make_row, run_validate

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.validation.suites import read_suites
from rlhf_core.errors import ConfigError, GateFailed


def own_suite(folder: Path, *expectations: dict[str, Any], name: str = "preferences.team.json") -> Path:
    shutil.copytree(SUITES, folder, dirs_exist_ok=True)
    (folder / name).write_text(json.dumps({"name": "team", "expectations": list(expectations)}))
    return folder


def no_swearing(**more: Any) -> dict[str, Any]:
    kwargs = {"column": "rejected", "regex": "damn"} | more.pop("kwargs", {})
    return {"type": "expect_column_values_to_not_match_regex", "kwargs": kwargs} | more


@pytest.mark.slow
def test_rows_are_refused_and_counted_by_the_expectations_of_a_team(tmp_path: Path) -> None:
    rows = good_rows()
    rows["preferences"] += [
        make_row("preferences", 700, rejected="damn"),
        make_row("preferences", 701, chosen="<b>Oh</b> ghp_" + "a" * 36),
    ]
    suites = own_suite(
        tmp_path / "own",
        no_swearing(meta={"rule": "no_swearing", "reason": "a reply swears"}),
        no_swearing(severity="warning", kwargs={"regex": "^bad 1$"}, meta={"rule": "no_bad_one"}),
        no_swearing(kwargs={"regex": "bad", "mostly": 0.001}, meta={"rule": "mostly_fine"}),
        {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 5}, "meta": {"rule": "enough"}},
    )
    metrics, outputs = run_validate(rows, tmp_path, expectations=suites)
    numbers = metrics["preferences"]
    assert (numbers["failed_no_swearing"], numbers["warned_no_bad_one"], numbers["failed_enough"]) == (1, 1, 0)
    assert "failed_mostly_fine" not in numbers, "an expectation that holds as a whole refuses no row"
    reasons = [row["reasons"] for row in pq.read_table(outputs.quarantine).to_pylist()]
    assert ["a reply swears"] in reasons and len(reasons) == 2
    pages = {path: path.read_text() for path in outputs.docs.rglob("*.html")}
    (page,) = (
        text
        for path, text in pages.items()
        if path.name == "raw-preferences.html" and path.parents[2].name == "preferences"
    )
    assert "Data asset: preferences" in page and "a reply swears" in page and "damn" in page
    assert "ghp_" not in page and "&lt;b&gt;" in page and "<b>Oh" not in page
    for path, text in pages.items():
        assert "The data passed its gate" in text, path
        assert not re.search(r"<(?:script|link|img)[^>]*https?:", text), f"{path} loads something"


@pytest.mark.slow
def test_an_expectation_of_the_whole_table_shuts_the_gate(tmp_path: Path) -> None:
    many = {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 500}, "meta": {"rule": "enough"}}
    with pytest.raises(GateFailed, match=r"preferences.failed_enough is 1, must be <= 0"):
        run_validate(good_rows(), tmp_path, expectations=own_suite(tmp_path / "own", many))
    assert "The data gate failed: preferences.failed_enough" in (tmp_path / "data/docs/index.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "preferences.team.json is not a suite of expectations"),
        ("[]", "preferences.team.json is not a suite of expectations"),
        ('{"expectations": {}}', "is not a suite of expectations"),
        ('{"expectations": [3]}', "expectation 1 has no 'type'"),
        ('{"expectations": [{"type": "expect_no_finding"}]}', "did you mean 'expect_no_findings'?"),
        (json.dumps({"expectations": [no_swearing(kwargs={"column": "reject"})]}), "did you mean 'rejected'?"),
        (json.dumps({"expectations": [no_swearing(severity="high")]}), "there is no severity 'high'"),
        (json.dumps({"expectations": [no_swearing(kwargs={"regex": 3.5, "mostly": "all"})]}), "expectation 1: "),
        (json.dumps({"expectations": [no_swearing(severity="info", meta={"rule": "roles"})]}), "rule roles must be"),
    ],
)
def test_a_wrong_suite_gives_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    folder = own_suite(tmp_path)
    (folder / "preferences.team.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_suites(folder, ValidateConfig())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_suite_of_no_kind_and_a_missing_needed_rule_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows of kind 'prefs'"):
        read_suites(own_suite(tmp_path / "a", name="prefs.json"), ValidateConfig())
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"preferences.json: rule complete is missing"):
        read_suites(tmp_path / "b", ValidateConfig())
