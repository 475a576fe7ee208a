"""Counterfactual pairs: each copy differs from its reply in the one thing that its kind says, in
any script.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from rlhf_core.config.gates import PROBES, WORLD_PROBES
from rlhf_core.data.schema import Message, Preference
from rlhf_core.training.reward.probes import (
    MOST_PAIRS,
    SENTENCE_MARKS,
    counterfactuals,
    drawn_rows,
    numbers_and_names,
    sentences_of,
    world_contrasts,
)
from rlhf_core.world import corpus, gold
from rlhf_core.world.questions import Kind, parse_prompt, parse_reply

CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "New Delhi", "Quito", "Bern")


def row(number: int, prompt: str, reply: str, group: str = "") -> Preference:
    return Preference(
        str(number),
        [Message("user", prompt)],
        reply,
        "no",
        None,
        "",
        "files",
        group or f"g{number}",
    )


def english(count: int) -> list[Preference]:
    """Replies with numbers, names, lists and line breaks."""
    return [
        row(
            i,
            f"Question {i}?",
            f"The road to {CITIES[i % 8]} is {1000 + i} km long. It was built in {1900 + i}.\n\n1. Take a map.\n"
            f"2. Go to {CITIES[(i + 3) % 8]}, then rest.",
        )
        for i in range(count)
    ]


def chinese(count: int) -> list[Preference]:
    return [
        row(i, f"问题{i}？", f"这条路长{1000 + i}公里。它建于{1900 + i}年。请带上地图！")
        for i in range(count)
    ]


def world(count: int) -> list[Preference]:
    made = corpus.preferences(3, count, contrast_share=0.5)
    return [
        Preference(
            **{
                **columns,
                "id": str(i),
                "prompt": [Message(**message) for message in columns["prompt"]],
            }
        )
        for i, columns in enumerate(made)
    ]


SETS = {"english": english(60), "chinese": chinese(60), "world": world(1000)}


@pytest.mark.parametrize("name", SETS)
def test_every_kind_is_formed_of_text_in_any_script(name: str) -> None:
    pairs = counterfactuals(SETS[name], seed=1)
    assert list(pairs) == list(PROBES)
    counts = {kind: len(made) for kind, made in pairs.items()}
    assert min(counts.values()) >= min(60, len(SETS[name])) and max(counts.values()) <= MOST_PAIRS
    by_id = {row.id: row for row in SETS[name]}
    for made in pairs.values():
        assert all(pair.rejected != pair.chosen == by_id[pair.id].chosen for pair in made)
        assert all(pair.prompt == by_id[pair.id].prompt for pair in made)


def test_the_same_seed_makes_the_same_pairs_and_another_one_others() -> None:
    rows = SETS["english"]
    assert counterfactuals(drawn_rows(rows, 5), 5) == counterfactuals(drawn_rows(rows, 5), 5)
    assert counterfactuals(rows, 5)["values_swapped"] != counterfactuals(rows, 6)["values_swapped"]


@pytest.mark.parametrize("name", SETS)
def test_shuffled_sentences_are_the_same_sentences_and_a_repeated_one_comes_twice(
    name: str,
) -> None:
    pairs = counterfactuals(SETS[name], seed=2)
    for pair in (pair for pair in pairs["sentences_shuffled"] if pair.chosen[-1] in SENTENCE_MARKS):
        own, shuffled = (
            [sentence.text for sentence in sentences_of(text)]
            for text in (pair.chosen, pair.rejected)
        )
        assert sorted(own) == sorted(shuffled) and own != shuffled
        assert pair.chosen.count("\n") == pair.rejected.count("\n")
    for pair in pairs["sentence_repeated"]:
        own, longer = (
            [sentence.text for sentence in sentences_of(text)]
            for text in (pair.chosen, pair.rejected)
        )
        assert len(longer) == len(own) + 1 and set(longer) == set(own)


@pytest.mark.parametrize("name", SETS)
def test_a_half_is_the_beginning_and_a_pleasantry_follows_the_whole(name: str) -> None:
    pairs = counterfactuals(SETS[name], seed=2)
    for pair in pairs["cut_in_half"]:
        assert pair.chosen.startswith(pair.rejected)
        assert 0.2 < len(pair.rejected) / len(pair.chosen) < 0.8
    for pair in pairs["pleasantry_appended"]:
        assert pair.rejected.startswith(pair.chosen)
        assert len(sentences_of(pair.rejected)) == len(sentences_of(pair.chosen)) + 2


def test_another_questions_reply_stands_as_often_on_either_side() -> None:
    """So a rule that reads replies alone is right in half."""
    rows = [
        row(i, f"Question {i // 2}?", f"Reply number {i}.", group=f"g{i // 2}") for i in range(80)
    ]
    pairs = counterfactuals(drawn_rows(rows, 1), seed=1)["other_question"]
    assert sorted(pair.chosen for pair in pairs) == sorted(pair.rejected for pair in pairs)
    of_reply = {row.chosen: row.group for row in rows}
    assert all(of_reply[pair.rejected] != pair.group for pair in pairs)


def test_a_swapped_value_is_one_number_or_name_of_the_set_wherever_it_stands() -> None:
    pairs = counterfactuals(SETS["english"], seed=3)["values_swapped"]
    known = {value.text for row in SETS["english"] for value in numbers_and_names(row.chosen)}
    for pair in pairs:
        own, swapped = (
            {value.text for value in numbers_and_names(text)}
            for text in (pair.chosen, pair.rejected)
        )
        assert len(own - swapped) == len(swapped - own) == 1 and swapped <= known
        assert re.findall(r"^\d+\.", pair.rejected, re.MULTILINE) == ["1.", "2."], (
            "items keep their numbers"
        )
    chinese_pairs = counterfactuals(SETS["chinese"], seed=3)["values_swapped"]
    assert all(
        re.sub(r"\d{4}", "", pair.chosen) == re.sub(r"\d{4}", "", pair.rejected)
        for pair in chinese_pairs
    )


def test_what_the_prompt_names_is_swapped_only_where_nothing_else_can_be() -> None:
    rows = [
        row(i, f"Tell me of {CITIES[i % 8]}.", f"we know {CITIES[i % 8]} by its {1900 + i} towers.")
        for i in range(40)
    ]
    for pair in counterfactuals(rows, seed=1)["values_swapped"]:
        assert pair.rejected.split()[:-2] == pair.chosen.split()[:-2]
    rows = [
        row(i, f"Tell me of {CITIES[i % 8]}.", f"we know {CITIES[i % 8]} by its towers.")
        for i in range(40)
    ]
    # The set has no other name of two words.
    assert len(counterfactuals(rows, seed=1)["values_swapped"]) == sum(
        "New" not in row.chosen for row in rows
    )


def test_words_that_fill_one_slot_are_values_and_words_of_the_language_are_none() -> None:
    colours = ("red", "blue", "green", "white", "brown", "black")
    rows = [row(i, f"Which colour has the {thing}?", f"the colour of the {thing} is {colour}.")
            for i, (thing, colour) in enumerate((t, c) for t in ("lamp", "boat", "frog") for c in colours)]  # fmt: skip
    pairs = counterfactuals(rows, seed=1)["values_swapped"]
    assert len(pairs) == len(rows)
    assert all(pair.rejected.rsplit(" ", 1)[0] == pair.chosen.rsplit(" ", 1)[0] for pair in pairs)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("We met in Paris in 1990, near New York, and I left.", ["1990", "Paris", "New York"]),
        ("1. First\n2) second 3.5 of GPT4 and 10:30", ["3.5", "10:30"]),
        ("Hello There. How are you, Tom? the end, Ann", ["Tom", "Ann"]),
        ("It weighs 5kg, or 3.5kg by GPT4.", ["5", "3.5"]),
        ("第115届国会发生在2017年。", ["115", "2017"]),
        ("", []),
    ],
)
def test_numbers_and_names(text: str, values: list[str]) -> None:
    found = numbers_and_names(text)
    assert [value.text for value in found] == values
    assert all(text[value.start :].startswith(value.text) for value in found)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("1. Wash it.\n2. Dry it.", ["1. Wash it.", "2. Dry it."]),
        ("你好。再见！ 好", ["你好。", "再见！", "好"]),
        ("It is 3.5 m\nlong", ["It is 3.5 m", "long"]),
        ("No", ["No"]),
        ("5", ["5"]),
        ("", []),
    ],
)
def test_sentences_with_their_separators_are_the_text(text: str, sentences: list[str]) -> None:
    found = sentences_of(text)
    assert [sentence.text for sentence in found] == sentences
    assert "".join(sentence.text + sentence.separator for sentence in found) == text


@pytest.mark.parametrize(
    "texts", [["yes"], ["no", "no", "no"], ["", " "], ["1. \n2. \n"], ["...", "?!"]]
)
def test_replies_that_lack_what_a_kind_needs_make_no_pair(texts: list[str]) -> None:
    made = counterfactuals([row(i, "x", text) for i, text in enumerate(texts)], seed=1)
    for kind in ("values_swapped", "cut_in_half", "sentence_repeated", "sentences_shuffled"):
        assert made[kind] == []


def test_one_of_each_question_is_drawn_before_a_second_one() -> None:
    rows = [row(i, f"Question {i % 7}?", f"Reply {i}.", group=f"g{i % 7}") for i in range(70)]
    drawn = drawn_rows(rows, seed=1)
    assert len({row.group for row in drawn[:7]}) == len({row.group for row in drawn[7:14]}) == 7


@pytest.fixture(scope="module")
def contrasts() -> dict[str, list[Preference]]:
    return world_contrasts(drawn_rows(SETS["world"], 1), seed=1)


def test_the_worlds_contrasts_are_right_beside_wrong_by_gold(
    contrasts: dict[str, list[Preference]],
) -> None:
    assert set(contrasts) == set(WORLD_PROBES)
    for kind, pairs in contrasts.items():
        assert len(pairs) >= 100 or kind == "world_howto"
        prompts = [pair.prompt[-1].content for pair in pairs]
        right, wrong = (
            np.array(
                [
                    gold.score(prompt, getattr(pair, side), True)
                    for prompt, pair in zip(prompts, pairs, strict=True)
                ]
            )
            for side in ("chosen", "rejected")
        )
        assert np.mean(right > wrong) > 0.98, kind


@pytest.mark.parametrize("kind", ["world_fact", "world_story", "world_howto"])
def test_only_the_content_of_a_contrast_differs(
    contrasts: dict[str, list[Preference]], kind: str
) -> None:
    for pair in contrasts[kind]:
        question = parse_prompt(pair.prompt[-1].content)
        assert question is not None and question.benign
        right, wrong = (parse_reply(text).sentences for text in (pair.chosen, pair.rejected))
        assert [meaning.kind for meaning in right] == [meaning.kind for meaning in wrong]
        assert all(
            a == b
            for a, b in zip(right, wrong, strict=True)
            if a.kind not in (Kind.FACT, Kind.STEP)
        )


def test_other_data_have_no_contrasts_of_the_world() -> None:
    assert world_contrasts(SETS["english"], seed=1) == {}
