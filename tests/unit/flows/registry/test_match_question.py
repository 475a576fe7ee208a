"""What a match is about: whatever changes its result makes it another question."""

from __future__ import annotations

from pathlib import Path

from mlflow.entities.model_registry import ModelVersion, ModelVersionTag

from flows.registry.match import match_question, question_digest
from flows.registry.stored_models import CONTENT_TAG


def test_changed_checks_are_another_question(tmp_path: Path) -> None:
    old, new = (ModelVersion("m", number, 0, tags=[ModelVersionTag(CONTENT_TAG, number)]) for number in ("1", "2"))
    lines, code, params = (tmp_path / name for name in ("checks.jsonl", "checks_of_match.py", "params.yaml"))
    digests = []
    for path, content in (
        (params, "evaluate: {}\n"),
        (lines, '{"prompt": "?", "require": {"max_words": 3}}\n'),
        (params, "evaluate:\n  verifiable: {path: checks.jsonl, functions: {f: 'checks_of_match:f'}}\n"),
        (code, "def f(prompt, reply):\n    return True\n"),
        (code, "def f(prompt, reply):\n    return False\n"),
        (lines, '{"prompt": "?", "require": {"max_words": 2}}\n'),
    ):
        path.write_text(content)
        digests.append(question_digest(match_question(tmp_path, new, old)) if params.exists() else "")
    assert digests[0] == digests[1], "a file that nothing names"
    assert len(set(digests[1:])) == 5
