"""Answers of the LLM judge on disk, one file for each by the hash of what was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.llm.endpoint import Completion, token_count
from rlhf_core.storage.files import atomic_write_json, read_json


class AnswerCache:
    """Keeps each answer as soon as it is there, so that an evaluation that was stopped asks for the others alone.

    Files are written atomically and hold the request beside the answer. Several processes may use the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Completion | None:
        """Return the answer to a request; None if there is none, or its file is damaged."""
        try:
            stored = read_json(self._path(key))
            completion = Completion(stored["text"], stored["prompt_tokens"], stored["completion_tokens"])
        except (DataError, KeyError, TypeError, ValueError, RecursionError, OSError):
            return None
        counts = completion.prompt_tokens, completion.completion_tokens
        are_counts = all(count is None or token_count(count) is not None for count in counts)
        return completion if isinstance(completion.text, str) and are_counts else None

    def put(self, key: str, request: dict[str, Any], completion: Completion) -> None:
        """Store the answer to a request."""
        answer = {
            "request": request,
            "text": completion.text,
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
        }
        atomic_write_json(self._path(key), answer)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
