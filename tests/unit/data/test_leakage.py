"""Rules about a whole set: leakage between splits, overlap with evaluation files, and near
duplicates by MinHash.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation_rows import dialogue, make_row, memory_rows, origins_of, row, set_of, suites_of

from rlhf_core.config import yaml_text
from rlhf_core.config.data import NearDuplicatesConfig, ValidateConfig
from rlhf_core.config.loading import check_params
from rlhf_core.config.paths import rebase_sources
from rlhf_core.data.collection.raw_folder import RawData
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.schema import PairUser
from rlhf_core.data.validation import similar_texts
from rlhf_core.data.validation.set_rules import (
    SetFindings,
    apply_set_rules,
    beginning_hashes,
    check_set,
    contamination,
    prefix_leakage,
    similar_prompts,
)
from rlhf_core.data.validation.similar_texts import CROWDED, SimilarTexts, shingle_hashes
from rlhf_core.data.validation.tables import Validated, validate
from rlhf_core.errors import DataError

SEARCH = NearDuplicatesConfig(search=True)


def test_prompts_that_are_the_beginning_of_a_held_out_one_and_the_reverse() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", "Hello?"),  # begins the test dialogue
            row(
                "preferences", 1, "train", "Hello?", "Hi.", "How  ARE you?", "Fine.", "Really?"
            ),  # which begins this
            row(
                "preferences", 2, "train", "Hello?", "Go away.", "Why?"
            ),  # shares the first turn alone
            row("preferences", 3, "train", "Other?"),
            row("preferences", 4, "test", "hello?", "Hi.", "How are you?"),
        ],
        demonstrations=[row("demonstrations", 5, "train", "Hello?")],
        prompts=[row("prompts", 6, "test", "Nothing of the kind?")],
    )
    found, counts = prefix_leakage(rows)
    assert {(b.rule, b.kind, b.number) for b in found} == {
        ("no_prefix_leakage", "preferences", 0),
        ("no_prefix_leakage", "preferences", 1),
        ("no_prefix_leakage", "demonstrations", 0),
        ("no_shared_first_turn", "preferences", 0),
        ("no_shared_first_turn", "preferences", 1),
        ("no_shared_first_turn", "preferences", 2),
        ("no_shared_first_turn", "demonstrations", 0),
    }
    test_id = make_row("preferences", 4, prompt=dialogue("hello?", "Hi.", "How are you?"))["id"]
    assert {b.other for b in found} == {test_id}
    assert "split test" in found[0].reason
    assert counts["preferences"] == {"test_prefix_leaks": 1, "test_first_turn_leaks": 1}
    assert counts["prompts"] == {"test_prefix_leaks": 0, "test_first_turn_leaks": 0}


def test_the_judges_pairs_are_held_out_from_the_reward_models() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", "A?", user=PairUser.REWARD),
            row("preferences", 1, "train", "A?", "B.", "C?", user=PairUser.JUDGE),
        ]
    )
    prefix = [b for b in prefix_leakage(rows)[0] if b.rule == "no_prefix_leakage"]
    assert [(b.number, b.reason.count("the judge's pairs")) for b in prefix] == [(0, 1)]


def test_turns_are_told_apart_by_where_they_end() -> None:
    assert beginning_hashes(["ab", "c", "d"])[1:] != beginning_hashes(["a", "bc", "d"])[1:]
    assert len(beginning_hashes(["a", "b", "c", "d"])) == 2, "a beginning ends with the user's turn"


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=12),
    st.randoms(),
)
def test_against_a_comparison_of_all_pairs(dialogues: list[list[str]], random: Any) -> None:
    odd = [turns if len(turns) % 2 else [*turns, "x"] for turns in dialogues]
    splits = [random.choice(["train", "test"]) for _ in odd]
    rows = set_of(
        demonstrations=[
            row("demonstrations", i, s, *t)
            for i, (s, t) in enumerate(zip(splits, odd, strict=True))
        ]
    )
    held_out = [t for s, t in zip(splits, odd, strict=True) if s == "test"]
    expected = {
        i
        for i, (s, t) in enumerate(zip(splits, odd, strict=True))
        if s == "train" and any(t == h[: len(t)] or h == t[: len(h)] for h in held_out)
    }
    assert {b.number for b in prefix_leakage(rows)[0] if b.rule == "no_prefix_leakage"} == expected


LONG = "Please explain to me in simple terms how the tides of the sea are made by the moon and the sun together"


def test_prompts_that_are_worded_nearly_alike() -> None:
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", f"{LONG} today?"),
            row(
                "preferences",
                1,
                "train",
                "How do I bake a loaf of bread with no yeast in an hour or two?",
            ),
            row("preferences", 2, "test", f"{LONG.upper()}?"),
            row("preferences", 3, "train", f"{LONG} tomorrow?", user=PairUser.JUDGE),
        ]
    )
    found = list(similar_prompts(rows, SEARCH))
    # Both resemble the test prompt. The judge's are held out from the reward model's, so row 0
    # resembles row 3 too.
    assert [(b.number, b.reason.rpartition(" of ")[2]) for b in found] == [
        (0, "split test"),
        (3, "split test"),
        (0, "the judge's pairs"),
    ]
    assert all(0.8 <= (b.similarity or 0) < 1 for b in found)


def test_equal_prompts_of_one_group_are_no_matter_of_similarity() -> None:
    rows = set_of(
        preferences=[row("preferences", i, "train", f"{LONG}?") for i in range(3)],
        prompts=[row("prompts", 9, "train", f"{LONG}?")],
    )
    assert not list(similar_prompts(rows, SEARCH))


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_prompts_are_compared_than_max_rows(limit: int) -> None:
    rows = set_of(
        prompts=[row("prompts", 0, "test", f"{LONG}?"), row("prompts", 1, "train", f"{LONG} now?")]
    )
    found = list(similar_prompts(rows, SEARCH.model_copy(update={"max_rows": limit})))
    assert len(found) == limit - 1


TIDES = f"{LONG}."
BREAD = "How do I bake a good loaf of bread at home?"
SHORT = "What is RLHF?"


def test_rows_of_training_that_overlap_are_named(tmp_path: Path) -> None:
    questions = [{"question": prompt, "answer": "?"} for prompt in (TIDES, SHORT, BREAD)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "broken.jsonl").write_text('{"prompt": "Is this read?"}\n{"prompt": \n')
    config = check_params(
        yaml_text.parse(
            "validate: {evaluation_files: [{path: eval.jsonl, columns: {prompt: question}}, broken.jsonl]}",
            "a file",
        )
    ).validate_
    rows = set_of(
        preferences=[
            row(
                "preferences",
                0,
                "train",
                "Nothing of the kind, I only ask how the weather will be in the north.",
            ),
            row("preferences", 1, "train", "what is rlhf ?"),
            row(
                "preferences", 2, "validation", "Tell me what RLHF is, what is RLHF?"
            ),  # a short prompt must be whole
            row("preferences", 3, "train", "Hi.", "Hello.", SHORT),
            row(
                "preferences",
                4,
                "train",
                "In short: in simple terms how the tides of the sea are made by the moon",
            ),
            row("preferences", 5, "train", "How do I bake a good loaf of bread at home today?"),
            row("preferences", 6, "test", TIDES),
        ],
        pretrain=[
            row("pretrain", 7, "train", "x") | {"text": f"Said one: {TIDES} Said the other: no."}
        ],
    )
    files = list(read_sources(config.evaluation_files, "prompts", tmp_path))
    found, overlaps = contamination(
        rows, files, NearDuplicatesConfig(shingle_words=2, similarity=0.75, permutations=512)
    )
    named = {(b.kind, b.number): (b.other, b.reason.startswith("nearly")) for b in found}
    assert named == {
        ("preferences", 1): ("eval.jsonl:2", False),
        ("preferences", 3): ("eval.jsonl:2", False),
        ("preferences", 4): ("eval.jsonl:1", False),
        ("preferences", 5): ("eval.jsonl:3", True),
        ("pretrain", 0): ("eval.jsonl:1", False),
    }
    assert [(f.source, f.prompts, f.refused, len(f.met)) for f in overlaps] == [
        ("eval.jsonl", 3, 0, 3),
        ("broken.jsonl", 1, 1, 0),
    ]


def test_without_evaluation_files_the_rule_is_not_checked() -> None:
    findings = check_set(
        set_of(prompts=[row("prompts", 0, "train", TIDES)]).clean, ValidateConfig(), suites_of()
    )
    assert "no_contamination" not in findings.checked["prompts"] and not findings.evaluation


def test_a_file_that_does_not_exist_is_named_with_its_parameter(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no file matches 'gone\.jsonl'.*correct it in validate\.evaluation_files"
    ):
        list(
            read_sources(["gone.jsonl"], "prompts", tmp_path, parameter="validate.evaluation_files")
        )


def test_a_new_workspace_finds_the_files() -> None:
    files = "[x.jsonl, {path: ../y.jsonl, format: prompt}, ~/z.jsonl, 'hub:a/b', {path: memory://e.jsonl}]"
    text = (
        f"validate: {{evaluation_files: {files}}}\ncollect: {{files: {{preferences: {files}}}}}\n"
    )
    moved = yaml_text.plain(
        yaml_text.parse(rebase_sources(text, Path("/a/b"), Path("/a/c/d")), "a file")
    )
    for listed in (moved["validate"]["evaluation_files"], moved["collect"]["files"]["preferences"]):
        paths = [source if isinstance(source, str) else source["path"] for source in listed]
        assert paths == [
            "../../b/x.jsonl",
            "../../y.jsonl",
            "~/z.jsonl",
            "hub:a/b",
            "memory://e.jsonl",
        ]


def test_a_new_workspace_finds_the_checks_and_keeps_annotations_of_its_own() -> None:
    text = "collect: {{annotations: {0}}}\nevaluate: {{verifiable: {{path: checks.jsonl}}}}\n"
    own = "data/annotations/*.jsonl"
    for pattern, expected in ((own, own), ("x.jsonl", "../../b/x.jsonl")):
        document = rebase_sources(text.format(pattern), Path("/a/b"), Path("/a/c/d"))
        moved = yaml_text.plain(yaml_text.parse(document, "a file"))
        assert moved["collect"]["annotations"] == expected
        assert moved["evaluate"]["verifiable"]["path"] == "../../b/checks.jsonl"
    for nothing in ("collect:\n", "evaluate:\n  verifiable:\n", "collect:\n  annotations:\n"):
        assert rebase_sources(nothing, Path("/a/b"), Path("/a/c/d")) == nothing


MINHASH = NearDuplicatesConfig(search=True, permutations=256)
WORDS = [f"w{i}" for i in range(1000)]


def hashes(text: str, size: int) -> set[int]:
    return set(shingle_hashes(list(text), size).tolist())


def test_shingles_are_runs_of_words() -> None:
    assert len(hashes("abcde", 3)) == 3
    assert len(hashes("ababab", 2)) == 2, "ab and ba"
    assert len(hashes("xabc", 3) & hashes("abcy", 3)) == 1
    assert len(hashes("a", 3)) == 1 and not hashes("", 3)
    assert hashes("ab", 3) != hashes("ba", 3), "of fewer words than a run the whole text"


@pytest.mark.parametrize("shared", [50, 80, 95])
def test_the_estimate_is_the_jaccard_similarity_of_the_shingles(shared: int) -> None:
    # With runs of one word, two sets of 100 words that share n have similarity n / (200 - n).
    texts = SimilarTexts(NearDuplicatesConfig(shingle_words=1, permutations=256, similarity=0.2))
    texts.add(0, texts.signature(" ".join(WORDS[:100])))
    similar = texts.most_similar(texts.signature(" ".join(WORDS[100 - shared : 200 - shared])))
    expected = shared / (200 - shared)
    assert similar is not None
    assert similar[1] == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 256))


def test_the_signature_of_a_long_text_is_made_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = SimilarTexts(MINHASH)
    whole = texts.signature(" ".join(WORDS))
    monkeypatch.setattr(similar_texts, "SHINGLES", 7)
    assert (texts.signature(" ".join(WORDS)).hashvalues == whole.hashvalues).all()


def test_texts_below_the_limit_are_not_similar_and_equal_ones_are() -> None:
    texts = SimilarTexts(MINHASH)
    texts.add(3, texts.signature("one two three four five six"))
    assert texts.most_similar(texts.signature("seven eight nine ten eleven")) is None
    same = texts.most_similar(texts.signature("One two  three\nfour FIVE six"))
    assert same == (3, 1.0)


def test_the_index_stays_small_where_all_texts_are_alike() -> None:
    # 300 texts that share nine in ten shingles pairwise but are no near duplicates: without a
    # bound, each lookup would compare with all others.
    texts = SimilarTexts(NearDuplicatesConfig(shingle_words=1, similarity=0.95))
    kept = 0
    for i in range(300):
        before = len(texts)
        texts.add(i, texts.signature(" ".join([*WORDS[:90], *(f"own{i}-{k}" for k in range(5))])))
        kept += len(texts) - before
    assert CROWDED <= kept < 300


STORY = (
    "Once upon a time a fox met a crow on a tree with a piece of cheese, and asked it to sing a song for all. "
    * 2
)


def found(**settings: object) -> tuple[Validated, SetFindings]:
    """Check 3 rows of preferences: the second is nearly a copy of the first."""
    rows = [
        make_row(
            "preferences", 900, chosen=f"{STORY} The crow sang about fifty songs.", rejected="No."
        ),
        make_row(
            "preferences", 900, chosen=f"{STORY} The crow sang about sixty songs.", rejected="No."
        ),
        make_row("preferences", 901, chosen=f"{STORY[::-1]}.", rejected="No."),
    ]
    stored = {"preferences": memory_rows("preferences", rows, origins_of("pairs.jsonl", (1, 2, 3)))}
    raw = RawData(stored, Path("none"))
    suites = suites_of(**settings)
    with TemporaryDirectory() as folder:
        validated = validate(raw, suites, Path(folder))
        findings = check_set(validated.clean, ValidateConfig.model_validate(settings), suites)
        apply_set_rules(validated, findings)
    return validated, findings


@pytest.mark.slow
def test_by_default_small_sets_are_compared_and_large_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validated, _ = found()
    assert validated.kinds["preferences"].warned["no_near_duplicates"] == 1
    monkeypatch.setattr("rlhf_core.config.data.AUTOMATIC_ROWS", 2)
    validated, findings = found()
    assert (
        "no_near_duplicates" not in validated.kinds["preferences"].warned and not findings.breaches
    )
    validated, _ = found(near_duplicates={"search": True})
    assert validated.kinds["preferences"].warned["no_near_duplicates"] == 1
    _, findings = found(rules={"no_near_duplicates": "refuse"})
    assert findings.breaches, "a rule that decides is applied to a set of any size"


def test_rows_that_are_nearly_copies_are_counted_and_stay() -> None:
    validated, findings = found(near_duplicates={"search": True})
    assert validated.kinds["preferences"].warned["no_near_duplicates"] == 1
    assert (
        findings.counts["preferences"]["near_duplicates_compared"]
        == 3
        == validated.clean["preferences"].num_rows
    )
    assert [b.number for b in findings.breaches] == [1] and not list(validated.quarantine())
    unwanted, _ = found(near_duplicates={"search": False})
    assert "no_near_duplicates" not in unwanted.kinds["preferences"].warned


@pytest.mark.slow
@pytest.mark.parametrize("severity", ["refuse", "fail"])
def test_rows_that_are_nearly_copies_are_refused_where_the_rule_says_so(severity: str) -> None:
    validated, _ = found(near_duplicates={"search": True}, rules={"no_near_duplicates": severity})
    ((row,),) = validated.quarantine()
    first, third = (
        i for part in validated.clean["preferences"].parts() for i in part.column("id").to_pylist()
    )
    assert row.reasons == [f"nearly a copy of an earlier row ({first})"]
    assert (row.source, row.position) == ("pairs.jsonl", 2) and row.id not in (first, third)
    assert validated.clean["preferences"].numbers.tolist() == [0, 2]
    assert validated.kinds["preferences"].failed["no_near_duplicates"] == 1
    assert validated.kinds["preferences"].quarantined_share == 0, "it is left out, but no bad row"


def flagged(*positions: int) -> list[int]:
    """Return which pairs to one prompt, that share replies as those of a ranking do, count as near
    duplicates.
    """
    replies = [f"{STORY} The {bird} sang." for bird in ("crow", "wren", "rook")]
    pairs = [(replies[0], replies[1]), (replies[0], replies[2]), (replies[1], replies[2])] * 2
    rows = [
        make_row("preferences", 7, chosen=better, rejected=worse)
        for (better, worse), _ in zip(pairs, positions, strict=False)
    ]
    config = ValidateConfig.model_validate({"near_duplicates": {"search": True}})
    stored = {
        "preferences": memory_rows("preferences", rows, origins_of("rankings.jsonl", positions))
    }
    findings = check_set(stored, config, suites_of())
    return [breach.number for breach in findings.breaches if breach.rule == "no_near_duplicates"]


def test_pairs_of_one_ranking_are_no_near_duplicates_of_each_other() -> None:
    assert flagged(4, 4, 4) == []
    assert flagged(4, 5, 6) == [1, 2], "rows of their own are"
    assert flagged(4, 4, 5) == [2], "a row behind the ranking that resembles it is"
    assert flagged(4, 4, 4, 5, 5, 5) == [3, 4, 5], (
        "and so are the pairs of a ranking that is nearly a copy"
    )
