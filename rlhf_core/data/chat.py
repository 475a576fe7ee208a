"""Messages to tokens and back, and padding whose masks come from lengths alone (so pad may equal eos)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, ModelError


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of the dialogue so far, ending where the assistant's reply begins.

    Uses the tokenizer's own chat template with its generation prompt; ``ModelError`` where it has none.
    """
    if not messages or messages[-1].role != "user":
        raise DataError("a prompt must end with a user turn")
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give one with tokenizer.chat_template"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself; adding them again would double the beginning-of-text token.
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_reply(tokenizer: PreTrainedTokenizerBase, reply: str, finished: bool = True) -> list[int]:
    """Token ids of the last assistant turn: closed by one end-of-sequence token, or by none if it is unfinished."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; a reply could never end"
        )
    ids = list(tokenizer.encode(reply, add_special_tokens=False))
    return [*ids, int(tokenizer.eos_token_id)] if finished else ids


def encode_dialogue(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], reply: str
) -> tuple[list[int], list[int]]:
    """``(prompt ids, reply ids)`` whose concatenation is the training sequence; never cut here."""
    return encode_prompt(tokenizer, messages), encode_reply(tokenizer, reply)


def decode_reply(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, bool]:
    """Text of a generated reply up to its first end-of-sequence token, and whether there was one.

    Special tokens inside the reply stay visible, such as ``<|user|>``: whoever reads the text must see what the policy
    wrote.
    """
    listed = [int(i) for i in ids]
    finished = tokenizer.eos_token_id in listed
    if finished:
        listed = listed[: listed.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(listed, skip_special_tokens=False)), finished


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of tokens that no reply may contain: padding, roles, beginning of text, unknown; all but end-of-sequence."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset((added | set(tokenizer.all_special_ids)) - {tokenizer.eos_token_id})


def vocabulary_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest that two tokenizers share if and only if the same token ids mean the same to both."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to fill with: the pad token, else end-of-sequence. Masks never look at it."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that end together, for generation. Returns ids and attention mask, both LongTensor (B, L)."""
    return _pad(sequences, pad_id, left=True)


def right_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that begin together, for training. Returns ids and attention mask, both LongTensor (B, L)."""
    return _pad(sequences, pad_id, left=False)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max((len(sequence) for sequence in sequences), default=0)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        span = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, span] = torch.tensor(list(sequence), dtype=torch.long)
        mask[row, span] = 1
    return ids, mask
