"""Inputs of the functions here: records of any known format, and tokenizers with or without a chat template."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.stages.collect import ReadOptions
from rlhf_core.data.chat.chat_template import bos_expression
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.detection import format_of
from rlhf_core.data.schema import Demonstration, Message, Preference, Prompt
from rlhf_core.data.text.visible_text import has_visible_text
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.models.forward import embedding_weight
from rlhf_core.models.starting.stop_tokens import with_stop_tokens

Row = TypeVar("Row", Demonstration, Preference, Prompt)

HELD_OUT_EVERY = 20
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def rows_of(kind: type[Row], records: Iterable[Row | Mapping[str, Any] | str], name: str) -> list[Row]:
    """Read records of a known format (see docs/data-formats.md) as rows; a string is a prompt of one user turn.

    Args:
        kind: The class of the rows.
        records: Rows, or records such as those of a ``datasets.Dataset``.
        name: What messages call them.

    Raises:
        DataError: There are none, they are of no known format, or one of them is not of the format of the first, or
            prefers no reply.
    """
    if isinstance(records, str | Mapping):
        raise DataError(f"{name} is one {type(records).__name__}; give a list of records")
    listed = list(records)
    if not listed:
        raise DataError(f"{name} is empty; at least one record is needed")
    rows = [record for record in listed if isinstance(record, kind)]
    if len(rows) == len(listed):
        return rows
    values = [{"prompt": record} if isinstance(record, str) else record for record in listed]
    # All records must be of one format: that of the first which has one.
    shape = next(filter(None, map(format_of, values)), None)
    numbered = [Record(number, value) for number, value in enumerate(values, start=1)]
    options = ReadOptions.model_validate({"format": shape.name if shape else None})
    result = read_records(numbered, kind.KIND, name, "", options=options)
    if result.refused:
        first = result.refused[0]
        raise DataError(f"{name}, record {first.position}: {first.reason}")
    if result.counts.dropped:
        reason, count = result.counts.dropped.most_common(1)[0]
        raise DataError(f"{name}: {count} of the records cannot be used ({reason}); take them out")
    rows = [
        kind(**row | {"prompt": [Message(turn["role"], turn["content"]) for turn in row["prompt"]]})
        for row in result.rows
    ]
    for number, row in enumerate(rows, start=1):
        _require_usable(row, f"{name}, record {number}")
    return rows


def _require_usable(row: Demonstration | Preference | Prompt, where: str) -> None:
    if not row.prompt or row.prompt[-1].role != "user":
        raise DataError(f"{where}: the prompt must end with a turn of the user")
    if not any(has_visible_text(turn.content) for turn in row.prompt):
        raise DataError(f"{where}: the prompt is empty")
    if isinstance(row, Demonstration) and not has_visible_text(row.reply):
        raise DataError(f"{where}: the reply is empty")


def held_out(rows: Sequence[Row], validation: Sequence[Row] | None, name: str) -> tuple[list[Row], list[Row]]:
    """Training and validation rows: ``validation`` where it is given, else every twentieth row and the last one.

    Raises:
        DataError: There are too few rows to hold one out.
    """
    if validation is not None:
        return list(rows), list(validation)
    if len(rows) < 2:
        raise DataError(f"{name} has {len(rows)} record, of which none can be held out; give validation records")
    numbers = {*range(HELD_OUT_EVERY - 1, len(rows), HELD_OUT_EVERY), len(rows) - 1}
    return [row for n, row in enumerate(rows) if n not in numbers], [rows[n] for n in sorted(numbers)]


def checked_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy for a model that knows no roles: its template joins the texts of the turns.

    Where the tokenizer begins every text with a special token, so does the template. A copy also names the tokens at
    which the model's generation config ends a reply.

    Raises:
        ModelError: It has no end-of-sequence token, so that no reply could ever end, or more entries than the model.
    """
    entries = embedding_weight(model).shape[0]
    if len(tokenizer) > entries:
        raise ModelError(f"the tokenizer has {len(tokenizer)} entries, the model only {entries}: they differ")
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set tokenizer.eos_token to one of "
            "its tokens"
        )
    if getattr(tokenizer, "chat_template", None):
        return with_stop_tokens(tokenizer, model)
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = bos_expression(plain) + PLAIN_TEMPLATE
    return with_stop_tokens(plain, model)


def require_type(value: object, kind: type, name: str) -> None:
    """Check the class of an argument, where a mistake would show much later and as something else.

    Raises:
        ConfigError: ``value`` is neither None nor of that class.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; a {kind.__name__} is needed")
