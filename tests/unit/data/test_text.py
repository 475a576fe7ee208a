"""Texts: statistics, refusals, what tells two apart, what no terminal is sent; Chinese through a
tokenizer.
"""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from clean_files import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from flows.commands.text import print_error
from rlhf_core.cli import app
from rlhf_core.data import text as stats
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.text import (
    TAKEN_OUT,
    comparable,
    escaped_controls,
    is_refusal,
    language_shares,
    language_tag,
    without_keys,
)
from rlhf_core.data.tokens import decode_reply, encode_dialogue
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.redaction import SECRETS
from rlhf_core.sampling.reply import ReplyPieces, sample_reply
from rlhf_extras.chat.session import prompts_to_try

REFUSALS = (
    "Good question. I will not help you to do that.",
    "I can't do this.",
    "I'm unable to assist.",
    "Sorry, that is against the rules.",
    "I’m really sorry, but I can’t help with that.",
    "I'm very sorry, but that's not something I do.",
    "As an AI language model, I cannot provide instructions for building weapons.",
    "I apologize, but I do not feel comfortable writing this.",
    "I'm not able to help you with that. Here is why.",
    "We are not allowed to share this.",
    "I must respectfully decline.",
    "I don't condone violence.",
    "It is not appropriate to threaten someone.",
    "It's illegal to buy a gun without a background check.",
    "Writing this goes against my ethical guidelines.",
    "As a small model, I'm designed to avoid providing advice.",
    "Unfortunately, this is not something that I do.",
    "No, I won't.",
    "很抱歉, 我不能回答这个问题。",
    "对不起，这个请求是违法的。",
    "此类请求无法为您提供帮助。",
    "這個問題我們無法回答。",
)
ANSWERS = (
    "i am not sure about that.",
    "the boat is red.",
    "First boil the water. Then pour it. You cannot drink it yet.",
    "Boil water. Add salt. I cannot tell you more.",  # after two sentences of answer
    "",
    "I'm sorry to hear that you had a rough day. What happened?",
    "I am so sorry for your loss. Here is a letter that you can adapt.",
    "Sorry to hear that! Try to restart it.",
    "I can't wait to help you with this! First open a terminal.",
    "I cannot recommend this book enough.",
    "As an AI, I don't have feelings, but here is a poem about joy.",
    "As an AI language model, I am not a lawyer, but the contract says so.",
    "You can kill a process with `kill -9`. It cannot catch that signal.",
    "Nobody knows. The house is against the rules of the town.",
    "北京是中国的首都。",
    "你可以用任务管理器结束程序。如果不能结束, 请重启电脑。",
    "作为一名老师，您可以这样开始。",
    "我們不能根據這句話得出結論。",  # what cannot be concluded
    "我们不能简单地照常经营。对环境负责很重要。",
    "人体不能直接吸收铁。我们无法直接从铁中吸收营养。",
)


@pytest.mark.parametrize("reply", REFUSALS)
def test_refusals_of_chat_models_are_recognised(reply: str) -> None:
    assert is_refusal(reply)


@pytest.mark.parametrize("reply", ANSWERS)
def test_answers_that_begin_like_refusals_are_none(reply: str) -> None:
    assert not is_refusal(reply)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Hello there. More.", "hello there."),
        ("no end", "no end"),
        ("", ""),
        ("A  b!\nC", "a b!"),
        ("好的。再见", "好的。"),
        ("Version 1.5 is out. Yes.", "version 1.5 is out."),
    ],
)
def test_first_sentence(text: str, first: str) -> None:
    assert stats.first_sentence(text) == first


SAME = ["I am sorry, but I cannot help with that."] * 9 + ["The sky is blue."]


@pytest.mark.parametrize(
    ("statistic", "given", "expected"),
    [
        (stats.split_words, ["It's RED, ok."], ["it", "'", "s", "red", ",", "ok", "."]),
        (
            stats.split_words,
            ["𠮷野家、人々 very good。"],
            ["𠮷", "野", "家", "、", "人", "々", "very", "good", "。"],
        ),
        (stats.trigram_repetition, ["a b a b a"], 1 / 3),
        (stats.trigram_repetition, ["好茶好茶好"], 1 / 3),
        (stats.trigram_repetition, ["one two three four"], 0.0),
        (stats.trigram_repetition, ["two words"], 0.0),
        (stats.trigram_repetition, ["go " * 12], 0.9),
        (stats.distinct_n, [["a b c", "a b d"], 2], 3 / 4),
        (stats.distinct_n, [["我爱茶", "我爱水"], 2], 3 / 4),
        (stats.distinct_n, [[], 2], 0.0),
        (stats.first_sentence, ["好的。一"], "好的。"),
        (stats.commonest_share, [SAME], 0.9),
        (stats.commonest_share, [[]], 0.0),
        (stats.mean, [[]], 0.0),
    ],
)
def test_statistics_by_hand(statistic: Callable[..., Any], given: list[Any], expected: Any) -> None:
    assert statistic(*given) == (
        pytest.approx(expected) if isinstance(expected, float) else expected
    )


