"""Conversations as token ids and token ids as text; the ids of data files, made once and shared.

One text or many at once get the same ids. A fast tokenizer encodes a batch on all cores. Texts in
which special tokens are written out, and replies that have no token border at their beginning, are
encoded one by one.

The ids of a data file are Arrow lists, memory-mapped and shared by all ranks.
An entry of the cache is a folder ``KEY/`` with ``tokens.arrow``, an Arrow stream that
``datasets.Dataset.from_file`` opens too, and ``entry.json``, which says what it was made of. The
key is a hash of the data file, of everything in the tokenizer's files (chat template, special and
stop tokens, truncation settings), of the code that encodes and of the versions of the libraries.
Limits of length are not part of it: they apply to what is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat_template import (
    encode_escaped,
    escape,
    render_escaped,
    reply_format,
    special_tokens,
    without_panics,
    written_reply,
)
from rlhf_core.data.schema import (
    CLEAN_NAMES,
    CONTENT_FIELDS,
    Demonstration,
    Message,
    Preference,
    PretrainText,
    Prompt,
    as_dict,
    columns_of,
    plain_table,
    require_columns,
    tables_of,
)
from rlhf_core.data.tables import (
    parquet_footer,
    require_data_file,
    table_chunks,
    table_slices,
)
from rlhf_core.data.token_folder import RECORD
from rlhf_core.errors import DataError, UnwritableText
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import (
    LockFile,
    atomic_dir,
    atomic_write_json,
    read_json,
    scratch_folder,
    sha256_file,
)

# What decoding writes for bytes that are no whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


Ids = list[list[int]]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return token ids of the dialogue so far, up to where the assistant's reply begins.

    Uses the tokenizer's own chat template with its generation prompt; ``ModelError`` where it has
    none, ``UnwritableText`` where it refuses the dialogue. Special tokens written out in a turn are
    ordinary text.
    """
    return encode_prompts(tokenizer, [messages])[0]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]]) -> Ids:
    """Return :func:`encode_prompt` of each of several dialogues."""
    texts = []
    for messages in prompts:
        if not messages or messages[-1].role != "user":
            reason = "a prompt must end with a user turn"
            raise UnwritableText(reason, reason)
        texts.append(render_escaped(tokenizer, messages, add_generation_prompt=True))
        reply_format(tokenizer).require_fit(tokenizer, messages)
    return _encode_escaped(tokenizer, texts)


def encode_reply(
    tokenizer: PreTrainedTokenizerBase, reply: str, finished: bool = True
) -> list[int]:
    """Return token ids of the last assistant turn, as they follow :func:`encode_prompt`.

    They are those of the whole dialogue where it has a token border at the reply's beginning. It
    has none where, for example, the reply's first line break merges with the template's last; the
    reply is then tokenised by itself, as it is sampled.

    Args:
        tokenizer: Its template says how a reply is written; see
            :class:`~rlhf_core.data.chat_template.ReplyFormat`.
        reply: The text. Special tokens written out in it are ordinary text.
        finished: Whether the token that closes a turn follows.
    """
    return encode_replies(tokenizer, [reply], finished)[0]


def encode_replies(
    tokenizer: PreTrainedTokenizerBase, replies: Sequence[str], finished: bool = True
) -> Ids:
    """Return :func:`encode_reply` of each of several replies."""
    written = reply_format(tokenizer)
    texts = []
    for reply in replies:
        (escaped,), placeholders = escape(tokenizer, [reply])
        texts.append((written_reply(tokenizer, escaped, finished), placeholders))
    behind_header = [(written.header + text, placeholders) for text, placeholders in texts]
    header = len(written.header_ids)
    encoded = []
    for ids, text in zip(_encode_escaped(tokenizer, behind_header), texts, strict=True):
        if tuple(ids[:header]) == written.header_ids:
            reply_ids = ids[header:]
        else:
            reply_ids = encode_escaped(tokenizer, *text)
        if finished:
            reply_ids = [*reply_ids, written.closing_id]
        encoded.append(reply_ids)
    return encoded


def _encode_escaped(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, Mapping[str, str]]]
) -> Ids:
    """Return token ids of texts with their placeholders; those without are encoded together."""
    plain = iter(_encode(tokenizer, [text for text, placeholders in texts if not placeholders]))
    encoded = []
    for text, placeholders in texts:
        if placeholders:
            encoded.append(encode_escaped(tokenizer, text, placeholders))
        else:
            encoded.append(next(plain))
    return encoded


