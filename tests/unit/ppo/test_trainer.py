"""The loop: exact resume after kill -9, every switch running, health, selection, steps that are not
finite.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture.glossary import undocumented
from ranks import exit_code_of
from unit.ppo.tiny import Tiny, health_of, make_config, make_tiny, make_trainer, selection_of
from unit.training.tiny import at_step, die_behind, without_clock

from rlhf_core.config.health import Check, Rule
from rlhf_core.errors import RlhfError, TrainingPaused
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import update
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.engine.base import LocalEngine, lr_at


def history(work: Path) -> list[dict[str, Any]]:
    return without_clock(work / "history.jsonl")


def weights(tiny: Tiny) -> list[torch.Tensor]:
    return [p.detach().clone() for model in (tiny.policy, tiny.critic) for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def best(work: Path) -> dict[str, str]:
    """Hashes of the weights that selection kept, by their folder."""
    return {
        path.parent.name: sha256_file(path)
        for path in (work / "best").glob("*/weights.safetensors")
    }


def test_exact_kl_and_referee_are_measured_as_often_as_asked(tiny: Tiny, tmp_path: Path) -> None:
    """Neither changes anything else: the same run, with and without them."""
    make_trainer(tiny, make_config(iterations=3), tmp_path / "plain").run()
    asked = make_config(iterations=3, kl={"measure_full": True}, referee_every=2)
    make_trainer(make_tiny(), asked, tmp_path / "asked").run()
    plain, rows = history(tmp_path / "plain"), history(tmp_path / "asked")
    assert [("referee_mean" in row, "kl_full" in row) for row in plain] == [(True, False)] * 3
    assert ["referee_mean" in row for row in rows] == [True, False, True]
    assert ["reward_referee_correlation" in row for row in rows] == [True, False, True]
    assert all(row["kl_full"] >= 0 for row in rows) and rows[2]["kl_full"] > 1e-6
    for row, other in zip(plain, rows, strict=True):
        shared = row.keys() & other.keys()
        assert {name: row[name] for name in shared} == {name: other[name] for name in shared}
        assert row.keys() ^ other.keys() <= {
            "kl_full",
            "referee_mean",
            "reward_referee_correlation",
        }


def test_a_run_writes_every_signal(tiny: Tiny, tmp_path: Path) -> None:
    before = weights(tiny)
    make_trainer(tiny, make_config(), tmp_path).run()
    rows = history(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    wanted = {
        "kl", "reward_mean", "reward_std", "reward_p05", "reward_p95", "reward_treated", "length", "entropy",
        "perplexity", "perplexity_reference", "value_loss", "explained_variance", "ratio_mean", "ratio_max",
        "clip_fraction", "value_clip_fraction", "policy_grad_norm", "critic_grad_norm", "missing_eos", "repetition",
        "distinct_2", "reward_length_correlation", "kl_coefficient", "kl_pull", "ptx_weight", "ptx_loss",
        "policy_loss", "skipped_steps", "policy_lr", "kl_k2", "kl_k3", "referee_mean", "first_ratio", "sampler_gap",
    }  # fmt: skip
    for row in rows:
        assert {name for name in wanted if row.get(name) is None} == set()
        assert row["first_ratio"] == pytest.approx(1.0)
        assert "importance_sampling_ratio_mean" not in row, (
            "sampler and trainer round alike in float32"
        )
    raw = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])
    assert undocumented("history/ppo.jsonl", [*rows, raw]) == set()
    assert {"seconds_generation", "seconds_forward", "seconds_update"} <= raw.keys()
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-4) and rows[-1]["kl"] != 0.0
    assert "win_rate" in rows[1] and "selection_kl" in rows[1] and "win_rate" not in rows[0]
    assert not equal(before, weights(tiny))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["iteration"] for row in samples} == {2, 4} and {
        "prompt",
        "reply",
        "score",
    } <= samples[0].keys()


def test_every_second_of_an_iteration_is_in_a_named_row(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def takes(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return work(*given, **named)

        return done

    trainer = make_trainer(tiny, make_config(referee_every=2), tmp_path)
    trainer.reward_fn = takes(5.0, trainer.reward_fn)
    trainer.referee = takes(7.0, trainer.referee or trainer.reward_fn)
    trainer.decode = takes(0.25, trainer.decode)
    selection_of(trainer).measure = takes(11.0, selection_of(trainer).measure)
    monkeypatch.setattr(TrainingPrompts, "batch", takes(3.0, TrainingPrompts.batch))
    monkeypatch.setattr("rlhf_core.ppo.trainer.update", takes(13.0, update))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    expected = {"rewards": 5.0, "metrics": 8 * 0.25, "update": 13.0, "rest": 3.0}
    for own in ({"referee": 7.0}, {"selection": 11.0}):
        began = now[0]
        seconds = trainer.iterate().seconds
        taken = {name.removeprefix("seconds_"): each for name, each in seconds.items() if each}
        assert taken == pytest.approx(expected | own)
        assert sum(seconds.values()) == pytest.approx(now[0] - began)


MODES: dict[str, dict[str, Any]] = {
    "a critic of its own": {},
    "one backbone": {"critic_mode": "shared"},
    "no critic": {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4},
    "ratio to the sampler": {"importance_sampling_correction": {"mode": "ratio"}},
}


def trainer_in(work: Path, mode: str) -> Trainer:
    config = make_config(
        iterations=5, kl={"controller": "adaptive"}, checkpoint={"every": 2}, **MODES[mode]
    )
    return make_trainer(make_tiny(), config, work)


def run_and_die(work: Path, mode: str) -> None:
    """A run that is killed at the first of two steps of its fourth iteration, once its second one
    is saved.
    """
    step = at_step(6, partial(die_behind, "step-000002", work))
    LocalEngine.step = step  # type: ignore[assignment,method-assign]
    trainer_in(work, mode).run()


@pytest.mark.parametrize("mode", MODES)
def test_kill_9_and_resume_is_bit_identical(tmp_path: Path, mode: str) -> None:
    """Killed amid an update, the run ends with the weights and history of an uninterrupted one."""
    straight, work = trainer_in(tmp_path / "straight", mode), tmp_path / "killed"
    straight.run()
    assert exit_code_of(run_and_die, work, mode) == -signal.SIGKILL and len(history(work)) == 3
    resumed = trainer_in(work, mode)
    resumed.run()
    assert (
        health_of(resumed).state() == health_of(straight).state()
        and health_of(resumed).monitor.start
    )
    assert (
        selection_of(resumed).state() == selection_of(straight).state()
        and selection_of(resumed).best
    )
    assert (
        resumed.moments == straight.moments
        and resumed.kl_controller.value == straight.kl_controller.value
    )
    assert straight.learner.pair.engines.keys() == resumed.learner.pair.engines.keys()
    for one, other in zip(
        *(run.learner.pair.engines.values() for run in (straight, resumed)), strict=True
    ):
        assert equal(list(one.trained_weights().values()), list(other.trained_weights().values()))
    assert (
        history(tmp_path / "straight") == history(work)
        and undocumented("history/ppo.jsonl", history(work)) == set()
    )
    of_a_critic, of_groups = (
        name in history(work)[-1] for name in ("value_loss", "group_reward_std")
    )
    assert (of_a_critic, of_groups) == ((False, True) if mode == "no critic" else (True, False))
    assert best(tmp_path / "straight") == best(work)
    assert (tmp_path / "straight" / "samples.jsonl").read_text() == (
        work / "samples.jsonl"
    ).read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"surrogate": {"fixed_reference": True},
         "policy_optimizer": {"lr": 3e-3, "schedule": "inverse_sqrt", "warmup": 0.0, "max_grad_norm": None}},
        {"surrogate": {"kind": "penalty"}, "kl": {"coefficient": 0.0}, "ptx": {"weight": 0.0}, "value_clip": None,
         "reward": {"transform": "scale", "clip": None, "missing_eos_penalty": 1.0, "length_penalty": 0.5},
         "gradient_norm": "joint", "vf_loss_weight": 0.5},
        {"surrogate": {"clip": None, "aggregation": "sequence"}, "kl": {"estimator": "full", "placement": "loss"},
         "entropy": {"kind": "bonus", "weight": 0.01}, "temperature": 0.7, "min_new_tokens": 2},
        {"surrogate": {"dual_clip": 3.0}, "kl": {"estimator": "k3", "placement": "loss"},
         "advantage": {"normalize": True, "clip": 1.0, "lam": 1.0},
         "epochs": 2, "minibatches": 4, "micro_batch_size": 1},
        {"critic_mode": "shared", "gradient_norm": "joint", "vf_loss_weight": 0.5,
         "entropy": {"kind": "target", "weight": 0.01, "target": 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_every_switch_runs(tiny: Tiny, tmp_path: Path, changes: dict[str, Any]) -> None:
    make_trainer(tiny, make_config(iterations=2, **changes), tmp_path).run()
    rows = history(tmp_path)
    assert len(rows) == 2 and all(bool(p.isfinite().all()) for p in weights(tiny))
    if "ptx" in changes:
        assert "ptx_loss" not in rows[0]
    if changes.get("surrogate", {}).get("fixed_reference"):
        assert rows[1]["first_ratio"] != pytest.approx(1.0, abs=1e-6)


def made(engine: Any) -> set[int]:
    """How many optimiser steps were made on the engine's parameters, by AdamW's own count."""
    return {int(state["step"]) for state in engine.optimizer.state.values()}


EARLY: dict[str, Any] = {
    "target_kl_early_stop": 1e-9,
    "epochs": 3,
    "iterations": 2,
    "warmup_iterations": 0,
}
COSINE = {"lr": 3e-3, "schedule": "cosine", "warmup": 0.0, "final_ratio": 0.1}


@pytest.mark.parametrize(
    ("changes", "steps"),
    # Steps of the value loss alone would move a shared backbone's policy on.
    [
        ({}, [2, 12]),
        ({"gradient_norm": "joint"}, [2, 12]),
        (MODES["one backbone"], [2]),
        (MODES["no critic"], [2]),
    ],
    ids=["separate", "joint", "one backbone", "no critic"],
)
def test_an_early_stop_ends_the_policys_steps_alone(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], steps: list[int]
) -> None:
    config = make_config(**EARLY | changes, policy_optimizer=COSINE)
    trainer = make_trainer(tiny, config, tmp_path)
    trainer.run()
    engines = trainer.learner.pair.engines.values()
    # Two iterations of three epochs of two minibatches; the first step of an update has a KL of 0.
    assert [made(engine) for engine in engines] == [{count} for count in steps]
    rows = history(tmp_path)
    assert [(row["early_stopped"], row["steps"]) for row in rows] == [(1, 1), (1, 1)]
    # The decay ends where it was planned to end, however few steps were made of it.
    assert {engine.steps for engine in engines} == {12}
    assert [row["policy_lr"] for row in rows] == [
        lr_at(step, 12, config.policy_optimizer) for step in (0, 6)
    ]


def test_the_value_loss_is_the_mean_over_the_critics_steps(tiny: Tiny, tmp_path: Path) -> None:
    """The critic learns from the rollout alone, so that an early stop of the policy changes none of
    its figures.
    """
    rows = []
    for name, limit in (("whole", None), ("stopped", 1e-9)):
        rate = {"lr": 3e-3, "schedule": "constant", "warmup": 0.0}
        config = make_config(
            **EARLY | {"target_kl_early_stop": limit, "iterations": 1}, policy_optimizer=rate
        )
        make_trainer(tiny.copy(), config, tmp_path / name).run()
        rows.append(history(tmp_path / name)[0])
    whole, stopped = rows
    assert (whole["steps"], stopped["steps"]) == (6, 1) and whole["policy_loss"] != stopped[
        "policy_loss"
    ]
    for name in ("value_loss", "value_clip_fraction", "critic_grad_norm", "critic_lr"):
        assert whole[name] == stopped[name], name


def test_warm_up_reaches_the_peak_with_its_last_iteration(tiny: Tiny, tmp_path: Path) -> None:
    make_trainer(tiny, make_config(iterations=3, warmup_iterations=2), tmp_path).run()
    rates = [row["policy_lr"] for row in history(tmp_path)]
    assert rates[0] == pytest.approx(3e-3 * (0.25 + 0.5) / 2)
    assert rates[1] == pytest.approx(3e-3 * (0.75 + 1.0) / 2)
    assert rates[2] == pytest.approx(3e-3)


def test_sampler_that_disagrees_stops_the_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ignores its attention mask answers differently where rows are padded on the
    left: PPO refuses.
    """
    forward = type(tiny.policy.base_model).forward

    def deaf(
        self: Any, *args: Any, attention_mask: Any = None, use_cache: bool = True, **rest: Any
    ) -> Any:
        seen = attention_mask if use_cache else torch.ones_like(attention_mask)
        return forward(self, *args, attention_mask=seen, use_cache=use_cache, **rest)

    monkeypatch.setattr(type(tiny.policy.base_model), "forward", deaf)
    with pytest.raises(RlhfError, match="left padding"):
        make_trainer(tiny, make_config(micro_batch_tokens=None), tmp_path).run()


