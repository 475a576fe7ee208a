"""The token cache: ids made once by one of several processes, never read damaged; what ``rlhf gc``
removes.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from clean_files import write_rows
from ranks import run_ranks
from transformers import PreTrainedTokenizerFast as Tokenizer
from unit.training.tiny import demonstrations, preferences, text

from rlhf_core.data import tokens as token_ids
from rlhf_core.data.schema import Demonstration, Preference
from rlhf_core.data.token_folder import RECORD, TOKENS
from rlhf_core.data.tokens import STREAM, TokenTable, encode_prompt, encode_reply, read_tokens
from rlhf_core.errors import DataError
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.storage.files import LockFile
from rlhf_extras.retention.token_ids import clean_token_cache, unneeded_entries


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([text(i, 5) for i in range(20)], 300)


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fifty pairs, which are tokenised in batches of sixteen."""
    monkeypatch.setattr(token_ids, "BATCH_ROWS", 16)
    write_rows(tmp_path / "pairs.parquet", preferences(50))
    return tmp_path / "pairs.parquet"


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def columns(table: TokenTable) -> dict[str, list[list[int]]]:
    return {name: [list(ids) for ids in table.column(name)] for name in table.id_columns}


def test_an_entry_holds_each_rows_ids_mapped_into_memory(
    pairs: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    table = read_tokens(tmp_path / "tokens", pairs, Preference.KIND, tokenizer)
    assert columns(table) == {
        "prompt": [encode_prompt(tokenizer, row.prompt) for row in preferences(50)],
        "chosen": [encode_reply(tokenizer, row.chosen) for row in preferences(50)],
        "rejected": [encode_reply(tokenizer, row.rejected) for row in preferences(50)],
    }
    chosen = table.column("chosen")
    assert [list(chosen[row]) for row in range(50)] == columns(table)["chosen"]
    assert chosen.lengths.tolist() == [len(ids) for ids in columns(table)["chosen"]]
    assert list(chosen[-1]) == columns(table)["chosen"][-1]
    with pytest.raises(IndexError):
        chosen[50]
    (entry,) = entries(tmp_path / "tokens")
    assert str(entry / STREAM) in Path("/proc/self/maps").read_text()
    assert datasets.Dataset.from_file(str(entry / STREAM))["chosen"][:] == columns(table)["chosen"]
    assert columns(read_tokens(None, pairs, Preference.KIND, tokenizer)) == columns(table)


def test_ids_do_not_depend_on_the_size_of_batches(
    pairs: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = read_tokens(None, pairs, Preference.KIND, tokenizer)
    monkeypatch.setattr(token_ids, "BATCH_BYTES", 200)  # less than two rows
    apart = read_tokens(None, pairs, Preference.KIND, tokenizer)
    assert len(apart.table.to_batches()) > len(together.table.to_batches())
    in_memory = TokenTable.of_rows(tokenizer, Preference.KIND, preferences(50))
    assert len(in_memory.table.to_batches()) > len(together.table.to_batches())
    assert columns(apart) == columns(together) == columns(in_memory)


def test_what_ids_depend_on_makes_an_entry_of_its_own(
    pairs: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokens"

    def count(**given: Any) -> int:
        arguments = {"path": pairs, "kind": Preference.KIND, "tokenizer": tokenizer} | given
        read_tokens(folder, **arguments)
        return len(entries(folder))

    assert [count(), count()] == [1, 1]
    copied = tmp_path / "copied.parquet"
    copied.write_bytes(pairs.read_bytes())
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    loaded = Tokenizer.from_pretrained(saved)
    assert [count(path=copied), count(tokenizer=loaded)] == [1, 1], (
        "neither a path nor a folder's name counts"
    )
    loaded.chat_template = str(loaded.chat_template).replace(
        "message['content']", "message['content'] + '!'"
    )
    assert count(tokenizer=loaded) == 2
    loaded.backend_tokenizer.enable_truncation(7)
    assert count(tokenizer=loaded) == 3
    monkeypatch.setattr(token_ids, "LIBRARIES", ("transformers",))
    assert count() == 4
    write_rows(pairs, preferences(49))
    assert count() == 5
    write_rows(tmp_path / "rows.parquet", demonstrations(5))
    assert count(path=tmp_path / "rows.parquet", kind=Demonstration.KIND) == 6


def test_an_entry_is_made_once(
    pairs: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = columns(read_tokens(tmp_path / "tokens", pairs, Preference.KIND, tokenizer))

    def refuse(*_: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(token_ids, "encode_file", refuse)
    assert columns(read_tokens(tmp_path / "tokens", pairs, Preference.KIND, tokenizer)) == first


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "no record", "no stream", "other data", "half a record"]
)
def test_a_damaged_or_stale_entry_is_made_again_and_said(
    damage: str, pairs: Path, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    whole = columns(read_tokens(tmp_path / "tokens", pairs, Preference.KIND, tokenizer))
    (entry,) = entries(tmp_path / "tokens")
    stream, record = (entry / STREAM).read_bytes(), (entry / RECORD).read_text()
    if damage == "cut":
        (entry / STREAM).write_bytes(stream[: len(stream) // 2])
    elif damage == "flipped":
        middle = len(stream) // 2
        (entry / STREAM).write_bytes(
            stream[:middle] + bytes([stream[middle] ^ 1]) + stream[middle + 1 :]
        )
    elif damage == "other data":
        (entry / RECORD).write_text(record.replace('"kind": "preferences"', '"kind": "prompts"'))
    elif damage == "half a record":
        (entry / RECORD).write_text(record[:20])
    else:
        (entry / (STREAM if damage == "no stream" else RECORD)).unlink()
    with caplog.at_level(logging.WARNING):
        assert columns(read_tokens(tmp_path / "tokens", pairs, Preference.KIND, tokenizer)) == whole
    problem = "of other data" if damage == "other data" else "damaged"
    (line,) = caplog.messages
    assert f"are {problem}: tokenising again" in line and str(pairs) in line
    assert (entry / STREAM).read_bytes() == stream


def test_a_kill_leaves_nothing_that_is_read(
    pairs: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "tokens"
    child = os.fork()
    if child == 0:
        original, made = token_ids.encode_file, []

        def batches(*given: Any) -> Any:
            for batch in original(*given):
                yield batch
                made.append(batch)
                if len(made) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

        token_ids.encode_file = batches  # type: ignore[assignment]
        read_tokens(folder, pairs, Preference.KIND, tokenizer)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    (unfinished,) = folder.glob(".*.part")
    assert not entries(folder) and (unfinished / STREAM).exists()
    table = read_tokens(folder, pairs, Preference.KIND, tokenizer)
    assert len(table) == 50 and len(entries(folder)) == 1
    assert not list(folder.glob(".*.part")), "what the killed process left is removed"


def test_of_two_ranks_one_tokenises(pairs: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run_ranks(read_on_a_rank, 2, tmp_path / "ranks", pairs, tmp_path / "tokenizer")
    assert len((tmp_path / "ranks/made").read_text().split()) == 1
    assert (tmp_path / "ranks/ids-0").read_text() == (tmp_path / "ranks/ids-1").read_text()
    assert len(entries(tmp_path / "ranks/tokens")) == 1


def read_on_a_rank(folder: Path, pairs: Path, saved: Path) -> None:
    """Read on a rank; the one that tokenises takes its time and says so. A file that is missing
    stops both.
    """
    from rlhf_core.runtime import distributed

    original = token_ids.encode_file

    def slow(*given: Any) -> Any:
        with (folder / "made").open("a") as stream:
            stream.write(f"{distributed.rank()}\n")
        time.sleep(0.3)
        return original(*given)

    token_ids.encode_file = slow  # type: ignore[assignment]
    tokenizer = Tokenizer.from_pretrained(saved)
    table = read_tokens(folder / "tokens", pairs, Preference.KIND, tokenizer)
    (folder / f"ids-{distributed.rank()}").write_text(str(columns(table)))
    token_ids.encode_file = original
    other_kind = "is not a clean file of" if distributed.is_rank_zero() else "rank 0 says why"
    with pytest.raises(DataError, match=other_kind):
        read_tokens(folder / "tokens", pairs, Demonstration.KIND, tokenizer)


def test_a_file_of_another_kind_is_refused(
    pairs: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for folder in (None, tmp_path / "tokens"):
        with pytest.raises(
            DataError, match="has no column completion: it is not a clean file of demonstrations"
        ):
            read_tokens(folder, pairs, Demonstration.KIND, tokenizer)
        with pytest.raises(DataError, match="does not exist; run the stage that writes it"):
            read_tokens(folder, tmp_path / "none.parquet", Preference.KIND, tokenizer)
    assert not entries(tmp_path / "tokens"), "nothing is kept of a failure"


def test_what_is_not_needed_goes_and_the_rest_stays(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], 300)
    files = {
        name: tmp_path / f"{name}.parquet"
        for name in ("kept", "changed", "gone", "unread", "damaged")
    }
    cache, entries = tmp_path / TOKENS, {}
    for number, (name, path) in enumerate(files.items(), start=3):
        write_rows(path, preferences(number))
        before = set(cache.glob("*"))
        read_tokens(cache, path, Preference.KIND, tokenizer)
        (entries[name],) = {
            path for path in set(cache.glob("*")) - before if not path.name.endswith(".lock")
        }
    assert clean_token_cache(tmp_path, delete=False) == []

    write_rows(files["changed"], preferences(20))
    files["gone"].unlink()
    long_ago = time.time() - 31 * 86_400
    os.utime(entries["unread"] / RECORD, (long_ago, long_ago))
    (entries["damaged"] / RECORD).write_text("{")
    (cache / ".abc.x.part").mkdir()
    (cache / ".def.x.part").mkdir()
    reasons = {entry.folder.name: entry.reason for entry in unneeded_entries(tmp_path)}
    assert reasons == {
        entries["changed"].name: "changed.parquet is other data now",
        entries["gone"].name: f"{files['gone']} is gone",
        entries["unread"].name: "not read for 30 days",
        entries["damaged"].name: "damaged",
        ".abc.x.part": "unfinished",
        ".def.x.part": "unfinished",
    }
    listed = clean_token_cache(tmp_path, delete=False)
    assert len(listed) == 7 and all("would be deleted" in line for line in listed[1:])
    with LockFile(cache / ".def.lock") as lock:
        lock.acquire()
        clean_token_cache(tmp_path, delete=True)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == sorted(
        [entries["kept"].name, ".def.x.part"]
    )
    os.utime(entries["kept"] / RECORD, (long_ago, long_ago))
    read_tokens(cache, files["kept"], Preference.KIND, tokenizer)
    assert {entry.folder.name for entry in unneeded_entries(tmp_path)} == {".def.x.part"}, (
        "reading says when"
    )
