"""Readers take the prompt, the replies and their labels from a record, as they were written."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from unit.data.reading import read

HH = {"chosen": "\n\nHuman: Hi?\n\nAssistant: yes", "rejected": "\n\nHuman: Hi?\n\nAssistant: no"}
USER = {"role": "user", "content": "Hi?"}


@pytest.mark.parametrize(
    "prompt", ["Hi?", "\n\nHuman: Hi?", "\n\nHuman: Hi?\n\nAssistant:", [USER], "", None], ids=repr
)
def test_hh_rows_that_repeat_their_prompt_are_split_like_the_others(prompt: Any) -> None:
    result = read("preferences", HH | {"prompt": prompt})
    assert result.counts.format == "hh-rlhf" and not result.refused
    (row,) = result.rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([USER], "yes", "no")


def test_the_prompt_beside_hh_transcripts_may_be_their_first_or_last_question() -> None:
    before = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    rows = [
        {"chosen": f"{before} d", "rejected": f"{before} e", "prompt": prompt}
        for prompt in ("a", "c", before)
    ]
    result = read("preferences", *rows)
    assert [[turn["content"] for turn in row["prompt"]] for row in result.rows] == [
        ["a", "b", "c"]
    ] * 3


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("preferences", {"conversations": [{"from": "human", "value": "Hi?"}], **HH}),
        ("preferences", {"instruction": "Hi?", **HH}),
        (
            "preferences",
            {
                "prompt": [USER],
                "chosen": [{"role": "assistant", "content": HH["chosen"]}],
                "rejected": [],
            },
        ),
        ("demonstrations", {"prompt": "Hi?", "reply": HH["chosen"]}),
        ("demonstrations", {"prompt": "Hi?", "reply": HH["chosen"].lstrip()}),
        ("demonstrations", {"instruction": "Hi?", "output": HH["chosen"]}),
    ],
)
def test_a_transcript_never_becomes_a_reply(kind: str, row: dict[str, Any]) -> None:
    result = read(kind, row)
    assert not result.rows
    assert all("is a whole transcript" in refused.reason for refused in result.refused)


BAD_REPLIES = [
    {"prompt": "Q?", "completion": "bad", "label": False},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "bad"}], "label": "False"},
    {"prompt": "Q?", "response": "bad", "label": 0},
    {"messages": [USER, {"role": "assistant", "content": "bad"}], "kto_tag": False},
    {"instruction": "Q?", "output": "bad", "kto_tag": "false"},
    *(
        {"prompt": "Q?", "response": "bad", "label": label}
        for label in (
            " False",
            "False ",
            "0.0",
            "-1",
            -1,
            "no",
            "F",
            "undesirable",
            "Rejected",
            "bad",
            0.0,
            Decimal(0),
        )
    ),
    {"prompt": "Q?", "response": "bad", "label": True, "kto_tag": "no"},
]


@pytest.mark.parametrize("row", BAD_REPLIES, ids=str)
@pytest.mark.parametrize("kind", ["demonstrations", "pretrain"])
def test_a_reply_labelled_false_is_nothing_to_imitate(kind: str, row: dict[str, Any]) -> None:
    result = read(kind, row)
    assert not result.rows and not result.refused, "it is no bad row"
    assert dict(result.counts.dropped) == {"the reply is labelled false: nothing to imitate": 1}
    (prompt,) = read("prompts", row).rows
    prompt.pop("columns")  # for reward functions
    assert result.prompt_only == ([prompt | {"position": 1}] if kind == "demonstrations" else [])


@pytest.mark.parametrize(
    "label",
    [True, "true", " True ", "YES", "desirable", "chosen", 1, 1.0, "1.0", Decimal(1), None, ""],
    ids=repr,
)
def test_a_reply_labelled_true_or_not_at_all_is_a_demonstration(label: Any) -> None:
    assert (
        read("demonstrations", {"prompt": "Q?", "completion": "good", "label": label}).rows[0][
            "reply"
        ]
        == "good"
    )


UNKNOWN_LABELS = [
    *(
        "summarisation",
        "maybe",
        "2",
        "nan",
        2,
        0.4,
        1e300,
        float("nan"),
        Decimal("NaN"),
        Decimal("0.5"),
        [False],
        {},
    ),
    pytest.param(10**5000, id="long"),
]


@pytest.mark.parametrize("label", UNKNOWN_LABELS, ids=repr)
@pytest.mark.parametrize("kind", ["demonstrations", "pretrain"])
def test_a_reply_whose_label_says_neither_is_not_imitated(kind: str, label: Any) -> None:
    row = {"prompt": "Q?", "completion": "reply", "label": label}
    result = read(kind, row)
    (refused,) = result.refused
    assert (
        not result.rows
        and "says neither that the reply is good nor that it is bad" in refused.reason
    )
    assert refused.reason.startswith("label is ") and len(read("prompts", row).rows) == 1


CODE = "    if x:\n\treturn  1 \n"


def test_hh_keeps_the_white_space_of_turns_and_replies() -> None:
    """One space after the colon is the format's; all else is text."""
    before = f"\n\nHuman: Fix:\n{CODE}\n\nAssistant:\n{CODE}\n\nHuman:  and? \n\nAssistant:"
    (row,) = read(
        "preferences", {"chosen": f"{before} {CODE}", "rejected": f"{before}\n```\n{CODE}```\n"}
    ).rows
    assert [turn["content"] for turn in row["prompt"]] == [f"Fix:\n{CODE}", f"\n{CODE}", " and? "]
    assert (row["chosen"], row["rejected"]) == (CODE, f"\n```\n{CODE}```\n")


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        ("\n\nHuman: Hi? \n\nAssistant:", "Hi? "),
        ("\n\nHuman: Hi? \n", "Hi? \n"),
        ("\n\nHuman:  Hi?\n\nAssistant: ", " Hi?"),
        (" Hi?\n", " Hi?\n"),
    ],
)
def test_a_prompt_keeps_its_white_space(prompt: str, content: str) -> None:
    (row,) = read("preferences", {"prompt": prompt, "chosen": " a\n", "rejected": "\tb"}).rows
    assert row["prompt"] == [{"role": "user", "content": content}]
    assert (row["chosen"], row["rejected"]) == (" a\n", "\tb")


