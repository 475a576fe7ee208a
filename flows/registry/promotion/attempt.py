"""An attempt of a challenger at the champion: its number, the prompts that it is played on, and its match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.governance.ledger import EntryTaken, Ledger
from flows.registry.promotion.match import match_question, match_result, question_digest
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
TRIES = 20  # other machines may take a number at the same time


@dataclass(frozen=True)
class Attempt:
    """Attributes:
    number: Of the match among those on the same test prompts, from 1.
    question: What the match is about.
    match: What it measured.
    """

    number: int
    question: Mapping[str, Any]
    match: Mapping[str, Any]


def make_attempt(
    client: MlflowClient,
    workspace: Path,
    config: RegistryConfig,
    challenger: ModelVersion,
    champion: ModelVersion,
    play: Callable[[int], Mapping[str, Any]],
) -> Attempt:
    """Number the match, and play it unless it was played before.

    With ``registry.prompt_sets`` attempt k is played on set ``(k - 1) mod prompt_sets`` of the test prompts.

    Args:
        play: Plays the match on the set of prompts with this index.
    """
    sets = config.prompt_sets
    question = {**match_question(workspace, challenger, champion), **({"prompt_sets": sets} if sets > 1 else {})}
    number = attempt_number(client, workspace, config.policy, question_digest(question))
    index = (number - 1) % sets
    if sets > 1:
        question["prompt_set"] = index + 1
    match = match_result(client, workspace, challenger, question, lambda: play(index))
    return Attempt(number, question, match)


def attempt_number(client: MlflowClient, workspace: Path, model: str, digest: str) -> int:
    """The number of the match with this digest among those of ``model`` on the test prompts of ``workspace``, from 1.

    A question that was numbered before keeps its number: its match is not played again.

    Raises:
        RlhfError: There are no test prompts, or the registry does not answer.
    """
    prompts = workspace / TEST_PROMPTS
    if not prompts.is_file():
        raise RlhfError(f"there are no test prompts ({TEST_PROMPTS}), so nothing can be compared")
    ledger = Ledger.open(client, model, f"attempts.{sha256_file(prompts)[:16]}")
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
