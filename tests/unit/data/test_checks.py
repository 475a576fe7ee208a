"""Each check finds what it is for, and leaves ordinary text alone."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from validation_rows import memory_rows, suites_of

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.collection.raw_folder import RawData
from rlhf_core.data.schema import arrow_schema
from rlhf_core.data.validation.suites import column_schema
from rlhf_core.data.validation.tables import copies, read_columns, validate

BASE: dict[str, Any] = {
    "id": "i",
    "margin": None,
    "columns": None,
    "category": "c",
    "source": "s",
    "group": "g",
}
CONFIG = ValidateConfig(max_prompt_chars=20, max_reply_chars=60, max_turns=4)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def pair(**changes: Any) -> dict[str, Any]:
    return BASE | {"prompt": [user("hello")], "chosen": "good", "rejected": "bad"} | changes


def failed(
    *rows: dict[str, Any], kind: str = "preferences", config: ValidateConfig = CONFIG
) -> list[set[str]]:
    """The rules that each row breaks, as the project's suites say."""
    suites = suites_of(**config.model_dump(exclude_unset=True))
    with TemporaryDirectory() as folder:
        validated = validate(
            RawData({kind: memory_rows(kind, rows)}, Path(folder) / "none"), suites, Path(folder)
        )
        verdicts = validated.kinds[kind].verdicts.items()
        return [
            {
                rule.name
                for rule, verdict in verdicts
                if verdict.rows is not None and row in verdict.rows
            }
            for row in range(len(rows))
        ]


def test_ordinary_text_passes() -> None:
    texts = [
        "tab\tand\r\nnewline",
        "Ça va? École, Âge, Ãgua, naïve",
        "你好，世界",
        "emoji 👍🏽 ok",
        "25 °C, £5, “quoted”",
        "risk-free task-based",
        "page one\x0cpage two",
        "zero\u200bwidth",
        "👩\u200d💻",
    ]
    rows = [pair(chosen=text) for text in texts] + [pair(chosen="any margin", margin=-2.5)]
    rows.append(pair(prompt=[{"role": "system", "content": ""}, user("an empty system")]))
    assert failed(*rows) == [set()] * len(rows)


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"chosen": " \n"}, "chosen_not_empty"),
    ({"rejected": ""}, "rejected_not_empty"),
    ({"chosen": None}, "complete"),
    ({"prompt": [user(" ")]}, "prompt_not_empty"),
    ({"prompt": []}, "roles"),
    ({"prompt": None}, "complete"),
    ({"prompt": [user("a"), user("b")]}, "roles"),
    ({"prompt": [user("x" * 21)]}, "prompt_chars"),
    ({"prompt": [user("a"), {"role": "assistant", "content": "b"}] * 2 + [user("c")]}, "turns"),
    ({"chosen": "x" * 61}, "chosen_chars"),
    ({"rejected": "x" * 61}, "rejected_chars"),
    ({"chosen": "a  b", "rejected": " a\nb"}, "replies_differ"),
    ({"chosen": "same\u200b", "rejected": "same"}, "replies_differ"),
    ({"chosen": "caf\u00e9", "rejected": "cafe\u0301"}, "replies_differ"),
    ({"category": "AKIAABCDEFGHIJKLMNOP"}, "no_secrets"),
    ({"source": "AKIAABCDEFGHIJKLMNOP"}, "no_secrets"),
    ({"category": "a\x00b"}, "no_control_characters"),
    ({"source": "\x1b[31m"}, "no_control_characters"),
    ({"margin": float("nan")}, "margin_finite"),
    ({"margin": float("inf")}, "margin_finite"),
    ({"chosen": "a\x00b"}, "no_control_characters"),
    ({"chosen": "a\x1b[0m"}, "no_control_characters"),
    ({"chosen": "a\x0bb"}, "no_control_characters"),
    ({"chosen": "broken \ufffd"}, "no_control_characters"),
    ({"chosen": "Ã©cole"}, "no_mojibake"),
    ({"prompt": [user("donâ€™t")]}, "no_mojibake"),
    ({"chosen": "25 Â°C"}, "no_mojibake"),
    ({"chosen": "锟斤拷锟斤拷"}, "no_mojibake"),
    ({"chosen": "\u200b"}, "chosen_not_empty"),
    ({"rejected": " \ufeff\u200d\u2060\n"}, "rejected_not_empty"),
    ({"chosen": "\u3164\u2800"}, "chosen_not_empty"),
    ({"prompt": [user("\u200b")]}, "prompt_not_empty"),
    ({"prompt": [{"role": "system", "content": ""}, user(" ")]}, "prompt_not_empty"),
]


def test_bad_rows() -> None:
    good, *bad = failed(
        pair(), *(pair(id=str(i), **changes) for i, (changes, _) in enumerate(BAD_ROWS))
    )
    assert good == set()
    lacking = [
        (changes, rule, found)
        for (changes, rule), found in zip(BAD_ROWS, bad, strict=True)
        if rule not in found
    ]
    assert not lacking


SECRETS = [
    "-----BEGIN RSA PRIVATE " + "KEY-----",
    "AKIA" + "Q" * 16,
    "sk-" + "a1" * 16,
    "sk-proj-" + "a1" * 16,
    "ghp_" + "a" * 36,
    "hf_" + "a" * 34,
    "xoxb-" + "1" * 12,
    "AIza" + "b" * 35,
]


@pytest.mark.slow
def test_secrets_are_found_when_asked() -> None:
    rows = [pair(chosen=f"use {secret} now") for secret in SECRETS]
    assert failed(*rows) == [{"no_secrets"}] * len(rows)
    assert failed(*rows, config=ValidateConfig(secrets=False)) == [set()] * len(rows)


