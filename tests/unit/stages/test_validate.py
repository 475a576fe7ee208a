"""Validate end to end: Great Expectations finds the bad rows, the quarantine names every reason, the gate decides."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from validation_rows import SUITES, Rows, good_rows, make_row, run_validate, suites_of

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.dataset import KindStatistics, data_metrics, split_parts
from rlhf_core.data.row_counts import READABLE, RowFinding
from rlhf_core.data.schema import ROW_TYPES, Preference, arrow_schema, read_rows, write_dicts
from rlhf_core.data.validation.suites import Checkpoints
from rlhf_core.data.validation.tables import RawData, Validated
from rlhf_core.errors import EXIT_GATE_FAILED, DataError, GateFailed
from rlhf_core.gates import decide
from rlhf_core.stages import validate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext

REFUSED = RowFinding(READABLE, "preferences", "no prompt", "x.jsonl", 9, row="{}")


@pytest.mark.slow
def test_bad_rows_are_quarantined_with_every_reason(tmp_path: Path) -> None:
    rows = good_rows()
    secret = "ghp_" + "a" * 36
    rows["preferences"] += [
        make_row("preferences", 1),
        make_row("preferences", 500, chosen="", rejected=f"\x00 {secret}"),
        make_row("preferences", 501, margin=float("nan")),
        make_row("preferences", 2, chosen="bad 2", rejected="good 2"),
    ]
    rows["prompts"] += [make_row("prompts", 7, prompt=[{"role": "assistant", "content": "Hm?"}])]
    metrics, outputs = run_validate(rows, tmp_path, refused=[REFUSED])
    quarantined = pq.read_table(outputs.quarantine).to_pylist()
    reasons = [(row["kind"], sorted(row["reasons"])) for row in quarantined]
    swapped = ["the same pair is also labelled the other way round"]
    assert reasons == [
        ("preferences", ["no prompt"]),
        ("preferences", swapped),
        ("preferences", ["the same texts as an earlier row"]),
        (
            "preferences",
            ["chosen is empty", "control or replacement characters", "looks like an access key or a private key"],
        ),
        ("preferences", ["the margin is not a finite number"]),
        ("preferences", swapped),
        ("prompts", ["roles do not alternate between user and assistant, or the last turn is not the user's"]),
    ]
    assert quarantined[0]["id"] == "x.jsonl:9"
    assert json.loads(quarantined[3]["row"])["prompt"][0]["content"] == "Question 500?"
    numbers = metrics["preferences"]
    assert (numbers["raw"], numbers["clean"], numbers["quarantined"]) == (125, 119, 6)
    assert numbers["quarantined_share"] == pytest.approx(6 / 125)
    assert numbers["failed_not_contradicted"] == 2 and numbers["failed_chosen_not_empty"] == 1


@pytest.mark.slow
def test_clean_data_metrics_docs_and_gate(tmp_path: Path) -> None:
    metrics, outputs = run_validate(good_rows(), tmp_path)
    held = [f"{prefix}{split}" for prefix in ("", "referee_", "judge_") for split in ("train", "validation")]
    assert sum(metrics["preferences"][part] for part in [*held, "test"]) == metrics["preferences"]["clean"] == 120
    assert metrics["group_overlap"] == 0
    files = {str(p.relative_to(outputs.clean)) for p in outputs.clean.rglob("*.parquet")}
    assert len(files) == 15
    train = read_rows(outputs.clean / "preferences/train.parquet", Preference)
    assert len(train) == metrics["preferences"]["train"]
    # "good 10" has 7 characters and "bad 10" 6, so the longer reply is always the preferred one.
    assert metrics["preferences"]["chosen_longer_share"] == 1.0
    assert json.loads(outputs.metrics.read_text()) == metrics
    gate = json.loads(outputs.gate.read_text())
    assert gate["passed"] and set(gate["evidence"]) == {"metrics/data.json"}
    assert {"metric", "value", "bound", "passed", "why"} <= set(gate["conditions"][0])
    assert (outputs.docs / "index.html").is_file()
    assert len(list(outputs.docs.rglob("validations/**/*.html"))) == 12


@pytest.mark.slow
def test_too_much_quarantine_shuts_the_gate_and_leaves_evidence(tmp_path: Path) -> None:
    (tmp_path / "data/clean").mkdir(parents=True)
    rows = good_rows()
    rows["demonstrations"] = [make_row("demonstrations", i, reply="" if i % 2 else "fine") for i in range(120)]
    with pytest.raises(
        GateFailed, match=r"demonstrations.quarantined_share is 0.5, must be <= 0.2 \(most often check reply_not"
    ) as e:
        run_validate(rows, tmp_path)
    assert "\n" not in str(e.value) and e.value.exit_code == EXIT_GATE_FAILED
    assert not (tmp_path / "data/clean").exists(), "clean data of the earlier run must not pass for this one's"
    gate = json.loads((tmp_path / "gates/data.json").read_text())
    assert [c["metric"] for c in gate["conditions"] if not c["passed"]] == ["demonstrations.quarantined_share"]
    assert pq.read_table(tmp_path / "data/quarantine.parquet").num_rows == 60


def test_no_rows_at_all_shut_the_gate(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"preferences.clean is 0, must be >= 50; .* and \d+ more"):
        run_validate({kind: [] for kind in ROW_TYPES}, tmp_path)
    assert not json.loads((tmp_path / "gates/data.json").read_text())["passed"]


@pytest.mark.parametrize(
    ("changes", "settings", "failed"),
    [
        ({}, {}, set()),
        ({}, {"min_rows": 121}, {"preferences.clean", "demonstrations.clean", "prompts.clean"}),
        ({"pretrain": []}, {}, {"pretrain.clean", "pretrain.train", "pretrain.validation"}),
        (
            {"prompts": [make_row("prompts", i, group="g") for i in range(60)]},
            {},
            {"prompts.train", "prompts.test"},
        ),
    ],
)
def test_gate_conditions(changes: Rows, settings: dict[str, Any], failed: set[str]) -> None:
    config = ValidateConfig(**settings)
    rows = good_rows() | changes
    statistics = {kind: KindStatistics() for kind in rows}
    for kind, listed in rows.items():
        table = pa.Table.from_pylist(listed, schema=arrow_schema(kind))
        statistics[kind].add(kind, table, split_parts(kind, table, config.seed, config.split))
    validated = Validated(
        RawData({}, Path("none")),
        Checkpoints(suites_of()),
        raw_rows={kind: len(listed) for kind, listed in rows.items()},
        failed_checks={kind: Counter() for kind in rows},
        warned_checks={kind: Counter() for kind in rows},
    )
    metrics = data_metrics(validated, statistics)
    decision = decide("data", validate.gate_conditions(config), metrics)
    assert {c.metric for c in decision.conditions if not c.passed} == failed
    assert decision.passed is (not failed)


def test_raw_data_of_another_shape_is_a_users_error(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "raw"
    write_dicts(raw / "preferences/data.parquet", "prompts", good_prompts())
    with pytest.raises(DataError, match=r"preferences.data.parquet lacks the column chosen"):
        validate.run(
            ValidateConfig(),
            Paths({"raw": raw, "expectations": SUITES}),
            Paths({k: tmp_path / p for k, p in validate.STAGE.outputs.items()}),
            RunContext(tmp_path / "work"),
        )


def good_prompts() -> list[dict[str, Any]]:
    row = make_row("prompts", 1)
    return [{name: row[name] for name in ("id", "prompt", "category", "source", "group")}]