@pytest.mark.parametrize(
    "reply", ["\u200b", " \ufeff\u200d\n", "\u2060\u00ad", "\u3164", "\ufe0f"], ids=ascii
)
def test_hh_replies_that_show_nothing_are_empty(reply: str) -> None:
    row = HH | {"chosen": f"\n\nHuman: Hi?\n\nAssistant: {reply}"}
    assert [r.reason for r in read("preferences", row).refused] == [
        "the final reply of chosen is empty"
    ]


SAID = [USER, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("preferences", HH),
        ("preferences", {"prompt": "Hi?", "chosen": "yes", "rejected": "no"}),
        ("preferences", {"prompt": [USER], "chosen": "yes", "rejected": "no"}),
        (
            "preferences",
            {"chosen": SAID, "rejected": [USER, {"role": "assistant", "content": "no"}]},
        ),
        ("preferences", {"instruction": "Hi?", "chosen": "yes", "rejected": "no"}),
        (
            "preferences",
            {
                "conversations": [{"from": "human", "value": "Hi?"}],
                "chosen": "yes",
                "rejected": "no",
            },
        ),
        ("demonstrations", {"prompt": "Hi?", "reply": "yes"}),
        ("demonstrations", {"instruction": "Hi?", "output": "yes"}),
        ("demonstrations", {"messages": SAID}),
        ("prompts", {"prompt": "Hi?"}),
    ],
    ids=str,
)
def test_a_system_column_is_the_first_turn_in_every_format(kind: str, row: dict[str, Any]) -> None:
    (plain,) = read(kind, row).rows
    (result,) = read(kind, row | {"system": " Be brief.\n"}).rows
    assert result["prompt"] == [{"role": "system", "content": " Be brief.\n"}, *plain["prompt"]]
    assert (
        read(kind, row | {"system": ""}).rows == read(kind, row | {"system": None}).rows == [plain]
    )
