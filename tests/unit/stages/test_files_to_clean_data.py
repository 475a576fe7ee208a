"""From files to clean data: kinds are derived from the rows that passed, and texts stay as they were written."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from validation_rows import collect_files, validate_raw

from rlhf_core.data.schema import ROW_TYPES, Preference, read_rows
from rlhf_core.stages.runtime.contract import Paths

DERIVED = "derived only from rows that were refused"


def run(workspace: Path, pairs: list[dict[str, Any]], **settings: Any) -> tuple[Mapping[str, Any], Paths]:
    (workspace / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in pairs))
    return validated(workspace, "pairs.jsonl", **settings)


def validated(workspace: Path, file: str, **settings: Any) -> tuple[Mapping[str, Any], Paths]:
    collect_files(workspace, {"preferences": (file,)})
    return validate_raw(workspace, **settings)


def pair(number: int, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": f"Question {number}?", "chosen": chosen, "rejected": rejected}


def clean(outputs: Paths, kind: str, column: str) -> set[str]:
    rows = (row for path in (outputs.clean / kind).glob("*.parquet") for row in read_rows(path, ROW_TYPES[kind]))
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
    assert quarantined == [("demonstrations", [DERIVED])] * 4 + [("prompts", [DERIVED])] + [("pretrain", [DERIVED])] * 4
    assert (metrics["demonstrations"]["raw"], metrics["demonstrations"]["clean"]) == (123, 119)


@pytest.mark.slow
def test_a_copy_of_a_pair_leaves_its_demonstration(tmp_path: Path) -> None:
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    metrics, _ = run(tmp_path, [*pairs, pair(5, "good 5", "bad 5")])
    assert metrics["demonstrations"]["clean"] == 120 and metrics["preferences"]["quarantined"] == 1


@pytest.mark.slow
def test_no_ranking_keeps_a_demonstration_of_a_refused_pair_that_it_ranks_lower(tmp_path: Path) -> None:
    """Only the pair that is labelled both ways prefers "fine 0" outright: the ranking has a better reply than it."""
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    pairs += [pair(0, "fine 0", "poor 0"), pair(0, "poor 0", "fine 0")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in pairs))
    ranking = {"prompt": "Question 0?", "responses": ["bad 0", "fine 0", "best 0"], "scores": [1, 2, 3]}
    (tmp_path / "rankings.jsonl").write_text(json.dumps(ranking))
    _, outputs = validated(tmp_path, "*.jsonl")
    replies = {reply for reply in clean(outputs, "demonstrations", "reply") if reply.endswith(" 0")}
    assert replies == {"good 0", "best 0"}
    assert pq.read_table(tmp_path / "data/raw/demonstrations/data.parquet").num_rows == 123


@pytest.mark.slow
def test_the_best_reply_of_a_ranking_stays_while_one_of_its_pairs_does(tmp_path: Path) -> None:
    """Of 1,500 rankings of three pairs each; some are where one part of the rows ends and the next begins."""
    middle = [f"fine {i}" if i % 2 else "\x00" for i in range(1500)]
    rankings = [
        {"prompt": f"Question {i}?", "responses": [f"best {i}", middle[i], f"bad {i}"], "ranks": [1, 2, 3]}
        for i in range(1500)
    ]
    metrics, outputs = run(tmp_path, rankings, max_quarantined=0.5, near_duplicates={"search": False})
    assert metrics["preferences"]["clean"] == 750 * 3 + 750
    assert clean(outputs, "demonstrations", "reply") == {f"best {i}" for i in range(1500)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv", "pairs.parquet"])
def test_texts_are_the_same_bytes_from_the_file_to_the_clean_data(name: str, tmp_path: Path) -> None:
    """Code with indentation, tabs, both kinds of line ends, trailing space, no-break space, and emoji of several."""
    odd = ["    if x:\n\treturn 1\n", "a\r\nb\r\n", " end ", "\u00a0x\u2028y\u3000", "👩‍💻\ufe0f", "\n\n# 1\n\n"]
    rows = [{"prompt": f"{i}{a}", "chosen": a, "rejected": f"{a}{a}"} for i in range(20) for a in odd]
    if name.endswith("jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    elif name.endswith("csv"):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    _, outputs = validated(tmp_path, name)
    read = [row for path in (outputs.clean).glob("preferences*/*.parquet") for row in read_rows(path, Preference)]
    assert {(row.prompt[0].content, row.chosen, row.rejected) for row in read} == {
        (row["prompt"], row["chosen"], row["rejected"]) for row in rows
    }


@pytest.mark.slow
def test_rows_over_a_limit_are_left_out_and_do_not_shut_the_gate(tmp_path: Path) -> None:
    """A third of the prompts is longer than max_prompt_chars: the limit's choice, no sign of bad data."""
    pairs = [pair(i, f"good {i}", f"bad {i}") for i in range(120)]
    pairs += [{"prompt": f"{i}" + "x" * 16_000, "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)]
    metrics, outputs = run(tmp_path, [*pairs, pair(121, "\x00", "b")])
    numbers = metrics["preferences"]
    assert (numbers["clean"], numbers["quarantined"], numbers["left_out"]) == (120, 61, 60)
    assert numbers["quarantined_share"] == pytest.approx(1 / 181)
    reasons = [row["reasons"] for row in pq.read_table(outputs.quarantine).to_pylist() if row["kind"] == "preferences"]
    assert reasons.count(["the prompt is over 16000 characters"]) == 60
