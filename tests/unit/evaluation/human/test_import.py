"""Answers of people: half filled, repeated, contradictory, from elsewhere; agreement, win rate,
preference pairs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_core.config.data import CollectConfig, FileSources, WorldConfig
from rlhf_core.data.schema import Preference, read_table, rows_of_table
from rlhf_core.errors import DataError
from rlhf_core.stages.collect import collect
from rlhf_core.storage.files import sha256_tree, split_json_lines
from rlhf_core.world import corpus
from rlhf_extras.annotation.command import app
from rlhf_extras.annotation.human_answers import (
    as_text,
    cohen_kappas,
    fleiss_kappa,
    import_answers,
    read_form,
)
from rlhf_extras.annotation.human_pairs import (
    AnnotationExport,
    Candidate,
    blinded_export,
    write_forms,
)

from .test_export import candidate

CANDIDATES = [candidate(i) for i in range(4)]


@pytest.fixture
def exported(tmp_path: Path) -> AnnotationExport:
    """Four pairs of the workspace ``tmp_path``, all of them control, the first candidate a bad
    case.
    """
    export = blinded_export(CANDIDATES, [0], 4, 1)
    export.save_key(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    return export


def jsonl(path: Path, choices: Mapping[str, Any], **more: Any) -> Path:
    rows = [{"id": pair, "choice": choice, **more} for pair, choice in choices.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def for_policy(export: AnnotationExport) -> dict[str, str]:
    """The choices of somebody who always prefers the policy's reply."""
    return {pair.id: str(pair.policy_reply) for pair in export.pairs}


def for_sft(export: AnnotationExport) -> dict[str, str]:
    return {pair.id: str(3 - pair.policy_reply) for pair in export.pairs}


def label_studio(pair: str, *choices: str, who: Any = 7, cancelled: bool = False) -> dict[str, Any]:
    results = [
        {"type": "choices", "from_name": "tie", "value": {"choices": ["tie"]}}
        if choice == "tie"
        else {"type": "pairwise", "from_name": "choice", "value": {"selected": choice}}
        for choice in choices
    ]
    annotation = {"result": results, "completed_by": who, "was_cancelled": cancelled}
    return {"id": 1, "data": {"pair_id": pair, "reply_1": "x"}, "annotations": [annotation]}


def test_csv_of_any_spreadsheet_is_read(tmp_path: Path) -> None:
    file = tmp_path / "alice.csv"
    file.write_bytes(
        '\ufeffid;prompt;choice;annotator\na-1;"a; ""b""\nc";1.0;\na-2;x;TIE;bob\na-3;x;;\n;;;\n'.encode()
    )
    form = read_form(file)
    assert [(a.pair, a.annotator, a.choice) for a in form.answers] == [
        ("a-1", "alice", "1"),
        ("a-2", "bob", "tie"),
    ]
    assert form.unanswered == 1 and form.unusable == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bo.CSV", "id,choice\na-1,1\n"),
        ("bo.JSONL", '{"id": "a-1", "choice": "1"}\n'),
        ("bo.JSON", "label studio"),
    ],
)
def test_a_suffix_in_capitals_is_the_same_form(tmp_path: Path, name: str, content: str) -> None:
    text = json.dumps([label_studio("a-1", "left", who="bo")]) if name == "bo.JSON" else content
    (tmp_path / name).write_text(text)
    assert [answer.pair for answer in read_form(tmp_path / name, "bo").answers] == ["a-1"]


def test_what_cannot_be_used_is_said_by_line_and_never_guessed(tmp_path: Path) -> None:
    file = tmp_path / "alice.jsonl"
    rows = [
        '{"id": "a-1", "choice": 2}',
        "[1]",
        "{",
        '{"choice": "1"}',
        '{"id": "a-2", "choice": "maybe"}',
    ]
    file.write_text("\n".join(rows))
    form = read_form(file)
    assert [(a.pair, a.choice) for a in form.answers] == [("a-1", "2")]
    assert form.problems() == [
        "alice.jsonl: 2 left out for no JSON object (line 2, 3)",
        "alice.jsonl: 1 left out for no id (line 4)",
        "alice.jsonl: 1 left out for a choice other than 1, 2 or tie (line 5)",
    ]