def test_one_refusal_for_everything_shows() -> None:
    statistics = stats.reply_statistics(SAME, [12] * 9 + [3], [True] * 10)
    assert statistics["distinct_first_sentences"] == pytest.approx(0.2)
    assert statistics["commonest_first_sentence"] == 0.9
    assert list(map(stats.is_refusal, SAME)) == [True] * 9 + [False]


def test_lengths_and_ends() -> None:
    statistics = stats.reply_statistics(
        ["a", "b", "c", "d"], [1, 3, 4, 9], [True, False, True, True]
    )
    assert (statistics["length"], statistics["short_replies"], statistics["missing_eos"]) == (
        4.25,
        0.5,
        0.25,
    )
    assert set(stats.reply_statistics([], [], []).values()) == {0.0}


@given(st.text())
def test_any_text_gives_a_share(text: str) -> None:
    assert 0.0 <= stats.trigram_repetition(text) <= 1.0
    assert 0.0 <= stats.distinct_n([text, text]) <= 1.0


FAMILY = "\U0001f468\u200d\U0001f469"
PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        (" a\n\tb ", "a b"),
        ("a\u200bb", "ab"),
        ("\ufeffa\u2060\u00ad\u200e", "a"),
        ("a\u200db\u200c", "ab"),
        ("e\u200b\u0301", "\u00e9"),
        ("\u2764\ufe0f", "\u2764"),
        # Joiners that alter what is shown stay.
        (FAMILY, FAMILY),
        (PERSIAN, PERSIAN),
        (f"{PERSIAN}\u200c {FAMILY}\u200d", f"{PERSIAN} {FAMILY}"),
        ("\u5929\u3000\u5730", "\u5929 \u5730"),
        *(
            (("\u0645\u200d\u200d\u0645",) * 2),
            ("\u0645\u200d\u200d a", "\u0645 a"),
            ("\u200c", ""),
        ),
    ],
)
def test_what_cannot_be_seen_tells_no_texts_apart(text: str, compared: str) -> None:
    assert comparable(text) == compared


@given(st.text())
def test_texts_are_composed_and_of_single_spaces(text: str) -> None:
    compared = comparable(text)
    assert unicodedata.is_normalized("NFC", compared) and compared == " ".join(compared.split())


def test_control_characters_are_escaped_and_white_space_is_not() -> None:
    assert escaped_controls("a\x00\x1b[31m\x9b\u202eb\n\tc") == "a\\x00\\x1b[31m\\x9b\\u202eb\n\tc"
    assert escaped_controls("\u5929 caf\u00e9") == "\u5929 caf\u00e9"


def test_a_long_run_of_joiners_takes_no_longer_than_other_text() -> None:
    # Time that grew with the square of its length would not end within a day.
    text = "\u0645" + "\u200d" * 1_000_000 + "\u0645"
    assert comparable(text) == text and comparable(text[:-1]) == "\u0645"


KEYS = {
    "of one service": "sk-" + "a1" * 16,
    "of a project": "sk-proj-" + "a1" * 16,
    "of several parts": "sk-ant-api03-a_b-" + "b" * 90,
    "web token": "eyJ" + "a" * 33 + ".eyJ" + "b-" * 3000 + "." + "c" * 43,
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("before", ["", "key=", "-", "\\n"])
def test_keys_are_taken_out_of_texts_and_of_json(key: str, before: str) -> None:
    assert without_keys(f"so {before}{key} end") == f"so {before}{TAKEN_OUT} end"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "sk-" * 400_000,
            "sk-" + "a-" * 500_000,
            ("sk-" + "a" * 90 + "_-") * 10_000 + "a" * 10,
            "\\nsk-" * 200_000,
        ),
        *(
            "eyJ-" * 250_000,
            "eyJ-" * 250_000 + ".",
            ("eyJ-" * 240 + ".") * 1000,
            "eyJ-" * 240 + ".eyJ" + "-" * 900_000,
        ),
        *(
            "-----BEGIN " * 90_000,
            "-----BEGIN " + "A " * 500_000,
            "gho_" * 250_000,
            "xoxb-" * 2 + "AIza" * 250_000,
        ),
    ],
    ids=lambda text: f"{text[:12]}-{text[-8:]}",
)
def test_a_long_text_that_keys_begin_in_everywhere_is_looked_through_once(text: str) -> None:
    # Time that grew with the square of its length would not end within an hour.
    assert len(without_keys(text)) <= len(text)
    assert pc.match_substring_regex(pa.array([text[:100_000]]), SECRETS).null_count == 0


