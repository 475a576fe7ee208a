"""Text statistics by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data import text as stats


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
