"""Rules of validation: suites as files, a team's own too, and whether a rule refuses a row, warns
or shuts the gate.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from validation_rows import SUITES, good_rows, make_row, memory_rows, run_validate, suites_of

from rlhf_core.config import yaml_text
from rlhf_core.config.data import ROW_RULES, SET_RULES, ValidateConfig
from rlhf_core.config.loading import check_params
from rlhf_core.data.collection.raw_folder import RawData
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.suites import ROWS, Checkpoints, Suites, read_suites
from rlhf_core.data.validation.tables import Validated, validate
from rlhf_core.errors import ConfigError, GateFailed


def own_suite(
    folder: Path, *expectations: dict[str, Any], name: str = "preferences.team.json"
) -> Path:
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
        {
            "type": "expect_table_row_count_to_be_between",
            "kwargs": {"min_value": 5},
            "meta": {"rule": "enough"},
        },
    )
    metrics, outputs = run_validate(rows, tmp_path, expectations=suites)
    numbers = metrics["preferences"]
    assert (
        numbers["failed_no_swearing"],
        numbers["warned_no_bad_one"],
        numbers["failed_enough"],
    ) == (1, 1, 0)
    assert "failed_mostly_fine" not in numbers, (
        "an expectation that holds as a whole refuses no row"
    )
    kept = [
        row for row in rows["preferences"] if "ghp_" not in row["chosen"]
    ]  # a secret refuses the row
    bad = sum("bad" in row["rejected"] for row in kept)
    assert numbers["failed_no_secrets"] == 1
    assert numbers["warned_mostly_fine"] == bad > 0, "and counts those that it does not hold for"
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
        assert "newsletter" not in text and "__none__" not in f"{text} {path}"


def test_every_page_of_the_data_docs_is_reached_from_the_first_and_loads_nothing(
    tmp_path: Path,
) -> None:
    suites = read_suites(own_suite(tmp_path / "own", no_swearing()), ValidateConfig())
    checkpoints = Checkpoints(suites)
    for kind, column in {"preferences": "rejected", "pretrain": "text"}.items():
        checkpoints.run(kind, pd.DataFrame({column: ["damn", "No."]}), ROWS, str)
    docs = tmp_path / "docs"
    checkpoints.write_docs(docs, [])
    reached, waiting = set(), [docs / "index.html"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        text = page.read_text()
        assert not re.search(r"url\(|@import|<(?:script|link|img)\b", text), (
            f"{page} loads something"
        )
        for link in re.findall(r'href="([^"#]+)"', text):
            assert not link.startswith("http"), f"{page} leads elsewhere: {link}"
            target = (page.parent / link).resolve()
            assert target.is_file(), f"{page} links {link}"
            if target not in reached:
                waiting.append(target)
    assert reached == {path for path in docs.rglob("*") if path.is_file()}, "nothing else is left"
    assert len(reached) == 5
    first = (docs / "index.html").read_text()
    assert re.search(r"preferences.* of .* expectations hold", first)


def test_a_team_brings_classes_of_its_own(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data-validation.md").read_text()
    (own_class,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    polite = {
        "type": "expect_column_values_to_be_polite",
        "kwargs": {"column": "rejected"},
        "meta": {"rule": "polite"},
    }
    folder = own_suite(tmp_path / "own", polite)
    with pytest.raises(
        ConfigError, match="there is no expectation 'expect_column_values_to_be_polite'"
    ):
        read_suites(folder, ValidateConfig())
    (folder / "team.py").write_text(own_class)
    for _ in range(2):  # by two stages of one process
        rules = {
            rule.name: rule for rule in read_suites(folder, ValidateConfig()).rules["preferences"]
        }
    frame = pd.DataFrame({"rejected": ["Damn.", "No.", "damned"]})
    suites = Suites({"preferences": [rules["polite"]]}, {})
    (verdict,) = Checkpoints(suites).run("preferences", frame, ROWS, str).values()
    assert (verdict.passed, list(verdict.rows)) == (False, [0, 2])
    assert {path.name for path in folder.iterdir() if path.suffix != ".json"} == {"team.py"}
    (folder / "team.py").write_text("import nothing_of_that_name")
    with pytest.raises(
        ConfigError, match=r"team\.py: its expectations cannot be loaded \(ModuleNotFoundError: "
    ):
        read_suites(folder, ValidateConfig())


@pytest.mark.slow
def test_an_expectation_of_the_whole_table_shuts_the_gate(tmp_path: Path) -> None:
    many = {
        "type": "expect_table_row_count_to_be_between",
        "kwargs": {"min_value": 500},
        "meta": {"rule": "enough"},
    }
    with pytest.raises(GateFailed, match=r"preferences.failed_enough is 1, required ≤ 0"):
        run_validate(good_rows(), tmp_path, expectations=own_suite(tmp_path / "own", many))
    assert (
        "The data gate failed: preferences.failed_enough"
        in (tmp_path / "data/docs/index.html").read_text()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "preferences.team.json is not a suite of expectations"),
        ("[]", "preferences.team.json is not a suite of expectations"),
        ('{"expectations": {}}', "is not a suite of expectations"),
        ('{"expectations": [3]}', "expectation 1 has no 'type'"),
        ('{"expectations": [{"type": "expect_no_finding"}]}', "did you mean 'expect_no_findings'?"),
        (
            json.dumps({"expectations": [no_swearing(kwargs={"column": "reject"})]}),
            "did you mean 'rejected'?",
        ),
        (
            json.dumps({"expectations": [no_swearing(severity="high")]}),
            "there is no severity 'high'",
        ),
        (
            json.dumps({"expectations": [no_swearing(kwargs={"regex": 3.5, "mostly": "all"})]}),
            "expectation 1: ",
        ),
        (
            json.dumps({"expectations": [no_swearing(severity="info", meta={"rule": "roles"})]}),
            "rule roles must be",
        ),
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


def validated(folder: Path, derived: bool = False, **settings: Any) -> Validated:
    """Validate a pair, a copy of it, a copied pair with an access key, and a pair that is labelled
    both ways.
    """
    secret = "ghp_" + "a" * 36
    pairs = [
        *[make_row("preferences", 0)] * 2,
        *[make_row("preferences", 1, chosen=secret)] * 2,
        make_row("preferences", 2),
        make_row("preferences", 2, chosen="bad 2", rejected="good 2"),
    ]
    rows = {"preferences": pairs}
    if derived:
        rows["demonstrations"] = [
            make_row("demonstrations", 2, reply=row["chosen"]) for row in pairs[4:]
        ]
    stored = {kind: memory_rows(kind, listed) for kind, listed in rows.items()}
    raw = RawData(stored, folder / "none", derived=["demonstrations"] if derived else [])
    return validate(raw, suites_of(["demonstrations"] if derived else [], **settings), folder)


def test_by_default_every_rule_of_rows_refuses(tmp_path: Path) -> None:
    result = validated(tmp_path)
    assert (
        result.clean["preferences"].num_rows == 1 and result.kinds["preferences"].quarantined == 5
    )
    assert result.kinds["preferences"].failed == {
        "not_duplicate": 2,
        "no_secrets": 2,
        "not_contradicted": 2,
    }
    assert not result.kinds["preferences"].warned


def test_a_warning_keeps_the_row_unless_another_rule_refuses_it(tmp_path: Path) -> None:
    rules = {"not_duplicate": "warn", "not_contradicted": "warn"}
    result = validated(tmp_path, derived=True, rules=rules)
    assert result.clean["preferences"].num_rows == 4
    # The copy of the first pair stays; both rows with a key are refused, for the key alone.
    assert result.kinds["preferences"].warned == {"not_duplicate": 1, "not_contradicted": 2}
    assert [row.reasons for rows in result.quarantine() for row in rows] == [
        ["looks like an access key or a private key"]
    ] * 2
    assert result.clean["demonstrations"].num_rows == 2, "their sources stay, so they do too"


@pytest.mark.slow
def test_a_single_row_shuts_the_gate_where_the_rule_fails_the_set(tmp_path: Path) -> None:
    rows = good_rows() | {"pretrain": [make_row("pretrain", i) for i in range(20)]}
    rows["preferences"].append(make_row("preferences", 0))
    with pytest.raises(GateFailed, match=r"preferences.failed_not_duplicate is 1, required ≤ 0"):
        run_validate(rows, tmp_path, rules={"not_duplicate": "fail", "prompt_chars": "fail"})
    conditions = {
        c["metric"]: c for c in json.loads((tmp_path / "gates/data.json").read_text())["conditions"]
    }
    assert [name for name, c in conditions.items() if not c["passed"]] == [
        "preferences.failed_not_duplicate"
    ]
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
        (
            "{roles: warn}",
            "roles cannot be warn: nothing can be trained on such rows; choose refuse or fail",
        ),
    ],
)
def test_wrong_rules_are_refused(rules: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'validate\.rules") as error:
        check_params(yaml_text.parse(f"validate: {{rules: {rules}}}", "a file"))
    assert message in str(error.value)