RED, TITLE, C1, BACK = "\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\rgone"


@pytest.fixture
def hostile(here: Path) -> str:
    row = {"prompt": f"{RED}a?", "chosen": f"{TITLE}b", "rejected": f"{C1}c", f"{RED}d{BACK}": 1}
    name = f"x{RED}{BACK}.jsonl"
    Path(name).write_text(json.dumps(row) + "\n" + json.dumps(row | {"margin": RED}) + "\n")
    return name


@pytest.mark.parametrize(
    "options", [["inspect"], ["inspect", "--json"], ["convert", "--to", "out.jsonl"]]
)
def test_reports_hold_no_control_characters(hostile: str, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["data", *options, hostile], color=True)
    assert result.exit_code == 0, result.exception
    assert not {
        character
        for character in result.stdout
        if ord(character) < 32 or 127 <= ord(character) < 160
    } - {"\n"}
    assert "31m" in result.stdout  # shown as an escape
    if "--json" in options:
        (file,) = json.loads(result.stdout)["files"]
        assert file["examples"][0]["rejected"] == f"{C1}c" and file["file"].endswith(hostile)


def test_errors_hold_none() -> None:
    stream = io.StringIO()
    print_error(f"the row {RED}x{C1}\nsecond line", stream)
    assert stream.getvalue() == "rlhf: the row \\x1b[31mx\\x9b31m\nsecond line\n"


QUESTION = "请问：怎样煮一杯好茶？"
REPLY = "先把水烧开，再放茶叶；等三分钟，就可以喝了。　（水温约９０℃！）\n\n“好茶”……不必贵，对吧？"
# Characters of three and four bytes that the tokenizer has not seen, kana, and an emoji of several
# code points.
UNSEEN = "龘𠮷「あ」～￥❤️👩‍👩‍👧"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([QUESTION, REPLY] * 4, 400)


@given(
    st.text(st.characters(codec="utf-8", min_codepoint=0x3000)),
    st.text(st.characters(codec="utf-8")),
)
@settings(max_examples=100)
def test_every_text_comes_back_from_its_tokens(
    tokenizer: PreTrainedTokenizerBase, wide: str, plain: str
) -> None:
    text = wide + UNSEEN + plain
    assert (
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )
        == text
    )


def test_common_characters_are_one_token_and_the_rest_are_bytes(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert len(tokenizer.encode("茶", add_special_tokens=False)) == 1
    assert len(tokenizer.encode("龘", add_special_tokens=False)) == 3
    assert len(tokenizer.encode(REPLY, add_special_tokens=False)) < len(REPLY)


def test_a_dialogue_is_written_by_the_template_with_nothing_between(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    texts = {"system": "你是助手。", "user": "茶？", "assistant": "好。"}
    turns = [*(Message(role, text) for role, text in texts.items()), Message("user", QUESTION)]
    prompt, reply = encode_dialogue(tokenizer, turns, REPLY)
    expected = (
        f"<|system|>你是助手。<|user|>茶？<|assistant|>好。<|end|><|user|>{QUESTION}<|assistant|>"
    )
    assert tokenizer.decode(prompt) == expected
    assert tokenizer.decode(reply) == f"{REPLY}<|end|>"


def test_a_reply_that_was_cut_off_shows_no_half_character(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = f"喝茶{UNSEEN}吧"
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen = set()
    for length in range(len(ids) + 1):
        cut, finished = decode_reply(tokenizer, ids[:length])
        assert text.startswith(cut) and not finished
        seen.add(cut)
    assert {"喝茶", "喝茶龘", "喝茶龘𠮷", text} <= seen


def test_bytes_that_no_character_has_stay_visible_in_a_reply_that_ended(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    half = tokenizer.encode("龘", add_special_tokens=False)[:2]
    assert decode_reply(tokenizer, [*half, tokenizer.eos_token_id]) == ("\ufffd", True)


def test_streamed_pieces_are_whole(
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
    whole = ReplyPieces()
    unread: Any = (
        None  # the model, its sampling and its random numbers are those of the function above
    )
    reply = sample_reply(
        unread, tokenizer, [], unread, unread, lambda text: pieces.append(whole.next(text))
    )
    pieces.append(whole.rest(reply.text))
    assert "".join(pieces) == text and len(pieces) > 5


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


def test_prompts_to_try_fit_a_line_in_which_a_chinese_character_takes_two_columns(
    tmp_path: Path,
) -> None:
    texts = ["茶" * 36, "茶" * 35]
    rows = [Prompt(text, [Message("user", text)], "fact", "test", text) for text in texts]
    write_rows(tmp_path / "data" / "clean" / "prompts" / "test.parquet", rows)
    assert prompts_to_try(tmp_path) == ["茶" * 35]
