"""``rlhf data convert`` loses and overwrites nothing, and ``rlhf data diff`` counts each row of two
states once.
"""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.csv import write_csv
from rich.cells import cell_len
from typer.testing import CliRunner
from unit.data.reading import is_unmarked

from rlhf_core.cli import app
from rlhf_core.config.data import DataSource, ReadOptions
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.row_counts import Record
from rlhf_core.data.schema import arrow_schema
from rlhf_core.errors import DataError, RlhfError
from rlhf_extras.data_files.changes import as_text, compare, compare_kinds, file_state
from rlhf_extras.data_files.convert import Conversion, convert

SAMPLES = Path(__file__).parent / "samples"
PAIR = {"prompt": "Q?", "chosen": "a", "rejected": "b"}


def rows_of(path: Path, kind: str, **options: Any) -> list[dict[str, Any]]:
    (read,) = read_sources([DataSource(path=str(path), **options)], kind, path.parent)
    assert not read.refused
    return read.rows


def write(folder: Path, listed: list[Any], name: str = "x.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in listed))
    return name


def converted(
    folder: Path, file: str, kind: str = "preferences", output: str = "out.jsonl"
) -> Conversion:
    return convert([DataSource(path=file)], folder, kind, folder / output)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["preferences", "demonstrations", "prompts"])
@pytest.mark.parametrize("name", ["helpsteer3-preference", "ultrafeedback", "turn-list-pair"])
def test_the_rows_of_a_published_set_come_back(
    name: str, kind: str, suffix: str, tmp_path: Path
) -> None:
    output = tmp_path / f"out{suffix}"
    done = convert([DataSource(path=f"{name}.jsonl")], SAMPLES, kind, output)
    (read,) = read_sources([f"{name}.jsonl"], kind, SAMPLES)
    come_back = [row | {"columns": None} for row in rows_of(output, kind)]
    assert come_back == [row | {"columns": None} for row in read.rows] and done.rows == len(
        read.rows
    )
    (file,) = done.files
    assert file.records + file.expanded == file.kept + file.refused + sum(file.dropped.values())


def test_texts_come_back_but_not_those_of_dialogues(tmp_path: Path) -> None:
    texts = [{"text": "once upon a time"}, {"text": " \n天"}]
    done = converted(tmp_path, write(tmp_path, texts), "pretrain", "out.parquet")
    assert done.rows == 2 and [
        row["text"] for row in rows_of(tmp_path / "out.parquet", "pretrain")
    ] == [row["text"] for row in texts]
    with pytest.raises(
        DataError, match="whose prompt decides on its split; convert it as demonstrations"
    ):
        convert([DataSource(path="open-orca.jsonl")], SAMPLES, "pretrain", tmp_path / "orca.jsonl")


PLAIN = st.text().filter(is_unmarked)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": PLAIN}
    ),
    min_size=1,
)
ROWS = st.fixed_dictionaries(
    {"prompt": TURNS, "chosen": PLAIN, "rejected": PLAIN},
    optional={
        "margin": st.none() | st.floats(allow_nan=True).filter(bool),  # 0 is a tie, and dropped
        "category": PLAIN,
        "source": PLAIN,
        "system": PLAIN,
    },
)


