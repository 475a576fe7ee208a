"""A reply as metrics and judges see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.encoding import decode_reply, reply_length, special_token_ids, vocabulary_id


@dataclass(frozen=True)
class Reply:
    """A reply to one prompt, as the policy wrote it.

    Attributes:
        text: The reply without its end marker. Special tokens inside it are visible, such as ``<|user|>``.
        finished: Whether the reply ended by itself.
        token_ids: The generated ids, end marker included; empty for a reply that is known as text only.
        special_tokens: How many of ``token_ids`` are padding, role or other special tokens: defects of the reply.
        vocabulary: The vocabulary that ``token_ids`` belong to; see
            :func:`~rlhf_core.data.chat.encoding.vocabulary_id`.
    """

    text: str
    finished: bool
    token_ids: tuple[int, ...] = ()
    special_tokens: int = 0
    vocabulary: str = ""


def generated_replies(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Sequence[int]]) -> list[Reply]:
    """Turn sequences of generated token ids into replies; what follows an end marker is left out."""
    special, vocabulary = special_token_ids(tokenizer), vocabulary_id(tokenizer)
    replies = []
    for sequence in sequences:
        text, finished = decode_reply(tokenizer, sequence)
        length, _ = reply_length(tokenizer, sequence)
        token_ids = tuple(int(i) for i in sequence[:length])
        replies.append(Reply(text, finished, token_ids, sum(i in special for i in token_ids), vocabulary))
    return replies
