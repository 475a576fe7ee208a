"""``rlhf data validate``: any file goes through collect and validate, and every row of it is
accounted for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.config.data import FileSources, ReadOptions, ValidateConfig
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.data.collection.sources import best_kind, source_files, sources_by_kind
from rlhf_core.errors import EXIT_USER_ERROR, DataError, RlhfError
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.storage.files import read_json
from rlhf_extras.data_files import validate_command
from rlhf_extras.data_files.checked_files import CheckedFiles, as_text, check_files

NO_SYSTEM_TURN = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {i}?", "chosen": f"good {i}", "rejected": f"bad {i}"}
        for i in range(count)
    ]


def write(
    folder: Path, listed: list[dict[str, Any]], name: str = "pairs.jsonl", tail: str = ""
) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in listed) + tail)
    return name


def check(folder: Path, *files: str, **settings: Any) -> CheckedFiles:
    config = ValidateConfig(**settings)
    return check_files(
        sources_by_kind(files, folder, ReadOptions()), folder, config, folder / "out"
    )


@pytest.mark.slow
def test_every_refused_row_has_its_file_its_line_and_all_reasons(tmp_path: Path) -> None:
    listed = rows(100)
    listed[1]["rejected"] = "good 1"
    listed[2]["chosen"] = "\u200b"
    listed[3]["margin"] = "great"
    listed[4] = listed[5] | {"prompt": "Question 5?"}
    checked = check(tmp_path, write(tmp_path, listed, tail="{broken\n"))
    assert [(row["source"], row["position"], row["reasons"]) for row in checked.refused] == [
        ("pairs.jsonl", 2, ["chosen and rejected are the same text"]),
        ("pairs.jsonl", 3, ["chosen is empty"]),
        ("pairs.jsonl", 4, ["margin 'great' is not a number"]),
        ("pairs.jsonl", 6, ["the same texts as an earlier row"]),
        ("pairs.jsonl", 101, checked.refused[-1]["reasons"]),
    ]
    (file,) = checked.files
    assert (file.kind, file.format, file.records, file.kept, file.refused) == (
        "preferences",
        "standard",
        101,
        96,
        5,
    )
    assert checked.kinds["preferences"] == {"raw": 101, "clean": 96}
    first = file.reasons.commonest()[0]
    assert (first.reason, first.positions) == ("chosen and rejected are the same text", [2])
    assert checked.passed and list(checked.derived) == ["demonstrations", "prompts", "pretrain"]
    text = as_text(checked, width=80)
    assert (
        "refused  5" in text and "is not a number (at line 4)" in text and "it would open" in text
    )
    assert max(map(cell_len, text.splitlines())) <= 80


@pytest.mark.slow
def test_rows_that_the_chat_template_refuses_are_counted_and_the_first_is_named(
    tmp_path: Path,
) -> None:
    tokenizer = train_tokenizer([""], 261)
    tokenizer.chat_template = NO_SYSTEM_TURN + str(tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    listed = rows(60)
    for number in (6, 30):
        listed[number]["system"] = "Be brief."
    file = write(tmp_path, [listed[0] | {"rejected": "good 0"}, *listed])
    checked = check(tmp_path, file, tokenizer=str(tmp_path / "tokenizer"))
    (unwritable,) = checked.unwritable
    reason = (
        "the chat template refuses a dialogue of the turns system, user: System role not supported"
    )
    assert (unwritable.first.kind, unwritable.reason, unwritable.rows) == ("preferences", reason, 2)
    assert (unwritable.first.source, unwritable.first.position) == ("pairs.jsonl", 8), (
        "the first row is refused for other reasons"
    )
    assert checked.files[0].kept == 60 and checked.tokens["preferences"]["prompt"]["100"] == 14
    assert f"none for 2: {reason} (first at line 8 of pairs.jsonl)" in as_text(checked, 200)
    findings = pq.read_table(tmp_path / "out/data/card/findings.parquet").to_pylist()
    found = [
        row
        for row in findings
        if row["rule"] == "writable_by_tokenizer" and row["kind"] == "preferences"
    ]
    assert [(row["source"], row["position"], row["severity"]) for row in found] == [
        ("pairs.jsonl", 8, "warn"),
        ("pairs.jsonl", 32, "warn"),
    ]
    card = (tmp_path / "out/data/card/card.md").read_text()
    assert "preferences: 2 rows have no tokens" in card and "(first: pairs.jsonl:8)" in card


@pytest.mark.slow
def test_where_every_row_is_refused_there_are_no_lengths(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([""], 261)
    tokenizer.chat_template = NO_SYSTEM_TURN + str(tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    replies = [
        f"{'The fox met a crow on a tree and asked it for a song. ' * 3} It sang {n} songs."
        for n in range(3)
    ]
    ranking = {
        "system": "Be brief.",
        "prompt": "What happened?",
        "responses": replies,
        "scores": [3, 2, 1],
    }
    near_duplicates = {"search": True}
    checked = check(
        tmp_path,
        write(tmp_path, [ranking]),
        tokenizer=str(tmp_path / "tokenizer"),
        near_duplicates=near_duplicates,
    )
    assert checked.tokens == {"preferences": {}} and [
        of_kind.rows for of_kind in checked.unwritable
    ] == [3]
    assert "none for 3: the chat template refuses" in as_text(checked, 200)
    assert checked.warned["preferences"]["no_near_duplicates"] == 0, "pairs of one ranking"


@pytest.mark.slow
def test_several_files_of_several_kinds(tmp_path: Path) -> None:
    demonstrations = [{"prompt": row["prompt"], "reply": row["chosen"]} for row in rows(80)]
    tied = rows(81)[80] | {"score_chosen": 1, "score_rejected": 1}
    listed = [*rows(80), tied, *rows(10)]
    checked = check(
        tmp_path, write(tmp_path, listed), write(tmp_path, demonstrations, "demos.jsonl")
    )
    assert [(file.source, file.kind, file.kept) for file in checked.files] == [
        ("pairs.jsonl", "preferences", 80),
        ("demos.jsonl", "demonstrations", 80),
    ]
    assert checked.files[0].dropped == {"both replies have the same score": 1}
    assert list(checked.derived) == ["prompts", "pretrain"]
    where = "at lines 82, 83, 84, 85, 86, 87, 88, 89 and 2 more"
    assert f"10  the same texts as an earlier row ({where})" in as_text(checked, width=200)


@pytest.mark.slow
def test_without_preferences_only_what_there_is_can_fail(tmp_path: Path) -> None:
    prompts = [{"prompt": f"Question {i}?"} for i in range(60)]
    checked = check(tmp_path, write(tmp_path, prompts, "prompts.jsonl"))
    assert checked.passed and list(checked.kinds) == ["prompts"] and not checked.derived
    assert {condition.metric.partition(".")[0] for condition in checked.gate.conditions} == {
        "group_overlap",
        "prompts",
    }
    (tmp_path / "b").mkdir()
    few = check(tmp_path / "b", write(tmp_path / "b", prompts[:3], "prompts.jsonl"))
    assert not few.passed and "prompts.clean is 3, required ≥ 50: too few rows" in as_text(few, 200)


@pytest.mark.slow
def test_what_is_derived_is_derived_from_what_there_is(tmp_path: Path) -> None:
    demonstrations = [
        {"prompt": row["prompt"], "reply": row["chosen"], "quality": "low"} for row in rows(60)
    ]
    checked = check(tmp_path, write(tmp_path, demonstrations, "demos.jsonl"))
    assert checked.derived == {"prompts": "demonstrations", "pretrain": "demonstrations"}
    assert "preferences" not in as_text(checked) and "WARNING  60: quality may say" in as_text(
        checked, 200
    )
    assert checked.passed and read_json(tmp_path / "out/gates/data.json")["passed"], (
        "the evidence says the same"
    )
    assert "The data passed its gate." in (tmp_path / "out/data/card/card.md").read_text()
    clean = [
        pq.read_table(file).num_rows
        for file in (tmp_path / "out/data/clean/demonstrations").iterdir()
    ]
    assert sum(clean) == 60


@pytest.mark.slow
def test_paths_of_evaluation_files_start_where_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``--set`` at the current folder, those of a workspace there."""
    workspace, current = tmp_path / "ws", tmp_path / "elsewhere"
    for folder in (workspace, current):
        folder.mkdir()
        write(folder, [{"prompt": f"Question {i}?"} for i in range(5)], f"{folder.name}.jsonl")
    (workspace / "params.yaml").write_text('validate: {evaluation_files: ["ws.jsonl"]}\n')
    file = write(current, rows(80))
    monkeypatch.chdir(current)
    given = ["--set", 'validate.evaluation_files=["elsewhere.jsonl"]']
    for number, options in enumerate(([], given), 1):
        done = CliRunner().invoke(
            app, ["data", "validate", file, "-w", "../ws", *options, "-o", f"out{number}"]
        )
        assert done.exit_code == 0, done.exception
        name = (current if options else workspace).name
        assert f"{name}.jsonl | 5 | 0 |" in (current / f"out{number}/data/card/card.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("current", "more"), [("ws/inside", []), ("beside", ["-w", "../ws"])], ids=["within", "named"]
)
def test_the_workspaces_expectations_decide(
    current: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / current).mkdir(parents=True)
    shutil.copytree(recipe_folder() / "expectations", tmp_path / "ws/expectations")
    (tmp_path / "ws/params.yaml").write_text("collect: {source: files}\n")
    no_two = {
        "type": "expect_column_values_to_not_match_regex",
        "kwargs": {"column": "chosen", "regex": "good 2"},
    }
    own = {"expectations": [no_two | {"meta": {"rule": "no_two", "reason": "it is two"}}]}
    (tmp_path / "ws/expectations/preferences.own.json").write_text(json.dumps(own))
    monkeypatch.chdir(tmp_path / current)
    done = CliRunner().invoke(
        app, ["data", "validate", write(Path.cwd(), rows(4)), "--json", *more]
    )
    assert [row["reasons"] for row in json.loads(done.stdout)["refused"]] == [["it is two"]]


