"""Conversations as token ids, one by one or many at once with the same ids, and token ids as text.

A fast tokenizer encodes a batch on all cores. Texts in which special tokens are written out, and
replies that have no token border at their beginning, are encoded one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from rlhf_core.data.schema import Message
from rlhf_core.errors import UnwritableText

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
