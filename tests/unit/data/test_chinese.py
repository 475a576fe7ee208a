"""Chinese text through tokenizer, chat template, masks, decoding and text statistics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhf_core.chat.session import ReplyStream, prompts_to_try
from rlhf_core.data import text as stats
from rlhf_core.data.encoding import decode_reply, encode_dialogue
from rlhf_core.data.schema import Message, Preference, Prompt, write_rows
from rlhf_core.data.text import language_shares, language_tag
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.sampling.reply import sample_reply
from rlhf_core.training.reward.evaluation import bag_of_words_accuracy

QUESTION = "请问：怎样煮一杯好茶？"
REPLY = "先把水烧开，再放茶叶；等三分钟，就可以喝了。　（水温约９０℃！）\n\n“好茶”……不必贵，对吧？"
# Characters of three and four bytes that the tokenizer has not seen, kana, and an emoji of several code points.
UNSEEN = "龘𠮷「あ」～￥❤️👩‍👩‍👧"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([QUESTION, REPLY] * 4, 400)


@given(st.text(st.characters(codec="utf-8", min_codepoint=0x3000)), st.text(st.characters(codec="utf-8")))
@settings(max_examples=100)
def test_every_text_comes_back_from_its_tokens_to_the_character(
    tokenizer: PreTrainedTokenizerBase, wide: str, plain: str
) -> None:
    text = wide + UNSEEN + plain
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) == text


def test_common_characters_are_one_token_and_the_rest_are_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode("茶", add_special_tokens=False)) == 1
    assert len(tokenizer.encode("龘", add_special_tokens=False)) == 3
    assert len(tokenizer.encode(REPLY, add_special_tokens=False)) < len(REPLY)


def test_a_dialogue_is_written_by_the_template_with_nothing_between(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [Message("system", "你是助手。"), Message("user", QUESTION)]
    prompt, reply = encode_dialogue(tokenizer, turns, REPLY)
    assert tokenizer.decode(prompt) == f"<|system|>你是助手。<|user|>{QUESTION}<|assistant|>"
    assert tokenizer.decode(reply) == f"{REPLY}<|end|>"


def test_a_reply_that_was_cut_off_shows_no_half_character(tokenizer: PreTrainedTokenizerBase) -> None:
    text = f"喝茶{UNSEEN}吧"
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen = set()
    for length in range(len(ids) + 1):
        cut, finished = decode_reply(tokenizer, ids[:length])
        assert text.startswith(cut) and not finished
        seen.add(cut)
    assert {"喝茶", "喝茶龘", "喝茶龘𠮷", text} <= seen


def test_bytes_that_no_character_has_stay_visible_in_a_reply_that_ended(tokenizer: PreTrainedTokenizerBase) -> None:
    half = tokenizer.encode("龘", add_special_tokens=False)[:2]
    assert decode_reply(tokenizer, [*half, tokenizer.eos_token_id]) == ("\ufffd", True)


def test_streamed_pieces_are_whole_characters(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"喝茶{UNSEEN}吧"
    tokens = tokenizer.encode(text, add_special_tokens=False)

    def generate(model: Any, prompts: Any, uniforms: Any, sampling: Any, on_tokens: Any) -> Any:
        for token in tokens:
            on_tokens(torch.tensor([token]))
        return SimpleNamespace(replies=lambda: [tokens])

    monkeypatch.setattr("rlhf_core.sampling.reply.generate", generate)
    pieces: list[str] = []
    stream = ReplyStream(pieces.append)
    unread: Any = None  # the model, its sampling and its random numbers are those of the function above
    stream.finish(sample_reply(unread, tokenizer, [], unread, unread, stream.write).text)
    assert "".join(pieces) == text and len(pieces) > 5


def test_an_ideograph_is_a_word_also_beyond_the_basic_plane() -> None:
    assert stats.split_words("𠮷野家、人々 very good。") == ["𠮷", "野", "家", "、", "人", "々", "very", "good", "。"]
    assert stats.trigram_repetition("好茶好茶好") == pytest.approx(1 / 3)
    assert stats.distinct_n(["我爱茶", "我爱水"], 2) == pytest.approx(3 / 4)
    assert stats.commonest_first_sentence(["好的。一", "好的。二", "不。"]) == ("好的。", 2 / 3)


def test_the_bag_of_words_takes_clauses_apart() -> None:
    def pair(i: int) -> Preference:
        good, bad = f"这是第{i}杯茶谢谢你", f"这是第{i}杯茶烦死了"
        return Preference(str(i), [Message("user", "茶")], good, bad, None, "c", "s", "g")

    assert bag_of_words_accuracy([pair(i) for i in range(20)], {"test": [pair(99)]}) == {"test": 1.0}


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        (REPLY, "zh"),
        ("用 pandas 读取 CSV 文件。", "zh"),
        ("お茶を入れてください。", "ja"),
        ("차를 끓여 주세요.", "ko"),
        ("The word 茶 means tea.", ""),
        ("plain English", ""),
        ("１２３ ！", ""),
        ("", ""),
    ],
)
def test_the_script_of_a_text_tells_its_language(text: str, tag: str) -> None:
    assert language_tag(text) == tag
    assert language_shares([text, "English"]) == ({tag: 0.5} if tag else {})


def test_prompts_to_try_fit_a_line_in_which_a_chinese_character_takes_two_columns(tmp_path: Path) -> None:
    texts = ["茶" * 36, "茶" * 35]
    rows = [Prompt(text, [Message("user", text)], "fact", "test", text) for text in texts]
    write_rows(tmp_path / "data" / "clean" / "prompts" / "test.parquet", rows)
    assert prompts_to_try(tmp_path) == ["茶" * 35]