@pytest.mark.slow
@given(ROWS, st.sampled_from([".jsonl", ".parquet"]))
def test_a_row_comes_back_whatever_its_text(row: dict[str, Any], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write(path, [row, PAIR | {"prompt": [{"role": "user", "content": "Q?"}]}])
        done = converted(path, "x.jsonl", output=f"out{suffix}")
        (read,) = read_sources(["x.jsonl"], "preferences", path)
        back = rows_of(path / f"out{suffix}", "preferences")
        assert len(back) + done.files[0].refused == 2
        assert all(same in read.rows for same in back)
        if len(back) == len(read.rows):
            assert back == read.rows


def test_a_conversion_of_a_conversion_is_the_same_file(tmp_path: Path) -> None:
    write(tmp_path, [PAIR | {"margin": 0.1, "category": "c"}, PAIR | {"chosen": "天\u2028\n"}])
    converted(tmp_path, "x.jsonl", output="one.jsonl")
    converted(tmp_path, "one.jsonl", output="two.jsonl")
    text = (tmp_path / "one.jsonl").read_text()
    assert (tmp_path / "two.jsonl").read_text() == text and "天" in text
    assert json.loads(text.splitlines()[0]) == {
        "prompt": [{"role": "user", "content": "Q?"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
        "margin": 0.1,
        "category": "c",
        "source": "x.jsonl",
    }


def test_refused_rows_are_beside_with_file_line_and_reason(tmp_path: Path) -> None:
    reply = "Human: hm\n\nAssistant: yes"  # a message may hold this, a reply beside a prompt is refused for it
    question = {"role": "user", "content": "Q?"}
    dialogues = {
        name: [question, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")
    }
    odd = dialogues | {"chosen": [question, {"role": "assistant", "content": reply}]}
    file = write(
        tmp_path,
        [*[dialogues] * 20, dialogues | {"margin": "great"}, dialogues | {"margin": 1e999}, odd],
    )
    (tmp_path / "out.refused.jsonl").write_text("of an earlier conversion\n")
    done = converted(tmp_path, file)
    assert (done.rows, done.refused_file) == (20, str(tmp_path / "out.refused.jsonl"))
    entries = [
        json.loads(line) for line in (tmp_path / "out.refused.jsonl").read_text().splitlines()
    ]
    assert [(entry["source"], entry["position"]) for entry in entries] == [
        ("x.jsonl", n) for n in (21, 22, 23)
    ]
    assert (
        "is not a number" in entries[0]["reason"] and "not a finite number" in entries[1]["reason"]
    )
    assert entries[2]["reason"] == "would be refused: chosen is a whole transcript, not a reply"
    assert json.loads(entries[0]["row"])["margin"] == "great"
    write(tmp_path, [PAIR])
    assert converted(tmp_path, file).refused_file is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "x.jsonl"]


def test_nothing_is_written_when_nothing_can_be_used(tmp_path: Path) -> None:
    file = write(tmp_path, [PAIR | {"margin": "great"}])
    with pytest.raises(
        DataError, match=r"no row can be written to .*out.jsonl \(most often: margin 'great'"
    ):
        converted(tmp_path, file)
    with pytest.raises(RlhfError, match="is one of the files that are read"):
        converted(tmp_path, file, output="../" + tmp_path.name + "/x.jsonl")
    with pytest.raises(DataError, match="which holds no preferences"):
        converted(tmp_path, write(tmp_path, [{"text": "t"}], "texts.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl", "x.jsonl"]


def test_the_command_finds_the_kind_and_overwrites_nothing(here: Path) -> None:

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["data", "convert", *words])

    pairs = write(here, [{"q": "Why?", "good": "a", "bad": "b"}], "odd.jsonl")
    columns = ["--column", "prompt=q", "--column", "chosen=good", "--column", "rejected=bad"]
    done = run(pairs, *columns, "--to", "out.parquet")
    assert done.exit_code == 0 and "1 preferences are in out.parquet" in done.stdout
    assert [row["chosen"] for row in rows_of(here / "out.parquet", "preferences")] == ["a"]
    assert "exists already" in str(run(pairs, *columns, "--to", "out.parquet").exception)
    value = json.loads(run(pairs, *columns, "--to", "out.parquet", "--force", "--json").stdout)
    assert (value["rows"], value["kind"], value["refused_file"]) == (1, "preferences", None)
    assert "ends with .jsonl or .parquet" in str(run(pairs, "--to", "out.csv").exception)
    texts = write(here, [{"text": "t"}], "texts.jsonl")
    assert "serve as preferences and pretrain" in str(
        run("out.parquet", texts, "--to", "both.jsonl").exception
    )
    assert run("out.parquet", "--kind", "prompts", "--to", "prompts.jsonl").exit_code == 0
    assert rows_of(here / "prompts.jsonl", "prompts")[0]["group"] == "why?"


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_refused_rows_replace_no_other_file(options: list[str], here: Path) -> None:
    """It is derived from the name of the output, so the file may be the very one that is
    converted.
    """
    write(here, [PAIR], "pairs.refused.jsonl")
    write(here, [PAIR], "x.jsonl")
    own = CliRunner().invoke(
        app, ["data", "convert", "pairs.refused.jsonl", "--to", "pairs.jsonl", *options]
    )
    assert "one of the files that are read" in str(own.exception) or "exists already" in str(
        own.exception
    )
    assert (here / "pairs.refused.jsonl").read_text() == json.dumps(PAIR) + "\n"
    other = CliRunner().invoke(app, ["data", "convert", "x.jsonl", "--to", "pairs.jsonl", *options])
    assert (other.exit_code == 0) == (here / "pairs.jsonl").exists() == bool(options)
    assert (here / "pairs.refused.jsonl").exists() != bool(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "output"), [("x.csv", "out.parquet"), ("x.parquet", "out.jsonl")]
)
def test_a_converted_file_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str
) -> None:
    monkeypatch.setattr("rlhf_core.data.collection.rows.CHUNK_RECORDS", 100)
    monkeypatch.setattr("rlhf_extras.data_files.convert.BATCH", 100)
    monkeypatch.setattr("rlhf_core.data.readers.table_records.BATCH_ROWS", 100)
    rows = [{"prompt": f"{i:04000}?", "chosen": "a", "rejected": "b"} for i in range(3000)]
    table = pa.Table.from_pylist(rows)
    (write_csv if source.endswith(".csv") else pq.write_table)(table, tmp_path / source)
    del rows, table
    tracemalloc.start()
    try:
        conversion = convert([DataSource(path=source)], tmp_path, "preferences", tmp_path / output)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert conversion.rows == 3000 and peak < 12_000_000 / 2, (
        "twelve megabytes of text, of which a part is held"
    )


def table(*pairs: tuple[str, str, str], **labels: Any) -> pa.Table:
    values = [
        dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) | labels for pair in pairs
    ]
    rows = (
        read_records([Record(n, v) for n, v in enumerate(values, 1)], "preferences", "x").rows
        if values
        else []
    )
    return pa.Table.from_pylist(rows, schema=arrow_schema("preferences"))


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def test_every_row_is_counted_once() -> None:
    before = table(
        ("stays?", "a", "b"),
        ("goes?", "a", "b"),
        ("other reply?", "a", "b"),
        ("swapped?", "a", "b"),
    )
    after = table(
        ("new?", "a", "b"), ("stays?", "a", "b"), ("other reply?", "A", "b"), ("swapped?", "b", "a")
    )
    changes = compare("preferences", before, after, show=9)
    counts = {
        name: changes[name]
        for name in ("unchanged", "added", "removed", "changed", "swapped", "relabelled")
    }
    assert counts == {
        "unchanged": 1,
        "added": 1,
        "removed": 1,
        "changed": 2,
        "swapped": 1,
        "relabelled": 0,
    }
    examples = changes["examples"]
    assert (prompts(examples["added"]), prompts(examples["removed"])) == (["new?"], ["goes?"])
    for when in ("before", "after"):
        assert prompts([pair[when] for pair in examples["changed"]]) == ["other reply?", "swapped?"]
    text = as_text({"preferences": changes}, width=80)
    assert "changed     2, 1 of them with the replies swapped" in text and "new?" in text
    assert max(map(cell_len, text.splitlines())) <= 80