def encode_dialogue(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], reply: str
) -> tuple[list[int], list[int]]:
    """Return ids of prompt and reply, which together are the training sequence; nothing is cut."""
    return encode_prompt(tokenizer, messages), encode_reply(tokenizer, reply)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return token ids of a plain text of pretraining.

    They begin with the beginning-of-text token where the tokenizer has one, and end with
    end-of-sequence. Special tokens written out in the text are ordinary text.
    """
    return encode_texts(tokenizer, [text])[0]


def decode_reply(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, bool]:
    """Return a generated reply up to the first token that ends one, and whether there was one.

    Special tokens inside the reply stay visible, such as ``<|user|>``: whoever reads the text must
    see what the policy wrote. A reply that was cut off may end in the first bytes of a character,
    which are left out; byte-level tokenizers have several tokens for a rare Chinese character.
    """
    length, finished = reply_length(tokenizer, ids)
    kept = [int(i) for i in ids[: length - finished]]
    text = str(tokenizer.decode(kept, skip_special_tokens=False))
    if not finished:
        text = text.rstrip(REPLACEMENT)
    return reply_format(tokenizer).read(text, finished), finished


def reply_length(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, bool]:
    """Count a generated reply's tokens, with the first that ends it, and say if there was one."""
    stop_ids = set(stop_token_ids(tokenizer))
    for position, token in enumerate(ids):
        if int(token) in stop_ids:
            return position + 1, True
    return len(ids), False


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a sampled reply.

    The first closes a turn in training; ``eos_token`` and those that the model's generation config
    lists follow.
    """
    return reply_format(tokenizer).stop_ids


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that no reply may contain: all special tokens but those that end it."""
    return frozenset(special_tokens(tokenizer).ids.values()) - frozenset(stop_token_ids(tokenizer))


def vocabulary_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest that two tokenizers share only if token ids mean the same to both."""
    content: list[object] = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id]
    closing = reply_format(tokenizer).closing_id
    if closing != tokenizer.eos_token_id:
        content.append(closing)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id to fill with, the pad token or else end-of-sequence; masks leave it out."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return int(tokenizer.eos_token_id or 0)


def left_pad(
    sequences: Sequence[Sequence[int]], pad_id: int, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows so that they end together, for generation.

    Returns:
        Ids and attention mask, both LongTensor (B, L). L is the length of the longest row, and at
        least ``width``.
    """
    width = max(width, *(len(sequence) for sequence in sequences), 0)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(list(sequence), dtype=torch.long)
        mask[row, width - len(sequence) :] = 1
    return ids, mask


def right_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows so that they begin together, for training.

    Returns:
        Ids and attention mask, both LongTensor (B, L).
    """
    # The mirror image of padding on the left.
    ids, mask = left_pad([sequence[::-1] for sequence in sequences], pad_id)
    return ids.flip(1), mask.flip(1)


def encode_columns(
    tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, Sequence[Any]]
) -> dict[str, Ids]:
    """Encode columns of content as training reads them, see ``CONTENT_FIELDS``.

    Args:
        columns: ``prompt`` holds lists of :class:`~rlhf_core.data.schema.Message`, ``text`` texts
            of pretraining, every other column replies.

    Raises:
        UnwritableText: The template refuses a dialogue, or a text cannot be written as ordinary
            text.
    """
    encoders: dict[str, Callable[[PreTrainedTokenizerBase, Any], Ids]] = {
        "prompt": encode_prompts,
        "text": encode_texts,
    }
    encoded = {}
    for name, values in columns.items():
        encode = encoders.get(name, encode_replies)
        encoded[name] = encode(tokenizer, values)
    return encoded


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Ids:
    """Return :func:`encode_text` of each of several texts."""
    end = tokenizer.eos_token_id
    encoded = _encode(tokenizer, texts, add_special_tokens=True, split_special_tokens=True)
    if end is None:
        return encoded
    for ids in encoded:
        if ids[-1:] != [end]:
            ids.append(int(end))
    return encoded


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = False,
    **options: bool,
) -> Ids:
    if not texts:
        return []
    with without_panics(max(texts, key=len)):
        encoded = tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # whether a text is too long for a model is for the caller to say
            **options,
        )
    ids: Ids = encoded["input_ids"]
    return ids


BATCH_ROWS = 2048  # rows that are tokenised together: more were no faster, and each holds Python lists meanwhile
BATCH_BYTES = (
    8 * 2**20
)  # of their texts: a token takes a hundred bytes and more until it is in an array
IDS = pa.list_(pa.int32())
CATEGORY = "category"  # the one column that is text


@dataclass(frozen=True)
class TokenTable:
    """Rows of token ids.

    Of a memory-mapped table only the pages that are read take memory, once for all processes.
    """

    table: pa.Table

    @classmethod
    def of_rows(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        rows: Sequence[Preference | Demonstration | Prompt | PretrainText],
    ) -> TokenTable:
        """Tokenise rows of ``kind`` that are in memory."""
        tables = tables_of(kind, map(as_dict, rows))
        return cls(pa.Table.from_batches(_encoded(tokenizer, kind, tables), token_schema(kind)))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def id_columns(self) -> list[str]:
        """Names of the columns of token ids."""
        return [name for name in self.table.column_names if name != CATEGORY]

    def column(self, name: str) -> TokenColumn:
        """The ids of one column, such as ``chosen``."""
        return TokenColumn(self.table.column(name))

    def categories(self) -> list[str]:
        """The category of each row."""
        return list(self.table.column(CATEGORY).to_pylist())


class TokenColumn(Sequence[Sequence[int]]):
    """Token ids row by row; a row is read when it is asked for, as an array of 32-bit integers.

    Attributes:
        lengths: Tokens of each row, int32 (N,).
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column
        self.lengths: npt.NDArray[np.int32] = pc.list_value_length(column).to_numpy()

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...

    @overload
    def __getitem__(self, row: slice) -> list[Sequence[int]]: ...

    def __getitem__(self, row: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        # A row of datasets.Dataset takes 17 times as long as this one, or 100 times as NumPy's.
        return array("i", self._column[row].values.to_numpy().tobytes())


def token_schema(kind: str) -> pa.Schema:
    """Return the Arrow schema of ``kind``: lists of 32-bit integers, and the category."""
    return pa.schema([*((name, IDS) for name in CONTENT_FIELDS[kind]), (CATEGORY, pa.string())])


def encode_file(
    tokenizer: PreTrainedTokenizerBase, kind: str, path: Path
) -> Iterator[pa.RecordBatch]:
    """Tokenise a file of clean data, some thousand rows at a time, fewer where they are long.

    Raises:
        DataError: The file is missing, unreadable or of another kind.
        UnwritableText: The tokenizer cannot write one of its rows.
    """
    names = [CLEAN_NAMES.get(name, name) for name in (*CONTENT_FIELDS[kind], CATEGORY)]
    require_columns(path, kind, names, parquet_footer(path)[0].names)
    yield from _encoded(
        tokenizer, kind, (plain_table(path, kind, table) for table in table_chunks(path, names))
    )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, kind: str, tables: Iterable[pa.Table]
) -> Iterator[pa.RecordBatch]:
    for table in tables:
        for part in table_slices(table, BATCH_ROWS, BATCH_BYTES):
            texts = columns_of(part.select(CONTENT_FIELDS[kind]))
            ids = [pa.array(values, IDS) for values in encode_columns(tokenizer, texts).values()]
            category = part.column(CATEGORY).combine_chunks()
            yield pa.record_batch([*ids, category], schema=token_schema(kind))


