"""Multiple-choice questions: read, answered by the likelihood of each choice, and counted.

They are the evaluation ``multiple_choice`` of ``rlhf.evaluations``.
"""

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
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.text import has_visible_text, language_tag
from rlhf_core.data.tokens import encode_prompt, encode_reply, pad_id
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.rivals import Rival
from rlhf_core.evaluation.perplexity import reply_log_likelihoods
from rlhf_core.evaluation.plugged import AddedEvaluation
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
        """Return the user's turn: the question, with the choices where letters are scored."""
        if score == "text":
            return self.text
        instruction, before_answer = INSTRUCTIONS.get(language_tag(self.text), DEFAULT_INSTRUCTION)
        lines = [instruction, "", self.text]
        for letter, choice in zip(LETTERS, self.choices, strict=True):
            lines.append(f"{letter}. {choice}")
        return "\n".join([*lines, before_answer])

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
    def load(cls, config: MultipleChoiceConfig, workspace: Path) -> MultipleChoiceSet:
        """Read all files.

        Raises:
            DataError: A file is missing or not in the format, or a subject lacks examples; the
                message names the first.
        """
        questions: list[MultipleChoiceQuestion] = []
        for of_subject in _by_subject(config.files, workspace).values():
            questions += of_subject
        if not config.few_shot:
            return cls(questions, {}, config.score)
        known = _by_subject(config.few_shot_files, workspace)
        only = next(iter(known.values())) if len(known) == 1 else None
        examples: dict[str, Sequence[MultipleChoiceQuestion]] = {}
        for subject in dict.fromkeys(question.subject for question in questions):
            rows = known.get(subject, []) if only is None else only
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
    files: list[Path] = []
    for pattern in patterns:
        files += expand(pattern, workspace, REMEDY)
    questions: dict[str, list[MultipleChoiceQuestion]] = {}
    for file in dict.fromkeys(files):
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
    questions = []
    for where, position, row in rows_of_file(file):
        questions.append(_question(row, where, position, subject))
    return questions


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
    answer = "" if row["answer"] is None else str(row["answer"]).strip()
    if not answer:
        raise DataError(
            f"{where}, column answer: is empty; files without answers, such as C-Eval's test split, "
            "measure nothing"
        )
    if answer not in LETTERS:
        raise DataError(f"{where}, column answer: {answer!r} is none of A, B, C, D")
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
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    text = str(value).strip() if is_text else ""
    if not has_visible_text(text):
        raise DataError(f"{where}: it has no text")
    return text


class MultipleChoice(AddedEvaluation):
    """The questions of ``evaluate.multiple_choice``, and the answers of both models.

    Attributes:
        asked: The questions.
        answers: Of ``sft`` and ``policy``, as positions of choices; None for a question that was
            too long for a model.
    """

    def __init__(
        self, settings: MultipleChoiceConfig, prompts: Sequence[Prompt], workspace: Path
    ) -> None:
        super().__init__(settings, prompts, workspace)
        self.asked = MultipleChoiceSet.load(settings, workspace)
        self.answers: dict[str, Sequence[int | None]] = {}

    def measure(
        self, side: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
    ) -> None:
        """Let a model answer the questions."""
        self.answers[side] = answer_questions(model, tokenizer, self.asked, size)

    def metrics(self, rivals: Mapping[str, Rival], groups: Sequence[str]) -> dict[str, Any]:
        """Return accuracies under ``sft``, ``policy`` and ``multiple_choice``.

        docs/metrics.md explains them.
        """
        return multiple_choice_metrics(self.asked, self.answers["sft"], self.answers["policy"])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per question with the right letter and those of both models."""
        return answer_rows(self.asked, self.answers["sft"], self.answers["policy"])


def multiple_choice_metrics(
    asked: MultipleChoiceSet, sft: Sequence[int | None], policy: Sequence[int | None]
) -> dict[str, Any]:
    """Return the accuracies of both models on the questions that both of them could answer."""
    subjects, sft_right, policy_right = [], [], []
    for question, by_sft, by_policy in zip(asked.questions, sft, policy, strict=True):
        if by_sft is not None and by_policy is not None:
            subjects.append(question.subject)
            sft_right.append(by_sft == question.answer)
            policy_right.append(by_policy == question.answer)
    of_sft, of_policy = np.array(sft_right), np.array(policy_right)
    of_subject = np.array(subjects)
    policy_alone = int((of_policy & ~of_sft).sum())
    sft_alone = int((of_sft & ~of_policy).sum())
    low, high = paired_difference_bounds(policy_alone, sft_alone, len(subjects))
    by_subject = {}
    for subject in sorted(set(subjects)):
        here = of_subject == subject
        by_subject[subject] = {
            "questions": int(here.sum()),
            "sft": float(of_sft[here].mean()),
            "policy": float(of_policy[here].mean()),
        }
    return {
        "sft": {"multiple_choice": accuracy(of_sft, of_subject)},
        "policy": {"multiple_choice": accuracy(of_policy, of_subject)},
        "multiple_choice": {
            "questions": len(subjects),
            "too_long": len(asked.questions) - len(subjects),
            "difference": float(of_policy.mean() - of_sft.mean()),
            "difference_low95": low,
            "difference_high95": high,
            "policy_alone_right": policy_alone,
            "sft_alone_right": sft_alone,
            "subject": by_subject,
        },
    }


def answer_rows(
    asked: MultipleChoiceSet, sft: Sequence[int | None], policy: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return one row per question with the right letter and those of both models."""
    rows = []
    for question, by_sft, by_policy in zip(asked.questions, sft, policy, strict=True):
        row: dict[str, Any] = {
            "subject": question.subject,
            "id": question.id,
            "question": question.text,
        }
        for column, answer in (("answer", question.answer), ("sft", by_sft), ("policy", by_policy)):
            row[column] = None if answer is None else LETTERS[answer]
        rows.append(row)
    return rows


def accuracy(right: np.ndarray, subjects: np.ndarray) -> dict[str, float]:
    """Return the share of right answers with its 95 % interval (Wilson 1927).

    Beside it stands the unweighted mean over subjects.

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
    asked: list[list[Example]] = []  # by question, with each choice
    needed: list[int] = []  # by question, the tokens of the longest of these
    for question, dialogue in zip(questions.questions, questions.dialogues(), strict=True):
        prompt = encode_prompt(tokenizer, dialogue)
        choices = []
        for text in question.answers(questions.score):
            choices.append(Example(prompt, encode_reply(tokenizer, text, finished=False)))
        asked.append(choices)
        needed.append(max(choice.length for choice in choices))
    longest = fitting_length(max(needed, default=0), model)
    examples: list[Example] = []
    for choices, length in zip(asked, needed, strict=True):
        if length <= longest:
            examples += choices
    if asked and not examples:
        raise DataError(
            "every multiple-choice question is longer than the model has positions; lower few_shot"
        )
    log_likelihoods = iter(reply_log_likelihoods(model, examples, pad_id(tokenizer), batch_size))
    answers: list[int | None] = []
    for question, length in zip(questions.questions, needed, strict=True):
        if length > longest:
            answers.append(None)
            continue
        per_length = []
        for text in question.answers(questions.score):
            characters = len(text) if questions.score == "text" else 1
            per_length.append(next(log_likelihoods) / characters)
        answers.append(per_length.index(max(per_length)))
    return answers
