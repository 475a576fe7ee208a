"""What people are asked: blind, shuffled, the bad cases and a random control; and the forms that
they get.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clean_files import write_rows
from typer.testing import CliRunner

from rlhf_core.data.schema import write_table
from rlhf_core.errors import DataError, RlhfError
from rlhf_extras.annotation import human_pairs
from rlhf_extras.annotation.command import app

from ..conftest import made_prompt, sums


def candidate(i: int, cluster: int | None = None) -> human_pairs.Candidate:
    prompt = [{"role": "user", "content": f"question {i}?"}]
    return human_pairs.Candidate(
        prompt, "sums", f"{i if cluster is None else cluster}", f"sft {i}", f"policy {i}"
    )


CANDIDATES = [candidate(i) for i in range(200)]


def test_the_control_is_drawn_from_all_pairs_and_bad_cases_are_kept() -> None:
    exported = human_pairs.blinded_export(CANDIDATES, [5, 3, 8], control=150, seed=1)
    assert (
        sum(pair.bad_case for pair in exported.pairs) == 3
        and sum(pair.control for pair in exported.pairs) == 150
    )
    both = [pair for pair in exported.pairs if pair.bad_case and pair.control]
    assert len(exported.pairs) == 153 - len(both) and both
    assert {pair.prompt_text for pair in exported.pairs if pair.bad_case} == {
        f"user: question {i}?" for i in (3, 5, 8)
    }


def test_sides_and_order_say_nothing_and_the_seed_decides_them() -> None:
    exported = human_pairs.blinded_export(CANDIDATES, [], control=200, seed=1)
    policy_first = [pair.policy_reply == 1 for pair in exported.pairs]
    assert 70 < sum(policy_first) < 130
    for pair in exported.pairs:
        assert (pair.reply_1.startswith("policy")) == (pair.policy_reply == 1)
        assert pair.outcome(str(pair.policy_reply)) == 1.0 and pair.outcome("tie") == 0.5
    numbers = [int(pair.prompt_text.split()[-1].rstrip("?")) for pair in exported.pairs]
    assert numbers != sorted(numbers)
    assert (
        human_pairs.blinded_export(CANDIDATES, [], 200, 1)
        == exported
        != human_pairs.blinded_export(CANDIDATES, [], 200, 2)
    )


def test_equal_replies_are_not_asked_about() -> None:
    equal = [human_pairs.Candidate([{"role": "user", "content": "?"}], "", "", "yes", "yes")]
    (pair,) = human_pairs.blinded_export([*equal, CANDIDATES[0]], [0, 1], 5, 1).pairs
    assert pair.prompt == CANDIDATES[0].prompt
    with pytest.raises(DataError, match="no pair of different replies"):
        human_pairs.blinded_export(equal, [0], None, 1)


def test_the_forms_hold_nothing_about_who_wrote_what(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "=1+1"}]
    candidates = [
        human_pairs.Candidate(
            prompt, "secret category", "secret cluster", "=SUM(A1)", '好的，\n"是"'
        )
    ]
    exported = human_pairs.blinded_export(candidates, [0], 0, 1)
    files = human_pairs.write_forms(exported.pairs, tmp_path / "out")
    for file in files:
        text = file.read_text()
        assert not any(
            word in text for word in ("policy", "sft", "bad_case", "control", "secret category")
        )
    with (tmp_path / "out/pairs.csv").open(encoding="utf-8-sig", newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert tuple(row) == human_pairs.COLUMNS and {row["reply_1"], row["reply_2"]} == {
        "'=SUM(A1)",
        '好的，\n"是"',
    }
    (task,) = json.loads((tmp_path / "out/label_studio_tasks.json").read_text())
    config = ElementTree.parse(tmp_path / "out/label_studio_config.xml")
    fields = {node.attrib["value"].removeprefix("$") for node in config.iter("Text")}
    (pairwise,) = config.iter("Pairwise")
    names = {node.attrib["name"] for node in config.iter("Text")}
    assert fields < set(task["data"]) and set(pairwise.attrib["toName"].split(",")) < names


def test_the_key_comes_back_as_it_was_and_others_are_refused(tmp_path: Path) -> None:
    exported = human_pairs.blinded_export(CANDIDATES[:4], [1], 2, 1)
    exported.save_key(tmp_path)
    assert human_pairs.AnnotationExport.load_key(tmp_path, exported.name) == exported
    for name in ("a00000000", "../x", ""):
        with pytest.raises(DataError, match="is not of this workspace"):
            human_pairs.AnnotationExport.load_key(tmp_path, name)
    (tmp_path / "data/annotations/exports" / f"{exported.name}.json").write_text('{"name": "x"}')
    with pytest.raises(DataError, match="is no key of an export"):
        human_pairs.AnnotationExport.load_key(tmp_path, exported.name)


def evaluated(root: Path) -> Path:
    """A workspace with an evaluation of four prompts, one of them a bad case."""
    rows = [made_prompt(f"question {i}?", "sums", "a file") for i in range(4)]
    write_rows(root / "data/clean/prompts/test.parquet", rows)
    said = [{"sft_reply": f"sft {i}", "policy_reply": f"policy {i}"} for i in range(4)]
    pairs = [
        {"id": row.id, "category": row.category} | replies
        for row, replies in zip(rows, said, strict=True)
    ]
    write_table(root / "samples/comparisons.parquet", pa.Table.from_pylist(pairs))
    bad = json.dumps(pairs[2] | {"prompt": "a\u2028b"}, ensure_ascii=False)
    (root / "samples/bad_cases.jsonl").write_text(f"{bad}\n")
    (root / "params.yaml").write_text("seed: 1\n")
    return root


def test_the_command_writes_forms_and_keeps_the_key(tmp_path: Path) -> None:
    root, out = evaluated(tmp_path / "workspace"), tmp_path / "out"
    candidates, bad = human_pairs.evaluated_candidates(root)
    assert candidates[bad[0]].policy_reply == "policy 2" and len(candidates) == 4
    command = ["export", str(out), "--workspace", str(root), "--control", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "1 bad cases, 2 of the control" in result.output
    all_of_them = CliRunner().invoke(
        app, ["export", str(tmp_path / "all"), "--workspace", str(root), "--control", "4"]
    )
    assert (
        "4 pairs" in all_of_them.output
        and "1 bad cases, 4 of the control, 1 of them both" in all_of_them.output
    )
    assert len(list((root / "data/annotations/exports").iterdir())) == 2
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, RlhfError) and "exists already" in str(again.exception)
    multiplied = CliRunner().invoke(app, ["export", str(tmp_path / "more"), "--replies", "2"])
    assert isinstance(multiplied.exception, RlhfError) and "--replies needs --prompts" in str(
        multiplied.exception
    )


def test_of_several_replies_to_a_prompt_the_bad_one_is_asked_about(tmp_path: Path) -> None:
    root = evaluated(tmp_path)
    rows = pq.read_table(root / "samples/comparisons.parquet").to_pylist()
    further = [row | {"policy_reply": f"further {i}"} for i, row in enumerate(rows)]
    every = [row for of_prompt in zip(rows, further, strict=True) for row in of_prompt]
    write_table(root / "samples/comparisons.parquet", pa.Table.from_pylist(every))
    candidates, bad = human_pairs.evaluated_candidates(root)
    assert [candidates[i].policy_reply for i in bad] == ["policy 2"]


def test_of_several_equal_replies_to_a_prompt_the_bad_case_stays_one(tmp_path: Path) -> None:
    root = evaluated(tmp_path)
    rows = pq.read_table(root / "samples/comparisons.parquet").to_pylist()
    write_table(
        root / "samples/comparisons.parquet",
        pa.Table.from_pylist([row for row in rows for _ in range(3)]),
    )
    cases = root / "samples/bad_cases.jsonl"
    cases.write_text(cases.read_text() * 3)
    candidates, bad = human_pairs.evaluated_candidates(root)
    assert (len(candidates), bad) == (4, [2])
    for seed in range(5):
        export = human_pairs.blinded_export(candidates, bad, 4, seed)
        assert [pair.bad_case for pair in export.pairs].count(True) == 1


def test_an_evaluation_of_other_data_is_refused(tmp_path: Path) -> None:
    root = evaluated(tmp_path)
    write_rows(
        root / "data/clean/prompts/test.parquet", [made_prompt("another?", "sums", "a file")]
    )
    with pytest.raises(DataError, match="4 prompts of the evaluation are not in"):
        human_pairs.evaluated_candidates(root)


def test_training_prompts_are_answered_by_both_models(tmp_path: Path, models: Path) -> None:
    rows = sums(6)
    write_rows(tmp_path / "data/clean/prompts/train.parquet", rows)
    (tmp_path / "models").symlink_to(models)
    (tmp_path / "params.yaml").write_text("seed: 1\nevaluate: {sampling: {max_new_tokens: 5}}\n")
    candidates, bad = human_pairs.sampled_candidates(tmp_path, 4)
    assert len(candidates) == 4 and {pair.category for pair in candidates} == {"sums"}
    assert {pair.prompt[0]["content"] for pair in candidates} < {row.group for row in rows}
    assert any(pair.sft_reply != pair.policy_reply for pair in candidates) and set(bad) <= set(
        range(4)
    )

    more, bad = human_pairs.sampled_candidates(tmp_path, 4, replies_per_prompt=3)
    keys = {pair.key for pair in more}
    assert {pair.key for pair in candidates} <= keys and len(keys) == len(more) > 4
    assert {pair.prompt[0]["content"] for pair in more} == {
        pair.prompt[0]["content"] for pair in candidates
    }
    assert set(bad) <= set(range(len(more)))


def test_a_pair_that_repeats_is_asked_about_once() -> None:
    swapped = human_pairs.Candidate(CANDIDATES[0].prompt, "sums", "0", "policy 0", "sft 0")
    candidates = [*CANDIDATES[:3], swapped, CANDIDATES[1], CANDIDATES[3]]
    kept, bad = human_pairs._without_repeats(candidates, [5, 4, 2])
    assert kept == CANDIDATES[:4]
    # The second of an equal pair is gone as a bad case too.
    assert bad == [3, 2]
