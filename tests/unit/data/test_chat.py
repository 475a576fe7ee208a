"""The chat template, end-of-sequence, and padding whose masks never depend on what the pad token
is.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core.data.batches import TokenisedPair, usable_pairs
from rlhf_core.data.schema import Message, Preference
from rlhf_core.data.tables import TableRows
from rlhf_core.data.tokens import (
    TokenTable,
    decode_reply,
    encode_dialogue,
    encode_prompt,
    encode_reply,
    left_pad,
    pad_id,
    right_pad,
    vocabulary_id,
)
from rlhf_core.errors import DataError, ModelError

WORDS = [
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<unk>",
    "hello",
    "there",
    "red",
    "blue",
]
PAD, END, USER, ASSISTANT, SYSTEM, UNKNOWN, HELLO, THERE, RED, BLUE = range(len(WORDS))
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(pad_token: str | None = "<|pad|>") -> PreTrainedTokenizerFast:
    """One token per word, so that expected ids can be written by hand."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:5])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad_token
    )
    fast.chat_template = TEMPLATE
    return fast


def pair(chosen: str, rejected: str) -> Preference:
    return Preference("x", [Message("user", "hello")], chosen, rejected, None, "", "test", "hello")


def test_dialogue_by_hand() -> None:
    messages = [
        Message("system", "blue"),
        Message("user", "hello"),
        Message("assistant", "there"),
        Message("user", "red"),
    ]
    prompt, reply = encode_dialogue(word_tokenizer(), messages, "hello there")
    assert prompt == [SYSTEM, BLUE, USER, HELLO, ASSISTANT, THERE, END, USER, RED, ASSISTANT]
    assert reply == [HELLO, THERE, END]


def test_prompt_must_end_with_user() -> None:
    with pytest.raises(DataError, match="user turn"):
        encode_prompt(word_tokenizer(), [Message("assistant", "hello")])


def test_tokenizer_without_template_or_eos_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="chat template"):
        encode_prompt(tokenizer, [Message("user", "hello")])
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        encode_reply(tokenizer, "hello")


def test_decode_stops_at_the_first_end() -> None:
    tokenizer = word_tokenizer()
    assert decode_reply(tokenizer, [HELLO, THERE, END, RED, END]) == ("hello there", True)
    assert decode_reply(tokenizer, [HELLO, RED]) == ("hello red", False)
    assert decode_reply(tokenizer, [END]) == ("", True)
    assert decode_reply(tokenizer, torch.tensor([HELLO, END])) == ("hello", True)


def test_special_tokens_inside_a_reply_stay_visible() -> None:
    tokenizer = word_tokenizer()
    assert decode_reply(tokenizer, [HELLO, USER, PAD, RED, END]) == (
        "hello <|user|> <|pad|> red",
        True,
    )
    assert decode_reply(tokenizer, [PAD, PAD]) == ("<|pad|> <|pad|>", False)


def test_an_unfinished_reply_is_encoded_without_an_end_marker() -> None:
    tokenizer = word_tokenizer()
    assert encode_reply(tokenizer, "hello red", finished=False) == [HELLO, RED]
    assert encode_reply(tokenizer, "", finished=False) == []


def test_vocabulary_id_tells_vocabularies_and_end_markers_apart() -> None:
    tokenizer, other = word_tokenizer(), word_tokenizer()
    assert vocabulary_id(tokenizer) == vocabulary_id(other)
    other.eos_token = "<|user|>"
    assert vocabulary_id(tokenizer) != vocabulary_id(other)
    other = word_tokenizer()
    other.add_tokens(["green"])
    assert vocabulary_id(tokenizer) != vocabulary_id(other)


def test_pad_falls_back_to_end_and_masks_do_not_care() -> None:
    tokenizer = word_tokenizer(pad_token=None)
    assert pad_id(tokenizer) == END
    ids, mask = right_pad(
        [encode_reply(tokenizer, "red"), encode_reply(tokenizer, "red blue")], pad_id(tokenizer)
    )
    assert ids.tolist() == [[RED, END, END], [RED, BLUE, END]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]], (
        "the real end counts although it has the pad's id"
    )


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8), st.integers(0, 9)
)
def test_padding_keeps_every_token_on_its_side(sequences: list[list[int]], pad: int) -> None:
    width = max(len(s) for s in sequences)
    for pads_left, (ids, mask) in (
        (True, left_pad(sequences, pad)),
        (False, right_pad(sequences, pad)),
    ):
        assert (
            ids.shape == mask.shape == (len(sequences), width)
            and ids.dtype == mask.dtype == torch.long
        )
        assert mask.sum(1).tolist() == [len(s) for s in sequences]
        for row, sequence in enumerate(sequences):
            assert ids[row][mask[row].bool()].tolist() == sequence
            assert (ids[row][~mask[row].bool()] == pad).all()
            edges = mask[row].diff()
            assert (edges >= 0).all() if pads_left else (edges <= 0).all(), (
                "the mask is one block at its side"
            )


def usable(
    pairs: list[Preference], max_tokens: int
) -> tuple[TableRows[TokenisedPair], dict[str, int]]:
    return usable_pairs(TokenTable.of_rows(word_tokenizer(), "preferences", pairs), max_tokens)


def test_pairs_over_long_or_identical_are_dropped_and_counted() -> None:
    rows = [
        pair("red", "blue"),
        pair("red  blue", "red blue"),
        pair("red", "red blue there hello red"),
        pair("zzz", "yyy"),
    ]
    kept, dropped = usable(rows, max_tokens=8)
    # prompt 3 tokens; row 1 differs in spaces only, row 2 needs 3 + 6, row 3 is unknown on both
    # sides.
    assert [p.row for p in kept] == [0]
    assert list(kept[0].prompt) == [USER, HELLO, ASSISTANT]
    assert (list(kept[0].chosen), list(kept[0].rejected), kept[0].length) == (
        [RED, END],
        [BLUE, END],
        5,
    )
    assert dropped == {"over_long": 1, "identical": 2, "identical_if_cut": 0}


def test_over_long_pairs_that_would_be_identical_if_they_were_cut_are_counted() -> None:
    same = "red blue there hello"
    rows = [pair(f"{same} red", f"{same} blue"), pair(f"{same} red", f"red {same}")]
    for max_tokens, identical in ((7, 1), (8, 0), (3, 2), (1, 2)):  # the prompt has 3 tokens
        _, dropped = usable(rows, max_tokens=max_tokens)
        assert dropped == {"over_long": 2, "identical": 0, "identical_if_cut": identical}


def test_a_reply_is_never_cut() -> None:
    kept, _ = usable([pair("red blue there", "blue")], max_tokens=7)
    assert list(kept[0].chosen) == [RED, BLUE, THERE, END]
    assert usable([pair("red blue there", "blue")], max_tokens=6)[0].rows.tolist() == []


def test_tokens_of_pairs_take_four_bytes() -> None:
    (words,), _ = usable([pair("red " * 200, "blue " * 200)], max_tokens=1000)
    ids = words.prompt, words.chosen, words.rejected
    assert sum(map(len, ids)) > 400
    assert sum(map(sys.getsizeof, (words, *ids))) < 4 * sum(map(len, ids)) + 500
