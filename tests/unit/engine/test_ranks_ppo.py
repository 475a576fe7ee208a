"""What PPO does on two ranks beyond single steps: rollbacks, a shared backbone, reward sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from unit.engine import cases
from unit.ppo.rollback_runs import config_with, rule
from unit.ppo.tiny import health_of, make_config, make_learner, make_tiny, make_trainer

from rlhf_core.config.health import Check
from rlhf_core.ppo.checkpoints import abandoned_rows
from rlhf_core.ppo.reward_sources.source import PromptReader, RankShared, Replies
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.update import update
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import Tokens

WEAK = Check("kl_coefficient", "<", 0.07, window=2)  # holds until a rollback has doubled the 0.05
SIZE = 7  # replies to score: no share of two or three ranks is even


def everything(folder: Path) -> None:
    """What one group of ranks is asked."""
    with_rollback(folder)
    with_shared_backbone(folder)
    without_critic(folder)
    with_budget(folder)
    with_ratio_to_the_sampler(folder)
    with_sources(folder)


def with_rollback(folder: Path) -> None:
    """A run that is stopped behind its first rollback, goes on in new folders of all ranks but the
    first, and goes back again."""
    first = distributed.is_rank_zero()
    told: list[Any] = []
    for life, after in enumerate((3, 6)):
        tiny = make_tiny()
        work = folder / "work" if first else folder / f"scratch-{distributed.rank()}-{life}"
        config = config_with(iterations=4 if life == 0 else 7)
        check = WEAK if life == 0 else Check("kl_coefficient", "<", 0.15, window=2)
        trainer = make_trainer(tiny, config, work, rules=[rule(check, after=after)])
        trainer.run()
        rates = [engine.lr_factor for engine in trainer.learner.pair.engines.values()]
        journal = trainer.checkpoints.journal
        told.append(
            [
                trainer.done,
                [entry.record() for entry in journal.entries],
                rates,
                health_of(trainer).findings,
            ]
        )
    (folder / f"rollback-{distributed.rank()}.json").write_text(json.dumps(told))
    weights = trainer.learner.pair.policy_weights()
    cases.write_result(folder, "rollback", weights, {"kl": 0.0})
    if first:
        (folder / "history.jsonl").write_bytes(trainer.history.path.read_bytes())
        (folder / "abandoned.json").write_text(json.dumps(abandoned_rows(work, "rows")))


def with_budget(folder: Path) -> None:
    """Scoring and two updates in micro-batches by a budget of tokens, in chunks of logits."""
    tiny, config = (
        make_tiny(),
        make_config(minibatches=2, micro_batch_tokens=24, ptx={"weight": 0.0}),
    )
    learner = make_learner(tiny, config, logits_bytes=cases.FEW_LOGITS)
    experience = cases.rollout(tiny, pair=learner.pair)
    figures = update(learner, experience, 0.1, 0).metrics
    cases.write_result(folder, "budget", learner.pair.engines["policy"].trained_weights(), figures)


def with_shared_backbone(folder: Path) -> None:
    """Two updates of policy and value head on one backbone."""
    tiny = make_tiny()
    config = make_config(
        critic_mode="shared",
        minibatches=2,
        micro_batch_size=2,
        vf_loss_weight=0.7,
        ptx={"weight": 0.3, "batch_size": 1},
    )
    learner = make_learner(tiny, config)
    experience = cases.rollout(tiny)
    for iteration in range(2):
        figures = update(learner, experience, 0.1, iteration).metrics
    cases.write_result(folder, "shared", learner.pair.engines["policy"].trained_weights(), figures)


def without_critic(folder: Path) -> None:
    """Two iterations on groups of four replies, of which no share of two ranks is one."""
    tiny = make_tiny()
    free = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4}
    config = make_config(
        iterations=2, micro_batch_size=2, ptx={"weight": 0.3, "batch_size": 1}, **free
    )
    work = folder / "free" if distributed.is_rank_zero() else folder / f"free-{distributed.rank()}"
    trainer = make_trainer(tiny, config, work)
    records = [trainer.iterate() for _ in range(2)]
    advantages = [record.experience.advantages[:, 0].tolist() for record in records]
    (folder / f"advantages-{distributed.rank()}.json").write_text(json.dumps(advantages))
    cases.write_result(
        folder, "free", trainer.learner.pair.policy_weights(), {"kl": records[-1].metrics["kl"]}
    )


RATIO = {
    "a_row": {"batch_size": 8},
    "rows": {"batch_size": 18},
    "tokens": {"batch_size": 18, "micro_batch_tokens": 24},
}


def with_ratio_to_the_sampler(folder: Path) -> None:
    """Two iterations whose policy scores one reply or three, of which no share of two ranks is
    even.
    """
    for name, changes in RATIO.items():
        mode = {"importance_sampling_correction": {"mode": "ratio"}, "ptx": {"weight": 0.0}}
        limits = {} if name == "tokens" else {"micro_batch_size": 2, "micro_batch_tokens": None}
        work = (
            folder / name if distributed.is_rank_zero() else folder / f"{name}-{distributed.rank()}"
        )
        trainer = make_trainer(
            make_tiny(), make_config(iterations=2, **changes, **limits, **mode), work
        )
        figures = [trainer.iterate().metrics for _ in range(2)][-1]
        figures = {
            key: value for key, value in figures.items() if not key.startswith("padding_share")
        }
        cases.write_result(folder, name, trainer.learner.pair.policy_weights(), figures)


class Counting:
    """Scores by the first token of a reply, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        firsts = replies.tokens.response[:, 0]
        self.asked += firsts.tolist()
        self.metrics = {"even": float((firsts % 2 == 0).float().mean())}
        return firsts.float() / 3


