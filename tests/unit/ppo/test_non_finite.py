"""NaN and infinity in rewards, values, logits and gradients: the step is skipped and counted, three
in a row stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_states import whole_state
from torch import Tensor
from unit.ppo.test_trainer import history, weights
from unit.ppo.tiny import Tiny, health_of, make_config, make_trainer

from rlhf_core.api.ppo import summary
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.trainer import Trainer

FIRST = 1  # the iteration at which something breaks


@dataclass
class Fault:
    """Multiplies what passes by ``bad`` in iteration ``FIRST``, and in all after it when
    ``lasting``.

    Iterations are told by the calls of the reward model, which come after a rollout's passes and
    before its update.
    """

    bad: float
    lasting: bool
    scored: int = 0

    def strikes(self, iteration: int) -> bool:
        return iteration == FIRST or (self.lasting and iteration > FIRST)

    def __call__(self, values: Tensor, during: str) -> Tensor:
        """Breaks ``values`` of the pass that is named (``rollout`` or ``update``), and of no
        other.
        """
        rollout = torch.is_inference_mode_enabled()
        iteration = self.scored + 1 if rollout else self.scored
        return (
            values * self.bad
            if rollout == (during == "rollout") and self.strikes(iteration)
            else values
        )


def in_rewards(tiny: Tiny, fault: Fault) -> None:
    """Every score."""
    original = tiny.reward.reply_scores
    tiny.reward.reply_scores = lambda *given: fault(original(*given), "rollout")  # type: ignore[method-assign]


def in_values_of(during: str) -> Callable[[Tiny, Fault], None]:
    """Every value, of the rollout's pass or of the update's."""

    def break_(tiny: Tiny, fault: Fault) -> None:
        original = tiny.critic.token_scores
        tiny.critic.token_scores = lambda *given: fault(original(*given), during)  # type: ignore[method-assign]

    return break_


def in_logits(tiny: Tiny, fault: Fault) -> None:
    """Every logit of the update's pass."""
    tiny.policy.lm_head.register_forward_hook(lambda module, given, logits: fault(logits, "update"))


def in_gradient_of(model: str) -> Callable[[Tiny, Fault], None]:
    """One parameter's gradient; the losses stay finite."""

    def break_(tiny: Tiny, fault: Fault) -> None:
        parameter = next(getattr(tiny, model).parameters())
        parameter.register_hook(lambda gradient: fault(gradient, "update"))

    return break_


@dataclass(frozen=True)
class Place:
    """How to break something, and which engines then skip their steps."""

    break_: Callable[[Tiny, Fault], None]
    engines: tuple[str, ...]


PLACES = {
    "rewards": Place(in_rewards, ("policy", "critic")),
    "values of the rollout": Place(in_values_of("rollout"), ("policy", "critic")),
    "values of the update": Place(in_values_of("update"), ("critic",)),
    "logits of the update": Place(in_logits, ("policy",)),
    "gradient of the policy": Place(in_gradient_of("policy"), ("policy",)),
    "gradient of the critic": Place(in_gradient_of("critic"), ("critic",)),
}


def broken_trainer(tiny: Tiny, work: Path, place: Place, fault: Fault) -> Trainer:
    """Two minibatches an iteration, the referee left out (it is the reward model here)."""
    place.break_(tiny, fault)
    original = tiny.reward_fn

    def reward_fn(batch: Any) -> Tensor:
        rewards = original(batch)
        fault.scored += 1
        return rewards

    return make_trainer(tiny, make_config(iterations=2), work, reward_fn=reward_fn, referee=None)


def all_finite(trainer: Trainer) -> bool:
    """Weights and optimiser moments alike."""
    tensors = [
        t for engine in trainer.learner.pair.engines.values() for t in whole_state(engine).values()
    ]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, math.nan) for name in PLACES),
     *((name, math.inf) for name in ("rewards", "logits of the update", "gradient of the policy"))],
)  # fmt: skip
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    tiny: Tiny, tmp_path: Path, name: str, bad: float
) -> None:
    place = PLACES[name]
    trainer = broken_trainer(tiny, tmp_path, place, Fault(bad, lasting=False))
    trainer.run()
    first, second = history(tmp_path)
    assert (first["skipped_steps"], second["skipped_steps"]) == (2 * len(place.engines), 0)
    if name == "logits of the update" and math.isnan(bad):
        # Recorded as null, like every number that is not finite, and not as the largest of the
        # others.
        assert (first["ratio_max"], first["ratio_mean"]) == (None, None) and second[
            "ratio_max"
        ] >= 1.0
    skipped = {
        engine_name: engine.skipped_steps
        for engine_name, engine in trainer.learner.pair.engines.items()
    }
    assert skipped == {
        engine_name: 2 * (engine_name in place.engines) for engine_name in ("policy", "critic")
    }
    assert all_finite(trainer)
    assert trainer.moments.count == (8 if name == "rewards" else 16)
    assert any(finding["rule"] == "steps_skipped" for finding in health_of(trainer).findings)
    for rows in ([first, second], [second, first]):  # the end of the run says what there is to say
        gain = summary(trainer, rows, [], None)["reward_gain"]
        assert (gain is None) == (name == "rewards")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["rewards", "values of the update", "gradient of the policy"])
def test_three_in_a_row_stop_with_the_diagnosis(tiny: Tiny, tmp_path: Path, name: str) -> None:
    place = PLACES[name]
    trainer = broken_trainer(tiny, tmp_path, place, Fault(math.nan, lasting=True))
    with pytest.raises(
        TrainingPaused,
        match=f"{place.engines[0]}: 3 steps in a row .*weights are still finite.*Lower",
    ):
        trainer.run()
    assert all_finite(trainer) and all(bool(p.isfinite().all()) for p in weights(tiny))
    last = history(tmp_path)[-1]
    told = next(finding for finding in last["findings"] if finding["rule"] == "steps_not_finite")
    assert last["iteration"] == FIRST + 1 and told["evidence"] == [
        "nonfinite_in_a_row 3 > 2 (window 1)"
    ]
    assert told["cause"] and told["remedy"]
