"""The estimate of every phase beside the bytes of tensors that the trainers themselves keep
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from unit.memory import subjects

from benchmarks.memory_phases import RUNS, measure
from benchmarks.random_models import Subject
from rlhf_extras.memory.stages import plan_stages

pytestmark = pytest.mark.slow

CASES: list[tuple[Callable[[], Subject], tuple[str, ...]]] = [
    (subjects.plain, tuple(RUNS)),
    (subjects.grouped, tuple(RUNS)),
    (subjects.recomputed, tuple(RUNS)),
    (subjects.exact_kl, ("ppo",)),
    (subjects.own_logits, ("ppo",)),
    (subjects.packed, ("ppo",)),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("subject", "stages"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_phase_is_estimated_within_a_twentieth(
    subject: Callable[[], Subject], stages: tuple[str, ...]
) -> None:
    case = subject()
    if case.params.ppo.policy_lora is not None:
        pytest.importorskip("peft")
        if case.params.ppo.policy_lora.quantize is not None:
            pytest.importorskip("bitsandbytes")
    measured = measure(case, stages)
    for stage in plan_stages(case.inputs, stages):
        estimated = {name: use.total for name, use in stage.phases.items()}
        assert set(measured[stage.stage]) == set(estimated) - {"loading", "saving"}
        for name, size in measured[stage.stage].items():
            assert estimated[name] == pytest.approx(size, rel=0.05), (stage.stage, name)
