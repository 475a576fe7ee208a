"""Two ranks compute what one process does: gradients, updates, rollouts, figures, moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_calls import counted_reads, counted_reductions
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor
from unit.engine import cases
from unit.ppo.tiny import make_config, make_learner, make_tiny

from rlhf_core.data import batches as sharding
from rlhf_core.models.forward import LazyLogits
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.update import update
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import Tokens, response_logits, token_statistics
from rlhf_core.training.losses import chunked_cross_entropy

RANKS = [2, pytest.param(3, marks=pytest.mark.slow)]


def everything(folder: Path, stored: Path) -> None:
    """What one group of ranks is asked: every case, a rollout and the collectives."""
    for case in cases.CASES:
        before = cases.start(case)
        for kind, (lr, steps) in cases.KINDS.items():
            engines, figures = cases.train(case, cases.local, lr, steps, stored)
            cases.write_result(folder, f"{case}-{kind}", cases.changes(engines, before), figures)
    experience = cases.rollout(make_tiny())
    if distributed.is_rank_zero():
        cases.save_experience(folder / "rollout.safetensors", experience)
    (folder / f"few-{distributed.rank()}.txt").write_text(
        str(cases.rollout(make_tiny(), range(1)).tokens.tolist())
    )
    check_collectives()
    check_waits_of_a_step()
    check_passes_ask_no_other_rank(experience)
    check_sharded_heads_keep_step()


def check_waits_of_a_step() -> None:
    """However many passes a step has, it waits for the device and for the other ranks once, in its
    end.
    """
    model = make_tiny().policy
    engine = cases.local(model, cases.optimizer(0.1), "policy")
    trained = sum(parameter.numel() for parameter in model.parameters())
    for bad in (False, True):
        with counted_reads() as read, counted_reductions() as reduced:
            for index in range(3):
                batch = torch.tensor(cases.tokens(index, 12)).view(2, 6)
                loss = engine.forward(
                    lambda batch=batch: model(input_ids=batch).logits.square().mean()
                )
                nonfinite = (
                    bad and index == 0 and distributed.rank() == distributed.world_size() - 1
                )
                engine.backward(loss * (math.nan if nonfinite else 1.0))
        assert read.names == reduced.names == []
        with counted_reads() as read, counted_reductions() as reduced:
            assert engine.step().skipped == bad
        assert bad or len(read.names) == 1
        assert sum(reduced.sizes) == (trained + 1 if distributed.world_size() > 1 else 0)


def check_passes_ask_no_other_rank(experience: Experience) -> None:
    """Where nothing is sharded, ranks sum each model's gradients once in a step, and at the end what
    all of its passes found; the passes ask the other ranks nothing.
    """
    several = distributed.world_size() > 1
    for limits in ({"micro_batch_size": 2}, {"micro_batch_tokens": 24}):
        learner = make_learner(make_tiny(), make_config(minibatches=2), cases.FEW_LOGITS, **limits)
        with counted_reductions() as reduced:
            score_rollout_alone(learner.pair, learner.reference, experience)
        assert reduced.names == []
        with counted_reductions() as reduced:
            steps = update(learner, experience, 0.1, 0).metrics["steps"]
        of_step = len(learner.pair.engines) + 2  # sums and maxima of metrics
        assert len(reduced.names) == (steps * of_step if several else 0)


def score_rollout_alone(pair: ActorCriticPair, reference: Any, experience: Experience) -> None:
    """The passes that score this rank's share of a rollout, without the exchange at their end."""
    for part in pair.limits.split(experience.batch):
        logits = response_logits(pair.policy, part.tokens)
        others = response_logits(reference, part.tokens)
        token_statistics(logits, part.tokens, pair.sampling, cases.FEW_LOGITS, reference=others)
        assert pair.limits.padding_share(experience.batch) < 1


def check_sharded_heads_keep_step() -> None:
    """A head that ranks gather together is called equally often by all, whichever of two models has
    it, and however unequal their shares are.
    """
    width, vocabulary = 4 + 3 * distributed.rank(), 11
    tokens = torch.ones(1, width + 1, dtype=torch.long)
    batch = Tokens(tokens, tokens, torch.ones(1, width, dtype=torch.bool))
    called: list[int] = []

    def gathering(states: Tensor) -> Tensor:
        called.append(len(states))
        distributed.largest_of_ranks(1)  # as a gathering, it waits for all ranks
        return states @ torch.ones(2, vocabulary)

    def whole(states: Tensor) -> Tensor:
        return states @ torch.ones(2, vocabulary)

    states, limit = torch.ones(1, width + 1, 2), 4 * vocabulary * 2
    own = LazyLogits(states, whole, vocabulary)
    sharded = LazyLogits(states, gathering, vocabulary, sharded=True)
    most = math.ceil((4 + 3 * (distributed.world_size() - 1) + 1) / 2)
    for logits, reference in ((own, sharded), (sharded, own), (sharded, sharded)):
        called.clear()
        token_statistics(
            logits, batch, Sampling(1, 0, width), limit, entropies=True, reference=reference
        )
        assert len(called) == most
    called.clear()
    chunked_cross_entropy(replace(sharded, states=states[0]), tokens[0], 1, limit)
    assert len(called) == most


