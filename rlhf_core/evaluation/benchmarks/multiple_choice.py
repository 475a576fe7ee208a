"""Multiple-choice questions: read, answered by the likelihood of each choice, and counted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.evaluation import MultipleChoiceConfig
from rlhf_core.data.encoding import encode_prompt, encode_reply, pad_id
from rlhf_core.data.schema import Message
from rlhf_core.data.text import has_visible_text, language_tag
from rlhf_core.errors import DataError
from rlhf_core.evaluation.perplexity import reply_log_likelihoods
from rlhf_core.evaluation.replies import rows_of_file
from rlhf_core.evaluation.statistics import paired_difference_bounds
from rlhf_core.models.causal_lm import fitting_length
from rlhf_core.storage.data_files import expand
from rlhf_core.training.examples import Example

LETTERS = ("A", "B", "C", "D")
TEXT_COLUMNS = ("question", *LETTERS)
PART_OF_DATA = re.compile(r"_(dev|val|test)$")
UNNAMEABLE = re.compile(r"[^\w -]")
REMEDY = "correct evaluate.multiple_choice"

# By language of the question: what to do, and what comes before the answer.
INSTRUCTIONS = {"zh": ("以下是单项选择题，请选出其中的正确答案。", "答案：")}
DEFAULT_INSTRUCTION = (
    "This is a multiple-choice question. Answer with the letter of the right choice.",
    "Answer:",
)


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """A question with four choices, and the position of the right one."""

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int
    subject: str

    def turn(self, score: str) -> str:
        """Return the user's turn: with the choices where their letters are scored, else the
        question alone.
        """
        if score == "text":
            return self.text
        instruction, before_answer = INSTRUCTIONS.get(language_tag(self.text), DEFAULT_INSTRUCTION)
        listed = [
            f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True)
        ]
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
            DataError: A file is missing or not in the format, or a subject lacks examples; the
                message names the first.
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


def _by_subject(
    patterns: Sequence[str], workspace: Path
) -> dict[str, list[MultipleChoiceQuestion]]:
    files = dict.fromkeys(
        file for pattern in patterns for file in expand(pattern, workspace, REMEDY)
    )
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
        DataError: It cannot be read, or a row is no question; the message has path, line and column
            of the first.
    """
    subject = subject_of(file)
    return [_question(row, where, position, subject) for where, position, row in rows_of_file(file)]


def _question(
    cells: Mapping[str, Any], where: str, position: int, subject: str
) -> MultipleChoiceQuestion:
    row = {str(name).strip(): value for name, value in cells.items()}
    for column in (*TEXT_COLUMNS, "answer"):
        if column not in row:
            raise DataError(
                f"{where}: there is no column {column}; the columns are {', '.join(TEXT_COLUMNS)}, answer"
            )
    texts = {column: _text(row[column], f"{where}, column {column}") for column in TEXT_COLUMNS}
    answer = str(row["answer"] if row["answer"] is not None else "").strip()
    if answer not in LETTERS:
        none = "is empty; files without answers, such as C-Eval's test split, measure nothing"
        raise DataError(
            f"{where}, column answer: {f'{answer!r} is none of A, B, C, D' if answer else none}"
        )
    choices = tuple(texts[letter] for letter in LETTERS)
    for letter, choice in zip(LETTERS, choices, strict=True):
        if choice in choices[: LETTERS.index(letter)]:
            raise DataError(f"{where}, column {letter}: the choice is the same as an earlier one")
    number = str(row.get("id", "")).strip() or str(position)
    return MultipleChoiceQuestion(
        number, texts["question"], choices, LETTERS.index(answer), subject
    )


def _text(value: Any, where: str) -> str:
    """Return a cell as text without white space around it; numbers of typed tables are text too."""
    text = (
        str(value).strip()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else ""
    )
    if not has_visible_text(text):
        raise DataError(f"{where}: it has no text")
    return text


