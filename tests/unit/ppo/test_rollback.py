"""Rolling back: to which checkpoint, with what changed, how often, and the same after kill -9 and
preemption.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import exit_code_of
from unit.ppo.rollback_runs import ITERATIONS, MOMENTS, config_with, rule, run_and_die, trainer_in
from unit.ppo.test_trainer import best, equal, history, weights
from unit.ppo.tiny import Tiny, first_weight, health_of, make_tiny, make_trainer, selection_of

from rlhf_core.api.ppo import summary
from rlhf_core.config.health import Check
from rlhf_core.errors import Preempted, TrainingPaused
from rlhf_core.ppo.checkpoints import RollbackJournal, abandoned_rows, load_best
from rlhf_core.ppo.experience import IterationRecord
from rlhf_core.ppo.health import HealthMonitor, last_healthy
from rlhf_core.ppo.selection import CheckpointCandidate, CheckpointChoice
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.run_context import RunContext

WEAK = Check("kl_coefficient", "<", 0.07, window=2)  # holds until a rollback has doubled the 0.05


def checkpoints(work: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (work / "checkpoints").glob("step-*")
    )


@pytest.mark.parametrize(
    ("first", "expected"),
    # The rollout of iteration 6 was sampled by the policy of checkpoint 5, so a window from 6 on
    # makes 5 suspect.
    [(7, 5), (6, 2), (4, 2), (3, 0), (1, 0)],
)
def test_a_healthy_checkpoint_is_older_than_what_the_window_saw(first: int, expected: int) -> None:
    assert last_healthy([0, 2, 5, 9], first) == expected
    assert last_healthy([5, 9], 3) is None


def test_a_finding_tells_where_its_window_began() -> None:
    both = rule(Check("kl", ">", 0.0, window=2), Check("win_rate", ">", 0.0, window=2))
    monitor = HealthMonitor({}, [both])
    assert monitor.earliest_window() == 1
    found = [
        monitor.observe(i, {"kl": 1.0} | ({"win_rate": 1.0} if i % 3 == 0 else {}))
        for i in range(1, 7)
    ]
    (finding,) = found[5]  # kl of 5 and 6, win rate of 3 and 6
    assert (finding.since, monitor.earliest_window()) == (3, 3)
    assert (
        HealthMonitor({}, [rule(Check("kl", ">", 0.0), action="pause")]).earliest_window() is None
    )


def test_the_run_returns_to_before_the_window_with_other_settings(
    tiny: Tiny, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tiny, config_with(iterations=7, keep=1), tmp_path, rules=[rule(WEAK, after=5)]
    )
    trainer.run()
    (entry,) = trainer.checkpoints.journal.entries
    # Seen at 5 over 4 and 5: checkpoint 4 is inside the window, so 2 it is, though only one is to
    # be kept.
    assert entry.record() == {"rule": "told", "from": 5, "to": 2, "kl_coefficient": 2.0, "lr": 0.5}
    rows = history(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["kl_coefficient"] for row in rows] == [0.05] * 2 + [0.1] * 5
    assert [row["policy_lr"] for row in rows[1:]] == pytest.approx([3e-3] + [1.5e-3] * 5)
    assert [row["critic_lr"] for row in rows[1:]] == pytest.approx([3e-3] + [1.5e-3] * 5)
    assert [record["from"] for record in rows[2]["rollbacks"]] == [5] and "rollbacks" not in rows[3]
    abandoned = abandoned_rows(tmp_path, "rows")
    assert [(row["rollback"], row["iteration"]) for row in abandoned] == [(1, 3), (1, 4), (1, 5)]
    assert abandoned[-1]["findings"][0]["rule"] == "told" and abandoned[0]["kl_coefficient"] == 0.05
    assert {row["iteration"] for row in abandoned_rows(tmp_path, "samples")} == {4}
    # The same policy, the same prompts, but other replies.
    assert abandoned[0]["reward_mean"] != rows[2]["reward_mean"]
    assert checkpoints(tmp_path) == [
        4,
        6,
        7,
    ]  # a window that ends at 8 may begin at 6, which makes 5 and later suspect
    assert [finding["rule"] for finding in health_of(trainer).findings] == ["told"]
    choice = CheckpointChoice(CheckpointCandidate(4, 0.6, 1.0, 1.0, 0.0), True, "best")
    metrics = summary(trainer, trainer.history.rows(), health_of(trainer).findings, choice)
    assert (metrics["rollbacks"], metrics["pauses"], metrics["findings"]) == (1, 0, 1)
    assert metrics["rollback_1"] == entry.record()


def test_without_a_checkpoint_before_the_window_it_returns_to_the_start(
    tiny: Tiny, tmp_path: Path
) -> None:
    start = weights(tiny)
    seen: list[list[torch.Tensor]] = []

    class Watching(Trainer):
        def restore(self) -> None:
            super().restore()
            seen.append(weights(tiny))

    trainer = make_trainer(tiny, config_with(iterations=3), tmp_path, rules=[rule(WEAK, after=3)])
    trainer.__class__ = Watching
    trainer.run()
    assert [entry.to_iteration for entry in trainer.checkpoints.journal.entries] == [0]
    assert len(seen) == 2 and equal(seen[1], start) and not equal(start, weights(tiny))
    assert [row["iteration"] for row in history(tmp_path)] == [1, 2, 3]


def test_after_the_last_rollback_allowed_the_run_pauses_and_pauses_again(
    tiny: Tiny, tmp_path: Path
) -> None:
    always = rule(Check("kl", ">", -1e9, window=1), after=4)
    for models in (tiny, make_tiny()):
        trainer = make_trainer(models, config_with(iterations=6), tmp_path, rules=[always])
        with pytest.raises(
            TrainingPaused, match=r"told at iteration 4.*2 rollbacks were made.*max_rollbacks"
        ):
            trainer.run()
        assert [entry.to_iteration for entry in trainer.checkpoints.journal.entries] == [2, 2]
        last = history(tmp_path)[-1]
        assert last["kl_coefficient"] == pytest.approx(0.2) and last["policy_lr"] == pytest.approx(
            3e-3 / 4
        )
        assert (
            health_of(trainer).findings[-1]["action"] == "rollback"
            and len(health_of(trainer).findings) == 3
        )


def test_a_pause_rule_wins_over_a_rollback(tiny: Tiny, tmp_path: Path) -> None:
    stop = rule(Check("kl", ">", -1e9), action="pause", after=3, name="stop")
    trainer = make_trainer(
        tiny, config_with(iterations=4), tmp_path, rules=[rule(WEAK, after=3), stop]
    )
    with pytest.raises(TrainingPaused, match=r"paused by 2 rules: .*told at.*stop at"):
        trainer.run()
    assert len(trainer.checkpoints.journal) == 0


def test_without_any_healthy_checkpoint_the_run_pauses(tiny: Tiny, tmp_path: Path) -> None:
    def losing(policy: Any) -> dict[str, float]:
        """Something deletes the checkpoints while it looks at the policy."""
        manager = trainer.checkpoints.manager
        manager.finish()
        shutil.rmtree(manager.directory)
        manager.directory.mkdir()
        return first_weight(policy)

    trainer = make_trainer(
        tiny, config_with(4), tmp_path, rules=[rule(WEAK, after=3)], measure=losing
    )
    with pytest.raises(TrainingPaused, match="No checkpoint from before it is left"):
        trainer.run()
    assert len(trainer.checkpoints.journal) == 0 and checkpoints(tmp_path) == [2]


def test_the_best_weights_are_again_those_from_before(tiny: Tiny, tmp_path: Path) -> None:
    """A checkpoint of an abandoned iteration is no candidate, whatever the selector thought of
    it.
    """
    scores = iter(
        [0.5, 0.9, 0.4, 0.3]
    )  # of iterations 2 and 4, of 4 again after the rollback, and of 6

    def measure(policy: Any) -> dict[str, float]:
        return {
            "win_rate": next(scores),
            "kl": 1.0,
            "length_ratio": 1.0,
            "repetition_increase": 0.0,
        }

    trainer = make_trainer(
        tiny, config_with(iterations=6), tmp_path, rules=[rule(WEAK, after=5)], measure=measure
    )
    trainer.run()
    assert selection_of(trainer).best == 2 and set(best(tmp_path)) == {"iteration-000002"}
    assert load_best(tmp_path / "best", 2).keys() == dict(tiny.policy.named_parameters()).keys()


def test_steps_that_are_not_finite_can_send_the_run_back(tiny: Tiny, tmp_path: Path) -> None:
    calls = []

    def reward_fn(batch: Any) -> torch.Tensor:
        calls.append(1)
        return tiny.reward_fn(batch) * (torch.inf if len(calls) in (4, 5) else 1.0)

    told = rule(Check("nonfinite_in_a_row", ">", 2.0, window=1), name="steps_not_finite")
    trainer = make_trainer(
        tiny, config_with(iterations=6), tmp_path, rules=[told], reward_fn=reward_fn
    )
    trainer.run()
    # Two minibatches of iteration 4 and the first of iteration 5.
    assert trainer.checkpoints.journal.entries[0].record() == {
        "rule": "steps_not_finite", "from": 5, "to": 2, "kl_coefficient": 2.0, "lr": 0.5,
    }  # fmt: skip
    assert all(bool(p.isfinite().all()) for p in weights(tiny)) and len(history(tmp_path)) == 6
    assert sum(row["skipped_steps"] for row in history(tmp_path)) == 0


def outcome(work: Path) -> dict[str, Any]:
    """All that a finished run leaves, without wall-clock times."""
    journal = RollbackJournal(work / "rollbacks.json")
    folders = {number: work / f"checkpoints/step-{number:06d}" for number in checkpoints(work)}
    saved = {
        n: sha256_file(folder / "state-00001-of-00001.safetensors") for n, folder in folders.items()
    }
    return {
        "history": history(work),
        "samples": (work / "samples.jsonl").read_text(),
        "best": best(work),
        "rollbacks": [(entry.record(), entry.finding, entry.samples) for entry in journal.entries],
        "abandoned": [
            {name: value for name, value in row.items() if not name.startswith("seconds_")}
            for row in abandoned_rows(work, "rows")
        ],
        "checkpoints": saved,
    }


@pytest.mark.slow
def test_kill_9_around_a_rollback_changes_nothing(tmp_path: Path) -> None:
    """Real processes, killed before, within and after each of two rollbacks, end like one that was
    left alone.
    """
    trainer_in(tmp_path / "straight", make_tiny()).run()
    for moment in MOMENTS:
        assert exit_code_of(run_and_die, tmp_path / moment, moment) == -signal.SIGKILL, (
            f"{moment} did not kill"
        )
        trainer_in(tmp_path / moment, make_tiny()).run()
    straight = outcome(tmp_path / "straight")
    assert [(record["from"], record["to"]) for record, _, _ in straight["rollbacks"]] == [
        (3, 0),
        (5, 2),
    ]
    assert (
        len(straight["history"]) == ITERATIONS and straight["history"][-1]["kl_coefficient"] == 0.2
    )
    for moment in MOMENTS:
        assert outcome(tmp_path / moment) == straight, moment


@pytest.mark.slow
def test_a_run_that_is_preempted_after_every_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_tiny()
    trainer_in(tmp_path / "straight", straight).run()

    original, starts = Trainer.iterate, list[int]()

    def iterate_and_be_told_to_stop(trainer: Trainer) -> IterationRecord:
        starts.append(trainer.done)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer)

    monkeypatch.setattr(Trainer, "iterate", iterate_and_be_told_to_stop)
    while True:
        pieces = make_tiny()
        preemption = PreemptionSignal()
        context = RunContext(tmp_path / "pieces", preemption=preemption)
        trainer = trainer_in(tmp_path / "pieces", pieces, context=context)
        with (
            pytest.raises(Preempted, match=r"iteration \d of 6 and was stopped there"),
            preemption.handled("ppo"),
        ):
            trainer.run()
        if trainer.done == ITERATIONS:
            break
    # Back to the start after iteration 3, and to 2 after iteration 5.
    assert starts == [0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 4, 5]

    assert equal(weights(pieces), weights(straight))
    whole, found = (outcome(tmp_path / run) for run in ("straight", "pieces"))
    assert found.pop("best").items() >= whole.pop("best").items()
    assert found == whole
