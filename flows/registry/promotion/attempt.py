"""An attempt of a challenger at the champion: its number, the prompts that it is played on, and its match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.governance.attempts import attempt_number, expected_number
from flows.registry.promotion.match import match_question, match_result
from rlhf_core.config.operations.operations import RegistryConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


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
    prompts: str,
    challenger: ModelVersion,
    champion: ModelVersion,
    play: Callable[[int], Mapping[str, Any]],
) -> Attempt:
    """Play the match, unless it was played before, and number it.

    With ``registry.prompt_sets`` attempt k is played on set ``(k - 1) mod prompt_sets`` of the test prompts. Where
    another machine takes the expected number meanwhile, what was played on the wrong set counts for nothing.

    Args:
        prompts: The hash of the test prompts, whose attempts are counted.
        play: Plays the match on the set of prompts with this index.
    """
    sets = config.prompt_sets
    about = {**match_question(workspace, challenger, champion), **({"prompt_sets": sets} if sets > 1 else {})}

    def played(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        index = (number - 1) % sets
        question = {**about, "prompt_set": index + 1} if sets > 1 else about
        return question, match_result(client, workspace, challenger, question, lambda: play(index))

    expected = expected_number(client, config.policy, prompts, about)
    question, match = played(expected)
    number = attempt_number(client, config.policy, prompts, about)
    if number != expected:
        question, match = played(number)
    return Attempt(number, question, match)