@dataclass(frozen=True)
class AnsweredQuestions:
    """The answers of both models, as positions of choices; None for a question that was too long
    for a model.
    """

    asked: MultipleChoiceSet
    sft: Sequence[int | None]
    policy: Sequence[int | None]

    def add_to(self, metrics: dict[str, Any]) -> None:
        """Put accuracies into ``metrics`` under ``sft``, ``policy`` and ``multiple_choice``; see
        docs/metrics.md.
        """
        rows = zip(self.asked.questions, self.sft, self.policy, strict=True)
        answered = [row for row in rows if None not in row]
        questions = [question for question, _, _ in answered]
        sft = np.array([by_sft == question.answer for question, by_sft, _ in answered])
        policy = np.array([by_policy == question.answer for question, _, by_policy in answered])
        subjects = np.array([question.subject for question in questions])
        policy_alone, sft_alone = int((policy & ~sft).sum()), int((sft & ~policy).sum())
        low, high = paired_difference_bounds(policy_alone, sft_alone, len(answered))
        metrics["sft"]["multiple_choice"] = accuracy(sft, subjects)
        metrics["policy"]["multiple_choice"] = accuracy(policy, subjects)
        metrics["multiple_choice"] = {
            "questions": len(answered),
            "too_long": len(self.asked.questions) - len(answered),
            "difference": float(policy.mean() - sft.mean()),
            "difference_low95": low,
            "difference_high95": high,
            "policy_alone_right": policy_alone,
            "sft_alone_right": sft_alone,
            "subject": {
                subject: {
                    "questions": int((subjects == subject).sum()),
                    "sft": float(sft[subjects == subject].mean()),
                    "policy": float(policy[subjects == subject].mean()),
                }
                for subject in sorted(set(subjects.tolist()))
            },
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per question with the right letter and those of both models."""
        choices: tuple[str | None, ...] = (*LETTERS, None)
        return [
            {
                "subject": question.subject,
                "id": question.id,
                "question": question.text,
                "answer": choices[question.answer],
                "sft": choices[-1 if sft is None else sft],
                "policy": choices[-1 if policy is None else policy],
            }
            for question, sft, policy in zip(
                self.asked.questions, self.sft, self.policy, strict=True
            )
        ]


def accuracy(right: np.ndarray, subjects: np.ndarray) -> dict[str, float]:
    """Return the share of right answers with its 95 % interval (Wilson 1927), and the unweighted
    mean over subjects.

    Args:
        right: Whether each question was answered rightly, bool (n,).
        subjects: The subject of each question (n,).
    """
    interval = stats.binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="wilson")
    by_subject = [float(right[subjects == subject].mean()) for subject in np.unique(subjects)]
    return {
        "accuracy": float(right.mean()),
        "accuracy_low95": float(interval.low),
        "accuracy_high95": float(interval.high),
        "subject_mean": float(np.mean(by_subject)),
    }


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: MultipleChoiceSet,
    batch_size: int,
) -> list[int | None]:
    """Return the position of the choice that the model finds likeliest for each question.

    None for a question that, with a choice, is longer than the model has positions: nothing is cut.
    Of equally likely choices the first counts.

    Raises:
        DataError: Every question is too long.
    """
    dialogues = zip(questions.questions, questions.dialogues(), strict=True)
    asked: list[list[Example]] = []
    for question, dialogue in dialogues:
        prompt = encode_prompt(tokenizer, dialogue)
        replies = (
            encode_reply(tokenizer, text, finished=False)
            for text in question.answers(questions.score)
        )
        asked.append([Example(prompt, reply) for reply in replies])
    longest = fitting_length(max((row.length for rows in asked for row in rows), default=0), model)
    fits = [max(row.length for row in rows) <= longest for rows in asked]
    if asked and not any(fits):
        raise DataError(
            "every multiple-choice question is longer than the model has positions; lower few_shot"
        )
    examples = [row for rows, fit in zip(asked, fits, strict=True) if fit for row in rows]
    log_likelihoods = iter(reply_log_likelihoods(model, examples, pad_id(tokenizer), batch_size))
    answers: list[int | None] = []
    for question, fit in zip(questions.questions, fits, strict=True):
        if not fit:
            answers.append(None)
            continue
        texts = question.answers(questions.score)
        lengths = [len(text) if questions.score == "text" else 1 for text in texts]
        per_length = [next(log_likelihoods) / length for length in lengths]
        answers.append(max(range(len(texts)), key=lambda choice: per_length[choice]))
    return answers
