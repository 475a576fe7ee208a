"""From raw to clean data: rules find the bad rows, the quarantine says why, the gate decides, texts
stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.malformed.case import lines, parquet, table_text
from validation_rows import (
    SUITES,
    Rows,
    collect_files,
    good_rows,
    make_row,
    memory_rows,
    run_validate,
    suites_of,
    validate_raw,
)

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.collection.raw_folder import RawData
from rlhf_core.data.dataset import KindStatistics, data_metrics, split_parts
from rlhf_core.data.row_counts import READABLE, RowFinding
from rlhf_core.data.schema import ROW_TYPES, Preference, arrow_schema, read_rows, write_dicts
from rlhf_core.data.validation.suites import Checkpoints
from rlhf_core.data.validation.tables import CheckedKind, Validated
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
            [
                "chosen is empty",
                "control or replacement characters",
                "looks like an access key or a private key",
            ],
        ),
        ("preferences", ["the margin is not a finite number"]),
        ("preferences", swapped),
        (
            "prompts",
            [
                "roles do not alternate between user and assistant, or the last turn is not the user's"
            ],
        ),
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
    held = [
        f"{prefix}{split}"
        for prefix in ("", "referee_", "judge_")
        for split in ("train", "validation")
    ]
    assert (
        sum(metrics["preferences"][part] for part in [*held, "test"])
        == metrics["preferences"]["clean"]
        == 120
    )
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
    rows["demonstrations"] = [
        make_row("demonstrations", i, reply="" if i % 2 else "fine") for i in range(120)
    ]
    with pytest.raises(
        GateFailed,
        match=r"demonstrations.quarantined_share is 0.5, required ≤ 0.2 \(most often check reply_not",
    ) as e:
        run_validate(rows, tmp_path)
    assert "\n" not in str(e.value) and e.value.exit_code == EXIT_GATE_FAILED
    assert not (tmp_path / "data/clean").exists(), (
        "clean data of the earlier run must not pass for this one's"
    )
    gate = json.loads((tmp_path / "gates/data.json").read_text())
    assert [c["metric"] for c in gate["conditions"] if not c["passed"]] == [
        "demonstrations.quarantined_share"
    ]
    assert pq.read_table(tmp_path / "data/quarantine.parquet").num_rows == 60


def test_no_rows_at_all_shut_the_gate(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"preferences.clean is 0, required ≥ 50; .* and \d+ more"):
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
        {kind: CheckedKind(memory_rows(kind, listed)) for kind, listed in rows.items()},
    )
    metrics = data_metrics(validated, statistics)
    decision = decide("data", validate.gate_conditions(config), metrics)
    assert {c.metric for c in decision.conditions if not c.passed} == failed
    assert decision.passed is (not failed)


def test_raw_data_of_another_shape_is_a_users_error(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "raw"
    row = make_row("prompts", 1)
    names = ("id", "prompt", "category", "source", "group")
    write_dicts(raw / "preferences/data.parquet", "prompts", [{name: row[name] for name in names}])
    with pytest.raises(DataError, match=r"preferences.data.parquet lacks the column chosen"):
        validate.run(
            ValidateConfig(),
            Paths({"raw": raw, "expectations": SUITES}),
            Paths({k: tmp_path / p for k, p in validate.STAGE.outputs.items()}),
            RunContext(tmp_path / "work"),
        )


DERIVED = "derived only from rows that were refused"


def run(
    workspace: Path, pairs: list[dict[str, Any]], **settings: Any
) -> tuple[Mapping[str, Any], Paths]:
    (workspace / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in pairs))
    return validated(workspace, "pairs.jsonl", **settings)


def validated(workspace: Path, file: str, **settings: Any) -> tuple[Mapping[str, Any], Paths]:
    collect_files(workspace, {"preferences": (file,)})
    return validate_raw(workspace, **settings)


def pair(number: int, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": f"Question {number}?", "chosen": chosen, "rejected": rejected}


def clean(outputs: Paths, kind: str, column: str) -> set[str]:
    rows = (
        row
        for path in (outputs.clean / kind).glob("*.parquet")
        for row in read_rows(path, ROW_TYPES[kind])
    )
    return {getattr(row, column) for row in rows}


@pytest.mark.slow
def test_replies_of_pairs_labelled_both_ways_are_no_demonstrations(tmp_path: Path) -> None:
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    # Question 0 stays with its third pair, question 1 has no other.
    pairs += [pair(0, "bad 0", "good 0"), pair(1, "bad 1", "good 1"), pair(0, "fine 0", "bad 0")]
    metrics, outputs = run(tmp_path, pairs)
    replies = clean(outputs, "demonstrations", "reply")
    assert not {"good 0", "bad 0", "good 1", "bad 1"} & replies and "fine 0" in replies
    assert not {"Question 1?\ngood 1", "Question 1?\nbad 1"} & clean(outputs, "pretrain", "text")
    assert {"question 0?", "question 2?"} <= clean(outputs, "prompts", "group")
    assert "question 1?" not in clean(outputs, "prompts", "group")
    quarantined = [
        (row["kind"], row["reasons"])
        for row in pq.read_table(outputs.quarantine).to_pylist()
        if row["kind"] != "preferences"
    ]
    assert (
        quarantined
        == [("demonstrations", [DERIVED])] * 4
        + [("prompts", [DERIVED])]
        + [("pretrain", [DERIVED])] * 4
    )
    assert (metrics["demonstrations"]["raw"], metrics["demonstrations"]["clean"]) == (123, 119)


@pytest.mark.slow
def test_a_copy_of_a_pair_leaves_its_demonstration(tmp_path: Path) -> None:
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    metrics, _ = run(tmp_path, [*pairs, pair(5, "good 5", "bad 5")])
    assert metrics["demonstrations"]["clean"] == 120 and metrics["preferences"]["quarantined"] == 1


@pytest.mark.slow
def test_no_ranking_keeps_a_demonstration_of_a_refused_pair_that_it_ranks_lower(
    tmp_path: Path,
) -> None:
    """Only the pair that is labelled both ways prefers "fine 0" outright: the ranking has a better
    reply than it.
    """
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    pairs += [pair(0, "fine 0", "poor 0"), pair(0, "poor 0", "fine 0")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in pairs))
    ranking = {
        "prompt": "Question 0?",
        "responses": ["bad 0", "fine 0", "best 0"],
        "scores": [1, 2, 3],
    }
    (tmp_path / "rankings.jsonl").write_text(json.dumps(ranking))
    _, outputs = validated(tmp_path, "*.jsonl")
    replies = {reply for reply in clean(outputs, "demonstrations", "reply") if reply.endswith(" 0")}
    assert replies == {"good 0", "best 0"}
    assert pq.read_table(tmp_path / "data/raw/demonstrations/data.parquet").num_rows == 123


@pytest.mark.slow
def test_the_best_reply_of_a_ranking_stays_while_one_of_its_pairs_does(tmp_path: Path) -> None:
    """Of 1,500 rankings of three pairs each; some are where one part of the rows ends and the next
    begins.
    """
    middle = [f"fine {i}" if i % 2 else "\x00" for i in range(1500)]
    rankings = [
        {
            "prompt": f"Question {i}?",
            "responses": [f"best {i}", middle[i], f"bad {i}"],
            "ranks": [1, 2, 3],
        }
        for i in range(1500)
    ]
    metrics, outputs = run(
        tmp_path, rankings, max_quarantined=0.5, near_duplicates={"search": False}
    )
    assert metrics["preferences"]["clean"] == 750 * 3 + 750
    assert clean(outputs, "demonstrations", "reply") == {f"best {i}" for i in range(1500)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv", "pairs.parquet"])
def test_texts_are_the_same_bytes_from_the_file_to_the_clean_data(
    name: str, tmp_path: Path
) -> None:
    """Code with indentation, tabs, both kinds of line ends, trailing space, no-break space, and
    emoji of several.
    """
    odd = [
        "    if x:\n\treturn 1\n",
        "a\r\nb\r\n",
        " end ",
        "\u00a0x\u2028y\u3000",
        "👩‍💻\ufe0f",
        "\n\n# 1\n\n",
    ]
    rows = [
        {"prompt": f"{i}{a}", "chosen": a, "rejected": f"{a}{a}"} for i in range(20) for a in odd
    ]
    writers = {".jsonl": lambda rows: lines(*rows), ".csv": table_text, ".parquet": parquet}
    (tmp_path / name).write_bytes(writers[Path(name).suffix](rows))
    _, outputs = validated(tmp_path, name)
    read = [
        row
        for path in (outputs.clean).glob("preferences*/*.parquet")
        for row in read_rows(path, Preference)
    ]
    assert {(row.prompt[0].content, row.chosen, row.rejected) for row in read} == {
        (row["prompt"], row["chosen"], row["rejected"]) for row in rows
    }


@pytest.mark.slow
def test_rows_over_a_limit_are_left_out_and_do_not_shut_the_gate(tmp_path: Path) -> None:
    """A third of the prompts is longer than max_prompt_chars: the limit's choice, no sign of bad
    data.
    """
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    pairs += [
        {"prompt": f"{i}" + "x" * 16_000, "chosen": f"good {i}", "rejected": f"bad {i}"}
        for i in range(60)
    ]
    metrics, outputs = run(tmp_path, [*pairs, pair(121, "\x00", "b")])
    numbers = metrics["preferences"]
    assert (numbers["clean"], numbers["quarantined"], numbers["left_out"]) == (120, 61, 60)
    assert numbers["quarantined_share"] == pytest.approx(1 / 181)
    reasons = [
        row["reasons"]
        for row in pq.read_table(outputs.quarantine).to_pylist()
        if row["kind"] == "preferences"
    ]
    assert reasons.count(["the prompt is over 16000 characters"]) == 60
