"""The data card: what it says, that it quotes no key, and that markup in the data stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from validation_rows import good_rows, make_row, origins_of, row, run_validate, set_of, suites_of

from rlhf_core.config.data import CollectConfig, FileSources, ValidateConfig
from rlhf_core.data.collection.raw_folder import RawData
from rlhf_core.data.dataset import count_tokens, data_metrics, write_clean
from rlhf_core.data.row_counts import READABLE, REFUSED_SCHEMA, RowFinding, findings_table
from rlhf_core.data.schema import arrow_schema, write_table
from rlhf_core.data.statistics import character_lengths
from rlhf_core.data.text import EXCERPT, TAKEN_OUT, excerpt
from rlhf_core.data.validation.data_reports import CheckedData, write_reports
from rlhf_core.data.validation.set_rules import SetFindings, apply_set_rules, check_set
from rlhf_core.data.validation.suites import NOT_DERIVED, Checkpoints
from rlhf_core.data.validation.tables import Validated, validate
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.stages import collect
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext
from rlhf_extras.data_card import card as cards
from rlhf_extras.data_card import pages

KEY = "ghp_" + "a" * 36
MARKUP = "<script>alert(1)</script> | *x* [link](http://example.org)"
FILE = {"source": "a|b.jsonl", "format": "standard", "licence": "MIT", "records": 12, "expanded": 0, "rows": 4,
        "refused": 2, "dropped": {"both replies have the same score": 3, "a tie": 2}, "cut": 1,
        "share": 1.0}  # fmt: skip
KINDS: dict[str, Any] = {
    "preferences": {"rows": 4, "derived_from": "", "files": [FILE]},
    "demonstrations": {"rows": 1, "derived_from": "preferences", "files": []},
}


def written(folder: Path) -> tuple[str, str, str]:
    """Write the card of four pairs, one of which begins as a test prompt does, and of two refused
    rows.
    """
    stored = set_of(
        preferences=[
            row("preferences", 0, "train", "Hello?") | {"category": "x"},
            row("preferences", 1, "test", "Hello?", "Hi.", "And?") | {"category": "x"},
            row("preferences", 2, "train", MARKUP) | {"category": "<b>y</b>"},
            row("preferences", 3, "validation", "Bye?") | {"category": "x"},
        ]
    ).clean
    refused = [
        ("looks like an access key", json.dumps({"reply": KEY})),
        ("chosen is empty", MARKUP),
    ]
    unread = [
        RowFinding(READABLE, "preferences", reason, "a|b.jsonl", line, row=content)
        for line, (reason, content) in enumerate(refused, 5)
    ]
    write_table(folder / "refused.parquet", findings_table(unread, REFUSED_SCHEMA))
    origins = origins_of("a|b.jsonl", (1, 2, 3, 4))
    stored = {
        kind: replace(rows, origins=origins if kind == "preferences" else None)
        for kind, rows in stored.items()
    }
    raw = RawData(stored, folder / "refused.parquet")
    config, suites = ValidateConfig(), suites_of()
    with TemporaryDirectory() as columns:
        validated = validate(raw, suites, Path(columns))
        findings = check_set(validated.clean, config, suites)
        apply_set_rules(validated, findings)
    statistics = write_clean(folder / "clean", validated.clean, 1, config.split)
    findings.counts["preferences"] |= validated.agreement
    metrics = data_metrics(validated, statistics, findings.counts)
    manifest = {"source": "files", "kinds": KINDS}
    sources = CheckedData(manifest, validated, findings, metrics, statistics, ["preferences.clean"])
    write_reports(folder, sources, config)
    return tuple((folder / name).read_text() for name in ("card.md", "card.html", "release.md"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards") / "card"


@pytest.fixture(scope="module")
def card(folder: Path) -> tuple[str, str, str]:
    return written(folder)


def test_what_the_card_says(folder: Path, card: tuple[str, str, str]) -> None:
    text, page, release = card
    assert "The data gate failed: preferences.clean" in text and 'class="verdict bad"' in page
    assert r"| preferences | a\|b.jsonl | standard | MIT | 12 | 0 | 4 | 2 | 5 | 1 | 1.000 |" in text
    assert "- preferences: 3 records dropped, since both replies have the same score." in text
    assert "| demonstrations | derived from preferences |" in text
    assert "| no_prefix_leakage | warn | 1 |" in text
    # Of one test row; training row 1 of the file is named.
    assert (
        "| preferences | 1 | 1 | 1 |" in text
        and r"| no_prefix_leakage | preferences | a\|b.jsonl:1 |" in text
    )
    assert "2 categories, evenness 0.81" in text
    assert "No pair has more than one label" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[0] == "## Sources" and headings[-2:] == ["## Similar rows", "## Refused rows"]
    assert [line for line in release.splitlines() if line.startswith("## ")] == headings[:-2]
    similar = text.split("## Similar rows")[1].split("##")[0]
    assert (
        r"| a\|b.jsonl:1 | Hello? " in similar and r"| a\|b.jsonl:2 | Hello? Hi. And? " in similar
    )
    assert "Hello?" not in release and r"| a\|b.jsonl:2 |" in release
    assert page.count("<h2>") == len(headings) and page.count("<svg") == len(
        ["prompt", "chosen", "rejected"]
    )
    assert '<th class="n">prompts</th>' in page and "<th>source</th>" in page
    assert (
        "|  | preferences | demonstrations | prompts | pretrain |\n|---|---:|---:|---:|---:|"
        in text
    )
    (prefix, *_) = pq.read_table(folder / "findings.parquet").to_pylist()
    found = tuple(prefix[name] for name in ("rule", "severity", "source", "position"))
    assert found == ("no_prefix_leakage", "warn", "a|b.jsonl", 1)


def test_rows_whose_source_was_refused_are_listed_with_the_rules() -> None:
    suites = suites_of(["demonstrations"], rules={"turns": "warn"})
    metrics = {"demonstrations": {"failed_source_passed": 2.0, "warned_turns": 1.0}}
    (table,) = cards.rules_section(metrics, ["demonstrations"], suites).tables
    assert table.rows == [("turns", "warn", 1), ("source_passed", "refuse", 2)]


def test_one_of_a_thing_is_counted_as_one(tmp_path: Path) -> None:
    numbers = {"repeated_pairs": 1.0, "contradicted_pairs": 2.0, "label_agreement": 0.5}
    files = [{"source": "x", "format": "standard", "dropped": {"a tie": 1, "no label": 2}}]
    manifest = {"kinds": {"preferences": {"files": files}}}
    validated = Validated(RawData({}, tmp_path / "none"), Checkpoints(suites_of()))
    sources = CheckedData(manifest, validated, SetFindings(), {"preferences": numbers}, {}, [])
    notes = "\n".join(
        note for part in cards.build_card(sources, ValidateConfig()).sections for note in part.notes
    )
    assert (
        "1 pair has more than one label; 50.0% of these labels say what most do, and 2 pairs are labelled"
        in notes
    )
    assert (
        "preferences: 1 record dropped, since a tie." in notes
        and "preferences: 2 records dropped" in notes
    )


def test_no_key_is_quoted_and_markup_stays_text(card: tuple[str, str, str]) -> None:
    for content in card:
        assert KEY not in content and "<script>" not in content and "<b>y" not in content
    text, page, _ = card
    assert "taken out: looks like a key" in text and "taken out: looks like a key" in page
    assert "[link]" not in text.replace(r"\[link]", "")


def quarantined(kind: str, row_id: str, reason: str, *place: Any, row: str = "{}") -> RowFinding:
    return RowFinding("a_rule", kind, reason, *place, id=row_id, row=row)


def test_examples_of_refused_rows_cover_all_reasons_first() -> None:
    rows = [quarantined("prompts", str(i), "often" if i < 20 else f"rare {i}") for i in range(23)]
    chosen, total = cards.spread_over_reasons(rows, 10)
    assert [row.id for row in chosen[:5]] == ["0", "20", "21", "22", "1"]
    assert (len(chosen), total) == (10, 23)
    assert not cards.refused_section([]).tables
    ((long,), _) = cards.spread_over_reasons(
        [quarantined("prompts", "0", "long", row="x" * 10**6)], 10
    )
    assert len(long.row) <= EXCERPT + len("…"), (
        "the card holds the beginnings of rows, which may be large"
    )


def test_examples_are_of_different_rows_of_the_sources() -> None:
    """What is derived from a refused row repeats it, and says nothing of its own."""
    rows = [quarantined("preferences", str(i), "too long", "a.jsonl", i) for i in range(3)]
    rows += [quarantined("demonstrations", "d", "too long", "a.jsonl", 1)]
    rows += [quarantined("prompts", str(i), NOT_DERIVED, "a.jsonl", i) for i in range(5)]
    rows += [quarantined("prompts", "p", "too long", "b.jsonl", 1)]
    chosen, total = cards.spread_over_reasons(rows, 10)
    named = [(row.source, row.position) for row in chosen]
    assert named == [("a.jsonl", 0), ("b.jsonl", 1), ("a.jsonl", 1), ("a.jsonl", 2)] and total == 10


def test_a_column_of_numbers_is_aligned_to_the_right() -> None:
    table = pages.CardTable(("a", "b", "c", "d"), [("x", 1, None, 1.5), ("y", None, None, "?")])
    assert table.numeric == [False, True, True, False] and pages.CardTable(("a",), []).numeric == [
        False
    ]


def test_histograms_count_in_powers_of_two() -> None:
    histogram = pages.Histogram.of("x", np.array([3, 4, 5, 8, 9, 33]))
    assert (histogram.edges, histogram.counts) == ((4, 8, 16, 32, 64), (2, 2, 1, 0, 1))
    assert pages.Histogram.of("empty", np.array([0])).edges == (1,)


def test_the_turns_of_a_prompt_count_together_in_every_chunk() -> None:
    prompts = [
        row("prompts", 0, "train", "ab", "c", "defg"),
        *[row("prompts", 1, "train", "x")] * 2,
    ]
    table = pa.Table.from_pylist(
        [{name: prompt[name] for name in arrow_schema("prompts").names} for prompt in prompts],
        arrow_schema("prompts"),
    )
    whole = character_lengths("prompts", table)
    parts = [character_lengths("prompts", table.slice(i, 1))["prompt"] for i in range(3)]
    assert whole["prompt"].tolist() == np.concatenate(parts).tolist()
    section = cards.length_section({"prompts": whole})
    assert section.histograms[0].counts == (
        2,
        0,
        0,
        1,
    )  # of 1, 1 and 7 characters: up to 1, 2, 4, 8
    assert [table.rows for table in section.tables] == [[("prompts: prompt", 1, 7, 7, 7)]]
    assert (
        "validate.tokenizer names no tokenizer" in section.notes[1] and len(section.histograms) == 1
    )


def test_lengths_in_tokens_are_those_of_the_sequences_that_training_sees() -> None:
    pairs = [
        row("preferences", 0, "train", "hi?") | {"chosen": "ab", "rejected": "abcde"},
        row("preferences", 1, "train", "hi?", "ok", "so") | {"chosen": "a", "rejected": ""},
    ]
    clean = {"preferences": set_of(preferences=pairs).clean["preferences"]}
    # A token per character and per special token. Prompts: <|user|> h i ? <|assistant|>, the other
    # one of <|user|> h i ? <|assistant|> o k <|end|> <|user|> s o <|assistant|>. Each reply ends
    # with <|end|>.
    counted = count_tokens(clean, train_tokenizer([""], 261))
    replies = {"chosen": [3, 2], "rejected": [6, 1]}
    assert counted["preferences"].lengths == {
        "prompt": [5, 12],
        **replies,
        "prompt + reply": [11, 14],
    }
    assert counted["preferences"].metrics()["prompt_and_reply_tokens_50"] == 11
    section = cards.length_section({}, counted, "bytes")
    assert section.tables[1].header[0] == "tokens"
    assert ("preferences: prompt + reply", 11, 14, 14, 14) in section.tables[1].rows
    histogram = next(h for h in section.histograms if h.title == "preferences: prompt (tokens)")
    assert (histogram.edges, histogram.counts) == ((8, 16), (1, 1))
    assert "the tokenizer bytes" in section.notes[1] and len(section.notes) == 2


def test_of_many_rows_some_are_tokenised_and_the_card_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf_core.data.dataset.COUNTED_ROWS", 3)
    prompts = [row("prompts", i, "train", "x" * i) for i in range(1, 10)]
    clean = {"prompts": set_of(prompts=prompts).clean["prompts"]}
    counted = count_tokens(clean, train_tokenizer([""], 261))
    assert counted["prompts"].lengths["prompt"] == [3, 7, 11]  # the first, the middle and the last
    assert (
        "prompts: tokens of 3 of 9 rows were counted, spread evenly."
        in cards.length_section({}, counted, "bytes").notes
    )


def test_rows_that_the_chat_template_refuses_are_counted_apart() -> None:
    tokenizer = train_tokenizer([""], 261)
    strict = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    tokenizer.chat_template = f"{strict}{tokenizer.chat_template}"
    prompts = [row("prompts", 1, "train", "a"), row("prompts", 2, "train", "secret", "b", "c")]
    clean = {"prompts": set_of(prompts=prompts).clean["prompts"]}
    counted = count_tokens(clean, tokenizer)
    assert counted["prompts"].lengths == {"prompt": [3]} and counted["prompts"].looked_at == 2
    (note,) = (
        note
        for note in cards.length_section({}, counted, "bytes").notes
        if note.startswith("prompts: 1 row has no tokens")
    )
    assert (
        "the chat template refuses a dialogue of the turns user, assistant, user" in note
        and "secret" not in note
    )


def test_bars_are_as_high_as_their_values() -> None:
    svg = str(pages.bar_chart(["<a>", "b", "$c$"], [1, 4, 0], "t"))
    bars = [
        [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
        for path in re.findall(r'd="(M [^"]* z) "', svg)
    ]
    heights = [max(ys) - min(ys) for ys in bars]
    assert heights[1] == pytest.approx(4 * heights[0]) and heights[2] == 0
    assert "<a>" not in svg and "<title>t; &lt;a&gt;: 1, b: 4, $c$: 0</title>" in svg
    assert (
        "var(--s0)" in svg
        and "#2a62c9" not in svg
        and svg == str(pages.bar_chart(["<a>", "b", "$c$"], [1, 4, 0], "t"))
    )


def test_the_licence_of_a_source_is_in_the_manifest_and_on_the_card(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pair = {"prompt": f"{name}?", "chosen": "x", "rejected": "y"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(pair) + "\n")
    sources = FileSources.model_validate(
        {"preferences": ["a.jsonl", {"path": "b.jsonl", "licence": "CC-BY-4.0"}]}
    )
    for licence, expected in (("MIT", ["MIT", "CC-BY-4.0"]), (None, ["not stated", "CC-BY-4.0"])):
        config = CollectConfig(source="files", files=sources, licence=licence)
        collect.run(
            config, Paths({}), Paths({"raw": tmp_path / "data/raw"}), RunContext(tmp_path / "work")
        )
        manifest = json.loads((tmp_path / "data/raw/manifest.json").read_text())
        (table,) = cards.source_section(manifest).tables
        assert [r[3] for r in table.rows if r[0] == "preferences"] == expected


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
AWS = "AKIAABCDEFGHIJKLMNOP"


def private_key(kind: str = "RSA PRIVATE KEY", end: bool = True) -> str:
    return f"-----BEGIN {kind}-----\n{BODY}\n{BODY}\n" + (f"-----END {kind}-----\n" if end else "")


@pytest.mark.parametrize(
    "key", [private_key(), private_key("PGP PRIVATE KEY BLOCK"), private_key("PRIVATE KEY")]
)
def test_a_private_key_is_taken_out_with_its_body(key: str) -> None:
    shown = excerpt(json.dumps({"reply": f"before {key} after"}))
    assert "MII" not in shown and "END" not in shown and TAKEN_OUT in shown
    assert "before" in shown and "after" in shown


def test_without_its_end_a_private_key_goes_on_to_the_end() -> None:
    assert (
        excerpt(json.dumps({"reply": f"x {private_key(end=False)}", "more": "y"}))
        == f'{{"reply": "x {TAKEN_OUT}'
    )


@pytest.mark.parametrize("before", ["\n", "\t", "\x1b", "\u2028", " ", ""])
def test_a_key_is_taken_out_whatever_escape_it_follows(before: str) -> None:
    for ascii_only in (True, False):
        assert AWS not in excerpt(
            json.dumps({"reply": f"the key is{before or ':'}{AWS}"}, ensure_ascii=ascii_only)
        )


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
        text = (
            (tmp_path / "data/card" / name).read_text().replace("\\\\", "\\")
        )  # as Markdown shows a backslash
        assert (
            AWS not in text and "\x00" not in text and "\x1b" not in text and "c" * 100 not in text
        )
        assert (
            TAKEN_OUT.strip("[]") in text
            and r"nul\x00 and \x1b" in text
            and "c" * 60 + "\u2026" in text
        )


def test_only_sentences_paths_and_long_words_break_anywhere() -> None:
    assert (
        not pages.is_long("preferences")
        and not pages.is_long("no_prefix_leakage")
        and not pages.is_long(12345678901234567890123)
    )
    assert pages.breakable("/a_b/<c>") == "/<wbr>a_<wbr>b/<wbr>&lt;c&gt;"
    assert pages.is_long("/data/of/a/folder/pairs.jsonl") and pages.is_long(
        "a sentence of many words that may fill several lines"
    )


@pytest.mark.parametrize("before", ["", "\\", "\\\\"])
def test_no_link_of_the_data_is_one_in_markdown(before: str) -> None:
    """A backslash of the data must not take away the one that escapes."""
    card = pages.DataCard(True, f"{before}[x](javascript:alert(1)) {before}`code` {before}<b>", [])
    written = pages.markdown(card, "Card", quotes=True)
    assert "[x]" in written
    for character in "[`":
        escapes = written[: written.index(character)]
        assert (len(escapes) - len(escapes.rstrip("\\"))) % 2 == 1
