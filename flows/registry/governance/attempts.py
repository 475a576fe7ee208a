"""Attempts to promote on one set of prompts: each match is numbered once, and the error budget is spent by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flows.registry.governance.ledger import EntryTaken, Ledger
from flows.registry.promotion.match import question_digest
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRIES = 20  # other machines may take a number at the same time


def expected_number(client: MlflowClient, model: str, prompts: str, question: Mapping[str, Any]) -> int:
    """The number that :func:`attempt_number` would give if nobody else takes it before; nothing is recorded."""
    known = list(_ledger(client, model, prompts).entries())
    digest = question_digest(question)
    return known.index(digest) + 1 if digest in known else len(known) + 1


def attempt_number(client: MlflowClient, model: str, prompts: str, question: Mapping[str, Any]) -> int:
    """The number of the match about ``question`` among those of ``model`` on the test prompts ``prompts``, from 1.

    A question that was numbered before keeps its number: its match is not played again.

    Raises:
        RlhfError: There are no test prompts, or the registry does not answer.
    """
    digest = question_digest(question)
    ledger = _ledger(client, model, prompts)
    for _ in range(TRIES):
        known = list(ledger.entries())
        if digest in known:
            return known.index(digest) + 1
        try:
            ledger.append(len(known) + 1, digest)
        except EntryTaken:
            continue
        return len(known) + 1
    raise RlhfError(f"could not number the attempt on {model}: others promote at the same time; try again")


def _ledger(client: MlflowClient, model: str, prompts: str) -> Ledger:
    if not prompts:
        raise RlhfError("there are no test prompts (data/clean/prompts/test.parquet), so nothing can be compared")
    return Ledger.open(client, model, f"attempts.{prompts[:16]}")
