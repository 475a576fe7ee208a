"""Published data sets: the better reply is chosen, and every record is accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.data import reading
from unit.data.reading import said, user

from rlhf_core.api.inputs import rows_of
from rlhf_core.config.data import DataSource, ReadOptions
from rlhf_core.data.collection.rows import FileRows, read_records
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.row_counts import Record
from rlhf_core.data.schema import Preference
from rlhf_core.errors import DataError

SAMPLES = Path(__file__).parent / "samples"
ANSWERS = {
    row["question"]: (row["chosen"], row["rejected"])
    for row in map(
        json.loads, (SAMPLES / "orca-dpo.jsonl").read_text(encoding="utf-8").splitlines()
    )
}


def read(name: str, kind: str = "preferences", **options: Any) -> FileRows:
    (result,) = read_sources([DataSource(path=f"{name}.jsonl", **options)], kind, SAMPLES)
    kept = (
        len(result.rows) + len(result.refused) + result.counts.dropped.total() + result.counts.cut
    )
    assert result.counts.records + result.counts.expanded == kept and not result.refused
    assert len(result.positions) == len(result.rows)
    return result


def parse(value: Any, kind: str = "preferences", **options: Any) -> FileRows:
    return reading.read(kind, value, **options)


@pytest.mark.parametrize(
    ("name", "options", "rows", "dropped"),
    [
        ("pku-saferlhf", {"dimension": "helpful"}, 10, 0),
        ("pku-saferlhf", {"dimension": "agreed"}, 7, 3),
        ("pku-saferlhf-single", {}, 10, 0),
        ("helpsteer2-preference", {}, 9, 1),
        ("helpsteer3-preference", {}, 9, 1),
        ("shp", {}, 10, 0),
        ("orca-dpo", {}, 10, 0),
        ("ultrafeedback-ratings", {}, 9, 1),
        ("ultrafeedback", {"pairs": "best_worst"}, 9, 1),
        ("ultrafeedback-binarized", {}, 9, 1),
        ("ultrafeedback-system-prompts", {"pairs": "best_worst"}, 9, 1),
        ("nectar", {"pairs": "best_worst"}, 10, 0),
        ("ranking", {}, 10, 0),
        ("turn-list-pair", {}, 10, 0),
    ],
)
def test_the_better_reply_is_chosen(
    name: str, options: dict[str, Any], rows: int, dropped: int
) -> None:
    result = read(name, **options)
    others = {
        "ultrafeedback-binarized": "conversational-implicit",
        "ultrafeedback-system-prompts": "ultrafeedback",
    }
    assert result.counts.format == others.get(name, name)
    assert (result.counts.records, len(result.rows), result.counts.dropped.total()) == (
        10,
        rows,
        dropped,
    )
    for row in result.rows:
        assert (row["chosen"], row["rejected"]) == ANSWERS[row["prompt"][-1]["content"]]


def test_a_dialogue_of_several_turns_keeps_its_roles() -> None:
    for name in ("helpsteer2-preference", "helpsteer3-preference", "turn-list-pair"):
        (row,) = [row for row in read(name).rows if "stain" in row["prompt"][-1]["content"]]
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
        assert row["prompt"][1]["content"] == "Hello. What can I do for you?"


def test_safety_and_helpfulness_are_chosen_between() -> None:
    helpful, safe = (read("pku-saferlhf", dimension=name).rows for name in ("helpful", "safe"))
    different = [i for i in range(10) if helpful[i]["chosen"] == safe[i]["rejected"]]
    assert different == [7, 8, 9]
    assert {row["category"] for row in helpful} == {"helpful"} and {
        row["category"] for row in safe
    } == {"safe"}
    assert len(read("pku-saferlhf", "prompts").rows) == 10
    with pytest.raises(
        DataError,
        match=r"several preferences; choose one of helpful, safe, agreed \(--dimension, or",
    ):
        read("pku-saferlhf")
    with pytest.raises(DataError, match="format shp, which has no dimension safe"):
        read("shp", dimension="safe")


def test_strengths_and_score_gaps_are_margins() -> None:
    for name in ("helpsteer2-preference", "helpsteer3-preference"):
        assert [row["margin"] for row in read(name).rows] == [3, 2, 1, 1, 2, 3, 1, 1, 2]
    assert [row["margin"] for row in read("ultrafeedback-binarized").rows[:3]] == [2.5, 3.0, 3.5]
    assert {row["margin"] for row in read("ultrafeedback-ratings").rows} == {2.5}
    assert [row["margin"] for row in read("ultrafeedback").rows[:3]] == [2.5, 5.5, 3.0]
    for name in ("nectar", "shp", "orca-dpo", "turn-list-pair"):
        assert {row["margin"] for row in read(name).rows} == {None}


def test_categories_are_those_of_the_set() -> None:
    assert [row["category"] for row in read("helpsteer3-preference").rows[:3]] == [
        "general",
        "code",
        "multilingual",
    ]
    assert {row["category"] for row in read("shp").rows} == {
        "askculinary_train",
        "askscience_train",
    }


@pytest.mark.parametrize(("pairs", "count"), [("all", 27), ("adjacent", 18), ("best_worst", 9)])
def test_a_ranking_gives_the_pairs_that_are_asked_for(pairs: str, count: int) -> None:
    result = read("ultrafeedback", pairs=pairs)
    assert (len(result.rows), result.counts.expanded) == (count, count - 9)
    assert dict(result.counts.dropped) == {"no reply is better than another": 1}
    better, worst = ANSWERS[result.rows[0]["prompt"][0]["content"]]
    middle = f"{better} I hope that this helps."
    expected = {
        "all": [(better, middle), (better, worst), (middle, worst)],
        "best_worst": [(better, worst)],
    }
    expected["adjacent"] = [(better, middle), (middle, worst)]
    first = [
        row for row, position in zip(result.rows, result.positions, strict=True) if position == 1
    ]
    assert [(row["chosen"], row["rejected"]) for row in first] == expected[pairs]


@pytest.mark.parametrize(
    "name", ["helpsteer2-preference", "helpsteer3-preference", "helpsteer-ratings", "shp"]
)
def test_every_prompt_can_be_used(name: str) -> None:
    assert len(read(name, "prompts").rows) == 10


@pytest.mark.parametrize("name", ["ultrafeedback", "nectar", "oasst-trees", "open-orca"])
def test_only_the_best_reply_is_a_demonstration(name: str) -> None:
    for row in read(name, "demonstrations").rows[-8:]:
        assert row["reply"] == ANSWERS[row["prompt"][-1]["content"]][0]


def test_message_trees_give_a_pair_wherever_replies_are_ranked() -> None:
    result = read("oasst-trees")
    assert (len(result.rows), result.counts.expanded, result.counts.dropped.total()) == (10, 1, 1)
    deep = result.rows[1]
    assert [turn["role"] for turn in deep["prompt"]] == ["user", "assistant", "user"]
    assert (deep["chosen"], deep["rejected"]) == ("Because it is so.", "No idea.")
    assert (
        len(read("oasst-trees", "demonstrations").rows)
        == len(read("oasst-trees", "prompts").rows)
        == 11
    )
    texts = {
        text
        for kind in ("preferences", "demonstrations")
        for text in map(str, read("oasst-trees", kind).rows)
    }
    assert not any("BUY MY BOOK" in text for text in texts), "deleted messages are left out"


@pytest.mark.parametrize("kind", ["preferences", "demonstrations", "prompts"])
def test_messages_are_joined_into_the_trees_that_they_come_from(kind: str) -> None:
    joined, trees = read("oasst-messages", kind), read("oasst-trees", kind)
    assert (joined.counts.format, joined.counts.records) == ("oasst-messages", 4)
    own = {"source": "", "columns": None}  # a tree has columns that no message has
    assert [row | own for row in joined.rows] == [
        row | own
        for row, position in zip(trees.rows, trees.positions, strict=True)
        if position <= joined.counts.records
    ]
    assert joined.rows[0]["id"] == trees.rows[0]["id"] and joined.positions[0] == 1


def message(name: str, parent: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"message_id": name, "parent_id": parent, "role": role, "text": f"text of {name}"} | more


def test_a_message_that_no_tree_reaches_is_refused() -> None:
    tree = [message("q", None, "prompter"), message("a", "q", rank=1), message("b", "q", rank=0)]
    lost = [
        message("c", "gone"),
        message("d", "c", "prompter"),
        message("e", "f"),
        message("f", "e"),
        tree[1],
    ]
    odd = [*lost, message("g", 5), {"prompt": "Q?"}]
    records = [
        Record(n, value) for n, value in enumerate([*odd[:2], tree[2], *odd[2:], *tree[1::-1]], 1)
    ]
    result = read_records(records, "preferences", "x", options=ReadOptions(format="oasst-messages"))
    (row,) = result.rows
    assert (row["prompt"][0]["content"], row["chosen"], row["rejected"]) == (
        "text of q",
        "text of b",
        "text of a",
    )
    leads = "its parents do not lead to the first message of a tree"
    assert [
        (refused.position, refused.reason.partition(" of the")[0]) for refused in result.refused
    ] == [
        (1, "its parent is not in the file"),
        (2, leads),
        (4, leads),
        (5, leads),
        (7, "its parent_id is not text"),
        (8, "does not match the format oasst-trees"),
        (9, "its message_id occurs twice"),
    ]
    assert result.counts.records + result.counts.expanded == len(result.rows) + len(result.refused)


def test_replies_to_different_system_prompts_are_paired_only_where_that_is_meant() -> None:
    name = "ultrafeedback-system-prompts"
    ignored, kept = read(name), read(name, system_prompts=True)
    assert {len(row["prompt"]) for row in ignored.rows} == {1} and len(ignored.rows) == 27
    # Of three replies the first two have one system prompt, the third another; the last record has
    # none.
    with_system = [row for row in kept.rows if row["prompt"][0]["role"] == "system"]
    assert {row["prompt"][0]["content"] for row in with_system} == {"Be helpful."}
    assert all(
        (row["chosen"], row["rejected"]) == ANSWERS[row["prompt"][1]["content"]]
        for row in with_system
    )
    best = read(name, "demonstrations", system_prompts=True).rows
    assert [turn["role"] for turn in best[0]["prompt"]] == ["system", "user"]
    assert [row["reply"] for row in best] == [
        row["reply"] for row in read(name, "demonstrations").rows
    ]


def test_a_prompt_that_two_texts_share_ends_at_a_word() -> None:
    result = read("standard-implicit")
    first, code = result.rows[0], result.rows[4]
    assert (first["prompt"][0]["content"], first["chosen"], first["rejected"]) == (
        "The sky is",
        " blue.",
        " green.",
    )
    assert (code["prompt"][0]["content"], code["chosen"]) == (
        "def add(a, b):\n    return a",
        " + b",
    )
    (row,) = parse({"chosen": "The sky is blue", "rejected": "The sky is black"}).rows
    assert (row["prompt"][0]["content"], row["chosen"]) == ("The sky is", " blue")
    (row,) = parse({"chosen": "天空是蓝色的。", "rejected": "天空是绿色的。"}).rows
    assert (row["prompt"][0]["content"], row["chosen"]) == ("天空是", "蓝色的。")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "helpsteer-ratings",
            "preferences",
            "HelpSteer2's comparisons are in its folder preference",
        ),
        ("helpsteer-ratings", "demonstrations", "the worst of them too"),
        ("open-orca", "preferences", "it can serve as demonstrations, pretrain, prompts"),
        ("stepwise", "preferences", "format stepwise, which holds no preferences.*not steps"),
    ],
)
def test_what_does_not_serve_is_refused_by_name(name: str, kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(name, kind)


DIALOGUE = reading.PAIR_FORMATS["conversational-implicit"]("Q?", "a", "b")


def test_the_library_names_records_that_prefer_no_reply() -> None:
    pair = {"prompt": "Q?", "chosen": "a", "rejected": "b", "score_chosen": 2}
    assert len(rows_of(Preference, [pair | {"score_rejected": 1}], "preferences")) == 1
    with pytest.raises(
        DataError,
        match=r"preferences: 1 of the records cannot be used \(both replies have the same",
    ):
        rows_of(Preference, [pair | {"score_rejected": score} for score in (1, 2)], "preferences")


def test_replies_may_be_the_whole_dialogue_after_an_explicit_prompt() -> None:
    (row,) = parse(DIALOGUE | {"prompt": [user("Q?")]}).rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([user("Q?")], "a", "b")
    (refused,) = parse(DIALOGUE | {"prompt": [user("Another?")]}).refused
    assert "chosen has 2 turns" in refused.reason
    (row,) = parse(
        {"prompt": [user("Q?")], "completion": DIALOGUE["chosen"]}, "demonstrations"
    ).rows
    assert (row["prompt"], row["reply"]) == ([user("Q?")], "a")


def test_parts_of_a_turn_are_joined() -> None:
    parts = [{"type": "text", "text": " Look:\n"}, {"type": "text", "text": "why?", "image": None}]
    (row,) = parse({"messages": [{"role": "user", "content": parts}, said("a")]}, "prompts").rows
    assert row["prompt"] == [user(" Look:\nwhy?")]


# A text with these marks is a transcript.
PLAIN = st.text().filter(reading.is_unmarked)
TEXTS = PLAIN.filter(lambda text: "Human:" not in text and "Assistant:" not in text)


# A blank prompt may lose its spaces: such a row is refused.
@given(
    TEXTS.filter(str.strip),
    TEXTS,
    TEXTS,
    st.sampled_from(sorted({*reading.PAIR_FORMATS} - {"hh-rlhf"})),
)
def test_texts_are_read_as_they_were_written(
    prompt: str, better: str, worse: str, name: str
) -> None:
    options = {"dimension": "safe"} if name == "pku-saferlhf" else {}
    (row,) = parse(reading.PAIR_FORMATS[name](prompt, better, worse), **options).rows
    assert row["prompt"] == [user(prompt)]
    assert (row["chosen"], row["rejected"]) == (better, worse)


@given(PLAIN, PLAIN, PLAIN)
def test_texts_with_a_shared_beginning_lose_nothing(shared: str, first: str, second: str) -> None:
    texts = shared + first, shared + second
    result = parse({"chosen": texts[0], "rejected": texts[1]})
    for row in result.rows:
        assert (
            row["prompt"][0]["content"] + row["chosen"],
            row["prompt"][0]["content"] + row["rejected"],
        ) == texts
    assert len(result.rows) + len(result.refused) == 1
