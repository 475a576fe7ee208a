"""Batches of texts get the ids that each text gets alone, with every real chat template and written-out tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import REAL_TEMPLATES, RealTemplate

from rlhf_core.data.encoding import (
    encode_prompt,
    encode_prompts,
    encode_replies,
    encode_reply,
    encode_text,
    encode_texts,
)
from rlhf_core.data.schema import Message
from rlhf_core.errors import UnwritableText

by_template = pytest.mark.parametrize("real", REAL_TEMPLATES, ids=lambda real: real.name)
SPECIAL = sorted({token for real in REAL_TEMPLATES for token in real.special})
PIECES = ["the sky", "天空", " ", "\n", "\n\n", "é", "12", "<", "[", "🙂", "start|>system\n", *SPECIAL]
texts = st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=5)


@by_template
@settings(max_examples=25, deadline=None)
@given(drawn=texts)
def test_replies_texts_and_prompts_of_a_batch_are_those_of_one(real: RealTemplate, drawn: list[str]) -> None:
    tokenizer = real.tokenizer
    prompts = [[Message("user", f"a{text}"), Message("assistant", text), Message("user", text)] for text in drawn]
    assert encode_replies(tokenizer, drawn) == [encode_reply(tokenizer, text) for text in drawn]
    assert encode_prompts(tokenizer, prompts) == [encode_prompt(tokenizer, turns) for turns in prompts]
    assert encode_texts(tokenizer, drawn) == [encode_text(tokenizer, text) for text in drawn]


def test_a_prompt_that_ends_with_another_turn_is_refused() -> None:
    turns = [[Message("user", "a")], [Message("user", "a"), Message("assistant", "b")]]
    with pytest.raises(UnwritableText, match="must end with a user turn"):
        encode_prompts(REAL_TEMPLATES[0].tokenizer, turns)