def with_sources(folder: Path) -> None:
    """Replies whose first tokens are 10, 11, ..., scored by all ranks together, and one reply
    alone.
    """
    tokens = torch.stack([torch.arange(SIZE), torch.arange(10, 10 + SIZE)], dim=1)
    tokenizer: Any = None
    told = {}
    for count in (SIZE, 1):
        part = tokens[:count]
        batch = Tokens(part, torch.ones_like(part), torch.ones(count, 1, dtype=torch.bool))
        source = Counting()
        shared = RankShared(source)
        rewards = shared.rewards(Replies(batch, PromptReader(TrainingPrompts([], [])), tokenizer))
        told[str(count)] = {
            "rewards": rewards.tolist(),
            "metrics": shared.metrics,
            "asked": source.asked,
        }
    (folder / f"sources-{distributed.rank()}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of results by number of ranks."""
    root = tmp_path_factory.mktemp("ranks_ppo")
    (root / "1").mkdir()
    everything(root / "1")
    run_ranks(everything, 2, root / "2")
    return {size: root / str(size) for size in (1, 2)}


@pytest.mark.slow
def test_two_ranks_roll_back_as_one_process_does(found: dict[int, Path]) -> None:
    alone, first, second = (
        json.loads((found[size] / f"rollback-{rank}.json").read_text())
        for size, rank in ((1, 0), (2, 0), (2, 1))
    )
    assert first == second
    decided = [[done, records, rates] for done, records, rates, _ in alone]
    assert [[done, records, rates] for done, records, rates, _ in first] == decided
    assert [len(records) for _, records, _ in decided] == [1, 2] and decided[1][2] == [0.25, 0.25]


def test_what_two_ranks_record_and_learn_around_rollbacks_is_the_same(
    found: dict[int, Path],
) -> None:
    rows, others = (
        [json.loads(line) for line in (found[size] / "history.jsonl").read_text().splitlines()]
        for size in (1, 2)
    )
    assert (
        [row["iteration"] for row in others]
        == [row["iteration"] for row in rows]
        == list(range(1, 8))
    )
    assert [row.get("rollbacks") for row in others] == [row.get("rollbacks") for row in rows]
    for name in ("reward_mean", "kl", "policy_lr", "kl_coefficient"):
        assert [row[name] for row in others] == pytest.approx(
            [row[name] for row in rows], rel=1e-3, abs=1e-4
        ), name
    kept, also = (json.loads((found[size] / "abandoned.json").read_text()) for size in (1, 2))
    assert [(row["rollback"], row["iteration"]) for row in also] == [
        (row["rollback"], row["iteration"]) for row in kept
    ]
    plain, together = (cases.read_result(found[size], "rollback")[0] for size in (1, 2))
    assert cases.distance(plain, together) < 1e-2


@pytest.mark.parametrize("what", ["shared", "budget"])
def test_a_shared_backbone_and_a_budget_of_tokens_learn_the_same(
    what: str, found: dict[int, Path]
) -> None:
    (plain, figures), (together, others) = (cases.read_result(found[size], what) for size in (1, 2))
    assert cases.distance(plain, together) < 1e-4
    assert others == pytest.approx(figures, rel=1e-3, abs=1e-5)
    assert "value_loss" in figures and ("critic_lr" in figures) == (what == "budget")


@pytest.mark.parametrize("what", RATIO)
def test_the_ratio_to_the_sampler_is_the_same_on_two_ranks(
    what: str, found: dict[int, Path]
) -> None:
    (plain, figures), (together, others) = (cases.read_result(found[size], what) for size in (1, 2))
    assert cases.distance(plain, together) < 1e-2
    assert others == pytest.approx(figures, rel=1e-3, abs=1e-4) and figures["entropy"] > 0


def test_groups_of_replies_are_whole_on_every_rank(found: dict[int, Path]) -> None:
    alone, first, second = (
        json.loads((found[size] / f"advantages-{rank}.json").read_text())
        for size, rank in ((1, 0), (2, 0), (2, 1))
    )
    assert first == second
    assert first[0] == pytest.approx(alone[0], abs=1e-5) and first[1] == pytest.approx(
        alone[1], abs=1e-2
    )
    assert all(
        sum(rows[start : start + 4]) == pytest.approx(0.0, abs=1e-5)
        for rows in first
        for start in (0, 4)
    )
    (plain, figures), (together, others) = (
        cases.read_result(found[size], "free") for size in (1, 2)
    )
    assert cases.distance(plain, together) < 1e-2 and others["kl"] == pytest.approx(
        figures["kl"], rel=1e-3, abs=1e-4
    )


def test_each_reply_is_scored_by_one_rank_and_known_to_all(found: dict[int, Path]) -> None:
    first, second = (
        json.loads((found[2] / f"sources-{rank}.json").read_text())["7"] for rank in (0, 1)
    )
    alone = json.loads((found[1] / "sources-0.json").read_text())["7"]
    assert (
        first["rewards"]
        == second["rewards"]
        == alone["rewards"]
        == pytest.approx([(10 + i) / 3 for i in range(7)])
    )
    assert first["metrics"] == second["metrics"] == pytest.approx(alone["metrics"])
    assert (first["asked"], second["asked"]) == ([10, 12, 14, 16], [11, 13, 15])


def test_a_rank_without_replies_keeps_in_step(found: dict[int, Path]) -> None:
    first, second = (
        json.loads((found[2] / f"sources-{rank}.json").read_text())["1"] for rank in (0, 1)
    )
    assert first["rewards"] == second["rewards"] == pytest.approx([10 / 3])
    assert first["metrics"] == second["metrics"] == {"even": 1.0}