def test_label_studio_is_read(tmp_path: Path) -> None:
    file = tmp_path / "project.json"
    tasks = [
        label_studio("a-1", "left"),
        label_studio("a-2", "right", who={"id": 3, "email": "bob@example.com"}),
        label_studio("a-3", "tie"),
        label_studio("a-4", "left", cancelled=True),
        label_studio("a-5"),
        label_studio("a-6", "left", "tie"),
    ]
    file.write_text(json.dumps(tasks))
    form = read_form(file)
    assert [(a.pair, a.annotator, a.choice) for a in form.answers] == [
        ("a-1", "account 7", "1"),
        ("a-2", "bob@example.com", "2"),
        ("a-3", "account 7", "tie"),
    ]
    assert form.unanswered == 2 and len(form.unusable) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"id,answer\nx,1\n", "has no columns id and choice"),
        (
            "a.jsonl",
            b'{"prompt": "q", "chosen": "a", "rejected": "b"}\n',
            "has no columns id and choice",
        ),
        (
            "a.jsonl",
            b'{"id": "a-1", "answer": "1"}\n{"choice": "1"}\n',
            "has no columns id and choice",
        ),
        ("a.jsonl", b"a letter\n[1]\n", "has no columns id and choice"),
        ("a.CSV", b"id,answer\nx,1\n", "has no columns id and choice"),
        ("a.csv", "id,choice\nä,1".encode("latin-1"), "is not UTF-8"),
        ("a.json", b'[{"id": 1, "choice": "left"}]', "is no JSON export of Label Studio"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.xlsx", b"", "ends with .jsonl, .csv or .json"),
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"id,choice,choice\na-1,1,2\n", "names 'choice' twice"),
        ("a.csv", b'id,reply_1,choice\na-1,"not closed,1\na-2,x,2\n', "line 2: not readable CSV"),
        ("a.csv", "id,choice\na-1,1\n".encode("utf-16"), "UTF-16"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.json", b'[{"annotations": 5}]', "is no JSON export of Label Studio"),
        (
            "a.json",
            b'[{"annotations": [], "annotations": []}]',
            "the key 'annotations' occurs twice",
        ),
        (
            "a.json",
            b'[{"annotations": [{"result": [{"value": {"selected": "left", "selected": "right"}}]}]}]',
            "the key 'selected' occurs twice",
        ),
        (
            "a.json",
            b'[{"annotations": [], "data": {"pair_id": "a-1", "pair_id": "a-2"}}]',
            "'pair_id' occurs twice",
        ),
        (
            "a.json",
            b'[{"annotations": [{"completed_by": 1, "completed_by": 2}]}]',
            "'completed_by' occurs twice",
        ),
        ("a.json", b'{"a": [], "a": []}', "the key 'a' occurs twice"),
        (
            "a.json",
            b'[{"annotations": [{"completed_by": %s}]}]' % (b"1" * 5000),
            "an integer of 5000 digits",
        ),
    ],
)
def test_files_that_are_no_forms_are_refused_in_a_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_form(tmp_path / name)


def test_odd_contents_of_label_studio_are_no_answers(tmp_path: Path) -> None:
    file = tmp_path / "project.json"
    values: list[Any] = [
        {"selected": ["left"]},
        {"choices": 5},
        {"choices": [["tie"]]},
        {"selected": "middle"},
        7,
    ]
    tasks = [
        label_studio("a-1") | {"annotations": [{"result": [{"value": value}]}]} for value in values
    ]
    file.write_text(
        json.dumps([*tasks, label_studio("a-2") | {"annotations": ["x"]}]), encoding="utf-8-sig"
    )
    form = read_form(file)
    assert form.answers == [] and form.unanswered == 6


def test_a_row_of_another_width_is_left_out_since_its_columns_may_have_moved(
    tmp_path: Path,
) -> None:
    file = tmp_path / "alice.csv"
    file.write_text("id,choice,comment\na-1,1,good, really\na-2,2\na-3,2,\n")
    form = read_form(file)
    assert [answer.pair for answer in form.answers] == ["a-3"]
    assert form.problems() == [
        "alice.csv: 1 left out for more fields than the header (line 2)",
        "alice.csv: 1 left out for fewer fields than the header (line 3)",
    ]