def told_to(action: Any) -> Rule:
    """A rule that holds from the third iteration on."""
    check = Check("kl", ">", -1e9, window=1)
    return Rule(
        f"told to {action}",
        (check,),
        "critical",
        action,
        "it was told to",
        "a test",
        "none",
        after=3,
    )


def test_a_pause_keeps_the_last_checkpoint_and_pauses_again(tiny: Tiny, tmp_path: Path) -> None:
    config = make_config(health={"mode": "enforce"})
    for models in (tiny, make_tiny()):
        trainer = make_trainer(models, config, tmp_path, rules=[told_to("pause")])
        with pytest.raises(TrainingPaused, match="told to pause at iteration 3"):
            trainer.run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-000001",
        "step-000002",
    ]
    assert [[f["rule"] for f in row["findings"]] for row in history(tmp_path)] == [
        [],
        [],
        ["told to pause"],
    ]


@pytest.mark.parametrize(
    ("mode", "actions"), [("report", ("pause", "rollback")), ("enforce", ("warn",))]
)
def test_other_findings_are_only_recorded(
    tiny: Tiny, tmp_path: Path, mode: str, actions: tuple[str, ...]
) -> None:
    config = make_config(iterations=3, health={"mode": mode})
    trainer = make_trainer(tiny, config, tmp_path, rules=[told_to(action) for action in actions])
    trainer.run()
    assert [finding["rule"] for finding in health_of(trainer).findings] == [
        f"told to {action}" for action in actions
    ]
    assert trainer.done == 3 and len(trainer.checkpoints.journal) == 0