def test_the_kind_of_a_file_is_the_best_that_it_serves_as(tmp_path: Path) -> None:
    write(tmp_path, rows(2))
    (file,) = source_files(["pairs.jsonl"], tmp_path)
    assert best_kind(file) == "preferences"
    (tmp_path / "steps.jsonl").write_text(
        '{"prompt": "Q?", "completions": ["a"], "labels": [true]}\n'
    )
    assert best_kind(*source_files(["steps.jsonl"], tmp_path)) == "prompts"
    with pytest.raises(DataError, match="which holds no preferences"):
        check_files(
            sources_by_kind(["steps.jsonl"], tmp_path, ReadOptions(), "preferences"),
            tmp_path,
            ValidateConfig(),
            tmp_path / "out",
        )


@pytest.mark.parametrize("spec", ["*.jsonl", "**/*.jsonl", "{folder}", "file://{folder}/*.jsonl"])
def test_every_file_that_a_pattern_matches_is_read_as_what_it_serves_as_best(
    tmp_path: Path, spec: str
) -> None:
    write(tmp_path, [{"prompt": "Q?", "completion": "a"}], "a.jsonl")
    write(tmp_path, rows(2), "b.jsonl")
    write(tmp_path, [{"prompt": "Q?"}], "c.jsonl")
    sources = sources_by_kind(
        [spec.format(folder=tmp_path)], tmp_path, ReadOptions(pairs="adjacent")
    )
    kinds = {
        kind: [Path(source.path).name for source in sources.of(kind)]
        for kind in FileSources.model_fields
    }
    assert kinds == {
        "preferences": ["b.jsonl"],
        "demonstrations": ["a.jsonl"],
        "prompts": ["c.jsonl"],
        "pretrain": [],
    }
    assert sources.preferences[0].pairs == "adjacent"
    named = sources_by_kind([spec.format(folder=tmp_path)], tmp_path, ReadOptions(), "prompts")
    assert named.paths() == [spec.format(folder=tmp_path)]


