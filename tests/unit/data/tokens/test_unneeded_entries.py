"""What ``rlhf gc`` removes of the token cache: entries of other data, unread ones, leftovers; never one being made."""

from __future__ import annotations

import os
import time
from pathlib import Path

from unit.training.tiny import preferences, text

from flows.commands.registry_output import clean_token_cache
from rlhf_core.data.schema import Preference, write_rows
from rlhf_core.data.token_folder import RECORD, TOKENS, unneeded_entries
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.models.starting.base import train_tokenizer
from rlhf_core.storage.files import LockFile


def test_what_is_not_needed_goes_and_the_rest_stays(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], 300)
    files = {name: tmp_path / f"{name}.parquet" for name in ("kept", "changed", "gone", "unread", "damaged")}
    cache, entries = tmp_path / TOKENS, {}
    for number, (name, path) in enumerate(files.items(), start=3):
        write_rows(path, preferences(number))
        before = set(cache.glob("*"))
        read_tokens(cache, path, Preference.KIND, tokenizer)
        (entries[name],) = {path for path in set(cache.glob("*")) - before if not path.name.endswith(".lock")}
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
    assert {entry.folder.name for entry in unneeded_entries(tmp_path)} == {".def.x.part"}, "reading says when"
