"""What is advised makes a stage fit, and says what it costs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import yaml
from unit.memory import subjects

from rlhf_extras.memory.advice import AdviceStep, advise, advise_all
from rlhf_extras.memory.command import gib, plan_json, plan_text, refusal_line, worst
from rlhf_extras.memory.stage_plan import StagePlan
from rlhf_extras.memory.stages import plan_stage, plan_stages

TRAINED = ("sft", "reward", "referee", "judge", "critic", "ppo")
EIGHT = {"compute": {"launch": {stage: {"processes": 8} for stage in TRAINED}}}
Advised = list[tuple[StagePlan, list[AdviceStep]]]


def changed(
    plan: StagePlan, steps: list[AdviceStep], left_out: AdviceStep | None = None
) -> StagePlan:
    """The advised stage with all steps but one."""
    inputs = plan.inputs
    for step in steps:
        inputs = inputs if step is left_out else inputs.with_changes(step.changes)
    return plan_stage(inputs, plan.stage)


@pytest.fixture(scope="module")
def advised() -> Advised:
    """The stages that do not fit eight GPUs that are too small, and the advice on each."""
    return [
        (plan, advise(plan)) for plan in plan_stages(subjects.large(80, **EIGHT)) if not plan.fits
    ]


@pytest.mark.slow
def test_the_settings_advised_for_each_stage_make_it_fit(advised: Advised) -> None:
    assert "ppo" in {plan.stage for plan, _ in advised}
    for plan, steps in advised:
        assert steps and steps[-1].after.fits
        for number, step in enumerate(steps, 1):
            assert changed(plan, steps[:number]).peak == step.after.peak


@pytest.mark.slow
def test_nothing_that_is_advised_can_be_left_out(advised: Advised) -> None:
    for plan, steps in advised:
        for left_out in steps:
            assert not changed(plan, steps, left_out).fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "gpus", "memory"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 1, 4),
        ("Qwen/Qwen2.5-7B", 8, 40),
        ("huggyllama/llama-13b", 8, 80),
    ],
)
def test_a_reader_who_follows_the_printed_steps_gets_what_is_printed(
    source: str, gpus: int, memory: float
) -> None:
    sections = {"base": {"source": source}, "compute": {"launch": {"ppo": {"processes": gpus}}}}
    before = plan_stage(subjects.large(memory, **sections), "ppo")
    text = plan_text([before], {"ppo": advise(before)})
    printed = re.findall(r"^  \d+\. (.+): ([\d.]+ [GM]iB) \((.+)\)$", text, re.MULTILINE)
    assert printed, "every one of these is too large as it stands"
    after = before
    for assignments, size, phase in printed:
        changes = {path: yaml.safe_load(value) for path, value in map(split, assignments.split())}
        after = plan_stage(after.inputs.with_changes(changes), "ppo")
        assert (gib(after.peak), after.worst_phase) == (size, phase)
    assert ("so it fits" in text) == after.fits


def split(assignment: str) -> tuple[str, str]:
    """Path and value of an assignment as ``--set`` takes it."""
    path, _, value = assignment.partition("=")
    return path, value


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_saving_is_planned_as_computed_by_hand(zero: int) -> None:
    """LLaMA-7B on 8 GPUs: 6.74 billion parameters in bfloat16.

    Before the engine lets go of its weights, the model computes what the copy has to: ZeRO 1 and 2
    hold it whole, ZeRO 3 an eighth, with a billion parameters gathered at most. Beside it are a
    GPU's eighth of float32 master weights and two moments, and buckets of 50 million gradients: one
    in float32, two that overlap in bfloat16, or one. ZeRO 3 keeps an eighth of float32 gradients,
    too. What remains after it, one whole model, is less.
    """
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    eighth, bucket = parameters // 8, 50_000_000
    expected = {
        1: 2 * parameters + 12 * eighth + 4 * bucket,
        2: 2 * parameters + 12 * eighth + 2 * 2 * bucket,
        3: 2 * 1_000_000_000 + 12 * eighth + 2 * bucket + (2 + 4) * eighth,
    }[zero]
    launch = {"processes": 8, "engine": "deepspeed", "zero": zero}
    stage = plan_stage(subjects.large(80, compute={"launch": {"sft": launch}}), "sft")
    assert stage.phases["saving"].total == pytest.approx(expected, abs=100)  # rounded shares
    local = plan_stage(subjects.large(80), "sft")
    assert local.phases["saving"].total == pytest.approx(
        (2 + 12) * parameters, rel=1e-6
    )  # and its counts of steps


@pytest.mark.slow
def test_on_one_gpu_nothing_is_sharded() -> None:
    steps = [
        step for plan in plan_stages(subjects.large(80), ["critic", "ppo"]) for step in advise(plan)
    ]
    assert steps and not [
        path for step in steps for path in step.changes if path.endswith("processes")
    ]
    assert "sharded" not in [step.changes.get("compute.launch.ppo.frozen") for step in steps]


def test_no_advice_where_it_fits_or_nothing_is_known() -> None:
    assert advise(plan_stage(subjects.large(2000), "ppo")) == []
    unknown = plan_stage(replace(subjects.large(80), params=subjects.params()), "sft")
    assert unknown.fits and unknown.inputs.limit is None and advise(unknown) == []


@pytest.mark.slow
def test_what_cannot_fit_at_all_is_said_so() -> None:
    plan = plan_stage(subjects.large(8), "ppo")
    steps = advise(plan)
    assert not steps[-1].after.fits
    assert "more or larger GPUs, or a smaller model" in plan_text([plan], {"ppo": steps})
    line = refusal_line(plan)
    assert (
        line.startswith("ppo does not fit: ")
        and line.endswith("smaller model")
        and "\n" not in line
    )


@pytest.mark.slow
def test_where_it_cannot_fit_only_what_lowers_the_peak_is_advised() -> None:
    plans = [plan for plan in plan_stages(subjects.large(26, **EIGHT)) if not plan.fits]
    short = [
        (plan, steps) for plan in plans if (steps := advise(plan)) and not steps[-1].after.fits
    ]
    assert {plan.stage for plan, _ in short} >= {"critic"}
    for plan, steps in short:
        for left_out in steps:
            assert changed(plan, steps, left_out).peak > steps[-1].after.peak
        paths = [tuple(step.changes) for step in steps]
        assert len(set(paths)) == len(paths)


@pytest.mark.slow
def test_adapters_are_advised_only_where_their_package_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    steps = advise(plan_stage(subjects.large(8), "critic"))
    assert steps and not [path for step in steps for path in step.changes if "lora" in path]


@pytest.mark.slow
def test_a_shared_critic_can_be_advised_about() -> None:
    """Defaults of other sections must not count as set: ``critic.init`` of a shared critic may only
    be left out.
    """
    shared = {"critic_mode": "shared", "critic_optimizer": None, "max_new_tokens": 256}
    assert advise(plan_stage(subjects.large(80, ppo=shared), "ppo"))


def test_table_and_json_say_the_same() -> None:
    plans = plan_stages(subjects.large(80), ["critic", "ppo"])
    ppo = plans[1]
    changes = {"ppo.sampling_batch_size": 4, "ppo.share_base": True}
    advice = {"ppo": [AdviceStep(changes, ppo)]}
    text, document = plan_text(plans, advice), plan_json(plans, advice)
    assert worst(plans) is ppo
    assert document["stage"] == "ppo" and document["peak"] == ppo.peak and not document["fits"]
    assert document["stages"]["ppo"]["phases"]["step"]["total"] == ppo.phases["step"].total
    assert (
        f"peak {ppo.peak / 2**30:.1f} GiB per GPU: ppo, {document['phase']}. It DOES NOT FIT"
        in text
    )
    for role in ("policy", "critic", "reference", "reward", "referee"):
        assert f"\n  {role} " in text
    told = document["advice"]["ppo"]
    assert told["steps"][0]["changes"] == changes and all(path in text for path in changes)
    rows = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("  step")]
    totals = [
        document["stages"][stage]["phases"]["step"]["total"] / 2**30 for stage in ("critic", "ppo")
    ]
    assert (
        rows == [round(total, 1) for total in totals] and min(totals) > 100
    )  # two decimals are for smaller numbers


@pytest.mark.slow
def test_a_setting_of_all_stages_is_advised_once_and_before_offloading() -> None:
    """1.7 billion parameters in float32 on 24 GB."""
    source = {"source": "HuggingFaceTB/SmolLM2-1.7B", "dtype": "float32"}
    plans = plan_stages(subjects.large(24, base=source), ["sft", "reward", "ppo"])
    advice = advise_all(plans)
    assert set(advice) == {"sft", "reward", "ppo"}
    for steps in advice.values():
        assert steps[0].changes == {"base.dtype": "bfloat16"}
    text = plan_text(plans, advice)
    assert text.count("base.dtype=bfloat16") == 1
    assert text.index("for all stages: base.dtype=bfloat16") < text.index("offload")
