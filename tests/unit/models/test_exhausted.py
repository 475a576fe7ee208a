"""Memory or a disk that is used up is no fault of the file that is read: it is not called damaged,
or put aside.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_core.data import tables
from rlhf_core.data.readers import stream, table_records
from rlhf_core.errors import ConfigError, is_exhausted
from rlhf_core.models import folder_check, io
from rlhf_core.sampling import agreement
from rlhf_core.stages import token_lengths
from rlhf_core.storage.data_files import local_copy
from rlhf_core.training.checkpoints import checkpoint
from rlhf_extras import gguf_files

ERRORS = (
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    pa.ArrowMemoryError("malloc of size 9 failed"),
    OSError(errno.ENOSPC, "No space left on device"),
    SystemError("error return without exception set"),
    SystemError("<built-in function len> returned NULL without setting an exception"),
)


class Place:
    """A folder in which a function of a library raises an error."""

    def __init__(
        self, model: Path, empty: Path, patch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        self.model, self.empty, self.patch, self.error = model, empty, patch, error

    def fails(self, owner: Any, name: str) -> None:
        self.patch.setattr(owner, name, self.fail)

    def fail(self, *_: object, **__: object) -> NoReturn:
        raise self.error


def tiny_llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape))


def model_folder(place: Place) -> None:
    with io.reading(place.model):
        place.fail()


def header(place: Place) -> None:
    place.fails(folder_check, "safe_open")
    folder_check.check_folder(place.model)


def gguf_file(place: Place) -> None:
    place.fails(gguf_files, "quiet")
    place.patch.setattr(gguf_files, "_readable_header", lambda file: None)
    with gguf_files._reading(place.empty / "x.gguf"):
        pass


def tokenizer(place: Place) -> None:
    place.fails(AutoTokenizer, "from_pretrained")
    token_lengths._load_folder(place.model, "models/base")


def text(place: Place) -> None:
    with stream._StoredFile(place.empty / "x.jsonl.gz", "x.jsonl.gz", stream.uncounted).reading():
        place.fail()


def table(place: Place) -> None:
    place.fails(table_records, "parquet_parts")
    place.patch.setattr(table_records, "limit_reached", lambda *_: None)
    (place.empty / "x.parquet").write_bytes(b"PAR1")
    list(
        table_records.table_records(
            ".parquet", place.empty / "x.parquet", "x.parquet", stream.uncounted
        )
    )


def own_table(place: Place) -> None:
    (place.empty / "own.parquet").touch()
    with tables.readable(place.empty / "own.parquet"):
        place.fail()


def copy_of_a_url(place: Place) -> None:
    place.fails(LocalFileSystem, "get_file")
    with local_copy(f"file://{place.empty}/x.jsonl"):
        pass


def architecture(place: Place) -> None:
    place.fails(agreement, "selected_logits")
    agreement.require_next_tokens(tiny_llama(), "models/base")


def sampled_architecture(place: Place) -> None:
    place.fails(agreement, "_largest_difference")
    agreement.require_replies_as_scored(tiny_llama(), "models/base")


def saved_step(place: Place) -> None:
    place.fails(checkpoint, "SavedTensors")
    meta = json.dumps({"step": 3, "meta": {}})
    (place.empty / checkpoint.META).write_text(meta)
    digests = {checkpoint.META: hashlib.sha256(meta.encode()).hexdigest()}
    (place.empty / checkpoint.MANIFEST).write_text(json.dumps(digests))
    checkpoint.verified(place.empty)


READERS: tuple[Callable[[Place], None], ...] = (
    model_folder, header, gguf_file, tokenizer, text, table, own_table, copy_of_a_url, architecture,
    sampled_architecture, saved_step,
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_is_read_is_not_called_damaged(
    reader: Callable[[Place], None],
    error: Exception,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(type(error)) as raised:
        reader(Place(folder, empty, monkeypatch, error))
    assert raised.value is error or raised.value.__cause__ is error
    assert is_exhausted(error) and not is_exhausted(ConfigError(str(error)))