@pytest.mark.parametrize(
    "options",
    [["inspect", "--tokenizer"], ["validate", "--tokenizer"], ["validate", "--set"]],
    ids=" ".join,
)
def test_the_home_of_nobody_is_a_path_that_is_not_there(options: list[str], here: Path) -> None:
    command, option = options
    given = (
        "~nobody-here/x"
        if option == "--tokenizer"
        else "validate.evaluation_files=['~nobody-here/x']"
    )
    done = CliRunner().invoke(app, ["data", command, write(here, rows(2)), option, given])
    assert isinstance(done.exception, RlhfError) and "~nobody-here/x" in str(done.exception)


@pytest.mark.slow
def test_the_command_exits_as_the_gate_decides(here: Path) -> None:
    file = write(here, rows(80), tail="{broken\n")
    done = CliRunner().invoke(app, ["data", "validate", file, "--output", "checked"])
    assert "data gate: it would open" in done.stdout and "do not suffice" in done.stdout
    assert done.exit_code == EXIT_USER_ERROR, "as `rlhf init` and `rlhf doctor` exit of such pairs"
    quarantined = pq.read_table(here / "checked/data/quarantine.parquet").to_pylist()
    assert [(row["source"], row["position"]) for row in quarantined] == [("pairs.jsonl", 81)]
    assert read_json(here / "checked/gates/data.json")["passed"]
    again = CliRunner().invoke(app, ["data", "validate", file, "--output", "checked"])
    assert "checked exists already" in str(again.exception)
    strict = CliRunner().invoke(
        app, ["data", "validate", file, "--json", "--set", "validate.max_quarantined=0"]
    )
    value = json.loads(strict.stdout)
    assert strict.exit_code == 3 and not value["passed"]
    assert [c["metric"] for c in value["conditions"] if not c["passed"]] == [
        "preferences.quarantined_share"
    ]
    (here / "params.yaml").write_text("{collect: {source: files}, validate: {min_rows: 1000}}\n")
    assert CliRunner().invoke(app, ["data", "validate", file]).exit_code == 3
    other = CliRunner().invoke(app, ["data", "validate", file, "--set", "ppo.iterations=3"])
    assert "has no effect on data files" in str(other.exception)


