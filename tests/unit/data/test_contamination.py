"""Contamination: prompts of training that overlap with given evaluation files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from leakage_rows import row, set_of
from validation_rows import suites_of

from rlhf_core.config import yaml_text
from rlhf_core.config.data import NearDuplicatesConfig, ValidateConfig
from rlhf_core.config.loading import check_params, rebase_sources
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.validation.set_rules import check_set, contamination
from rlhf_core.errors import DataError

TIDES = "Please explain to me in simple terms how the tides of the sea are made by the moon and the sun together."
BREAD = "How do I bake a good loaf of bread at home?"
SHORT = "What is RLHF?"


def evaluation_files(folder: Path) -> None:
    prompts = [TIDES, SHORT, BREAD]
    (folder / "eval.jsonl").write_text("".join(json.dumps({"question": p, "answer": "?"}) + "\n" for p in prompts))
    (folder / "broken.jsonl").write_text('{"prompt": "Is this read?"}\n{"prompt": \n')


def test_rows_of_training_that_overlap_are_named(tmp_path: Path) -> None:
    evaluation_files(tmp_path)
    config = check_params(
        yaml_text.parse(
            "validate: {evaluation_files: [{path: eval.jsonl, columns: {prompt: question}}, broken.jsonl]}", "a file"
        )
    ).validate_
    rows = set_of(
        preferences=[
            row("preferences", 0, "train", "Nothing of the kind, I only ask how the weather will be in the north."),
            row("preferences", 1, "train", "what is rlhf ?"),
            row("preferences", 2, "validation", "Tell me what RLHF is, what is RLHF?"),  # a short prompt must be whole
            row("preferences", 3, "train", "Hi.", "Hello.", SHORT),
            row("preferences", 4, "train", "In short: in simple terms how the tides of the sea are made by the moon"),
            row("preferences", 5, "train", "How do I bake a good loaf of bread at home today?"),
            row("preferences", 6, "test", TIDES),
        ],
        pretrain=[row("pretrain", 7, "train", "x") | {"text": f"Said one: {TIDES} Said the other: no."}],
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
    findings = check_set(set_of(prompts=[row("prompts", 0, "train", TIDES)]).clean, ValidateConfig(), suites_of())
    assert "no_contamination" not in findings.checked["prompts"] and not findings.evaluation


def test_a_file_that_does_not_exist_is_named_with_its_parameter(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches 'gone\.jsonl'.*correct it in validate\.evaluation_files"):
        list(read_sources(["gone.jsonl"], "prompts", tmp_path, parameter="validate.evaluation_files"))


def test_a_new_workspace_finds_the_files() -> None:
    files = "[x.jsonl, {path: ../y.jsonl, format: prompt}, ~/z.jsonl, 'hub:a/b', {path: memory://e.jsonl}]"
    text = f"validate: {{evaluation_files: {files}}}\ncollect: {{files: {{preferences: {files}}}}}\n"
    moved = yaml_text.plain(yaml_text.parse(rebase_sources(text, Path("/a/b"), Path("/a/c/d")), "a file"))
    for listed in (moved["validate"]["evaluation_files"], moved["collect"]["files"]["preferences"]):
        paths = [source if isinstance(source, str) else source["path"] for source in listed]
        assert paths == ["../../b/x.jsonl", "../../y.jsonl", "~/z.jsonl", "hub:a/b", "memory://e.jsonl"]


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