def test_another_margin_or_category_is_another_label() -> None:
    before, after = (
        table(("q?", "a", "b"), ("r?", "a", "b"), margin=margin, category="c") for margin in (1, 2)
    )
    changes = compare("preferences", before, after)
    assert (changes["unchanged"], changes["relabelled"], changes["added"], changes["changed"]) == (
        0,
        2,
        0,
        0,
    )
    assert "margin 1.0 → 2.0" in as_text({"preferences": changes})
    same = compare("preferences", before, before)
    assert as_text({"preferences": same}) == "preferences: 2 rows before, 2 after, all the same"


PAIRS = st.lists(
    st.tuples(st.sampled_from("pq"), st.sampled_from("ab"), st.sampled_from("cd")), max_size=8
)


@pytest.mark.slow
@given(PAIRS, PAIRS)
def test_counts_add_up_and_copies_count_apart(before: list[Any], after: list[Any]) -> None:
    changes = compare("preferences", table(*before), table(*after), show=99)
    assert changes["unchanged"] == (Counter(before) & Counter(after)).total()
    assert len(before) == changes["unchanged"] + changes["removed"] + changes["changed"]
    assert len(after) == changes["unchanged"] + changes["added"] + changes["changed"]
    examples = changes["examples"]
    assert not {*prompts(examples["removed"])} & {*prompts(examples["added"])}


def test_files_are_compared_as_the_kind_that_both_hold(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "q?", "chosen": "a", "rejected": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "q?", "reply": "c"}\n')
    options = ReadOptions()
    tables = [
        file_state([name], tmp_path, options, tmp_path / name[0]) for name in ("a.jsonl", "b.jsonl")
    ]
    with pytest.raises(
        DataError, match="the one holds preferences, the other demonstrations; name the kind"
    ):
        compare_kinds(*tables)
    before, after = (
        file_state([name], tmp_path, options, tmp_path / name[0], "demonstrations")
        for name in ("a.jsonl", "b.jsonl")
    )
    ((kind, changes),) = compare_kinds(before, after).items()
    assert (kind, changes["changed"]) == ("demonstrations", 1)
    assert changes["examples"]["changed"][0]["before"]["reply"] == "a"
