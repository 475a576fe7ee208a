"""Prompts and sentences: nothing ambiguous, everything readable."""

from __future__ import annotations

from itertools import combinations

from rlhf_core.world import content as phrases
from rlhf_core.world.content import (
    HARMFUL_STEPS,
    PREFIXES,
    RECIPES,
    REQUESTS,
    VALUES,
    statements,
    stories,
    subjects,
    things,
)
from rlhf_core.world.questions import Kind, all_questions, is_world, normalise, parse_prompt, parse_reply, prompt_table


def test_every_prompt_reads_back_as_its_question() -> None:
    for question in all_questions():
        for prefix in PREFIXES:
            assert parse_prompt(question.with_prefix(prefix)) == question


def test_prompts_and_groups_are_distinct() -> None:
    questions = all_questions()
    assert len(prompt_table()) == len(questions) * len(PREFIXES)
    assert len({question.group for question in questions}) == len(questions)
    assert len({question.text for question in questions}) == len(questions)


def test_is_world() -> None:
    assert is_world("Hello. where is the  lamp?")
    assert not is_world("where is the moon?")
    assert not is_world("")


def test_no_sentence_has_two_meanings() -> None:
    families: dict[str, set[str]] = {
        "facts": {
            sentence
            for name in subjects()
            for attribute, values in VALUES.items()
            for value in values
            for sentence in statements(name, attribute, value)
        },
        "steps": {step for steps in RECIPES.values() for step in steps},
        "harm": set(HARMFUL_STEPS),
        "alternatives": set(REQUESTS.values()),
    }
    for name in ("OPENERS", "CLOSERS", "REFUSALS", "REASONS", "EVASIONS", "FILLERS", "RUDE"):
        families[name] = set(getattr(phrases, name))
    for one, other in combinations(families.values(), 2):
        assert not one & other
    assert len(families["steps"]) == 3 * len(RECIPES)
    assert len(families["alternatives"]) == len(REQUESTS)


def test_values_belong_to_one_attribute_and_facts_are_consistent() -> None:
    values = [value for options in VALUES.values() for value in options]
    assert len(values) == len(set(values))
    for known in things().values():
        assert all(known[attribute] in options for attribute, options in VALUES.items())
    for story in stories():
        assert story.value in VALUES[story.attribute]
    assert not set(things()) & {story.name for story in stories()}


def test_parse_reply_counts_words_and_finds_the_unfinished_tail() -> None:
    parsed = parse_reply("of course! First boil the water. and then")
    assert [sentence.kind for sentence in parsed.sentences] == [Kind.OPENER, Kind.STEP]
    assert (parsed.sentences[1].subject, parsed.sentences[1].detail) == ("make tea", "0")
    assert parsed.unfinished
    assert parsed.words == 8


def test_normalise_forgives_spacing_and_commas_only() -> None:
    assert normalise(" I am sorry,  but I cannot help with that .") == "i am sorry but i cannot help with that."
    assert parse_reply("the lamp ## is red.").sentences[0].kind is Kind.UNKNOWN
    assert parse_reply("the lamp,, is red.").sentences[0].kind is Kind.UNKNOWN
