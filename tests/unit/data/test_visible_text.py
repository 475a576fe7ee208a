"""What tells two texts apart, and what of a text a terminal or a page would obey instead of printing it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.text import comparable, escaped_controls

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