@pytest.mark.slow
def test_tokens_are_counted_with_the_tokenizer_that_is_named(here: Path) -> None:
    train_tokenizer([""], 261).save_pretrained(here / "tokenizer")
    file = write(here, rows(60))
    arguments = ["data", "validate", file, "--tokenizer", "tokenizer"]
    value = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--output", "out"]).stdout)
    # <|user|> Question 10? <|assistant|>, good 10 <|end|>: most numbers have two digits.
    assert value["tokens"]["preferences"]["prompt"] == {"50": 14, "90": 14, "99": 14, "100": 14}
    assert value["tokens"]["preferences"]["prompt + reply"]["100"] == 22 and list(
        value["tokens"]
    ) == ["preferences"]
    assert "| preferences: chosen | 8 | 8 | 8 | 8 |" in (here / "out/data/card/card.md").read_text()
    text = CliRunner().invoke(app, arguments).stdout
    assert "tokens of preferences" in text and "prompt + reply" in text
    assert list(value["tokens"]["preferences"]["prompt"]) == ["50", "90", "99", "100"], (
        "the headings' order"
    )
    wrong = CliRunner().invoke(app, ["data", "validate", file, "--tokenizer", "scratch"])
    assert "a tokenizer that is made from nothing is trained on the clean data" in str(
        wrong.exception
    )


@pytest.mark.slow
def test_rules_that_only_warn_are_listed_with_their_rows(here: Path) -> None:
    file = write(here, [*rows(60), *rows(2)])
    arguments = ["data", "validate", file, "--set", "validate.rules={not_duplicate: warn}"]
    value = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--output", "out"]).stdout)
    assert value["warned"]["preferences"]["not_duplicate"] == 2 and not value["refused"]
    assert value["warned"]["preferences"]["no_prefix_leakage"] == 0, (
        "checked, and nothing was found"
    )
    lines = [line.split() for line in CliRunner().invoke(app, arguments).stdout.splitlines()]
    assert ["warnings:", "rows", "that", "stay"] in lines and [
        "preferences",
        "not_duplicate",
        "2",
    ] in lines
    assert not any("no_prefix_leakage" in line for line in lines)
    card = (here / "out/data/card/card.md").read_text()
    assert "| not_duplicate | warn | 2 |" in card and "| no_prefix_leakage | warn | 0 |" in card


def test_the_folder_of_another_check_is_not_written_to(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command made it after this one had looked whether it is empty."""
    file = write(here, rows(3))
    checking_params = validate_command._checking_params

    def meanwhile(*arguments: Any) -> Params:
        (here / "out/data").mkdir(parents=True)
        return checking_params(*arguments)

    monkeypatch.setattr("rlhf_extras.data_files.validate_command._checking_params", meanwhile)
    result = CliRunner().invoke(app, ["data", "validate", file, "--output", "out"])
    assert "another command writes to out already" in str(result.exception)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        OSError(28, "No space left on device"),
        DataError("no rows"),
        KeyboardInterrupt(),
        MemoryError(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_folder_for_output_can_be_given_again_after_a_failure(
    failure: BaseException, is_there: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(here, rows(3)), here / "out"
    if is_there:
        out.mkdir()

    def fail(*arguments: Any) -> CheckedFiles:
        (out / "data/raw").mkdir()
        (out / "data/raw/half").write_text("x")
        (out / "gates").mkdir()
        (out / "metrics.json").write_text("{}")
        raise failure

    with monkeypatch.context() as failing:
        failing.setattr("rlhf_extras.data_files.checked_files.check_files", fail)
        CliRunner().invoke(app, ["data", "validate", file, "--output", "out"])
    assert out.exists() == is_there and not list(here.glob("out/*"))
    again = CliRunner().invoke(app, ["data", "validate", file, "--output", "out"])
    assert "exists already" not in str(again.exception) and (out / "data").is_dir()


@pytest.mark.parametrize("more", [[], ["--output", "out"]])
def test_a_full_disk_has_a_remedy(
    more: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(here, rows(3))

    def full(*arguments: Any) -> CheckedFiles:
        Path("/dev/full").write_text("x")
        raise AssertionError

    monkeypatch.setattr("rlhf_extras.data_files.checked_files.check_files", full)
    result = CliRunner().invoke(app, ["data", "validate", file, *more])
    assert isinstance(result.exception, RlhfError)
    assert "No space left on device; make room, or name another folder: --output" in str(
        result.exception
    )
