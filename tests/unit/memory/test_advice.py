"""What is advised makes a stage fit, and says what it costs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import yaml
from unit.memory import subjects

from rlhf_core.memory.advice import AdviceStep, MemoryAdvice, advise
from rlhf_core.memory.command import estimate_json, estimate_text, gib, refusal_line
from rlhf_core.memory.estimate import EstimateInputs, MemoryEstimate
from rlhf_core.memory.stages import estimate_memory

TRAINED = ("sft", "reward", "referee", "judge", "critic", "ppo")
EIGHT = {"compute": {"launch": {stage: {"processes": 8} for stage in TRAINED}}}


def changed(inputs: EstimateInputs, advice: MemoryAdvice, left_out: AdviceStep | None = None) -> MemoryEstimate:
    """The advised stage with all steps but one."""
    for step in advice.steps:
        inputs = inputs if step is left_out else inputs.with_changes(step.changes)
    return estimate_memory(inputs, [advice.stage])


@pytest.fixture(scope="module")
def advised() -> tuple[MemoryEstimate, tuple[MemoryAdvice, ...]]:
    """An estimate for eight GPUs that are too small, and the advice on it."""
    estimate = estimate_memory(subjects.large(80, **EIGHT))
    return estimate, tuple(advise(estimate))


@pytest.mark.slow
def test_the_settings_advised_for_each_stage_make_it_fit(
    advised: tuple[MemoryEstimate, tuple[MemoryAdvice, ...]],
) -> None:
    estimate, advice = advised
    assert not estimate.fits
    too_large = {stage.stage for stage in estimate.stages if stage.peak > (estimate.limit or 0)}
    assert {one.stage for one in advice} == too_large and "ppo" in too_large
    for one in advice:
        assert one.fits and one.steps
        for number, step in enumerate(one.steps, 1):
            until_here = replace(one, steps=one.steps[:number])
            assert changed(estimate.inputs, until_here).peak == step.after.peak
        assert changed(estimate.inputs, one).fits


@pytest.mark.slow
def test_nothing_that_is_advised_can_be_left_out(advised: tuple[MemoryEstimate, tuple[MemoryAdvice, ...]]) -> None:
    estimate, advice = advised
    for one in advice:
        for left_out in one.steps:
            assert not changed(estimate.inputs, one, left_out).fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "gpus", "memory"),
    [("HuggingFaceTB/SmolLM2-135M", 1, 4), ("Qwen/Qwen2.5-7B", 8, 40), ("huggyllama/llama-13b", 8, 80)],
)
def test_a_reader_who_follows_the_printed_steps_gets_what_is_printed(source: str, gpus: int, memory: float) -> None:
    sections = {"base": {"source": source}, "compute": {"launch": {"ppo": {"processes": gpus}}}}
    estimate = estimate_memory(subjects.large(memory, **sections), ["ppo"])
    text = estimate_text(estimate, advise(estimate))
    printed = re.findall(r"^  \d+\. (.+): ([\d.]+ [GM]iB) \((.+)\)$", text, re.MULTILINE)
    assert printed, "every one of these is too large as it stands"
    inputs, after = estimate.inputs, estimate
    for assignments, size, phase in printed:
        inputs = inputs.with_changes({path: yaml.safe_load(value) for path, value in map(split, assignments.split())})
        after = estimate_memory(inputs, ["ppo"])
        assert (gib(after.peak), after.worst.worst_phase) == (size, phase)
    assert ("so it fits" in text) == after.fits


def split(assignment: str) -> tuple[str, str]:
    """Path and value of an assignment as ``--set`` takes it."""
    path, _, value = assignment.partition("=")
    return path, value


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_saving_is_planned_as_computed_by_hand(zero: int) -> None:
    """LLaMA-7B on 8 GPUs: 6.74 billion parameters in bfloat16.

    Before the engine lets go of its weights, one whole model computes what the copy has to: ZeRO 1 and 2 hold it, ZeRO
    3 gathers it. Beside it are a GPU's eighth of float32 master weights and two moments, and buckets of 50 million
    gradients: one in float32, two that overlap in bfloat16, or one. ZeRO 3 keeps an eighth of weights and float32
    gradients, too. What remains after it, one whole model, is less.
    """
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    eighth, bucket = parameters // 8, 50_000_000
    expected = {
        1: 2 * parameters + 12 * eighth + 4 * bucket,
        2: 2 * parameters + 12 * eighth + 2 * 2 * bucket,
        3: 2 * parameters + 12 * eighth + 2 * bucket + (2 + 4) * eighth,
    }[zero]
    launch = {"processes": 8, "engine": "deepspeed", "zero": zero}
    (stage,) = estimate_memory(subjects.large(80, compute={"launch": {"sft": launch}}), ["sft"]).stages
    assert stage.phases["saving"].total == pytest.approx(expected, abs=100)  # rounded shares
    (local,) = estimate_memory(subjects.large(80), ["sft"]).stages
    assert local.phases["saving"].total == pytest.approx((2 + 12) * parameters, rel=1e-6)  # and its counts of steps


@pytest.mark.slow
def test_on_one_gpu_nothing_is_sharded() -> None:
    steps = [step for one in advise(estimate_memory(subjects.large(80), ["critic", "ppo"])) for step in one.steps]
    assert steps and not [path for step in steps for path in step.changes if path.endswith("processes")]
    assert "sharded" not in [step.changes.get("compute.launch.ppo.frozen") for step in steps]


def test_no_advice_where_it_fits_or_nothing_is_known() -> None:
    assert advise(estimate_memory(subjects.large(2000), ["ppo"])) == ()
    unknown = estimate_memory(replace(subjects.large(80), params=subjects.params()), ["sft"])
    assert unknown.fits and unknown.limit is None and advise(unknown) == ()


@pytest.mark.slow
def test_what_cannot_fit_at_all_is_said_so() -> None:
    estimate = estimate_memory(subjects.large(8), ["ppo"])
    (advice,) = advise(estimate)
    assert not advice.fits
    assert "more or larger GPUs, or a smaller model" in estimate_text(estimate, [advice])
    line = refusal_line(estimate, [advice])
    assert line.startswith("ppo does not fit: ") and line.endswith("smaller model") and "\n" not in line


@pytest.mark.slow
def test_where_it_cannot_fit_only_what_lowers_the_peak_is_advised() -> None:
    estimate = estimate_memory(subjects.large(30, **EIGHT))
    short = [one for one in advise(estimate) if not one.fits]
    assert {one.stage for one in short} >= {"critic"}
    for one in short:
        reached = one.steps[-1].after.peak if one.steps else 0
        for left_out in one.steps:
            assert changed(estimate.inputs, one, left_out).peak > reached
        paths = [tuple(step.changes) for step in one.steps]
        assert len(set(paths)) == len(paths)


@pytest.mark.slow
def test_adapters_are_advised_only_where_their_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    estimate = estimate_memory(subjects.large(8), ["critic"])
    (advice,) = advise(estimate)
    assert not [path for step in advice.steps for path in step.changes if "lora" in path]


@pytest.mark.slow
def test_a_shared_critic_can_be_advised_about() -> None:
    """Defaults of other sections must not count as set: ``critic.init`` of a shared critic may only be left out."""
    shared = {"critic_mode": "shared", "critic_optimizer": None, "max_new_tokens": 256}
    (advice,) = advise(estimate_memory(subjects.large(80, ppo=shared), ["ppo"]))
    assert advice.steps


def test_table_and_json_say_the_same() -> None:
    estimate = estimate_memory(subjects.large(80), ["critic", "ppo"])
    changes = {"ppo.sampling_batch_size": 4, "ppo.share_base": True}
    advice = [MemoryAdvice("ppo", (AdviceStep(changes, estimate.stages[1]),), fits=True)]
    text, document = estimate_text(estimate, advice), estimate_json(estimate, advice)
    assert document["stage"] == "ppo" and document["peak"] == estimate.peak and not document["fits"]
    assert document["stages"]["ppo"]["phases"]["step"]["total"] == estimate.stages[1].phases["step"].total
    assert f"peak {estimate.peak / 2**30:.1f} GiB per GPU: ppo, {document['phase']}. It DOES NOT FIT" in text
    for role in ("policy", "critic", "reference", "reward", "referee"):
        assert f"\n  {role} " in text
    told = document["advice"]["ppo"]
    assert told["fits"] and told["steps"][0]["changes"] == changes and all(path in text for path in changes)
    rows = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("  step")]
    totals = [document["stages"][stage]["phases"]["step"]["total"] / 2**30 for stage in ("critic", "ppo")]
    assert rows == [round(total, 1) for total in totals] and min(totals) > 100  # two decimals are for smaller numbers
