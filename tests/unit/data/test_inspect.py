"""``rlhf data inspect`` shows an example, lengths against limits, and the command to go on."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.cells import cell_len
from typer.testing import CliRunner
from validation_rows import collect_files

from rlhf_core.cli import app
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.data import FileSources, ReadOptions
from rlhf_core.config.loading import check_params
from rlhf_core.config.profiles import parse_assignment
from rlhf_core.data.collection.sources import source_files
from rlhf_core.data.readers.detection import PROBE
from rlhf_core.data.schema import tables_of
from rlhf_core.data.statistics import SEQUENCE, TokenCounts, character_lengths, percentiles
from rlhf_core.errors import DataError, ModelError, RlhfError
from rlhf_core.models.causal_lm import load_tokenizer, new_model, save_policy, train_tokenizer
from rlhf_core.stages.token_lengths import load_counting_tokenizer
from rlhf_core.storage.files import read_json
from rlhf_extras.data_files.describe import (
    TokenLimit,
    TokenLimits,
    as_json_value,
    as_text,
    describe_sources,
    local_token_limits,
    token_limits,
)

PAIR = {"prompt": "what color is the sky?", "chosen": "the sky is blue.", "rejected": "no"}


def write(folder: Path, *rows: dict[str, Any], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def described(
    folder: Path, *files: str, show: int = 1, width: int = 200, tokens: TokenLimits | None = None
) -> str:
    return as_text(describe_sources(files, folder, tokens, show=show), width)


def command_words(text: str) -> list[str]:
    """The words that a shell makes of the command at the end of a description."""
    return shlex.split(text.rpartition("next: ")[2].replace("\\\n", " "))


def byte_tokenizer() -> Any:
    return train_tokenizer(
        [""], 261
    )  # 256 bytes and the special tokens: a token per character of ASCII


def test_percentiles_are_lengths_that_occur() -> None:
    assert percentiles([3, 97]) == (3, 97, 97, 97)
    assert percentiles(range(1, 101)) == (50, 90, 99, 100) and percentiles([]) == ()


def test_characters_are_counted_by_column_and_over_all_turns() -> None:
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    row = {"prompt": turns, "chosen": "yes", "rejected": ""}
    for kind, record, expected in (
        ("preferences", row, {"prompt": [7], "chosen": [3], "rejected": [0]}),
        ("pretrain", {"text": "天地"}, {"text": [2]}),
    ):
        (table,) = tables_of(kind, [record])
        assert {
            name: lengths.tolist() for name, lengths in character_lengths(kind, table).items()
        } == expected


def test_a_file_of_many_parts_is_described_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.data.collection.rows.CHUNK_RECORDS", 200)
    monkeypatch.setattr("rlhf_extras.data_files.describe.SAMPLED_ROWS", 10)
    odd = [PAIR | {"margin": "great"}] * 2
    write(
        tmp_path,
        *[PAIR | {"chosen": "x" * (1 + i % 100), "source": f"s{i}"} for i in range(300)],
        *odd,
    )
    (file,) = describe_sources(["pairs.jsonl"], tmp_path, show=2).files
    assert (file.counts.records, file.counts.kept, len(file.examples)) == (302, 300, 2)
    (refused,) = file.counts.reasons.commonest()
    assert (refused.reason, refused.rows, refused.first.position) == (
        "margin 'great' is not a number",
        2,
        301,
    )
    assert file.characters["chosen"] == (50, 90, 99, 100)
    # Every 32nd row is left of those that were kept at first; the sample spreads over the whole
    # file.
    kept = [row["source"] for row in file.sample.spread()]
    assert len(kept) == 10 and kept[0] == "s0" and kept[-1] == "s288"


def test_tokens_are_those_of_the_longest_sequence_that_training_sees() -> None:
    row = {"prompt": [{"role": "user", "content": "hi?"}], "chosen": "ab", "rejected": "abcde"}
    short = {"prompt": [{"role": "user", "content": "hi?"}], "chosen": "a", "rejected": "b"}
    measured = TokenCounts("preferences", 2)
    for pair in (row, short):
        measured.add(byte_tokenizer(), pair)
    # <|user|> h i ? <|assistant|> are 5 tokens, a b c d e <|end|> are 6, b <|end|> are 2
    assert (measured.lengths[SEQUENCE], measured.looked_at) == ([11, 7], 2)
    assert TokenLimit("reward.max_tokens", 10).exceeded_by([10, 11]) == 1


def test_rows_that_the_chat_template_refuses_are_counted_and_the_others_measured(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    broken = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write(tmp_path, {"prompt": 1}, PAIR, *[PAIR | {"system": "Be brief."}] * 2, PAIR | broken)
    limits = TokenLimits(
        tokenizer, "models/base", {"preferences": TokenLimit("reward.max_tokens", 256, None)}
    )
    options = ReadOptions(format="standard")
    (file,) = describe_sources(["pairs.jsonl"], tmp_path, limits, options).files
    assert file.tokens is not None and file.tokens.looked_at == 3
    write(tmp_path, *[PAIR | {"system": "Be brief."}] * 3, PAIR, name="system.jsonl")
    described_files = describe_sources(["system.jsonl"], tmp_path, limits)
    reason = (
        "the chat template refuses a dialogue of the turns system, user: System role not supported"
    )
    text = as_text(described_files, 200)
    assert (
        f"3 of the rows have no tokens: {reason} (first at row 1)" in text
        and "reward.max_tokens is 256" in text
    )
    (value,) = as_json_value(described_files)["files"]
    assert value["tokens"]["unwritable"] == [{"reason": reason, "first": 1, "rows": 3}]
    write(tmp_path, PAIR | {"system": "Be brief."}, name="all.jsonl")
    described_files = describe_sources(["all.jsonl"], tmp_path, limits)
    assert "1 of the rows have no tokens" in as_text(described_files, 200)
    (value,) = as_json_value(described_files)["files"]
    assert value["tokens"]["percentiles"] == {}


def test_the_example_is_cut_to_the_width_in_columns_not_in_characters(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "天" * 100, "chosen": "line one\nline two", "rejected": "x" * 500})
    lines = described(tmp_path, "pairs.jsonl", width=60).splitlines()
    quoted = [
        line
        for line in lines
        if line.startswith(("    user", "    chosen ", "    rejected ")) and "  " in line
    ]
    assert all(cell_len(line) <= 60 for line in quoted) and quoted[0].endswith("…")
    assert "    chosen     line one line two" in lines


def test_over_long_rows_are_reported_with_the_parameter_that_drops_them(tmp_path: Path) -> None:
    write(tmp_path, PAIR, PAIR | {"chosen": "x" * 300})
    tokenizer = byte_tokenizer()

    def text(value: int, positions: int | None) -> str:
        limit = TokenLimit("reward.max_tokens", value, positions)
        return described(
            tmp_path,
            "pairs.jsonl",
            tokens=TokenLimits(tokenizer, "models/base", {"preferences": limit}),
        )

    expected = "reward.max_tokens is 256: 50.0% of the rows are longer and would be dropped (tokenizer of models/base)"
    assert expected in text(256, None)
    # <|user|>, the 22 characters of the prompt and <|assistant|> are 24 tokens, the reply and
    # <|end|> are 301
    assert "to keep all of them: --set reward.max_tokens=325\n" in text(256, None)
    assert "to keep all of them: --set reward.max_tokens=325\n" in text(256, 325)
    assert (
        "to keep more of them: --set reward.max_tokens=300, which is what the model takes"
        in text(256, 300)
    )
    assert "reward.max_tokens is 300: 50.0% of the rows are longer" in text(512, 300)
    assert "the model takes 300 at most: only one with more positions keeps them" in text(512, 300)
    assert "reward.max_tokens is 512: none is longer" in text(
        512, None
    ) and "--set reward" not in text(512, None)


def test_the_command_to_paste_names_all_sources_by_kind(tmp_path: Path) -> None:
    write(tmp_path, PAIR, name="my pairs.jsonl")
    write(tmp_path, PAIR, name="b.jsonl")
    write(tmp_path, {"text": "once upon a time"}, name="stories.jsonl")
    command = command_words(
        described(tmp_path, "my pairs.jsonl", "b.jsonl", "stories.jsonl", width=80)
    )
    assert command[:5] == ["rlhf", "init", "my-run", "--profile", "own-data"]
    assert command[5:] == [
        "--set",
        'collect.files.preferences=["my pairs.jsonl", "b.jsonl"]',
        "--set",
        'collect.files.pretrain=["stories.jsonl"]',
    ]


@pytest.mark.parametrize("spec", ["given/*.jsonl", "given", "given/**/*.jsonl"])
def test_files_of_several_kinds_that_one_pattern_matches_are_named_apart(
    tmp_path: Path, spec: str
) -> None:
    (tmp_path / "given").mkdir()
    write(tmp_path, {"prompt": "Q?", "completion": "a"}, name="given/a.jsonl")
    write(tmp_path, PAIR, name="given/b.jsonl")
    write(tmp_path, {"messages": [{"role": "user", "content": "Q?"}]}, name="given/c.jsonl")
    assert command_words(described(tmp_path, spec))[5:] == [
        "--set",
        f'collect.files.preferences=["{tmp_path}/given/b.jsonl"]',
        "--set",
        f'collect.files.demonstrations=["{tmp_path}/given/a.jsonl"]',
    ]


@pytest.mark.parametrize("spec", ["in/*", "./in/*", "{here}/in/*", "file://{here}/in/*", "in"])
def test_files_without_rows_beside_the_data_are_named_with_the_patterns_that_have_none(
    tmp_path: Path, spec: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.jsonl", "b.csv.gz", "c.jsonl"):
        (folder / name).write_text('{"prompt": "why?", "chosen": "so", "rejected": "no"}\n')
    others = ["README.md", "notes.txt"]
    for name in others:
        (folder / name).write_text("about\n")
    spec = spec.format(here=tmp_path)
    beside = spec.removesuffix("*").removesuffix("/") + "/*"
    listed = re.escape(", ".join(others if spec.endswith("*") else others[1:]))
    suits = re.escape(f"'{beside}.jsonl' and '{beside}.csv.gz'")
    with pytest.raises(DataError, match=rf"\({listed}\); name those that do, such as {suits}$"):
        source_files([spec], tmp_path)
    (jsonl, _) = source_files([f"{beside}.jsonl"], tmp_path)
    assert jsonl.name.endswith("a.jsonl")


@pytest.mark.parametrize(
    ("chinese", "english", "profile"),
    [(3, 0, "chinese-sample"), (3, 2, "chinese-sample"), (2, 2, "own-data")],
)
def test_the_profile_suits_the_language_of_most_pairs(
    tmp_path: Path, chinese: int, english: int, profile: str
) -> None:
    pair = {"prompt": "天空是什么颜色？", "chosen": "天空是蓝色的。", "rejected": "我不知道 DVC。"}
    write(tmp_path, *[pair] * chinese, *[PAIR] * english)
    write(tmp_path, {"text": "天" * 100}, name="stories.jsonl")  # pairs decide
    text = described(tmp_path, "pairs.jsonl", "stories.jsonl")
    assert command_words(text)[:5] == ["rlhf", "init", "my-run", "--profile", profile]
    assert f"language zh {chinese / (chinese + english):.0%} of the rows looked at" in text


def test_the_name_of_the_new_workspace_is_free(tmp_path: Path) -> None:
    write(tmp_path, PAIR)
    for taken, free in (("my-run", "my-run-2"), ("my-run-2", "my-run-3")):
        (tmp_path / taken).mkdir()
        assert command_words(described(tmp_path, "pairs.jsonl"))[2] == free


def test_every_line_fits_a_terminal(tmp_path: Path) -> None:
    odd = [{"prompt": "天" * 100, "chosen": "x" * 500}, PAIR | {"margin": "great"}]
    write(tmp_path, *[PAIR] * 20, *odd, name="b.jsonl")
    write(tmp_path, PAIR, PAIR | {"chosen": "x" * 300})
    limit = TokenLimits(
        byte_tokenizer(), "models/base", {"preferences": TokenLimit("reward.max_tokens", 256, 300)}
    )
    text = described(tmp_path, "pairs.jsonl", "b.jsonl", width=80, tokens=limit)
    lines = [
        line for line in text.splitlines() if not line.startswith("/")
    ]  # the paths of the files stay whole
    assert "does not match the format standard" in text and max(map(cell_len, lines)) <= 80


def test_without_pairs_there_is_no_command_but_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, {"text": "once upon a time"}, name="stories.jsonl")
    text = described(tmp_path, "stories.jsonl")
    assert "rlhf init" not in text and "needs pairs of replies" in text


@pytest.mark.parametrize(("positions", "limit"), [(512, 256), (64, 64)])
def test_limits_are_the_parameters_or_the_models_positions(
    tmp_path: Path, positions: int, limit: int
) -> None:
    (tmp_path / "params.yaml").write_text("{}\n")
    assert local_token_limits(tmp_path) is None
    tokenizer = byte_tokenizer()
    config = BaseConfig(
        hidden_size=8, intermediate_size=8, layers=1, heads=2, max_positions=positions
    )
    save_policy(tmp_path / "models" / "base", new_model(config, tokenizer, 1), tokenizer)
    limits = local_token_limits(tmp_path)
    assert limits is not None and limits.limits["preferences"] == TokenLimit(
        "reward.max_tokens", 256, positions
    )
    assert limits.limits["preferences"].longest_kept == limit
    assert limits.tokenizer.get_vocab() == load_tokenizer(tmp_path / "models" / "base").get_vocab()


def test_a_folder_without_weights_counts_and_bounds(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    limits = token_limits(check_params({}), "tokenizer", tmp_path).limits["preferences"]
    assert limits == TokenLimit("reward.max_tokens", 256, None)
    config = tmp_path / "tokenizer" / "config.json"
    config.write_text('{"model_type": "gpt2", "n_positions": 64}')
    assert (
        token_limits(check_params({}), "tokenizer", tmp_path).limits["preferences"].longest_kept
        == 64
    )
    config.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not readable|has no readable tokenizer"):
        token_limits(check_params({}), "tokenizer", tmp_path)


def test_the_command_works_outside_a_workspace(here: Path) -> None:
    file = write(here, PAIR)
    result = CliRunner().invoke(app, ["data", "inspect", file])
    assert result.exit_code == 0 and "rows     1 as preferences, of 1" in result.output
    assert "no tokens: there is no tokenizer at hand; name one with --tokenizer" in result.output
    for short in (["data", file], ["data", "--show", "1", file]):
        assert CliRunner().invoke(app, short).output == result.output


def test_a_given_tokenizer_counts_outside_a_workspace(here: Path) -> None:
    byte_tokenizer().save_pretrained(here / "tokenizer")
    file = write(here, PAIR, PAIR | {"chosen": "x" * 300})
    result = CliRunner().invoke(
        app, ["data", "inspect", file, "--tokenizer", "tokenizer", "--json"]
    )
    (described_file,) = json.loads(result.stdout)["files"]
    assert (
        described_file["tokens"]["percentiles"]["100"] == 325
    )  # as computed above, by the default of max_tokens
    assert (described_file["tokens"]["parameter"], described_file["tokens"]["over_limit"]) == (
        "reward.max_tokens",
        1,
    )
    wrong = CliRunner().invoke(app, ["data", "inspect", file, "--tokenizer", "./gone"])
    assert "the tokenizer ./gone does not exist" in str(wrong.exception)


def test_the_description_as_json(here: Path) -> None:
    file = write(here, PAIR, PAIR | {"margin": "great"})
    result = CliRunner().invoke(app, ["data", "inspect", file, "--json"])
    value = json.loads(result.stdout)
    (described_file,) = value["files"]
    assert (described_file["format"], described_file["kind"], described_file["rows"]) == (
        "standard",
        "preferences",
        1,
    )
    assert described_file["refused"] == [
        {"reason": "margin 'great' is not a number", "count": 1, "first": 2}
    ]
    assert described_file["characters"]["rejected"] == {"50": 2, "90": 2, "99": 2, "100": 2}
    assert described_file["examples"][0]["chosen"] == PAIR["chosen"]
    assert shlex.split(value["next"])[:3] == ["rlhf", "init", "my-run"]


def test_the_command_takes_the_options_of_a_source(here: Path) -> None:
    file = write(here, {"q": "Why?", "good": "a", "bad": "b"})
    columns = ["--column", "prompt=q", "--column", "chosen=good", "--column", "rejected=bad"]
    result = CliRunner().invoke(app, ["data", file, *columns])
    assert result.exit_code == 0 and "rows     1 as preferences, of 1" in result.output
    (assignment,) = [
        word for word in shlex.split(result.output) if word.startswith("collect.files.preferences=")
    ]
    (source,) = FileSources.model_validate(
        {"preferences": parse_assignment(assignment)[1]}
    ).preferences
    assert source.path == file and source.columns == {
        "prompt": "q",
        "chosen": "good",
        "rejected": "bad",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--column", "prompt"], "--column prompt: write it as FIELD=COLUMN"),
        (["--column", "promt=q"], "there is no field 'promt'; did you mean 'prompt'?"),
        (
            ["--column", "prompt=a", "--column", "prompt=b"],
            "--column names prompt twice, as a and as b",
        ),
        (
            ["--dimension", "nice"],
            "parameter 'dimension': input should be 'helpful', 'safe' or 'agreed'",
        ),
        (["--format", "nice"], "parameter 'format': input should be 'oasst-trees', "),
    ],
)
def test_wrong_options_are_named(given: list[str], message: str, here: Path) -> None:
    result = CliRunner().invoke(app, ["data", write(here, PAIR), *given])
    assert result.exit_code != 0 and message in str(result.exception)


def test_a_file_without_usable_rows_is_in_no_command(tmp_path: Path) -> None:
    write(tmp_path, PAIR | {"margin": "great"}, name="bad.jsonl")
    text = described(tmp_path, "bad.jsonl")
    assert "rlhf init" not in text and "no row of bad.jsonl can be used" in " ".join(
        text.split()
    ).replace(f"{tmp_path}/", "")
    write(tmp_path, PAIR, name="good.jsonl")
    both = described(tmp_path, "bad.jsonl", "good.jsonl")
    assert """'collect.files.preferences=["good.jsonl"]'""" in both


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt":\n', ["row 1", "its only row cannot be read", "correct the file"]),
        (
            '{"prompt":\n' * (PROBE + 1),
            ["row 1", f"none of the first {PROBE} rows can be read", "correct the file"],
        ),
    ],
    ids=["one", "many"],
)
def test_a_file_that_cannot_be_read_says_of_how_many_rows(
    content: str, said: list[str], here: Path
) -> None:
    (here / "odd.jsonl").write_text(content)
    message = str(CliRunner().invoke(app, ["data", "odd.jsonl"]).exception)
    assert all(part in message for part in said) and "\n" not in message
    assert "columns" not in message, "none are named"


def test_a_name_that_is_not_utf8_is_refused(here: Path) -> None:
    (here / os.fsdecode(b"bad\xff.jsonl")).write_text(json.dumps(PAIR))
    (here / os.fsdecode(b"folder\xff")).mkdir()
    (here / os.fsdecode(b"link\xff.csv")).symlink_to("nowhere")
    for given, message in (
        ("*.jsonl", r"bad\udcff.jsonl is not UTF-8; rename the file"),
        (os.fsdecode(b"bad\xff.jsonl"), r"bad\udcff.jsonl is not UTF-8; rename the file"),
        (os.fsdecode(b"folder\xff"), r"the folder folder\udcff holds no file of data"),
        ("*.csv", r"link\udcff.csv is no file that can be read"),
        (os.fsdecode(b"gone\xff.jsonl"), r"no file matches 'gone\\udcff.jsonl'"),
    ):
        result = CliRunner().invoke(app, ["data", "inspect", given])
        assert isinstance(result.exception, DataError) and message in str(result.exception)
        assert str(result.exception).encode()


def test_many_unused_columns_are_counted(tmp_path: Path) -> None:
    pair = {"prompt": "Q?", "chosen": "a", "rejected": "b"}
    wide = pair | {f"column {i}": 1 for i in range(1000)}
    rows = [wide, pair | {"column 7": 1, "n" * 500: 1}]
    (tmp_path / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect_files(tmp_path, {"preferences": ["wide.jsonl"]})
    (file,) = read_json(tmp_path / "data/raw/manifest.json")["kinds"]["preferences"]["files"]
    assert len(file["unused"]) == 20 and file["unused_columns"] == 1001
    assert file["unused"]["column 7"] == 2
    described = describe_sources(["wide.jsonl"], tmp_path)
    lines = as_text(described).splitlines()
    assert sum("is not read" in line for line in lines) == 20
    assert described.files[0].counts.unused.keys() >= {"n" * 80}, "the names of columns are cut"
    assert "  unused   981 further columns are not read" in lines
    (value,) = as_json_value(described)["files"]
    assert (value["unused"], value["unused_columns"]) == (file["unused"], 1001)


# A tokenizer.json that ends tokenizers in a panic, which is no Exception.
PANICS = json.dumps({
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "pre_tokenizer": None,
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
})  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the name of the tokenizer is empty; give a model's folder, a .gguf file or a hub id"),
        (
            "hub:owner/name",
            "hub:owner/name: hub: is for data sets; name the tokenizer as owner/name",
        ),
        (
            "two words",
            "the tokenizer 'two words' is no file here and no hub id (owner/name); give a",
        ),
        (
            "owner/no-such-name",
            "the tokenizer owner/no-such-name is not in the cache (HF_HUB_OFFLINE is set); give a",
        ),
        ("notes", "the folder notes has no tokenizer (tokenizer.json); give a"),
        ("config-only", "the folder config-only has no tokenizer (tokenizer.json); give a"),
        (
            "class-only",
            "the tokenizer in class-only has no vocabulary (tokenizer.json); give a complete folder",
        ),
        ("damaged", "damaged has no readable tokenizer: "),
        ("panics", "panics: opening its tokenizer makes its library give up"),
    ],
)
def test_a_tokenizer_that_is_none(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for folder, file, text in (
        ("notes", "notes.txt", "notes"),
        ("config-only", "config.json", '{"model_type": "llama"}'),
        ("class-only", "tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        ("damaged", "tokenizer.json", "{"),
        ("panics", "tokenizer.json", PANICS),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    with pytest.raises(RlhfError) as caught:
        load_counting_tokenizer(source, tmp_path)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_empty_option_is_no_folder(here: Path) -> None:
    (here / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = CliRunner().invoke(app, ["data", "validate", "pairs.jsonl", "--tokenizer", ""])
    assert isinstance(result.exception, RlhfError) and str(result.exception).startswith(
        "--tokenizer is empty; give a"
    )
