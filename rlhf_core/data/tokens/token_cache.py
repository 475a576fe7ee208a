"""Token ids of data files, made once and memory-mapped by all ranks and stages that need them.

An entry is a folder ``KEY/`` with ``tokens.arrow``, an Arrow stream that ``datasets.Dataset.from_file`` opens too, and
``entry.json``, which says what it was made of. The key is a hash of the data file, of everything in the tokenizer's
files (chat template, special and stop tokens, truncation settings), of the code that encodes and of the versions of the
libraries. Limits of length are not part of it: they apply to what is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokens import RECORD
from rlhf_core.data.tokens.token_table import TokenTable, encode_file, token_schema
from rlhf_core.errors import DataError
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import LockFile, atomic_dir, atomic_write_json, read_json, sha256_file

logger = logging.getLogger(__name__)

STREAM = "tokens.arrow"
CODE = (
    "chat/encoding.py",
    "chat/chat_template.py",
    "chat/special_tokens.py",
    "tokens/batch_encoding.py",
    "tokens/token_table.py",
)
LIBRARIES = ("transformers", "tokenizers", "jinja2")
# Where a tokenizer was loaded from: no token depends on it.
ORIGIN = ("name_or_path", "is_local", "local_files_only")


def read_tokens(folder: Path | None, path: Path, kind: str, tokenizer: PreTrainedTokenizerBase) -> TokenTable:
    """Return the token ids of a parquet file of ``kind``, row by row: neither cut nor dropped. All ranks must call it.

    Rank 0 makes an entry that is missing or damaged, and the others wait for it.

    Args:
        folder: The cache; None keeps nothing, and each rank tokenises for itself.
        path: The data file.
        kind: Of its rows.
        tokenizer: Its chat template writes prompts and replies.

    Raises:
        DataError: The file cannot be read, or the tokenizer cannot write one of its rows.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; run the stage that writes it")
    if folder is None:
        return TokenTable.of_file(tokenizer, kind, path)
    entry, ready = "", False
    try:
        if distributed.is_rank_zero():
            made_of = contents(path, kind, tokenizer)
            entry = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
            make_entry(folder / entry, made_of, path, tokenizer)
            ready = True
    finally:
        entry, ready = distributed.broadcast_from_rank0([entry, ready])
    if not ready:
        raise DataError(f"{path} could not be tokenised; rank 0 says why")
    return open_entry(folder / entry)


def contents(path: Path, kind: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the tokens of a file depend on."""
    folder = Path(__file__).parents[1]
    return {
        "kind": kind,
        "data": sha256_file(path),
        "tokenizer": tokenizer_digest(tokenizer),
        "code": hashlib.sha256(b"".join((folder / name).read_bytes() for name in CODE)).hexdigest(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's files as it would be saved, chat template included."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="rlhf-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                settings = {key: value for key, value in json.loads(content).items() if key not in ORIGIN}
                content = json.dumps(settings, sort_keys=True).encode()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def make_entry(entry: Path, made_of: Mapping[str, Any], path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tokenise ``path`` into the folder ``entry``, unless it is there and sound; it appears there as a whole.

    Of several processes one makes it, and the others wait.
    """
    with LockFile(entry.with_name(f".{entry.name}.lock")) as lock:
        lock.acquire()
        problem = damage(entry, made_of)
        if problem is None:
            os.utime(entry / RECORD)
            return
        if problem:
            logger.warning("the tokens of %s in %s %s: tokenising again", path, entry, problem)
        for leftover in entry.parent.glob(f".{entry.name}.*.part"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed, since the lock is ours
        started, rows, kind = time.perf_counter(), 0, str(made_of["kind"])
        with atomic_dir(entry) as folder:
            with pa.OSFile(str(folder / STREAM), "wb") as file, pa.ipc.new_stream(file, token_schema(kind)) as stream:
                for batch in encode_file(tokenizer, kind, path):
                    stream.write_batch(batch)
                    rows += batch.num_rows
            record = {
                "made_of": dict(made_of),
                "path": str(path.resolve()),
                "rows": rows,
                "sha256": sha256_file(folder / STREAM),
            }
            atomic_write_json(folder / RECORD, record)
        logger.info("tokenised %d rows of %s in %.1f s", rows, path, time.perf_counter() - started)


def damage(entry: Path, made_of: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an entry: None for nothing, an empty text where there is no entry."""
    if not entry.exists():
        return ""
    try:
        record = read_json(entry / RECORD)
        if record["made_of"] != made_of:
            return "are of other data"
        sound = sha256_file(entry / STREAM) == record["sha256"]
    except (DataError, OSError, KeyError, TypeError):
        sound = False
    return None if sound else "are damaged"


def open_entry(entry: Path) -> TokenTable:
    """Map the tokens of an entry into memory; a page is read when it is first asked for."""
    with pa.memory_map(str(entry / STREAM)) as source:
        return TokenTable(pa.ipc.open_stream(source).read_all())
