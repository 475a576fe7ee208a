"""Tokenise many prompts, replies or texts at once, with the same ids as one by one.

A fast tokenizer encodes a batch on all cores. What takes a path of its own goes one by one: texts in which special
tokens are written out, and replies that have no token border at their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.chat_template import render, reply_format
from rlhf_core.data.chat.encoding import encode_prompt, encode_reply
from rlhf_core.data.chat.special_tokens import special_tokens
from rlhf_core.data.schema import CONTENT_FIELDS, Message

Ids = list[list[int]]
Encoder = Callable[[PreTrainedTokenizerBase, Any], Ids]


def encode_columns(tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, Sequence[Any]]) -> dict[str, Ids]:
    """Encode columns of content as training reads them, see ``CONTENT_FIELDS``.

    Args:
        tokenizer: Its chat template writes prompts and replies.
        columns: ``prompt`` holds lists of :class:`~rlhf_core.data.schema.Message`, ``text`` texts of pretraining, every
            other column replies.

    Raises:
        UnwritableText: The template refuses a dialogue, or a text cannot be written as ordinary text.
    """
    encoders: dict[str, Callable[[PreTrainedTokenizerBase, Any], Ids]] = {
        "prompt": encode_prompts,
        "text": encode_texts,
    }
    return {name: encoders.get(name, encode_replies)(tokenizer, values) for name, values in columns.items()}


def content_columns(kind: str, rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Take the columns of content out of dataclass rows of ``kind``."""
    return {name: [getattr(row, name) for row in rows] for name in CONTENT_FIELDS[kind]}


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]]) -> Ids:
    """Token ids of dialogues: :func:`~rlhf_core.data.chat.encoding.encode_prompt` of each."""
    literal = special_tokens(tokenizer).literal

    def is_plain(messages: Sequence[Message]) -> bool:
        ends_well = bool(messages) and messages[-1].role == "user"
        return ends_well and not any(literal.search(m.content) for m in messages)

    plain = [row for row, messages in enumerate(prompts) if is_plain(messages)]
    texts = [render(tokenizer, prompts[row], add_generation_prompt=True) for row in plain]
    for row in plain:
        if len(prompts[row]) > 1:
            reply_format(tokenizer).require_fit(prompts[row])
    known = dict(zip(plain, _encode(tokenizer, texts), strict=True))
    return [known[row] if row in known else encode_prompt(tokenizer, prompts[row]) for row in range(len(prompts))]


def encode_replies(tokenizer: PreTrainedTokenizerBase, replies: Sequence[str]) -> Ids:
    """Token ids of finished replies: :func:`~rlhf_core.data.chat.encoding.encode_reply` of each."""
    literal, written = special_tokens(tokenizer).literal, reply_format(tokenizer)
    plain = [row for row, reply in enumerate(replies) if not literal.search(reply) and not written.is_marked(reply)]
    texts = [written.header + written.written(replies[row], finished=True) for row in plain]
    header = len(written.header_ids)
    known = {
        row: [*ids[header:], written.closing_id]
        for row, ids in zip(plain, _encode(tokenizer, texts), strict=True)
        if tuple(ids[:header]) == written.header_ids
    }
    return [known[row] if row in known else encode_reply(tokenizer, replies[row]) for row in range(len(replies))]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Ids:
    """Token ids of texts of pretraining: :func:`~rlhf_core.data.chat.encoding.encode_text` of each."""
    end = tokenizer.eos_token_id
    encoded = _encode(tokenizer, texts, add_special_tokens=True, split_special_tokens=True)
    return [ids if end is None or ids[-1:] == [end] else [*ids, int(end)] for ids in encoded]


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False, **options: bool
) -> Ids:
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        **options,
    )
    ids: Ids = encoded["input_ids"]
    return ids
