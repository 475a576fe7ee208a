"""MinHash: the estimate of similarity, near duplicates among rows, and the bound on comparisons."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from validation_rows import make_row, memory_rows, origins_of, suites_of

from rlhf_core.config.data import NearDuplicatesConfig, ValidateConfig
from rlhf_core.data.validation import set_rules as minhash
from rlhf_core.data.validation.set_rules import (
    CROWDED,
    SetFindings,
    SimilarTexts,
    apply_set_rules,
    check_set,
    shingle_hashes,
)
from rlhf_core.data.validation.tables import RawData, Validated, validate

CONFIG = NearDuplicatesConfig(search=True, permutations=256)
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


def test_the_signature_of_a_long_text_is_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = SimilarTexts(CONFIG)
    whole = texts.signature(" ".join(WORDS))
    monkeypatch.setattr(minhash, "SHINGLES", 7)
    assert (texts.signature(" ".join(WORDS)).hashvalues == whole.hashvalues).all()


def test_texts_below_the_limit_are_not_similar_and_equal_ones_are() -> None:
    texts = SimilarTexts(CONFIG)
    texts.add(3, texts.signature("one two three four five six"))
    assert texts.most_similar(texts.signature("seven eight nine ten eleven")) is None
    same = texts.most_similar(texts.signature("One two  three\nfour FIVE six"))
    assert same == (3, 1.0)


def test_the_index_stays_small_where_all_texts_are_alike() -> None:
    # 300 texts that share nine in ten shingles pairwise but are no near duplicates: without a bound, each lookup
    # would compare with all others.
    texts = SimilarTexts(NearDuplicatesConfig(shingle_words=1, similarity=0.95))
    kept = 0
    for i in range(300):
        before = len(texts)
        texts.add(i, texts.signature(" ".join([*WORDS[:90], *(f"own{i}-{k}" for k in range(5))])))
        kept += len(texts) - before
    assert CROWDED <= kept < 300


STORY = "Once upon a time a fox met a crow on a tree with a piece of cheese, and asked it to sing a song for all. " * 2


def found(**settings: object) -> tuple[Validated, SetFindings]:
    """Check 3 rows of preferences: the second is nearly a copy of the first."""
    rows = [
        make_row("preferences", 900, chosen=f"{STORY} The crow sang about fifty songs.", rejected="No."),
        make_row("preferences", 900, chosen=f"{STORY} The crow sang about sixty songs.", rejected="No."),
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
def test_by_default_small_sets_are_compared_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    validated, _ = found()
    assert validated.warned_checks["preferences"]["no_near_duplicates"] == 1
    monkeypatch.setattr("rlhf_core.config.data.AUTOMATIC_ROWS", 2)
    validated, findings = found()
    assert "no_near_duplicates" not in validated.warned_checks["preferences"] and not findings.breaches
    validated, _ = found(near_duplicates={"search": True})
    assert validated.warned_checks["preferences"]["no_near_duplicates"] == 1
    _, findings = found(rules={"no_near_duplicates": "refuse"})
    assert findings.breaches, "a rule that decides is applied to a set of any size"


def test_rows_are_not_compared_where_that_is_not_wanted() -> None:
    validated, _ = found(near_duplicates={"search": False})
    assert "no_near_duplicates" not in validated.warned_checks["preferences"]


def test_rows_that_are_nearly_copies_are_counted_and_stay() -> None:
    validated, findings = found(near_duplicates={"search": True})
    assert validated.warned_checks["preferences"]["no_near_duplicates"] == 1
    assert findings.counts["preferences"]["near_duplicates_compared"] == 3 == validated.clean["preferences"].num_rows
    assert [b.number for b in findings.breaches] == [1] and not list(validated.quarantine())


@pytest.mark.slow
@pytest.mark.parametrize("severity", ["refuse", "fail"])
def test_rows_that_are_nearly_copies_are_refused_where_the_rule_says_so(severity: str) -> None:
    validated, _ = found(near_duplicates={"search": True}, rules={"no_near_duplicates": severity})
    ((row,),) = validated.quarantine()
    first, third = (i for part in validated.clean["preferences"].parts() for i in part.column("id").to_pylist())
    assert row.reasons == [f"nearly a copy of an earlier row ({first})"]
    assert (row.source, row.position) == ("pairs.jsonl", 2) and row.id not in (first, third)
    assert validated.clean["preferences"].numbers.tolist() == [0, 2]
    assert validated.failed_checks["preferences"]["no_near_duplicates"] == 1
    assert validated.quarantined_share("preferences") == 0, "it is left out, but no bad row"


def flagged(*positions: int) -> list[int]:
    """Return which pairs to one prompt, that share replies as those of a ranking do, count as near duplicates."""
    replies = [f"{STORY} The {bird} sang." for bird in ("crow", "wren", "rook")]
    pairs = [(replies[0], replies[1]), (replies[0], replies[2]), (replies[1], replies[2])] * 2
    rows = [
        make_row("preferences", 7, chosen=better, rejected=worse)
        for (better, worse), _ in zip(pairs, positions, strict=False)
    ]
    config = ValidateConfig.model_validate({"near_duplicates": {"search": True}})
    stored = {"preferences": memory_rows("preferences", rows, origins_of("rankings.jsonl", positions))}
    findings = check_set(stored, config, suites_of())
    return [breach.number for breach in findings.breaches if breach.rule == "no_near_duplicates"]


def test_pairs_of_one_ranking_are_no_near_duplicates_of_each_other() -> None:
    assert flagged(4, 4, 4) == []
    assert flagged(4, 5, 6) == [1, 2], "rows of their own are"
    assert flagged(4, 4, 5) == [2], "a row behind the ranking that resembles it is"
    assert flagged(4, 4, 4, 5, 5, 5) == [3, 4, 5], "and so are the pairs of a ranking that is nearly a copy"
