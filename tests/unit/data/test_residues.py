"""What exports leave in texts is counted, and the texts stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
from unit.data.reading import read

from rlhf_core.data.readers.detection import warnings_of
from rlhf_core.data.readers.residues import EARLIER_REPLIES

REPLIES = {
    "names": [
        "Assistant: So.",
        "AI: So.",
        "**Assistant:** So.",
        "assistant\n\nSo.",
        "GPT-4: So.",
        "助手：So.",
    ],
    "markers": ["### Response:\nSo.", "[/INST] So.", "<|endoftext|>So.", "<pad>So."],
    "failed": [
        "Error: 429 Too Many",
        "openai.error.RateLimitError: wait",
        "[ERROR] no",
        "Traceback (most recent call",
    ],
    "further turns": [
        "So.\n\nHuman:",
        "So.\n\nHuman: Oh?\n\nAssistant: Yes.",
        "So.\nUser: Oh?",
        "So.\n### Instruction:\nGo.",
    ],
    "templates": [
        "So.<|im_end|>\n<|im_start|>user\n",
        "So.<end_of_turn>\n<start_of_turn>user\nOh?",
        "So. [INST] Oh?",
    ],
    "ends": [
        "So.[/INST]",
        "So. END",
        "So.\n###",
        "So.### End",
        "So.<|diff_marker|>",
        "So.<|im_end",
        "So.<s>",
        "So. [SEP]",
    ],
    "escapes": ["It&#39;s so.", "a &lt; b", "So.&nbsp;", "So.&lt;/s&gt;"],
    "line breaks": ["First\\nsecond", "So.\\n"],
    "tokens": ["ItĠisĠsoĠthen", "▁It▁is▁so"],
    "code": ["{{response}}", "{reply}", "b'So.'"],
    "media": ["data:image/png;base64,iVBORw0KGgo"],
    "cells": ["x" * 32_767],
    "cells as text": [
        '="It is so."',
        '= "So."',
        "'It is so.",
        "'-No idea.",
        "It is_x000D_\nso.",
        "_x0009_So.",
    ],
    "lists": ["['good 1']", "['good' 'better']", '["So."]'],
}
TURNS = {
    "names": ["Human: Why?", "User: Why?", "user\nWhy?\nassistant\n"],
    "answers": ["Why?\n\nAssistant:", "Why?\n### Response:"],
    "ends": ["Why?</s>", "Why?<|eot_id|>", "Why?\n\n###\n\n", "Why? ->"],
    "templates": [
        "<|im_start|>user\nWhy?<|im_end|>",
        "[INST] Why? [/INST]",
        '{"role": "user", "content": "Why?"}',
    ],
    "lists": ['["Why?"]', "['Why?']"],
    "cells as text": ["'Why?", '="Why?"', "Why?_x000D_"],
    "pictures": ["![](a.png)\nWhy?", '<img src="a.png"> Why?', "Picture 1: <img>a.jpg</img>"],
}
ORDINARY = [
    *(
        "So.",
        "The end",
        "Is a < b && c > d?",
        "A: so",
        "Answer: 3",
        "x -> y",
        "# Title\nText",
        "AIs: many",
        "Line\nprint('\\n')",
    ),
    *(
        "'Tis so.",
        "'So', he said.",
        "'So' is a word",
        "'90s music",
        "==",
        'a = "b"',
        "__x000__",
        "' is a quote",
    ),
    *(
        "Human rights: a text",
        "The user: me",
        "R&D and AT&T; so",
        "[1, 2]",
        "`b'x'` is bytes",
        "Use {name}.",
        "x" * 32_768,
    ),
    *("The error: 42", "An Error occurs", "1. END of it", "Écrit Ġ", 'It says: "Assistant: so"'),
]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "text",
    [text for texts in REPLIES.values() for text in texts],
    ids=lambda text: ascii(text)[:40],
)
@pytest.mark.parametrize("side", ["chosen", "rejected", "reply"])
def test_what_an_export_left_in_a_reply_is_counted_by_side(text: str, side: str) -> None:
    if side == "reply":
        rows: list[dict[str, Any]] = [
            {"messages": [turn("user", "Why?"), turn("assistant", r)]} for r in (text, "So.")
        ]
    else:
        pair = {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}
        rows = [pair | {side: text}, pair]
    result = read("demonstrations" if side == "reply" else "preferences", *rows)
    assert [row[side] for row in result.rows] == [text, rows[1].get(side, "So.")], (
        "texts stay as they are"
    )
    warnings = warnings_of(result.counts)
    assert warnings and all(warning.startswith(f"1: {side} ") for warning in warnings)


@pytest.mark.parametrize(
    "text", [text for texts in TURNS.values() for text in texts], ids=lambda text: ascii(text)[:40]
)
def test_what_an_export_left_in_a_turn_of_the_user_is_counted(text: str) -> None:
    rows = [
        {"messages": [turn("user", asked), turn("assistant", "So.")]} for asked in (text, "Why?")
    ]
    result = read("demonstrations", *rows)
    assert [row["prompt"][0]["content"] for row in result.rows] == [text, "Why?"]
    warnings = warnings_of(result.counts)
    assert warnings and all(warning.startswith("1: a user's turn ") for warning in warnings)


@pytest.mark.parametrize("text", ORDINARY, ids=lambda text: ascii(text)[:40])
def test_nothing_is_said_of_an_ordinary_text(text: str) -> None:
    texts = [(text, "Yes."), ("Why?", text)]
    result = read(
        "demonstrations", *({"messages": [turn("user", u), turn("assistant", a)]} for u, a in texts)
    )
    assert result.rows[1]["reply"] == text and not result.counts.noticed


def test_a_few_texts_among_many_are_what_people_wrote() -> None:
    rows = [
        {"prompt": f"{n}?", "response": "Assistant: so." if n < 2 else "So."} for n in range(300)
    ]
    few, enough = read("demonstrations", *rows), read("demonstrations", *rows[:200])
    assert few.counts.noticed.total() == enough.counts.noticed.total() == 2
    assert not warnings_of(few.counts) and len(warnings_of(enough.counts)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.",
        "<s>[INST] Why? [/INST] So. </s>",
        "### Human: Why?\n### Assistant: So.",
        "\n\nHuman: Why?\n\nAssistant: So.",
        "Below is an instruction that describes a task.\n\n### Instruction:\nWhy?\n\n### Response:\nSo.",
        '[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]',
    ],
)
def test_a_dialogue_among_texts_for_pretraining_is_named(text: str) -> None:
    assert "1: text is a dialogue, and read as pretraining text" in str(
        warnings_of(read("pretrain", {"text": text}).counts)
    )
    assert not read("pretrain", {"text": "A chapter about users: it is long."}).counts.noticed


ASKED = "What is there behind the hill?"


@pytest.mark.parametrize("reply", [ASKED, f"{ASKED}\n", f"{ASKED} A river.", f"{ASKED}\nA river."])
def test_replies_that_are_or_repeat_the_prompt_are_counted(reply: str) -> None:
    for row in (
        {"prompt": ASKED, "response": reply},
        {"messages": [turn("user", ASKED), turn("assistant", reply)]},
    ):
        (warning,) = warnings_of(read("demonstrations", row).counts)
        assert warning.startswith("1: reply ") and "the prompt" in warning
    if (
        reply.strip() == ASKED
    ):  # of two replies that begin with the prompt the rule prompt_not_repeated warns
        for side in ("chosen", "rejected"):
            pair = {"prompt": ASKED, "chosen": "A river.", "rejected": "No idea."} | {side: reply}
            (warning,) = warnings_of(read("preferences", pair).counts)
            assert warning.startswith(f"1: {side} is the prompt")


def test_a_short_reply_may_begin_as_the_prompt() -> None:
    assert not read(
        "demonstrations", {"prompt": "Hello", "response": "Hello there."}
    ).counts.noticed


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[" + "</s>" * 50_000 + " ]",
            "x" + "<image>" * 30_000 + "x",
            "![" * 100_000,
            "#" * 200_000 + ":",
        ),
        *(
            "&" * 200_000,
            "A" + "\\n" * 1_000_000 + "\nB",
            "\\n" * 1_000_000 + "\n" + "\\n" * 1_000_000,
        ),
    ],
    ids=[
        "end-markers",
        "placeholders",
        "pictures",
        "hashes",
        "escapes",
        "written-breaks",
        "breaks-of-both-kinds",
    ],
)
def test_a_long_text_is_looked_through_once(text: str) -> None:
    result = read("demonstrations", {"messages": [turn("user", text), turn("assistant", text)]})
    assert result.rows[0]["reply"] == text


def test_that_only_the_last_of_several_replies_is_learned_is_said() -> None:
    first = [turn("user", "Why?"), turn("assistant", "So.")]
    result = read(
        "demonstrations", {"messages": [*first, turn("user", "And?"), turn("assistant", "More.")]}
    )
    assert [row["reply"] for row in result.rows] == ["More."]
    assert warnings_of(result.counts) == [f"1: {EARLIER_REPLIES}"]
    assert not warnings_of(read("demonstrations", {"messages": first}).counts)


@pytest.mark.parametrize("role", ["developer", "Developer", "system"])
def test_a_developers_turn_is_one_of_the_system(role: str) -> None:
    turns = [turn(role, "Be brief."), turn("user", "Why?"), turn("assistant", "So.")]
    result = read("demonstrations", {"messages": turns})
    assert [each["role"] for each in result.rows[0]["prompt"]] == ["system", "user"]