def test_every_separator_of_lines_in_a_text_survives_the_round(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x0ce"
    export = blinded_export(
        [Candidate([{"role": "user", "content": odd}], "", "", odd, "x")], [], 1, 1
    )
    export.save_key(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    files = write_forms(export.pairs, tmp_path / "forms")
    row = json.loads(files[0].read_text().rstrip("\n")) | {
        "choice": "1",
        "comment": odd,
        "annotator": "\ud800",
    }
    file = tmp_path / "alice.jsonl"
    file.write_text(json.dumps(row, ensure_ascii=False).replace("\ud800", "\\ud800") + "\n")
    for _ in range(2):  # what was stored can be read again
        (result,) = import_answers(tmp_path, [file])["results"]
        assert result["answered"] == {"?": 1} and result["preferences"] == 1
    (stored,) = split_json_lines(
        (tmp_path / "data/annotations/exports" / f"{export.name}.answers.jsonl").read_text()
    )
    assert json.loads(stored)["comment"] == odd


def test_two_people_with_files_of_one_name_contradict_nobody(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    files = [tmp_path / who / "pairs.jsonl" for who in ("alice", "bob")]
    for file, choices in zip(files, (for_policy(exported), for_sft(exported)), strict=True):
        file.parent.mkdir()
        jsonl(file, choices)
    with pytest.raises(
        DataError, match=r"alice/pairs.jsonl and .*bob/pairs.jsonl answer .* rename them after who"
    ):
        import_answers(tmp_path, files)
    assert not (tmp_path / "data/annotations/exports" / f"{exported.name}.answers.jsonl").exists()
    jsonl(files[1], for_policy(exported))
    assert import_answers(tmp_path, files)["results"][0]["answered"] == {"pairs": 4}


def test_imports_at_the_same_time_lose_no_answer(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    people = [f"person{number}" for number in range(8)]
    files = [jsonl(tmp_path / f"{name}.jsonl", for_policy(exported)) for name in people]
    together = threading.Barrier(len(files))

    def add(file: Path) -> None:
        together.wait()
        import_answers(tmp_path, [file])

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(add, files))
    result = json.loads(
        (tmp_path / "data/annotations/exports" / f"{exported.name}.result.json").read_text()
    )
    assert sorted(result["answered"]) == people


def test_kappas_by_hand() -> None:
    # Observed agreement 3/4, by chance ½·¼ + ½·¾ = ½: kappa ½.
    choices = {
        "a": dict(zip("wxyz", "1122", strict=True)),
        "b": dict(zip("wxyz", "1222", strict=True)),
    }
    (cohen,) = cohen_kappas(choices)
    assert (
        cohen["value"] == pytest.approx(0.5)
        and cohen["pairs"] == 4
        and fleiss_kappa(choices) is None
    )
    # Pairs (1,1,1) and (1,2,2): mean agreement (1 + 1/3)/2 = 2/3, by chance (4/6)² + (2/6)² = 5/9:
    # kappa ¼.
    three = {
        "a": {"x": "1", "y": "1"},
        "b": {"x": "1", "y": "2"},
        "c": {"x": "1", "y": "2", "z": "1"},
    }
    fleiss = fleiss_kappa(three)
    assert fleiss is not None and fleiss["value"] == pytest.approx(0.25) and fleiss["pairs"] == 2
    alike = {name: {"x": "1"} for name in "abc"}
    assert fleiss_kappa(alike)["value"] is None and cohen_kappas(alike)[0]["value"] is None  # type: ignore[index]
    assert fleiss_kappa({"a": {"x": "1"}, "b": {"x": "1"}, "c": {"y": "1"}}) is None


def test_half_filled_files_grow_and_a_file_twice_changes_nothing(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    choices = for_policy(exported)
    first, *others = choices
    file = jsonl(tmp_path / "alice.jsonl", {first: choices[first], **dict.fromkeys(others, "")})
    imported = import_answers(tmp_path, [file])
    assert imported["problems"] == ["alice.jsonl: 3 not answered yet, 1 answered"]
    assert (
        imported["results"][0]["answered"] == {"alice": 1}
        and imported["results"][0]["preferences"] == 1
    )
    jsonl(file, choices)
    whole = import_answers(tmp_path, [file])
    assert whole["problems"] == [] and whole["results"][0]["answered"] == {"alice": 4}
    before = sha256_tree(tmp_path / "data")
    twice = import_answers(tmp_path, [file, file])
    assert twice["results"] == whole["results"] and sha256_tree(tmp_path / "data") == before


def test_people_decide_by_majority_and_pairs_are_written(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    ids = [pair.id for pair in exported.pairs]
    alice, bob = (
        for_policy(exported),
        for_sft(exported) | {ids[0]: "tie", ids[3]: for_policy(exported)[ids[3]]},
    )
    carol = for_policy(exported) | {ids[0]: "tie", ids[1]: for_sft(exported)[ids[1]]}
    del carol[ids[2]]
    files = [jsonl(tmp_path / f"{name}.jsonl", choices) for name, choices in
             {"alice": alice, "bob": bob, "carol": carol}.items()]  # fmt: skip
    (result,) = import_answers(tmp_path, files)["results"]
    # A tie; SFT by two of three; one each; the policy by all.
    assert (result["ties"], result["undecided"], result["preferences"]) == (1, 1, 2)
    assert result["control"] is not None and result["control"]["win_rate"] == pytest.approx(
        (0.5 + 0 + 0.5 + 1) / 4
    )
    assert result["bad_cases"] is not None and result["bad_cases"]["prompts"] == 1
    pairs = [["alice", "bob"], ["alice", "carol"], ["bob", "carol"]]
    assert [kappa["annotators"] for kappa in result["cohen"]] == pairs
    assert result["fleiss"] is not None and result["fleiss"]["pairs"] == 3
    rows = [json.loads(line) for line in (tmp_path / result["file"]).read_text().splitlines()]
    assert [row["chosen"][0]["content"].split()[0] for row in rows] == ["sft", "policy"]
    assert rows[0]["category"] == "sums" and rows[0]["prompt"] == exported.pairs[1].prompt


def test_contradictions_count_for_nobody_until_they_are_taken_back(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    file = jsonl(tmp_path / "alice.jsonl", for_policy(exported))
    import_answers(tmp_path, [file])
    jsonl(file, for_sft(exported))
    imported = import_answers(tmp_path, [file])
    (line,) = imported["problems"]
    assert (
        line.startswith("alice: 4 left out, answered in two ways")
        and imported["results"][0]["answered"] == {}
    )
    assert (
        imported["results"][0]["preferences"] == 0
        and not (tmp_path / imported["results"][0]["file"]).exists()
    )
    store = tmp_path / "data/annotations/exports" / f"{exported.name}.answers.jsonl"
    assert len(store.read_text().splitlines()) == 8, "nothing is lost"
    replaced = import_answers(tmp_path, [file], replace=True)
    assert replaced["problems"] == [] and replaced["results"][0]["control"]["win_rate"] == 0.0  # type: ignore[index]


def test_duplicates_are_counted_once_and_said(tmp_path: Path, exported: AnnotationExport) -> None:
    file = jsonl(tmp_path / "alice.jsonl", for_policy(exported))
    file.write_text(file.read_text() * 2)
    imported = import_answers(tmp_path, [file])
    assert imported["problems"] == ["alice.jsonl: 4 given twice in the same way, counted once"]
    assert imported["results"][0]["answered"] == {"alice": 4}


def test_foreign_and_changed_files_write_nothing(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    before = sha256_tree(tmp_path / "data")
    good = jsonl(tmp_path / "good.jsonl", for_policy(exported))
    for choices, message in (
        ({"a12345678-x": "1"}, "the export 'a12345678' is not of this workspace"),
        ({f"{exported.name}-changed": "1"}, "an id was changed; 1 in all"),
    ):
        with pytest.raises(DataError, match=message):
            import_answers(tmp_path, [good, jsonl(tmp_path / "bad.jsonl", choices)])
    with pytest.raises(DataError, match="no pair is answered"):
        import_answers(
            tmp_path, [jsonl(tmp_path / "empty.jsonl", dict.fromkeys(for_policy(exported), ""))]
        )
    assert sha256_tree(tmp_path / "data") == before


@pytest.mark.parametrize(
    "pair", ["{long}", "{long}-1", "{name}-{long}", "\n{name}-\x1b[2J\n{long}"]
)
def test_a_long_id_is_not_repeated_whole(
    tmp_path: Path, exported: AnnotationExport, pair: str
) -> None:
    choices = {pair.format(name=exported.name, long="a" * 100_000): "1"}
    with pytest.raises(DataError, match="…") as caught:
        import_answers(tmp_path, [jsonl(tmp_path / "alice.jsonl", choices)])
    assert len(str(caught.value).replace(str(tmp_path), "")) < 250


def test_long_names_and_ids_are_shortened_in_problems(
    tmp_path: Path, exported: AnnotationExport
) -> None:
    who = "n" * 100_000
    files = [
        jsonl(tmp_path / f"{i}.jsonl", of(exported), annotator=who)
        for i, of in enumerate((for_policy, for_sft))
    ]
    (problem,) = import_answers(tmp_path, files)["problems"]
    assert problem.startswith(f"{who[:60]}…: 4 left out") and len(problem) < 500


@pytest.mark.parametrize("earlier", [0, 60], ids=["at once", "in two imports"])
def test_too_many_annotators_are_refused_before_anything_is_written(
    tmp_path: Path, exported: AnnotationExport, earlier: int
) -> None:
    pair = exported.pairs[0].id

    def by(name: str, first: int, end: int) -> Path:
        file = tmp_path / name
        file.write_text(
            "id,choice,annotator\n" + "".join(f"{pair},1,person {i}\n" for i in range(first, end))
        )
        return file

    import_answers(tmp_path, [by("enough.csv", 0, earlier or 100)])
    before = sha256_tree(tmp_path / "data")
    with pytest.raises(DataError, match=r"101 annotators.* at most 100") as caught:
        import_answers(tmp_path, [by("more.csv", earlier, 101)])
    assert "\n" not in str(caught.value) and sha256_tree(tmp_path / "data") == before


def test_one_export_of_several_with_too_many_annotators_stops_them_all(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    exports = sorted(
        (blinded_export(CANDIDATES, [0], 4, seed) for seed in (1, 2)),
        key=lambda export: export.name,
    )
    for export in exports:
        export.save_key(tmp_path)
    before = sha256_tree(tmp_path / "data")
    rows = [
        f"{exports[0].pairs[0].id},1,alice",
        *(f"{exports[1].pairs[0].id},1,{i}" for i in range(101)),
    ]
    (tmp_path / "all.csv").write_text("id,choice,annotator\n" + "\n".join(rows))
    with pytest.raises(DataError, match=f"{exports[1].name} has answers of 101 annotators"):
        import_answers(tmp_path, [tmp_path / "all.csv"])
    assert sha256_tree(tmp_path / "data") == before


def test_a_damaged_store_is_never_overwritten(tmp_path: Path, exported: AnnotationExport) -> None:
    store = tmp_path / "data/annotations/exports" / f"{exported.name}.answers.jsonl"
    store.write_text("{")
    with pytest.raises(DataError, match="restore it from a copy, it holds people's answers"):
        import_answers(tmp_path, [jsonl(tmp_path / "alice.jsonl", for_policy(exported))])
    assert store.read_text() == "{"


def test_the_command_prints_what_was_found(tmp_path: Path, exported: AnnotationExport) -> None:
    files = [
        str(jsonl(tmp_path / f"{name}.jsonl", for_policy(exported))) for name in ("alice", "bob")
    ]
    result = CliRunner().invoke(app, ["import", *files, "--workspace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for text in ("answered by alice 4, bob 4", "Cohen's kappa of alice, bob: ", "control: win rate of the policy 1.00",
                 "4 preference pairs in data/annotations/", "the next run collects them"):  # fmt: skip
        assert text in result.output
    (tmp_path / "params.yaml").write_text("seed: 1\ncollect: {annotations: ../elsewhere/*.jsonl}\n")
    result = CliRunner().invoke(app, ["import", *files, "--workspace", str(tmp_path)])
    assert "add it to collect.annotations" in result.output
    as_json = CliRunner().invoke(app, ["import", *files, "--workspace", str(tmp_path), "--json"])
    assert json.loads(as_json.output)["results"][0]["preferences"] == 4


ODD_NAMES = [
    "\x1b[31mevil\nrlhf: all fine",
    "a\x9b2J\r\n b",
    "\x1b]0;title\x07",
    "x\u202ey\u2028z",
    "\x7f\t q",
]


@pytest.mark.parametrize("way", ["column", "option", "Label Studio", "file name", "contradiction"])
@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_no_name_controls_the_terminal(
    tmp_path: Path, exported: AnnotationExport, way: str, name: str
) -> None:
    files, options = (
        [tmp_path / (f"{name}.jsonl" if way == "file name" else "a.jsonl")],
        ["-w", str(tmp_path)],
    )
    jsonl(
        files[0],
        for_policy(exported),
        **({"annotator": name} if way in ("column", "contradiction") else {}),
    )
    if way == "contradiction":
        files.append(jsonl(tmp_path / "b.jsonl", for_sft(exported), annotator=name))
    if way == "Label Studio":
        files = [tmp_path / "project.json"]
        files[0].write_text(
            json.dumps([label_studio(exported.pairs[0].id, "left", who={"email": name})])
        )
    if way == "option":
        options += ["--annotator", name]
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, ["import", *map(str, files), *options, *more])
        assert result.exit_code == 0, result.output
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in result.output.replace("\n", ""))
        assert not any(line.startswith("rlhf: all fine") for line in result.output.splitlines())
    if way != "contradiction":
        (kept,) = json.loads(result.output)["results"][0]["answered"]
        assert kept == " ".join(name.split())


@pytest.mark.parametrize("source", ["world", "files"])
def test_the_next_collect_takes_the_annotated_pairs(
    tmp_path: Path, exported: AnnotationExport, source: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "why?", "chosen": "so", "rejected": "no"}\n')
    config = CollectConfig.model_validate(
        {
            "source": source,
            "world": WorldConfig(demonstrations=3, preferences=3, pretrain=3),
            "files": FileSources.model_validate({"preferences": ["pairs.jsonl"]}),
        }
    )
    raw = tmp_path / "data/raw"
    before = collect(config, tmp_path, raw)["preferences_rows"]
    plain = sha256_tree(raw)
    import_answers(tmp_path, [jsonl(tmp_path / "alice.jsonl", for_policy(exported))])
    assert collect(config, tmp_path, raw)["preferences_rows"] == before + 4
    collected = rows_of_table(read_table(raw / "preferences/data.parquet"), Preference)
    rows = [row for row in collected if row.category == "sums"]
    assert {row.chosen.split()[0] for row in rows} == {"policy"} and len(
        {row.id for row in rows}
    ) == 4
    manifest = json.loads((raw / "manifest.json").read_text())["kinds"]["preferences"]
    assert [
        f["rows"] for f in manifest["files"] if f["source"].startswith("data/annotations/")
    ] == [4]
    collect(config.model_copy(update={"annotations": None}), tmp_path, raw)
    assert sha256_tree(raw) == plain


def test_annotated_pairs_of_the_world_are_in_the_split_of_their_prompt(tmp_path: Path) -> None:
    config = CollectConfig.model_validate(
        {"world": WorldConfig(demonstrations=3, preferences=3, pretrain=3)}
    )
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    prompts = {row["prompt"][0]["content"]: row for row in corpus.prompts(config.seed)[:6]}
    rows = enumerate(prompts.values())
    candidates = [
        Candidate(row["prompt"], row["category"], "", "sft", f"policy {i}") for i, row in rows
    ]
    export = blinded_export([*candidates, CANDIDATES[0]], [], 7, 1)
    export.save_key(tmp_path)
    import_answers(tmp_path, [jsonl(tmp_path / "alice.jsonl", for_policy(export))])
    collect(config, tmp_path, tmp_path / "data/raw")
    collected = rows_of_table(
        read_table(tmp_path / "data/raw/preferences/data.parquet"), Preference
    )
    groups = {
        row.prompt[0].content: row.group
        for row in collected
        if row.source.startswith("annotations/")
    }
    assert groups == {text: row["group"] for text, row in prompts.items()} | {
        "question 0?": "question 0?"
    }


def test_pairs_about_one_question_are_one_piece_of_evidence(tmp_path: Path) -> None:
    """Of twelve pairs about three questions the interval is over three, and the text says so."""
    export = blinded_export([candidate(i, i % 3) for i in range(12)], [], 12, 1)
    export.save_key(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    lost = {pair.id for pair in export.pairs if pair.cluster == "0"}
    choices = {
        pair: (for_sft if pair in lost else for_policy)(export)[pair] for pair in for_sft(export)
    }
    imported = import_answers(tmp_path, [jsonl(tmp_path / "alice.jsonl", choices)])
    control = imported["results"][0]["control"]
    assert control is not None and (control["prompts"], control["clusters"]) == (12, 3)
    assert control["win_rate"] == pytest.approx(2 / 3)
    assert (control["win_rate_low95"], control["win_rate_high95"]) == (0.0, 1.0), (
        "three questions show next to nothing"
    )
    assert "on 12 pairs about 3 different questions" in as_text(imported)


def test_ten_pairs_that_all_prefer_the_policy_do_not_prove_a_rate_of_one(tmp_path: Path) -> None:
    export = blinded_export([candidate(i) for i in range(10)], [], 10, 1)
    export.save_key(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    for choices, rate, low in ((for_policy, 1.0, 0.722), (for_sft, 0.0, 0.0)):
        answers = jsonl(tmp_path / "answers.jsonl", choices(export))
        result = import_answers(tmp_path, [answers], replace=True)["results"][0]["control"]
        assert result["win_rate"] == rate
        assert result["win_rate_low95"] == pytest.approx(low, abs=1e-3)
        assert result["win_rate_high95"] == pytest.approx(1 - (0.722 if rate == 0 else 0), abs=1e-3)
