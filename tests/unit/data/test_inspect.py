"""What ``rlhf data`` says of a file: a readable example, lengths against the limits, and the command to use it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.collect import FileSources
from rlhf_core.config.loading.overlay import parse_assignment
from rlhf_core.data.inspect import TokenLimits, describe_sources
from rlhf_core.data.lengths import LengthPercentiles, character_lengths, token_lengths
from rlhf_core.models.base import load_tokenizer, new_model, save_policy, train_tokenizer
from rlhf_core.stages.token_limits import local_token_limits

PAIR = {"prompt": "what color is the sky?", "chosen": "the sky is blue.", "rejected": "no"}


def write(folder: Path, *rows: dict[str, Any], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def byte_tokenizer() -> Any:
    return train_tokenizer([""], 261)  # 256 bytes and the special tokens: a token per character of ASCII


def test_percentiles_are_lengths_that_occur() -> None:
    assert LengthPercentiles.of("x", [3, 97]).values == (3, 97, 97, 97)
    assert LengthPercentiles.of("x", range(1, 101)).values == (50, 90, 99, 100)


def test_characters_are_counted_by_column_and_over_all_turns() -> None:
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    row = {"prompt": turns, "chosen": "yes", "rejected": ""}
    by_name = {lengths.name: lengths.values[-1] for lengths in character_lengths("preferences", [row])}
    assert by_name == {"prompt": 7, "chosen": 3, "rejected": 0}
    assert character_lengths("pretrain", [{"text": "abcd"}]) == [LengthPercentiles("text", (4, 4, 4, 4))]
    assert character_lengths("preferences", []) == []


def test_tokens_are_those_of_the_longest_sequence_that_training_sees() -> None:
    row = {"prompt": [{"role": "user", "content": "hi?"}], "chosen": "ab", "rejected": "abcde"}
    short = {"prompt": [{"role": "user", "content": "hi?"}], "chosen": "a", "rejected": "b"}
    measured = token_lengths(byte_tokenizer(), "preferences", [row, short], limit=10)
    # <|user|> h i ? <|assistant|> are 5 tokens, a b c d e <|end|> are 6, b <|end|> are 2
    assert measured.percentiles.values == (7, 11, 11, 11)
    assert (measured.rows, measured.over_limit) == (2, 1)


def test_the_example_is_cut_to_the_width_in_columns_not_in_characters(tmp_path: Path) -> None:
    write(tmp_path, {"prompt": "天" * 100, "chosen": "line one\nline two", "rejected": "x" * 500})
    lines = describe_sources(["pairs.jsonl"], 1, tmp_path, width=60).splitlines()
    quoted = [line for line in lines if line.startswith(("    user", "    chosen ", "    rejected ")) and "  " in line]
    assert all(cell_len(line) <= 60 for line in quoted) and quoted[0].endswith("…")
    assert "    chosen     line one line two" in lines


def test_over_long_rows_are_reported_with_the_parameter_that_drops_them(tmp_path: Path) -> None:
    write(tmp_path, PAIR, PAIR | {"chosen": "x" * 300})
    limits = TokenLimits(byte_tokenizer(), "models/base", {"preferences": ("reward.max_tokens", 256)})
    text = describe_sources(["pairs.jsonl"], 0, tmp_path, tokens=limits)
    expected = "reward.max_tokens is 256: 50.0% of the rows are longer and would be dropped (tokenizer of models/base)"
    assert expected in text
    enough = TokenLimits(byte_tokenizer(), "models/base", {"preferences": ("reward.max_tokens", 512)})
    assert "reward.max_tokens is 512: none is longer" in describe_sources(["pairs.jsonl"], 0, tmp_path, tokens=enough)


def test_the_command_to_paste_names_all_sources_by_kind(tmp_path: Path) -> None:
    write(tmp_path, PAIR, name="my pairs.jsonl")
    write(tmp_path, PAIR, name="b.jsonl")
    write(tmp_path, {"text": "once upon a time"}, name="stories.jsonl")
    text = describe_sources(["my pairs.jsonl", "b.jsonl", "stories.jsonl"], 1, tmp_path)
    command = shlex.split(text.rpartition("next: ")[2])
    assert command[:5] == ["rlhf", "init", "my-run", "--profile", "own-data"]
    assert command[5:] == [
        "--set",
        'collect.files.preferences=["my pairs.jsonl", "b.jsonl"]',
        "--set",
        'collect.files.pretrain=["stories.jsonl"]',
    ]


def test_without_pairs_there_is_no_command_but_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, {"text": "once upon a time"}, name="stories.jsonl")
    text = describe_sources(["stories.jsonl"], 1, tmp_path)
    assert "rlhf init" not in text and "needs pairs of replies" in text


@pytest.mark.parametrize(("positions", "limit"), [(512, 256), (64, 64)])
def test_the_limits_of_a_workspace_are_its_parameters_or_the_models_positions(
    tmp_path: Path, positions: int, limit: int
) -> None:
    (tmp_path / "params.yaml").write_text("{}\n")
    assert local_token_limits(tmp_path) is None
    tokenizer = byte_tokenizer()
    config = BaseConfig(hidden_size=8, intermediate_size=8, layers=1, heads=2, max_positions=positions)
    save_policy(tmp_path / "models" / "base", new_model(config, tokenizer, 1), tokenizer)
    limits = local_token_limits(tmp_path)
    assert limits is not None and limits.limits["preferences"] == ("reward.max_tokens", limit)
    assert limits.tokenizer.get_vocab() == load_tokenizer(tmp_path / "models" / "base").get_vocab()


def test_the_command_works_outside_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["data", write(tmp_path, PAIR)])
    assert result.exit_code == 0 and "rows     1 as preferences, of 1" in result.output
    assert "tokens" not in result.output


def test_the_command_takes_the_options_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, {"q": "Why?", "good": "a", "bad": "b"})
    columns = ["--column", "prompt=q", "--column", "chosen=good", "--column", "rejected=bad"]
    result = CliRunner().invoke(app, ["data", file, *columns])
    assert result.exit_code == 0 and "rows     1 as preferences, of 1" in result.output
    (assignment,) = [word for word in shlex.split(result.output) if word.startswith("collect.files.preferences=")]
    (source,) = FileSources.model_validate({"preferences": parse_assignment(assignment)[1]}).preferences
    assert source.path == file and source.columns == {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--column", "prompt"], "--column prompt: write it as FIELD=COLUMN"),
        (["--column", "promt=q"], "there is no field 'promt'; did you mean 'prompt'?"),
        (["--dimension", "nice"], "parameter 'dimension': input should be 'helpful', 'safe' or 'agreed'"),
        (["--format", "nice"], "--format nice is unknown"),
    ],
)
def test_wrong_options_of_a_source_are_named(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["data", write(tmp_path, PAIR), *given])
    assert result.exit_code != 0 and message in str(result.exception)