def test_mojibake_of_every_accented_letter_is_found() -> None:
    letters = [
        (letter, letter.encode().decode("cp1252", errors="ignore")) for letter in "éèüöñçàâêô’“—🙂"
    ]
    garbled = [text for letter, text in letters if len(text) == len(letter.encode())]
    assert failed(*(pair(chosen=text) for text in garbled)) == [{"no_mojibake"}] * len(garbled)


def test_duplicates_keep_the_first_and_roles_count() -> None:
    rows = [
        pair(),
        pair(id="other", source="t"),
        pair(prompt=[{"role": "system", "content": "s"}, user("hello")]),
    ]
    assert failed(*rows) == [set(), {"not_duplicate"}, set()]


def test_a_pair_labelled_both_ways_is_refused_on_both_sides() -> None:
    rows = [
        *[pair(), pair(chosen="bad", rejected="good"), pair(chosen="better")],
        *[
            pair(prompt=[user("other")], chosen="bad", rejected="good"),
            pair(chosen="x", rejected="x"),
        ],
        # It may differ in white space and in invisible characters.
        *[pair(prompt=[user("w")]), pair(prompt=[user("w ")], chosen=" bad", rejected="good\n")],
        *[
            pair(prompt=[user("i")]),
            pair(prompt=[user("\ufeffi")], chosen="ba\u00add", rejected="good\u200d"),
        ],
    ]
    both = {"not_contradicted"}
    equal = {"replies_differ"}  # which are no contradiction
    assert failed(*rows) == [both, both, set(), set(), equal, both, both, both, both]


ROLES = dict.fromkeys(("u", "su", "uau", "suau"), True)
ROLES |= dict.fromkeys(("", "s", "a", "ua", "au", "uu", "usu", "ssu", "u?u"), False)


def test_roles() -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "?": "tool"}
    prompts = [
        [{"role": names[role], "content": f"{i}"} for role in roles]
        for i, roles in enumerate(ROLES)
    ]
    found = failed(*(BASE | {"prompt": prompt} for prompt in prompts), kind="prompts")
    assert [("roles" not in rules) for rules in found] == [*ROLES.values()]


@pytest.mark.slow
def test_a_row_is_not_lost_because_a_refused_one_has_its_texts() -> None:
    """Of rows with the same texts, the first that is accepted stays; copies of refused ones are
    called so as before.
    """
    bad = pair(margin=float("nan"))
    assert failed(bad, pair(), pair(margin=1.0)) == [{"margin_finite"}, set(), {"not_duplicate"}]
    assert failed(pair(), bad) == [set(), {"margin_finite", "not_duplicate"}]
    assert failed(bad, bad, pair()) == [
        {"margin_finite"},
        {"margin_finite", "not_duplicate"},
        set(),
    ]
    warned = ValidateConfig(rules={"no_control_characters": "warn"})
    rows = pair(category="a\x00b"), pair()
    assert failed(*rows, config=warned) == [{"no_control_characters"}, {"not_duplicate"}], (
        "a warned row is accepted"
    )
    assert failed(*rows) == [{"no_control_characters"}, set()]


@pytest.mark.slow
def test_replies_that_both_begin_with_the_prompt_are_warned_about() -> None:
    question = "Why is the sky blue?"
    repeated = pair(
        prompt=[user(question)], chosen=f"{question} Rayleigh.", rejected=f"{question} The sea."
    )
    assert failed(repeated) == [{"prompt_not_repeated"}]
    assert failed(repeated | {"rejected": "The sea."}) == [set()], "one reply may begin so"
    greeting = pair(prompt=[user("Hello")], chosen="Hello you", rejected="Hello!")
    assert failed(greeting) == [set()], "a short prompt is no sign of an error"
    assert suites_of().severity("preferences", "prompt_not_repeated") == "warn"


def test_other_kinds() -> None:
    demo = BASE | {"prompt": [user("hello")], "reply": "good"}
    assert failed(demo, demo, demo | {"reply": ""}, kind="demonstrations") == [
        set(),
        {"not_duplicate"},
        {"reply_not_empty"},
    ]
    assert failed(
        BASE | {"prompt": [user("a")]}, BASE | {"prompt": [user("b\x07")]}, kind="prompts"
    ) == [
        set(),
        {"no_control_characters"},
    ]
    assert failed(BASE | {"text": "t" * 100}, BASE | {"text": " "}, kind="pretrain") == [
        set(),
        {"text_not_empty"},
    ]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(*[st.sampled_from(["a", "b", " a", "a\n", ""])] * 3), min_size=1, max_size=12
    ),
    st.integers(1, 5),
)
def test_copies_and_contradictions_are_found_whatever_the_parts(
    rows: list[tuple[str, str, str]], size: int
) -> None:
    table = pa.Table.from_pylist(
        [
            pair(prompt=[user(prompt)], chosen=chosen, rejected=rejected)
            for prompt, chosen, rejected in rows
        ],
        schema=arrow_schema("preferences"),
    )
    with TemporaryDirectory() as folder:
        parts = (table.slice(i, size) for i in range(0, len(rows), size))
        frame, hashes = read_columns("preferences", parts, Path(folder) / "rows.arrow")
        contradicted_by = frame["contradicted_by"].tolist()
    assert {pa.large_string()} == {
        column_schema("preferences").field(name).type for name in ("prompt", "chosen")
    }
    repeated = {i: rows.index(row) for i, row in enumerate(rows) if row in rows[:i]}
    assert copies(hashes.column("content"), np.ones(len(rows), dtype=bool)) == repeated
    spaced = [tuple(" ".join(text.split()) for text in row) for row in rows]
    contradicted = [
        (p, rejected, chosen) in spaced and chosen != rejected for p, chosen, rejected in spaced
    ]
    assert [isinstance(other, str) for other in contradicted_by] == contradicted
