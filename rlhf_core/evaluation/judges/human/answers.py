"""Answers in filled forms: JSON lines, CSV, or Label Studio's JSON export."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.storage.files import read_json

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
            self.answers.append(Answer(pair.strip(), annotator, CHOICES[text], note))

    def problems(self) -> list[str]:
        """One line for each reason for which lines are left out."""
        return [
            f"{self.path.name}: {len(lines)} left out for {reason} (line {', '.join(map(str, lines[:LISTED]))}"
            f"{' …' if len(lines) > LISTED else ''})"
            for reason, lines in self.unusable.items()
        ]


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
    rows = _csv_rows if path.suffix == ".csv" else _json_rows
    for line, row in rows(path):
        if row is None:
            form.unusable.setdefault("no JSON object", []).append(line)
        else:
            who = annotator or str(row.get("annotator") or "").strip() or path.stem
            form.add(line, row.get("id"), who, row.get("choice"), row.get("comment"))
    return form


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8; save it as CSV UTF-8 or JSON lines") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            yield number, row if isinstance(row, dict) else None


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    text = _text(path)
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)  # spreadsheets write that of their language
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    if not {"id", "choice"} <= set(reader.fieldnames or ()):
        raise DataError(f"{path} has no columns id and choice; keep the header of the exported file")
    for row in reader:
        if any(row.values()):
            yield reader.line_num, row


def _read_label_studio(form: FilledForm, annotator: str | None) -> None:
    """Read the export named JSON, with one list of annotations per task."""
    tasks = read_json(form.path)
    if not isinstance(tasks, list) or not all(isinstance(task, dict) and "annotations" in task for task in tasks):
        raise DataError(f"{form.path} is no JSON export of Label Studio; export as JSON, not as JSON-MIN or CSV")
    for number, task in enumerate(tasks, start=1):
        data = task.get("data")
        pair = data.get("pair_id") if isinstance(data, dict) else None
        done = [a for a in task["annotations"] or () if isinstance(a, dict) and not a.get("was_cancelled")]
        if not done:
            form.add(number, pair, "", None)
        for annotation in done:
            who = _account(annotation.get("completed_by"))
            form.add(number, pair, annotator or who, _selected(annotation.get("result")))


def _account(completed_by: Any) -> str:
    """The e-mail address of an account where the export has it; Label Studio's own export has its number alone."""
    number = completed_by.get("id") if isinstance(completed_by, dict) else completed_by
    email = completed_by.get("email") if isinstance(completed_by, dict) else None
    return str(email or f"account {number}")


def _selected(result: Any) -> str | None:
    """The choice of one annotation; None if it has none, an unusable word if it selects a reply and a tie."""
    choices = set()
    for part in result if isinstance(result, list) else ():
        value = part.get("value") if isinstance(part, dict) else None
        if isinstance(value, dict):
            if value.get("selected") in SELECTED:
                choices.add(SELECTED[value["selected"]])
            choices.update(choice for choice in value.get("choices") or () if choice == "tie")
    return choices.pop() if len(choices) == 1 else " and ".join(sorted(choices)) or None
