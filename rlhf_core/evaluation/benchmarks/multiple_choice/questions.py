"""Read multiple-choice questions from files in C-Eval's format (Huang et al. 2023), and write them as dialogues."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import MultipleChoiceConfig
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import Message
from rlhf_core.data.text import has_visible_text, language_tag
from rlhf_core.errors import DataError
from rlhf_core.storage.file_patterns import expand

LETTERS = ("A", "B", "C", "D")
TEXT_COLUMNS = ("question", *LETTERS)
PART_OF_DATA = re.compile(r"_(dev|val|test)$")
UNNAMEABLE = re.compile(r"[^\w -]")
REMEDY = "correct evaluate.multiple_choice"

# By language of the question: what to do, and what comes before the answer.
INSTRUCTIONS = {"zh": ("以下是单项选择题，请选出其中的正确答案。", "答案：")}
DEFAULT_INSTRUCTION = ("This is a multiple-choice question. Answer with the letter of the right choice.", "Answer:")


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """A question with four choices, and the position of the right one."""

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int
    subject: str

    def turn(self, score: str) -> str:
        """Return the user's turn: with the choices where their letters are scored, else the question alone."""
        if score == "text":
            return self.text
        instruction, before_answer = INSTRUCTIONS.get(language_tag(self.text), DEFAULT_INSTRUCTION)
        listed = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True)]
        return "\n".join([instruction, "", self.text, *listed, before_answer])

    def answers(self, score: str) -> tuple[str, ...]:
        """Return the replies whose log-likelihoods are compared, in the order of the choices."""
        return self.choices if score == "text" else LETTERS


@dataclass(frozen=True)
class MultipleChoiceSet:
    """Questions, the answered questions that come before each by subject, and what is scored."""

    questions: Sequence[MultipleChoiceQuestion] = ()
    examples: Mapping[str, Sequence[MultipleChoiceQuestion]] | None = None
    score: str = "letter"

    @classmethod
    def load(cls, config: MultipleChoiceConfig | None, workspace: Path) -> MultipleChoiceSet:
        """Read all files; nothing without settings.

        Raises:
            DataError: A file is missing or not in the format, or a subject lacks examples; the message names the first.
        """
        if config is None:
            return cls()
        questions = [row for rows in _by_subject(config.files, workspace).values() for row in rows]
        subjects = dict.fromkeys(row.subject for row in questions)
        known = _by_subject(config.few_shot_files, workspace) if config.few_shot else {}
        examples: dict[str, Sequence[MultipleChoiceQuestion]] = {}
        for subject in subjects if config.few_shot else ():
            rows = next(iter(known.values())) if len(known) == 1 else known.get(subject, [])
            if len(rows) < config.few_shot:
                raise DataError(
                    f"the subject {subject} has {len(rows)} examples in few_shot_files, but few_shot is "
                    f"{config.few_shot}; {REMEDY}"
                )
            examples[subject] = rows[: config.few_shot]
        return cls(questions, examples, config.score)

    def dialogues(self) -> list[list[Message]]:
        """Return the prompt of each question: its examples as earlier turns, then the question."""
        dialogues = []
        for question in self.questions:
            messages = []
            for example in (self.examples or {}).get(question.subject, ()):
                messages.append(Message("user", example.turn(self.score)))
                messages.append(Message("assistant", example.answers(self.score)[example.answer]))
            dialogues.append([*messages, Message("user", question.turn(self.score))])
        return dialogues


def _by_subject(patterns: Sequence[str], workspace: Path) -> dict[str, list[MultipleChoiceQuestion]]:
    files = dict.fromkeys(file for pattern in patterns for file in expand(pattern, workspace, REMEDY))
    questions: dict[str, list[MultipleChoiceQuestion]] = {}
    for file in files:
        questions.setdefault(subject_of(file), []).extend(read_questions(file))
    return questions


def subject_of(file: Path) -> str:
    """Return the subject that a file's name tells: ``accountant`` for ``accountant_val.csv``."""
    return UNNAMEABLE.sub("_", PART_OF_DATA.sub("", file.name.split(".")[0]))


def read_questions(file: Path) -> list[MultipleChoiceQuestion]:
    """Read a file of questions; any kind of table that data files may be, with C-Eval's columns.

    Raises:
        DataError: It cannot be read, or a row is no question; the message has path, line and column of the first.
    """
    return [_question(record, file) for record in stream_records(file)]


def _question(record: Record, file: Path) -> MultipleChoiceQuestion:
    where, row = f"{file}, line {record.position}", record.value
    if record.problem or not isinstance(row, dict):
        raise DataError(f"{where}: {record.problem or 'not a row with columns'}")
    row = {str(name).strip(): value for name, value in row.items()}
    for column in (*TEXT_COLUMNS, "answer"):
        if column not in row:
            raise DataError(f"{where}: there is no column {column}; the columns are {', '.join(TEXT_COLUMNS)}, answer")
    texts = {column: _text(row[column], f"{where}, column {column}") for column in TEXT_COLUMNS}
    answer = str(row["answer"] if row["answer"] is not None else "").strip()
    if answer not in LETTERS:
        none = "is empty; files without answers, such as C-Eval's test split, measure nothing"
        raise DataError(f"{where}, column answer: {f'{answer!r} is none of A, B, C, D' if answer else none}")
    choices = tuple(texts[letter] for letter in LETTERS)
    for position, letter in enumerate(LETTERS):
        if choices[position] in choices[:position]:
            raise DataError(f"{where}, column {letter}: the choice is the same as an earlier one")
    number = str(row.get("id", "")).strip() or str(record.position)
    return MultipleChoiceQuestion(number, texts["question"], choices, LETTERS.index(answer), subject_of(file))


def _text(value: Any, where: str) -> str:
    """Return a cell as text without white space around it; numbers of typed tables are text too."""
    text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not has_visible_text(text):
        raise DataError(f"{where}: it has no text")
    return text
