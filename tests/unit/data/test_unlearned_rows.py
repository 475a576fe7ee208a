"""Rows that say that they are not to be learned, and rows that mean something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.reading import read, records_of

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.sources import read_sources, sources_by_kind
from rlhf_core.data.readers.detection import warnings_of
from rlhf_core.data.readers.residues import EARLIER_REPLIES
from rlhf_core.errors import DataError
from rlhf_extras.data_files.describe import as_text as inspected
from rlhf_extras.data_files.describe import describe_sources

TURN = {"role": "assistant", "content": "Rivers flow."}
SINGLE = {"prompt": "Why?", "response": "Because."}
PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
ORCA = {"input": "Why?", "chosen": "Because.", "rejected": "No."}


def dialogue(**flags: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Why?"}, TURN | flags]}


FLAGS = [  # a column, what says that the row is not to be learned, what says that it is
    *(
        ("train", False, True),
        ("trainable", "false", "true"),
        ("lossWeight", "0", "1"),
        ("loss_weight", 0.0, 1.0),
    ),
    *(
        ("train_on_turn", "no", "yes"),
        ("ignore", True, False),
        ("do_not_train", 1, 0),
        ("review_result", False, True),
    ),
    *(("status", "discarded", "submitted"), ("_status", "deleted", "completed")),
]
VERDICTS = [
    *(
        ("rating", 1, 5),
        ("rating", "2", "4"),
        ("stars", "★☆☆☆☆", "★★★★☆"),
        ("stars", "1/5", "9/10"),
    ),
    *(
        ("star_rating", "1 star", "5 stars"),
        ("thumbs", "down", "up"),
        ("thumbs_up", False, True),
        ("vote", -1, 1),
    ),
    *(("feedback", "negative", "positive"), ("reaction", "👎", "👍"), ("liked", "false", "true")),
]


@pytest.mark.parametrize(("name", "no", "yes"), FLAGS, ids=lambda value: str(value))
def test_a_turn_that_is_not_to_be_learned_is_no_demonstration(name: str, no: Any, yes: Any) -> None:
    result = read(
        "demonstrations", dialogue(**{name: yes}), dialogue(**{name: no}), dialogue(**{name: None})
    )
    assert result.positions == [1, 3] and not result.counts.unused and not result.refused
    assert [name in reason for reason in result.counts.dropped] == [True]
    assert [row["position"] for row in result.prompt_only] == [2], "its prompt can be used"
    assert len(read("prompts", dialogue(**{name: no})).rows) == 1
    shown = {
        "prompt": [{"role": "user", "content": "Why?"}],
        "rejected": [TURN | {"content": "No."}],
    }
    pairs = read(
        "preferences",
        shown | {"chosen": [TURN | {name: no}]},
        shown | {"chosen": [TURN | {name: yes}]},
    )
    assert pairs.positions == [2] and pairs.counts.dropped.total() == 1


@pytest.mark.parametrize(("name", "no", "yes"), [*FLAGS, *VERDICTS], ids=lambda value: str(value))
def test_a_row_that_is_not_to_be_learned_is_no_demonstration(name: str, no: Any, yes: Any) -> None:
    result = read(
        "demonstrations", SINGLE | {name: yes}, SINGLE | {name: no}, SINGLE | {name: float("nan")}
    )
    assert (
        result.positions == [1, 3]
        and not result.counts.unused.keys() - {name}
        and not result.refused
    )
    assert (
        result.counts.dropped.total() == 1 and len(read("pretrain", SINGLE | {name: no}).rows) == 0
    )


@pytest.mark.parametrize(
    "value",
    [
        *(
            "5" + " " * 1_000_000 + "x",
            " " * 1_000_000 + "stars" + " " * 1_000_000 + "x",
            "star " * 200_000 + "x",
        ),
        *("5 of " + "1" * 1_000_000 + "\nx", "1" + " " * 1_000_000 + "o", "1." * 500_000 + "x"),
    ],
    ids=["spaces", "spaces-around", "stars", "out-of-digits", "spaces-before-of", "digits"],
)
@pytest.mark.parametrize("name", ["rating", "stars"])
def test_a_long_rating_is_looked_through_once(name: str, value: str) -> None:
    # Time that grew with the square of its length would not end within an hour.
    assert read("demonstrations", SINGLE | {name: value}).positions == [1]


@pytest.mark.parametrize(
    ("name", "value"), [("loss_mask", [0, 1, 1]), ("trainable", "perhaps"), ("loss_weight", {})]
)
def test_a_flag_that_says_neither_is_refused_by_its_name(name: str, value: Any) -> None:
    result = read(
        "demonstrations", dialogue(**{name: value}) if value else dialogue(**{name: {"a": 1}})
    )
    assert [name in finding.reason for finding in result.refused] == [True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("score", 0.3),
            ("status", 7),
            ("quality", "low"),
            ("feedback", "Too long."),
            ("rating", 0.7),
        ),
        *(("weight", 0.5), ("split", "test"), ("inGsm8kTrain", True), ("finish_reason", "length")),
        ("instruct_reward", -5),
    ],
)
def test_a_flag_that_cannot_be_read_is_named_loudly(name: str, value: Any) -> None:
    counts = read("demonstrations", *[SINGLE | {name: value}] * 3).counts
    (warning,) = warnings_of(counts)
    assert warning.startswith(f"3: {name} may say") and counts.unused.keys() == {name}


@pytest.mark.parametrize("pair", [PAIR, ORCA], ids=["standard", "orca"])
@pytest.mark.parametrize(
    "flags",
    [
        *({name: (True, False)} for name in ("tie", "is_tie", "discarded", "is_deleted")),
        {"status": ("Tie", "accepted")},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_a_pair_that_is_not_to_be_learned_is_dropped(
    pair: dict[str, Any], flags: dict[str, Any]
) -> None:
    ((name, (no, yes)),) = flags.items()
    result = read("preferences", pair | {name: no}, pair | {name: yes})
    assert (
        result.positions == [2] and result.counts.dropped.total() == 1 and not result.counts.unused
    )
    assert len(read("prompts", pair | {name: no}).rows) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("score_chosen", "score_rejected"),
        ("chosenScore", "rejectedScore"),
        ("chosen-rating", "rejected-rating"),
        ("rejected_rank", "chosen_rank"),
    ],
)
def test_scores_of_the_replies_say_which_is_better_under_any_name(names: tuple[str, str]) -> None:
    result = read(
        "preferences", *(PAIR | dict(zip(names, (value, 3), strict=True)) for value in (5, 3, "1"))
    )
    assert (
        result.positions == [1] and result.counts.dropped.total() == 1 and not result.counts.unused
    )
    assert result.rows[0]["margin"] == (None if "chosen_rank" in names else 2)
    (refused,) = result.refused
    assert all(name in refused.reason for name in names)


@pytest.mark.parametrize(
    ("chosen", "rejected", "columns"),
    [
        ("response_a", "response_b", ("response_a", "response_b")),
        ("A", "B", ("a", "b")),
        ("0", "1", ("response_0", "response_1")),
        ("2", "1", ("answer1", "answer2")),
        ("gpt-4", "llama", ("llama", "gpt-4")),
    ],
)
def test_replies_that_only_name_columns_are_refused(
    chosen: str, rejected: str, columns: tuple[str, str]
) -> None:
    row = PAIR | {"chosen": chosen, "rejected": rejected}
    (refused,) = read("preferences", row | dict.fromkeys(columns, "Some reply.")).refused
    assert repr(chosen) in refused.reason and "name columns" in refused.reason
    assert len(read("preferences", row, row | dict.fromkeys(columns, "")).rows) == 2
    named = {name: name for name in PAIR}
    assert (
        len(read("preferences", row | dict.fromkeys(columns, "Some reply."), columns=named).rows)
        == 1
    )


@pytest.mark.parametrize("name", ["context", "systemMessage", "question"])
@pytest.mark.parametrize("row", [SINGLE, PAIR, {"prompt": "Why?"}])
def test_a_part_of_the_prompt_that_is_not_read_is_named(name: str, row: dict[str, Any]) -> None:
    kind = (
        "demonstrations" if "response" in row else "preferences" if "chosen" in row else "prompts"
    )
    result = read(kind, row | {name: "Rivers are water."}, row | {name: "Why?"}, row | {name: ""})
    (warning,) = warnings_of(result.counts)
    assert len(result.rows) == 3 and warning.startswith(f"1: {name} may be a part of the prompt")


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"question": "Why?", "input": "Rivers", "chosen": "a", "rejected": "b"}, "input"),
        (
            {"prompt": "Why?", "question": "Rivers", "responses": ["a", "b"], "scores": [2, 1]},
            "question",
        ),
        (
            {
                "question": "Why?",
                "instruction": "Answer.",
                "responses": ["a", "b"],
                "scores": [2, 1],
            },
            "question",
        ),
        (
            {
                "instruction": "Why?",
                "system_prompt": "Rhyme.",
                "generations": ["a", "b"],
                "ratings": [2, 1],
            },
            "system_prompt",
        ),
    ],
)
def test_of_two_columns_of_a_prompt_the_one_that_is_not_read_is_named(
    row: dict[str, Any], unread: str
) -> None:
    (warning,) = warnings_of(read("preferences", row).counts)
    assert warning.startswith(f"1: {unread} may be a part of the prompt")


def test_a_transcript_under_an_instruction_is_read() -> None:
    row = {
        "instruction": "\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: How?\n\nAssistant:",
        "input": "",
        "output": "So.",
    }
    assert set(read("demonstrations", row).counts.noticed) <= {EARLIER_REPLIES}


def test_turns_and_documents_beside_the_prompt_are_named() -> None:
    result = read(
        "preferences", PAIR | {"history": [["a", "b"]], "documents": ["Rivers are water."]}
    )
    assert sorted(warning.split()[1] for warning in warnings_of(result.counts)) == [
        "documents",
        "history",
    ]
    alpaca = {"instruction": "Why?", "input": "Rivers", "output": "So.", "history": [["a", "b"]]}
    both = read("demonstrations", alpaca, alpaca | {"history": [], "context": ""})
    assert set(both.counts.noticed) <= {EARLIER_REPLIES}


@pytest.mark.parametrize("name", ["rejected_response", "revision", "editedReply"])
def test_another_reply_beside_a_single_one_is_named(name: str) -> None:
    for row in (SINGLE, dialogue(), {"instruction": "Why?", "output": "Because."}):
        (warning,) = warnings_of(read("demonstrations", row | {name: "No."}, row).counts)
        assert warning.startswith(f"2: {name} may be a better or a worse reply")


@pytest.mark.parametrize("name", ["images", "tools", "imageUrl"])
@pytest.mark.parametrize(
    "row", [dialogue(), SINGLE, PAIR, {"prompt": "Why?"}, {"text": "See above."}]
)
def test_media_and_tools_of_a_row_are_refused_as_those_of_a_turn(
    name: str, row: dict[str, Any]
) -> None:
    kind = "prompts" if "prompt" in row else "pretrain" if "text" in row else "demonstrations"
    for value in (["a.jpg"], {"bytes": None, "path": "a.jpg"}, "a.jpg"):
        result = read(kind, row | {name: value})
        assert [name in finding.reason for finding in result.refused] == [True]
    for value in ([], None, "", "[]", {"bytes": None, "path": None}, [[]]):
        assert len(read(kind, row | {name: value}).rows) == 1


@pytest.mark.parametrize(
    "token", ["<image>", "<|image|>", "<video>", "<audio>", "<image><image>", "<|image_1|>"]
)
def test_a_placeholder_of_media_is_treated_as_the_media_are(token: str) -> None:
    """What it stands for may be in any column, or nowhere; training sees the token alone."""
    texts = f"{token}\nWhy?", f"Why? {token}", f"Look:\n {token}\nWhy?"
    for text in texts:
        asked = {"messages": [{"role": "user", "content": text}, TURN]}
        for kind, row in (
            ("prompts", {"prompt": text}),
            ("demonstrations", asked),
            ("preferences", PAIR | {"prompt": text}),
        ):
            (finding,) = read(kind, row).refused
            assert "<" in finding.reason and "training would not see" in finding.reason
        assert len(read("pretrain", {"text": text}).refused) == 1
        result = read("prompts", {"prompt": text}, columns={"prompt": "prompt"})
        assert len(result.rows) == 1 and "read as text" in warnings_of(result.counts)[0]
    inside = read("prompts", {"prompt": f"In {token} and the other, why?"})
    assert len(inside.rows) == 1 and inside.counts.noticed.total() == 1


@pytest.mark.parametrize(
    "text", ["<video>\n<source src=x>\n</video> Why?", "What are <images> and <img>?", "a <image b"]
)
def test_markup_is_no_placeholder(text: str) -> None:
    result = read("prompts", {"prompt": text})
    assert len(result.rows) == 1 and not result.counts.noticed


@pytest.mark.parametrize("marker", ["</s>", "<|im_end|>\n", "<｜end▁of▁sentence｜>", "[DONE]"])
def test_an_end_marker_that_an_export_wrote_is_taken_off_with_a_count(marker: str) -> None:
    for sides in (("chosen",), ("chosen", "rejected")):
        result = read("preferences", PAIR, PAIR | {side: PAIR[side] + marker for side in sides})
        assert [(row["chosen"], row["rejected"]) for row in result.rows] == [
            ("Because.", "No.")
        ] * 2
        assert [
            f"{marker.strip()} was taken off the end of {side}" in str(result.counts.noticed)
            for side in sides
        ]
        assert result.counts.noticed.total() == len(sides)
    twice = read("demonstrations", SINGLE | {"response": f"Because.{marker}{marker}"})
    assert twice.rows[0]["reply"] == "Because." and twice.counts.noticed.total() == 1
    turns = [
        {"role": "user", "content": "a"},
        TURN | {"content": f"b{marker}"},
        {"role": "user", "content": "c"},
    ]
    several = read("demonstrations", {"messages": [*turns, TURN | {"content": f"d{marker}"}]})
    assert [turn["content"] for turn in several.rows[0]["prompt"]] == ["a", "b", "c"]
    noticed = set(several.counts.noticed)
    assert several.rows[0]["reply"] == "d" and EARLIER_REPLIES in noticed and len(noticed) == 3
    assert read("pretrain", {"text": f"A text.{marker}"}).rows[0]["text"] == "A text."


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        *(
            (f"Because.{marker}", "Because.")
            for marker in ("<EOS>", "</S>", "<|EOT|>", "[done]", "<PAD><PAD>")
        ),
        *(
            (text, text)
            for text in ("It is <s>old</s>", "Write </s> at the end.", "a > b", "the list [1, 2]")
        ),
    ],
)
def test_end_markers_may_have_capitals_and_other_texts_keep_their_ends(
    text: str, kept: str
) -> None:
    result = read("demonstrations", SINGLE | {"response": text})
    assert result.rows[0]["reply"] == kept and result.counts.noticed.total() == (text != kept)


@pytest.mark.parametrize("word", ["NaN", "N/A", "undefined ", "{}"])
@pytest.mark.parametrize("side", ["chosen", "rejected", "prompt"])
def test_a_word_for_a_missing_value_is_noticed(word: str, side: str) -> None:
    result = read("preferences", PAIR, *[PAIR | {side: word}] * 2)
    (warning,) = warnings_of(result.counts)
    assert (
        warning.startswith("2: ")
        and side in warning
        and repr(word.strip()) in warning
        and len(result.rows) == 3
    )


@pytest.mark.parametrize("margin", [0, 0.0, "0", -0.0])
def test_a_margin_of_nothing_is_a_tie(margin: Any) -> None:
    result = read("preferences", PAIR | {"margin": margin}, PAIR | {"margin": 0.1})
    assert result.positions == [2] and [*result.counts.dropped.values()] == [1]
    assert len(read("demonstrations", PAIR | {"margin": margin}).rows) == 1


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [
        ("preferences", PAIR, "chosen"),
        ("preferences", PAIR, "rejected"),
        ("demonstrations", SINGLE, "response"),
    ],
)
def test_rows_without_a_reply_are_refused_and_do_not_change_the_format(
    missing: Any, kind: str, row: dict[str, Any], column: str, tmp_path: Path
) -> None:
    rows = [row | {column: missing if n % 3 == 0 else "text"} for n in range(9)]
    result = read(kind, *rows)
    assert len(result.rows) == 6 and {finding.reason for finding in result.refused} == {
        f"{column} is missing"
    }
    if missing is None:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
        (stored,) = read_sources(["x.parquet"], kind, tmp_path)
        assert (len(stored.rows), len(stored.refused)) == (6, 3)


@pytest.mark.parametrize("reply", [7, True, 1.5, {"a": 1}])
def test_a_reply_that_is_no_text_is_refused_and_the_file_is_not_taken_for_prompts(
    reply: Any, tmp_path: Path
) -> None:
    pairs = [PAIR | {"chosen": reply, "rejected": reply}] * 3
    for rows, kind in (
        (pairs, "preferences"),
        ([SINGLE | {"response": reply}] * 3, "demonstrations"),
    ):
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert sources_by_kind(["x.jsonl"], tmp_path, ReadOptions()).of(kind)
        assert len(read(kind, *rows).refused) == 3


@pytest.mark.parametrize(
    "names",
    [
        ("pos_resp", "neg_resp"),
        ("winner", "loser"),
        ("chosen_text", "rejected_text"),
        (" chosen", " rejected"),
        ("Chosen", "Rejected"),
    ],
)
def test_pairs_under_other_names_are_not_read_as_prompts(
    names: tuple[str, str], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}?", names[0]: "good", names[1]: "bad"} for n in range(3)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="look like a better and a worse reply") as refused:
        sources_by_kind(["x.jsonl"], tmp_path, ReadOptions())
    assert f"chosen={names[0]}" in str(refused.value)
    named = ReadOptions(columns={"prompt": "prompt", "chosen": names[0], "rejected": names[1]})
    assert sources_by_kind(["x.jsonl"], tmp_path, named).preferences
    assert sources_by_kind(["x.jsonl"], tmp_path, ReadOptions(), "prompts").prompts


TWO_REPLIES: list[dict[str, Any]] = [
    {"response_a": "so", "response_b": "no", "winner": "a"},
    {"output_1": "so", "output_2": "no", "preference": 1},
    {"answer_0": "so", "answer_1": "no", "label": 0},
    {"model_1_response": "so", "model_2_response": "no"},
    {"completion_A": "so", "completion_B": "no"},
    {"reply1": "so", "reply2": "no"},
    {"a": "so", "b": "no", "choice": "a"},
    {"choice": 1, "Left": "so", "right": "no"},
    {"model_1": "so", "model_2": "no", "Preferred": "model_2"},
    {"gpt": "so", "llama": "no", "winner": "llama"},
    {"completions": [{"text": "so", "score": 1}, {"text": "no", "score": 0}]},
    {"replies": ["so", "no"], "scores": [1, 0]},
    {"responses": '["so", "no"]', "scores": "[1, 0]"},
    {"messages": '[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]'},
    {
        "conversation": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So."},
        ]
    },
]


@pytest.mark.parametrize("columns", TWO_REPLIES, ids=lambda columns: next(iter(columns)))
def test_replies_of_no_known_form_are_not_read_as_prompts(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}?", **columns} for n in range(3)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = next(iter(columns))
    with pytest.raises(
        DataError, match=f"would be read as prompts, but .*'{name}'.* (like replies|better reply): "
    ):
        sources_by_kind(["x.jsonl"], tmp_path, ReadOptions())
    assert sources_by_kind(["x.jsonl"], tmp_path, ReadOptions(), "prompts").prompts
    text = inspected(describe_sources(["x.jsonl"], tmp_path), 999)
    assert "WARNING  3: " in text and f"'{name}'" in text
    # Two candidates with a verdict are a pair by another name.
    is_pair = not columns.keys().isdisjoint(
        {"winner", "preference", "label", "choice", "Preferred"}
    )
    assert ("response_0, response_1 and better_response_id (0 or 1)" in text) == is_pair


@pytest.mark.parametrize(
    "columns",
    [
        {"answer_type": "short", "output_format": "json"},
        {"reference_answer": "so"},
        {"response_1": "", "response_2": None},
        {"outputs": ["so"]},
        {"chosen": None, "rejected": None},
        {"ab": "so", "winners_of": "no"},
        {"a": "so", "b": "no"},
        {"topic": "so", "level": "no", "label": "easy"},
        {"w": 640, "l": 480, "good": 3, "bad": 1},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_other_columns_beside_prompts_do_no_harm(columns: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", **columns} for n in range(3)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert sources_by_kind(["x.jsonl"], tmp_path, ReadOptions()).prompts


@pytest.mark.parametrize(
    "name", ["answer", "Response", "response ", "target", "assistant", "chosen", "solution"]
)
def test_one_column_beside_prompts_that_may_be_the_reply_is_named(name: str) -> None:
    (warning,) = warnings_of(
        read("prompts", {"prompt": "Why?", name: "So."}, {"prompt": "How?"}).counts
    )
    assert warning.startswith(f"2: {name} may be the reply")
    named = read(
        "demonstrations",
        {"prompt": "Why?", name: "So."},
        columns={"prompt": "prompt", "reply": name},
    )
    assert named.rows[0]["reply"] == "So." and not warnings_of(named.counts)


@pytest.mark.parametrize(
    "text",
    [
        "prompt, chosen, rejected\nwhy?, so, no\n",
        "prompt , chosen ,rejected\nwhy?,so,no\n",
        'prompt, chosen, rejected\n"why?", "so", "no"\n',
        "prompt;chosen;rejected\nwhy?;so;no\n",
        '"prompt";"chosen";"rejected"\n"why?";"so";"no"\n',
        "prompt\tchosen\trejected\nwhy?\tso\tno\n",
        "prompt|chosen|rejected\nwhy?|so|no\n",
        "\ufeffprompt;chosen;rejected\r\nwhy?;so;no\r\n",
        "sep=;\r\nprompt;chosen;rejected\r\nwhy?;so;no\r\n",
        '\ufeff"sep=^"\nprompt^chosen^rejected\nwhy?^so^no\n',
        "prompt\u00a0,\u200bchosen,rejected\t\nwhy?,so,no\n",
        "\ufeff\ufeffprompt,chosen,rejected\nwhy?,so,no\n",
    ],
)
def test_spaces_and_other_separators_of_a_header_are_understood(text: str) -> None:
    (record,) = records_of("x.csv", text.encode())
    assert (record.value, record.problem) == (
        {"prompt": "why?", "chosen": "so", "rejected": "no"},
        "",
    )


def test_lines_below_a_line_that_names_the_separator_are_counted_as_in_the_file() -> None:
    good, short = records_of("x.csv", b"sep=;\nprompt;reply\nwhy?;so\nhow?\n")
    assert (good.position, short.position) == (3, 4) and "fewer fields" in short.problem


def test_a_text_with_commas_in_a_file_of_semicolons() -> None:
    (record,) = records_of("x.csv", b'prompt;reply\nwhy, oh why?;"so; and, so"\n')
    assert record.value == {"prompt": "why, oh why?", "reply": "so; and, so"}


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize("written", [json.dumps, repr, lambda turns: json.dumps(turns[0])])
def test_turns_that_are_written_out_as_text_are_named(column: str, written: Any) -> None:
    turns = [{"role": "user", "content": "Why?"}, TURN]
    with pytest.raises(DataError, match=f"'{column}' is a dialogue written out as text"):
        read("demonstrations", {column: written(turns)})