logger = logging.getLogger(__name__)

STREAM = "tokens.arrow"
CODE = ("chat_template.py", "tokens.py")
LIBRARIES = ("transformers", "tokenizers", "jinja2")
# Where a tokenizer was loaded from: no token depends on it.
ORIGIN = ("name_or_path", "is_local", "local_files_only")


def read_tokens(
    folder: Path | None, path: Path, kind: str, tokenizer: PreTrainedTokenizerBase
) -> TokenTable:
    """Return the token ids of each row of a parquet file of ``kind``; all ranks must call it.

    Rank 0 makes an entry that is missing or damaged, and the others wait for it.

    Args:
        folder: The cache; None keeps nothing, and each rank tokenises for itself.
        tokenizer: Its chat template writes prompts and replies.

    Raises:
        DataError: The file cannot be read, or the tokenizer cannot write one of its rows.
    """
    require_data_file(path)
    if folder is None:
        return TokenTable(
            pa.Table.from_batches(encode_file(tokenizer, kind, path), token_schema(kind))
        )
    entry = ""
    ready = False
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
    with pa.memory_map(
        str(folder / entry / STREAM)
    ) as source:  # a page is read when it is first asked for
        return TokenTable(pa.ipc.open_stream(source).read_all())


def contents(path: Path, kind: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the tokens of a file depend on."""
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in CODE)
    return {
        "kind": kind,
        "data": sha256_file(path),
        "tokenizer": tokenizer_digest(tokenizer),
        "code": hashlib.sha256(code).hexdigest(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's files as it would be saved, chat template included."""
    digest = hashlib.sha256()
    with scratch_folder("rlhf-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                settings = {
                    key: value for key, value in json.loads(content).items() if key not in ORIGIN
                }
                content = json.dumps(settings, sort_keys=True).encode()
            digest.update(
                f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content
            )
    return digest.hexdigest()


def make_entry(
    entry: Path, made_of: Mapping[str, Any], path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Tokenise ``path`` into the folder ``entry``, as a whole, unless it is there and sound.

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
            shutil.rmtree(
                leftover, ignore_errors=True
            )  # of a process that was killed, since the lock is ours
        started = time.perf_counter()
        rows = 0
        kind = str(made_of["kind"])
        with atomic_dir(entry) as folder:
            with (
                pa.OSFile(str(folder / STREAM), "wb") as file,
                pa.ipc.new_stream(file, token_schema(kind)) as stream,
            ):
                for batch in encode_file(tokenizer, kind, path):
                    stream.write_batch(batch)
                    rows += batch.num_rows
            made = {"made_of": dict(made_of), "path": str(path.resolve()), "rows": rows}
            atomic_write_json(folder / RECORD, made | {"sha256": sha256_file(folder / STREAM)})
        logger.info("tokenised %d rows of %s in %.1f s", rows, path, time.perf_counter() - started)


def damage(entry: Path, made_of: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an entry: None if it is sound, an empty text if it is not there."""
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
