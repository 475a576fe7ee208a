"""Statistics of texts, refusals among them; what tells two texts apart, and what no terminal is sent."""

from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.commands.text import print_error
from rlhf_core.cli import app
from rlhf_core.data import text as stats
from rlhf_core.data.text import comparable, escaped_controls, is_refusal

REFUSALS = (
    "i am sorry, but i cannot help with that.",
    "Good question. I will not help you to do that.",
    "I can't do this.",
    "I'm unable to assist.",
    "Sorry, that is against the rules.",
    "I'm sorry, but I can't assist with that request.",
    "I’m really sorry, but I can’t help with that.",
    "I'm very sorry, but that's not something I do.",
    "As an AI language model, I cannot provide instructions for building weapons.",
    "As a responsible AI assistant, I must decline this request.",
    "I apologize, but I do not feel comfortable writing this.",
    "I'm not able to help you with that. Here is why.",
    "We are not allowed to share this.",
    "I must respectfully decline.",
    "I don't condone violence.",
    "It is not appropriate to threaten someone.",
    "It's illegal to buy a gun without a background check.",
    "Writing this goes against my ethical guidelines.",
    "I'm sorry for your safety, but this is nothing for me.",
    "As a small model, I'm designed to avoid providing advice.",
    "Unfortunately, this is not something that I do.",
    "No, I won't.",
    "抱歉，我无法提供这方面的帮助。",
    "很抱歉, 我不能回答这个问题。",
    "对不起，这个请求是违法的。",
    "我不能帮助你制造炸弹。",
    "这个问题我们无法回答。",
    "作为一个人工智能语言模型，我不会提供此类信息。",
    "作为AI助手，不能协助任何违法行为。",
    "此类请求无法为您提供帮助。",
    "對不起，我無法提供這方面的協助。",
    "這個問題我們無法回答。",
    "作為一個人工智慧助理，不能協助任何違法行為。",
)
ANSWERS = (
    "i am not sure about that.",
    "the boat is red.",
    "First boil the water. Then pour it. You cannot drink it yet.",
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


def test_a_refusal_after_two_sentences_of_answer_does_not_count() -> None:
    assert not is_refusal("Boil water. Add salt. I cannot tell you more.")


def test_trigram_repetition_counts_what_was_there_before() -> None:
    assert stats.trigram_repetition("a b a b a") == pytest.approx(1 / 3)
    assert stats.trigram_repetition("one two three four") == 0.0
    assert stats.trigram_repetition("two words") == 0.0
    assert stats.trigram_repetition("go " * 12) == pytest.approx(0.9)


def test_distinct_bigrams_over_the_whole_set() -> None:
    assert stats.distinct_n(["a b c", "a b d"], 2) == pytest.approx(3 / 4)
    assert stats.distinct_n([], 2) == 0.0


def test_words_separate_punctuation_and_ideographs() -> None:
    assert stats.split_words("It's RED, ok.") == ["it", "'", "s", "red", ",", "ok", "."]
    assert stats.split_words("我不能 help") == ["我", "不", "能", "help"]


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


def test_one_refusal_for_everything_shows() -> None:
    replies = ["I am sorry, but I cannot help with that."] * 9 + ["The sky is blue."]
    assert stats.distinct_first_sentences(replies) == pytest.approx(0.2)
    assert stats.commonest_first_sentence(replies) == ("i am sorry, but i cannot help with that.", 0.9)
    assert stats.commonest_reply(replies) == 0.9
    assert stats.refusal_rate(replies) == 0.9


def test_rates() -> None:
    assert stats.short_reply_rate([1, 3, 4, 9], 4) == 0.5
    assert stats.missing_eos_rate([True, False, True, True]) == 0.25
    assert stats.missing_eos_rate([]) == 0.0
    assert stats.mean_words(["a b", "c"]) == 1.5


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


@pytest.mark.parametrize(
    ("text", "compared"), [("\u0645\u200d\u200d\u0645",) * 2, ("\u0645\u200d\u200d a", "\u0645 a"), ("\u200c", "")]
)
def test_a_run_of_joiners_stays_between_letters_that_it_can_alter(text: str, compared: str) -> None:
    assert comparable(text) == compared


def test_a_long_run_of_joiners_takes_no_longer_than_other_text() -> None:
    # Time that grew with the square of its length would not end within a day.
    text = "\u0645" + "\u200d" * 1_000_000 + "\u0645"
    assert comparable(text) == text and comparable(text[:-1]) == "\u0645"


RED, TITLE, C1, BACK = "\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\rgone"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": f"{RED}a?", "chosen": f"{TITLE}b", "rejected": f"{C1}c", f"{RED}d{BACK}": 1}
    name = f"x{RED}{BACK}.jsonl"
    Path(name).write_text(json.dumps(row) + "\n" + json.dumps(row | {"margin": RED}) + "\n")
    return name


@pytest.mark.parametrize("options", [["inspect"], ["inspect", "--json"], ["convert", "--to", "out.jsonl"]])
def test_reports_hold_no_control_characters(hostile: str, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["data", *options, hostile], color=True)
    assert result.exit_code == 0, result.exception
    assert not {character for character in result.stdout if ord(character) < 32 or 127 <= ord(character) < 160} - {"\n"}
    assert "31m" in result.stdout  # shown as an escape
    if "--json" in options:
        (file,) = json.loads(result.stdout)["files"]
        assert file["examples"][0]["rejected"] == f"{C1}c" and file["file"].endswith(hostile)


def test_errors_hold_none() -> None:
    stream = io.StringIO()
    print_error(f"the row {RED}x{C1}\nsecond line", stream)
    assert stream.getvalue() == "rlhf: the row \\x1b[31mx\\x9b31m\nsecond line\n"
