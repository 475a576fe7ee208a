"""The data card is passed on: no key, control character or endless label of the data is on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from validation_rows import good_rows, make_row, run_validate

from rlhf_core.data.safe_text import TAKEN_OUT, excerpt
from rlhf_core.evaluation.data_card.card import DataCard, breakable, is_long, markdown

BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
AWS = "AKIAABCDEFGHIJKLMNOP"


def private_key(kind: str = "RSA PRIVATE KEY", end: bool = True) -> str:
    return f"-----BEGIN {kind}-----\n{BODY}\n{BODY}\n" + (f"-----END {kind}-----\n" if end else "")


@pytest.mark.parametrize("key", [private_key(), private_key("PGP PRIVATE KEY BLOCK"), private_key("PRIVATE KEY")])
def test_a_private_key_is_taken_out_with_its_body(key: str) -> None:
    shown = excerpt(json.dumps({"reply": f"before {key} after"}))
    assert "MII" not in shown and "END" not in shown and TAKEN_OUT in shown
    assert "before" in shown and "after" in shown


def test_without_its_end_a_private_key_goes_on_to_the_end() -> None:
    assert excerpt(json.dumps({"reply": f"x {private_key(end=False)}", "more": "y"})) == f'{{"reply": "x {TAKEN_OUT}'


@pytest.mark.parametrize("before", ["\n", "\t", "\x1b", "\u2028", " ", ""])
def test_a_key_is_taken_out_whatever_escape_it_follows(before: str) -> None:
    for ascii_only in (True, False):
        assert AWS not in excerpt(json.dumps({"reply": f"the key is{before or ':'}{AWS}"}, ensure_ascii=ascii_only))


def test_labels_on_the_card_are_safe_and_short(tmp_path: Path) -> None:
    """Even where validation lets such rows pass, as it does here."""
    rows = good_rows(60)
    rows["preferences"] += [
        make_row("preferences", 100, category=AWS),
        make_row("preferences", 101, category="nul\x00 and \x1b[31mred"),
        make_row("preferences", 102, category="c" * 10_000),
    ]
    run_validate(rows, tmp_path, secrets=False, rules={"no_control_characters": "warn"})
    for name in ("card.md", "card.html", "release.md"):
        text = (tmp_path / "data/card" / name).read_text().replace("\\\\", "\\")  # as Markdown shows a backslash
        assert AWS not in text and "\x00" not in text and "\x1b" not in text and "c" * 100 not in text
        assert TAKEN_OUT.strip("[]") in text and r"nul\x00 and \x1b" in text and "c" * 60 + "\u2026" in text


def test_only_sentences_paths_and_long_words_break_anywhere() -> None:
    assert not is_long("preferences") and not is_long("no_prefix_leakage") and not is_long(12345678901234567890123)
    assert breakable("/a_b/<c>") == "/<wbr>a_<wbr>b/<wbr>&lt;c&gt;"
    assert is_long("/data/of/a/folder/pairs.jsonl") and is_long("a sentence of many words that may fill several lines")


@pytest.mark.parametrize("before", ["", "\\", "\\\\"])
def test_no_link_of_the_data_is_one_in_markdown(before: str) -> None:
    """A backslash of the data must not take away the one that escapes."""
    card = DataCard(True, f"{before}[x](javascript:alert(1)) {before}`code` {before}<b>", [])
    written = markdown(card, "Card", quotes=True)
    assert "[x]" in written
    for character in "[`":
        escapes = written[: written.index(character)]
        assert (len(escapes) - len(escapes.rstrip("\\"))) % 2 == 1
