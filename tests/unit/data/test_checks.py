"""Each check finds what it is for, and leaves ordinary text alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.stages.validate import ValidateConfig
from rlhf_core.data.schema import arrow_schema
from rlhf_core.data.validation.checks import check_frame, checks_for, roles_in_order

BASE: dict[str, Any] = {"id": "i", "margin": None, "category": "c", "source": "s", "group": "g"}
CONFIG = ValidateConfig(max_prompt_chars=20, max_reply_chars=60, max_turns=4)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def pair(**changes: Any) -> dict[str, Any]:
    return BASE | {"prompt": [user("hello")], "chosen": "good", "rejected": "bad"} | changes


def failed(*rows: dict[str, Any], kind: str = "preferences", config: ValidateConfig = CONFIG) -> list[set[str]]:
    """The columns that each row fails, read as the suites read them."""
    frame = check_frame(kind, [pa.Table.from_pylist(list(rows), schema=arrow_schema(kind))], config)
    failed: list[set[str]] = [set() for _ in rows]
    for check in checks_for(kind, config):
        for position, value in enumerate(frame[check.column]):
            good = value == 1 if check.is_flag else check.low <= value <= check.high
            if not good:
                failed[position].add(check.column)
    return failed


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
    assert failed(*(pair(chosen=text) for text in texts)) == [set()] * len(texts)


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"chosen": " \n"}, "chosen_not_empty"),
        ({"rejected": ""}, "rejected_not_empty"),
        ({"chosen": None}, "complete"),
        ({"prompt": [user(" ")]}, "prompt_not_empty"),
        ({"prompt": []}, "roles"),
        ({"prompt": None}, "complete"),
        ({"prompt": [user("a"), user("b")]}, "roles"),
        ({"prompt": [user("x" * 21)]}, "prompt_chars"),
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
        ({"chosen": "broken \ufffd"}, "no_control_characters"),
        ({"chosen": "Ã©cole"}, "no_mojibake"),
        ({"prompt": [user("donâ€™t")]}, "no_mojibake"),
        ({"chosen": "25 Â°C"}, "no_mojibake"),
        ({"chosen": "锟斤拷锟斤拷"}, "no_mojibake"),
        ({"chosen": "\u200b"}, "chosen_not_empty"),
        ({"rejected": " \ufeff\u200d\u2060\n"}, "rejected_not_empty"),
        ({"chosen": "\u3164\u2800"}, "chosen_not_empty"),
        ({"prompt": [user("\u200b")]}, "prompt_not_empty"),
    ],
)
def test_bad_rows(changes: dict[str, Any], column: str) -> None:
    good, bad = failed(pair(), pair(id="j", **changes))
    assert good == set()
    assert column in bad


@pytest.mark.parametrize(
    "secret",
    [
        "-----BEGIN RSA PRIVATE " + "KEY-----",
        "AKIA" + "Q" * 16,
        "sk-" + "a1" * 16,
        "sk-proj-" + "a1" * 16,
        "ghp_" + "a" * 36,
        "hf_" + "a" * 34,
        "xoxb-" + "1" * 12,
        "AIza" + "b" * 35,
    ],
)
def test_secrets_are_found_when_asked(secret: str) -> None:
    assert failed(pair(chosen=f"use {secret} now")) == [{"no_secrets"}]
    off = ValidateConfig(secrets=False)
    assert failed(pair(chosen=f"use {secret} now"), config=off) == [set()]


def test_mojibake_of_every_accented_letter_is_found() -> None:
    for letter in "éèüöñçàâêô’“—🙂":
        garbled = letter.encode().decode("cp1252", errors="ignore")
        if len(garbled) == len(letter.encode()):
            assert failed(pair(chosen=garbled)) == [{"no_mojibake"}], letter


def test_duplicates_keep_the_first_and_roles_count() -> None:
    rows = [pair(), pair(id="other", source="t"), pair(prompt=[{"role": "system", "content": "s"}, user("hello")])]
    assert failed(*rows) == [set(), {"not_duplicate"}, set()]


def test_a_pair_labelled_both_ways_is_refused_on_both_sides() -> None:
    rows = [pair(), pair(chosen="bad", rejected="good"), pair(prompt=[user("other")], chosen="bad", rejected="good")]
    assert failed(*rows) == [{"not_contradicted"}, {"not_contradicted"}, set()]
    assert failed(pair(chosen="x", rejected="x")) == [{"replies_differ"}], "equal replies are no contradiction"


def test_a_contradiction_may_differ_in_white_space() -> None:
    rows = [pair(), pair(prompt=[user("hello ")], chosen=" bad", rejected="good\n"), pair(chosen="better")]
    assert failed(*rows) == [{"not_contradicted"}, {"not_contradicted"}, set()]


def test_a_contradiction_may_differ_in_invisible_characters() -> None:
    rows = [pair(), pair(prompt=[user("\ufeffhello")], chosen="ba\u00add", rejected="good\u200d")]
    assert failed(*rows) == [{"not_contradicted"}, {"not_contradicted"}]


def test_an_empty_system_turn_is_no_reason_to_refuse() -> None:
    empty = {"role": "system", "content": ""}
    assert failed(pair(prompt=[empty, user("hello")])) == [set()]
    assert failed(pair(prompt=[empty, user(" ")])) == [{"prompt_not_empty"}]


def test_margin_may_be_missing_or_any_finite_number() -> None:
    assert failed(pair(), pair(margin=-2.5, chosen="better")) == [set(), set()]


@pytest.mark.parametrize(
    ("roles", "good"),
    [
        ("u", True),
        ("su", True),
        ("uau", True),
        ("suau", True),
        ("", False),
        ("s", False),
        ("a", False),
        ("ua", False),
        ("au", False),
        ("uu", False),
        ("usu", False),
        ("ssu", False),
        ("u?u", False),
    ],
)
def test_roles(roles: str, good: bool) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "?": "tool"}
    assert roles_in_order([names[role] for role in roles]) is good


def test_a_row_is_not_lost_because_a_refused_one_has_its_texts() -> None:
    """Of rows with the same texts, the first that is accepted stays; copies of refused ones are called so as before."""
    bad = pair(margin=float("nan"))
    assert failed(bad, pair(), pair(margin=1.0)) == [{"margin_finite"}, set(), {"not_duplicate"}]
    assert failed(pair(), bad) == [set(), {"margin_finite", "not_duplicate"}]
    assert failed(bad, bad, pair()) == [{"margin_finite"}, {"margin_finite", "not_duplicate"}, set()]
    warned = ValidateConfig(rules={"no_control_characters": "warn"})
    rows = pair(category="a\x00b"), pair()
    assert failed(*rows, config=warned) == [{"no_control_characters"}, {"not_duplicate"}], "a warned row is accepted"
    assert failed(*rows) == [{"no_control_characters"}, set()]


def test_replies_that_both_begin_with_the_prompt_are_warned_about() -> None:
    question = "Why is the sky blue?"
    repeated = pair(prompt=[user(question)], chosen=f"{question} Rayleigh.", rejected=f"{question} The sea.")
    assert failed(repeated) == [{"prompt_not_repeated"}]
    assert failed(repeated | {"rejected": "The sea."}) == [set()], "one reply may begin so"
    greeting = pair(prompt=[user("Hello")], chosen="Hello you", rejected="Hello!")
    assert failed(greeting) == [set()], "a short prompt is no sign of an error"
    (check,) = (check for check in checks_for("preferences", CONFIG) if check.column == "prompt_not_repeated")
    assert check.severity == "warn"


def test_other_kinds() -> None:
    demo = BASE | {"prompt": [user("hello")], "reply": "good"}
    assert failed(demo, demo, demo | {"reply": ""}, kind="demonstrations") == [
        set(),
        {"not_duplicate"},
        {"reply_not_empty"},
    ]
    assert failed(BASE | {"prompt": [user("a")]}, BASE | {"prompt": [user("b\x07")]}, kind="prompts") == [
        set(),
        {"no_control_characters"},
    ]
    assert failed(BASE | {"text": "t" * 100}, BASE | {"text": " "}, kind="pretrain") == [set(), {"text_not_empty"}]


def test_prompts_together_may_be_larger_than_an_array_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary arrow strings end at 2 GiB: the prompts of a data set are joined to large ones."""
    made: list[pa.DataType | None] = []
    array = pa.array

    def recorded(values: Any, type: pa.DataType | None = None, **more: Any) -> pa.Array:
        made.append(type)
        return array(values, type, **more)

    table = pa.Table.from_pylist([BASE | {"prompt": [user("a")]}], arrow_schema("prompts"))
    monkeypatch.setattr(pa, "array", recorded)
    check_frame("prompts", [table], CONFIG)
    assert pa.large_string() in made and pa.string() not in made


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from(["a", "b", " a", "a\n", ""])] * 3), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_copies_and_contradictions_are_found_in_whatever_parts_rows_arrive(
    rows: list[tuple[str, str, str]], size: int
) -> None:
    table = pa.Table.from_pylist(
        [pair(prompt=[user(prompt)], chosen=chosen, rejected=rejected) for prompt, chosen, rejected in rows],
        schema=arrow_schema("preferences"),
    )
    frame = check_frame("preferences", (table.slice(i, size) for i in range(0, len(rows), size)), CONFIG)
    assert frame["row_id"].tolist() == list(range(len(rows)))
    assert frame["not_duplicate"].tolist() == [int(row not in rows[:i]) for i, row in enumerate(rows)]
    spaced = [tuple(" ".join(text.split()) for text in row) for row in rows]
    contradicted = [(p, rejected, chosen) in spaced and chosen != rejected for p, chosen, rejected in spaced]
    assert frame["not_contradicted"].tolist() == [int(not found) for found in contradicted]
    assert frame["replies_differ"].tolist() == [int(chosen != rejected) for _, chosen, rejected in spaced]
