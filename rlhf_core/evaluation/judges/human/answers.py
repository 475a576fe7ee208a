"""Answers in filled forms: JSON lines, CSV, or Label Studio's JSON export."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.data.readers.content import require_text
from rlhf_core.data.readers.csv_records import csv_records
from rlhf_core.data.readers.json_records import json_line_records
from rlhf_core.errors import DataError

CHOICES = {"1": "1", "1.0": "1", "2": "2", "2.0": "2", "tie": "tie"}
SELECTED = {"left": "1", "right": "2"}
LISTED = 5


@dataclass(frozen=True)
class Answer:
    """One annotator's choice (1, 2 or tie) on one pair."""

    pair: str
    annotator: str
    choice: str
    comment: str = ""


@dataclass
class FilledForm:
    """What a file holds: answers, how many questions are open, and the lines that could not be used by reason."""

    path: Path
    answers: list[Answer] = field(default_factory=list)
    unanswered: int = 0
    unusable: dict[str, list[int]] = field(default_factory=dict)

    def add(self, line: int, pair: Any, annotator: str, choice: Any, comment: Any = "") -> None:
        """Add what a line says; a choice that is none of the three is never guessed."""
        text = "" if choice is None else str(choice).strip().lower()
        if not isinstance(pair, str) or not pair.strip():
            self.unusable.setdefault("no id", []).append(line)
        elif not text:
            self.unanswered += 1
        elif text not in CHOICES:
            self.unusable.setdefault("a choice other than 1, 2 or tie", []).append(line)
        else:
            note = comment.strip() if isinstance(comment, str) else ""
            self.answers.append(Answer(pair.strip(), _writable(annotator), CHOICES[text], _writable(note)))

    def problems(self) -> list[str]:
        """One line for each reason for which lines are left out."""
        return [
            f"{self.path.name}: {len(lines)} left out for {reason} (line {', '.join(map(str, lines[:LISTED]))}"
            f"{' …' if len(lines) > LISTED else ''})"
            for reason, lines in self.unusable.items()
        ]


def _writable(text: str) -> str:
    """The text without lone surrogates, which JSON can hold and no file can."""
    return text.encode("utf-8", "replace").decode()


def read_form(path: Path, annotator: str | None = None) -> FilledForm:
    """Read a filled form.

    Args:
        path: A ``.jsonl``, ``.csv`` or ``.json`` file (of Label Studio).
        annotator: Who filled it; by default its column ``annotator``, in Label Studio the account, else the file's
            name.

    Raises:
        DataError: The file cannot be read, or is no such form.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    form = FilledForm(path)
    if path.suffix == ".json":
        _read_label_studio(form, annotator)
        return form
    if path.suffix not in (".jsonl", ".csv"):
        raise DataError(f"{path}: a filled form ends with .jsonl, .csv or .json (Label Studio)")
    for line, row in _csv_rows(path) if path.suffix == ".csv" else _json_rows(path):
        if isinstance(row, str):
            form.unusable.setdefault(row, []).append(line)
        else:
            who = annotator or str(row.get("annotator") or "").strip() or path.stem
            form.add(line, row.get("id"), who, row.get("choice"), row.get("comment"))
    return form


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Lines with their numbers, each an object, or why it is none."""
    for record in json_line_records(str(path), io.BytesIO(path.read_bytes())):
        is_row = isinstance(record.value, dict) and not record.problem
        yield record.position, record.value if is_row else "no JSON object"


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Rows with the numbers of their lines, each by the names of its columns, or what is wrong with it."""
    content = path.read_bytes()
    if content:
        require_text(str(path), content)
    header = content.split(b"\n", 1)[0]
    delimiter = max(",;\t", key=lambda mark: header.count(mark.encode()))  # spreadsheets write that of their language
    rows = [
        record
        for record in csv_records(str(path), io.BytesIO(content), delimiter)
        if any(record.value.values() if isinstance(record.value, dict) else record.value)
    ]
    if not all({"id", "choice"} <= row.value.keys() for row in rows if not row.problem) or not rows:
        raise DataError(f"{path} has no columns id and choice, or no rows; keep the header of the exported file")
    for row in rows:
        yield row.position, row.problem or row.value


def _read_label_studio(form: FilledForm, annotator: str | None) -> None:
    """Read the export named JSON, with one list of annotations per task."""
    try:
        tasks = json.loads(form.path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{form.path} is not valid JSON ({error}); export it from Label Studio again") from error
    if not isinstance(tasks, list) or not all(_is_task(task) for task in tasks):
        raise DataError(f"{form.path} is no JSON export of Label Studio; export as JSON, not as JSON-MIN or CSV")
    for number, task in enumerate(tasks, start=1):
        data = task.get("data")
        pair = data.get("pair_id") if isinstance(data, dict) else None
        done = [a for a in task["annotations"] if isinstance(a, dict) and not a.get("was_cancelled")]
        if not done:
            form.add(number, pair, "", None)
        for annotation in done:
            who = _account(annotation.get("completed_by"))
            form.add(number, pair, annotator or who, _selected(annotation.get("result")))


def _is_task(task: Any) -> bool:
    return isinstance(task, dict) and isinstance(task.get("annotations"), list)


def _account(completed_by: Any) -> str:
    """The e-mail address of an account where the export has it; Label Studio's own export has its number alone."""
    number = completed_by.get("id") if isinstance(completed_by, dict) else completed_by
    email = completed_by.get("email") if isinstance(completed_by, dict) else None
    return str(email or f"account {number}")


def _selected(result: Any) -> str | None:
    """The choice of one annotation; None if it has none, an unusable word if it selects a reply and a tie."""
    choices: set[str] = set()
    for part in result if isinstance(result, list) else ():
        value = part.get("value") if isinstance(part, dict) else None
        if isinstance(value, dict):
            choices.update(SELECTED[side] for side in SELECTED if value.get("selected") == side)
            choices.update({"tie"} if value.get("choices") == ["tie"] else ())
    return choices.pop() if len(choices) == 1 else " and ".join(sorted(choices)) or None