def check_collectives() -> None:
    rank, size = distributed.rank(), distributed.world_size()
    assert distributed.reduce_metrics({"b": 1.5 + rank, "a_max": -float(rank)}) == {
        "b": 1.5 * size + sum(range(size)),
        "a_max": 0.0,
    }
    for broken in range(size):
        largest = distributed.reduce_metrics({"_max": math.nan if rank == broken else 1.0})["_max"]
        assert math.isnan(largest), f"rank {rank} does not see that rank {broken} has no number"
    # Several to a bucket, one that fills it alone, and another type.
    shapes = [
        ((2, 3), torch.float32),
        ((), torch.float32),
        ((300_000,), torch.float32),
        ((4,), torch.float64),
    ]
    sums = [
        torch.full(shape, float(10**position + rank), dtype=dtype)
        for position, (shape, dtype) in enumerate(shapes)
    ]
    distributed.BUCKET_BYTES = 1_000_000
    distributed.all_reduce_sums(sums)
    for position, ((shape, dtype), total) in enumerate(zip(shapes, sums, strict=True)):
        expected = float(size * 10**position + sum(range(size)))
        assert torch.equal(total, torch.full(shape, expected, dtype=dtype))
    assert distributed.every_rank([rank]) == [[each] for each in range(size)]
    assert distributed.any_rank(rank == size - 1) and not distributed.any_rank(False)
    sent = {"pi": math.pi, "nan": math.nan, "list": [1, None, "é"]}
    received = distributed.broadcast_from_rank0(sent if rank == 0 else None)
    assert (
        received["pi"] == math.pi
        and math.isnan(received["nan"])
        and received["list"] == [1, None, "é"]
    )
    assert distributed.gather_items(distributed.shard_for_rank([{"n": i} for i in range(5)])) == [
        {"n": i} for i in range(5)
    ]
    whole = torch.arange(10).view(5, 2)
    mine = distributed.shard_for_rank(whole)
    assert torch.equal(distributed.gather_rows(mine, 5), whole)
    assert torch.equal(distributed.gather_rows(distributed.shard_for_rank(whole[:1]), 1), whole[:1])


class Results(dict[int, Path]):
    """Folders of results by number of ranks, each group made when it is first asked for."""

    def __init__(self, root: Path, stored: Path) -> None:
        super().__init__({1: root / "1"})
        self.root, self.stored = root, stored

    def __missing__(self, size: int) -> Path:
        self[size] = self.root / str(size)
        run_ranks(everything, size, self[size], self.stored)
        return self[size]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What plain torch on one process and groups of ranks found."""
    root = tmp_path_factory.mktemp("ranks")
    stored = root / "experience.safetensors"
    cases.save_experience(stored, cases.rollout(make_tiny()))
    (root / "1").mkdir()
    everything(root / "1", stored)
    return Results(root, stored)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("case", cases.CASES)
def test_ranks_agree_with_one_process(case: str, kind: str, size: int, found: Results) -> None:
    (alone, figures), (together, shared) = (
        cases.read_result(found[n], f"{case}-{kind}") for n in (1, size)
    )
    assert cases.distance(alone, together) < 1e-5
    # Every logged figure is that of the whole batch.
    assert shared.keys() == figures.keys()
    # Gradients of 1e4 ruin the weights that are evaluated after the step.
    compared = {
        name: value for name, value in figures.items() if kind == "updates" or name == "loss"
    }
    assert {name: shared[name] for name in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", RANKS)
def test_rollouts_are_the_same_samples(size: int, found: Results) -> None:
    alone, together = (cases.load_experience(found[n] / "rollout.safetensors") for n in (1, size))
    for field in fields(Experience):
        one, many = getattr(alone, field.name), getattr(together, field.name)
        assert one.dtype == many.dtype
        assert torch.allclose(one.double(), many.double(), atol=1e-5), field.name
    for name in ("tokens", "attention_mask", "response_mask", "finished"):
        assert torch.equal(getattr(alone, name), getattr(together, name))


@pytest.mark.parametrize("size", RANKS)
def test_fewer_prompts_than_ranks(size: int, found: Results) -> None:
    expected = (found[1] / "few-0.txt").read_text()
    assert [(found[size] / f"few-{rank}.txt").read_text() for rank in range(size)] == [
        expected
    ] * size


def test_moments_take_in_the_rewards_of_all_ranks(found: Results) -> None:
    alone, together = RunningMeanStd(), RunningMeanStd()
    alone.update(cases.load_experience(found[1] / "rollout.safetensors").rewards)
    together.update(cases.load_experience(found[2] / "rollout.safetensors").rewards)
    assert together.count == alone.count == 7
    assert together.to_dict() == pytest.approx(alone.to_dict(), rel=1e-6)


def on_each_rank(
    share: Callable[..., Any], rows: int, size: int, ranks: int
) -> list[list[tuple[list[int], float]]]:
    """The passes of each rank over ``rows`` rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "world_size", lambda: ranks)
        shared = []
        for rank in range(ranks):
            patch.setattr(distributed, "rank", lambda rank=rank: rank)
            shared.append(list(share(list(range(rows)), size)))
    return shared


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 9))
def test_every_row_is_computed_once_and_all_ranks_make_as_many_passes(
    rows: int, size: int, ranks: int
) -> None:
    shared = on_each_rank(sharding.passes, rows, size, ranks)
    assert all(1 <= len(part) <= size for parts in shared for part, _ in parts)
    seen = [row for parts in shared for part, weight in parts if weight for row in part]
    assert len({*map(len, shared)}) == 1 and sorted(seen) == list(range(rows))


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 9))
def test_whole_passes_are_those_of_one_process(rows: int, size: int, ranks: int) -> None:
    alone = list(sharding.whole_passes(list(range(rows)), size))
    assert alone == list(sharding.passes(list(range(rows)), size))
    shared = on_each_rank(sharding.whole_passes, rows, size, ranks)
    in_turn = [part for round_of_ranks in zip(*shared, strict=True) for part in round_of_ranks]
    assert [part for part in in_turn if part[1]] == alone
    assert all(part == ([0], 0.0) for part in in_turn if not part[1])
