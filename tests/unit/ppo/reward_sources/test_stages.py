"""Critic pre-training and PPO as stages, scored by several sources: metrics, refusals at the start,
exact resume.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from unit.training.tiny import stage_paths, without_clock

from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import DataError
from rlhf_core.stages import critic, ppo
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext

from .conftest import Place, Scorer

ANY = {"max_kl": 1e9, "max_length_ratio": 1e9, "max_repetition_increase": 1.0}
PPO = {
    "iterations": 2, "batch_size": 6, "max_new_tokens": 6, "warmup_iterations": 1, "ptx": {"batch_size": 2},
    "selection": {"every": 2, "prompts": 3} | ANY, "checkpoint": {"every": 1}, "health": {"mode": "report"},
}  # fmt: skip
CRITIC = {"max_rollouts": 2, "batch_size": 6, "epochs": 1, "checkpoint": {"every": 1}}


def config(*sources: dict[str, Any]) -> PpoConfig:
    return PpoConfig.model_validate(
        PPO | {"reward": {"sources": list(sources)}} if sources else PPO
    )


def run_critic(place: Place, root: Path, settings: PpoConfig) -> Paths:
    inputs, outputs = stage_paths(critic.STAGE, place.root, root)
    config = CriticStageConfig.model_validate(CRITIC | {"ppo": settings})
    critic.run(config, inputs, outputs, RunContext(root / "work/critic"))
    return outputs


def run_ppo(place: Place, root: Path, settings: PpoConfig) -> Paths:
    """PPO from the critic under ``root``."""
    inputs, outputs = stage_paths(ppo.STAGE, place.root, root, critic=root / "models/critic")
    ppo.run(settings, inputs, outputs, RunContext(root / "work/ppo"))
    return outputs


def test_both_stages_score_with_the_same_sources(
    place: Place, scorer: Scorer, tmp_path: Path
) -> None:
    """The raw reward of each rollout is the weighted sum of what each source is said to have
    given.
    """
    settings = config(
        {"kind": "model"}, {"kind": "http", "url": scorer.url, "weight": 0.5, "name": "words"}
    )
    for outputs in (run_critic(place, tmp_path, settings), run_ppo(place, tmp_path, settings)):
        for row in without_clock(outputs.history):
            expected = row["source_model_mean"] + 0.5 * row["source_words_mean"]
            assert (
                row["reward_mean"] == pytest.approx(expected, abs=1e-5)
                and row["source_words_std"] > 0
            )
    assert json.loads((tmp_path / "metrics/ppo.json").read_text())["last"]["source_words_mean"] > 0
    asked = [len(request["items"]) for request in scorer.requests]
    assert asked == [2, 6, 6, 2, 6, 6]  # each stage tries two made-up replies first


def test_a_scorer_that_dies_halfway_costs_nothing_but_time(
    place: Place, scorer: Scorer, tmp_path: Path
) -> None:
    """Nothing is published, and the run that follows ends like one that was never interrupted."""
    settings = config({"kind": "model"}, {"kind": "http", "url": scorer.url, "retries": 0})
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_critic(place, straight, settings)
    shutil.copytree(straight / "models", stopped / "models")
    expected = run_ppo(place, straight, settings)
    good = (200, {"scores": [0.0, 0.0]})
    with pytest.raises(DataError, match="failed 1 times, at last with answered 500 'gone'"):
        # The probe and a rollout go well, the second does not.
        answer, seen = scorer.answer, []

        def dying(body: dict[str, Any]) -> Any:
            seen.append(body)
            return good if len(seen) == 1 else answer(body) if len(seen) < 3 else (500, "gone")

        scorer.answer = dying  # type: ignore[method-assign]
        run_ppo(place, stopped, settings)
    assert not [path for path in (stopped / "models").iterdir() if path.name != "critic"]
    assert (
        not (stopped / "metrics/ppo.json").exists() and not (stopped / "history/ppo.jsonl").exists()
    )
    scorer.answer = answer  # type: ignore[method-assign]
    found = run_ppo(place, stopped, settings)
    assert without_clock(found.history) == without_clock(expected.history) != []
    weights = [(outputs.model / "model.safetensors").read_bytes() for outputs in (expected, found)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("stage", [run_critic, run_ppo])
def test_a_bad_source_stops_a_stage_before_it_trains(
    place: Place, scorer: Scorer, tmp_path: Path, stage: Any
) -> None:
    scorer.script = [(200, {"scores": [1.0]})]
    with pytest.raises(DataError, match="gave 1 scores for 2 items"):
        stage(place, tmp_path, config({"kind": "http", "url": scorer.url}))
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == ["hashes.json", "run.json"]  # whose folder it is
