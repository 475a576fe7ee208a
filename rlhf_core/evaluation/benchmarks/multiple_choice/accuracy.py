"""Accuracy of SFT and policy on the same multiple-choice questions, and the paired difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from rlhf_core.errors import DataError
from rlhf_core.evaluation.benchmarks.multiple_choice.questions import LETTERS, MultipleChoiceSet
from rlhf_core.evaluation.statistics import bootstrap_bounds


@dataclass(frozen=True)
class AnsweredQuestions:
    """The answers of both models, as positions of choices; None for a question that was too long for a model."""

    asked: MultipleChoiceSet
    sft: Sequence[int | None]
    policy: Sequence[int | None]

    def add_to(self, metrics: dict[str, Any], bootstrap: int, seed: int) -> None:
        """Put the accuracies into ``metrics`` under ``sft``, ``policy`` and ``multiple_choice``; see docs/metrics.md.

        Raises:
            DataError: Every question was too long for one of the models.
        """
        pairs = enumerate(zip(self.sft, self.policy, strict=True))
        answered = [i for i, (sft_answer, policy_answer) in pairs if None not in (sft_answer, policy_answer)]
        if not answered:
            raise DataError("every multiple-choice question is longer than the model has positions; see few_shot")
        questions = [self.asked.questions[i] for i in answered]
        sft, policy = (
            np.array([side[i] == question.answer for i, question in zip(answered, questions, strict=True)])
            for side in (self.sft, self.policy)
        )
        subjects = np.array([question.subject for question in questions])
        low, high = np.clip(bootstrap_bounds((policy.astype(float) - sft)[np.newaxis], bootstrap, seed), -1.0, 1.0)
        metrics["sft"]["multiple_choice"] = accuracy(sft, subjects)
        metrics["policy"]["multiple_choice"] = accuracy(policy, subjects)
        metrics["multiple_choice"] = {
            "questions": len(answered),
            "too_long": len(self.asked.questions) - len(answered),
            "difference": float(policy.mean() - sft.mean()),
            "difference_low95": float(low[0]),
            "difference_high95": float(high[0]),
            "policy_alone_right": int((policy & ~sft).sum()),
            "sft_alone_right": int((sft & ~policy).sum()),
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
            for question, sft, policy in zip(self.asked.questions, self.sft, self.policy, strict=True)
        ]


def accuracy(right: np.ndarray, subjects: np.ndarray) -> dict[str, float]:
    """Return the share of right answers with its 95 % interval (Wilson 1927), and the unweighted mean over subjects.

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
