"""What is advised makes a plan fit, and says what it costs."""

from __future__ import annotations

from dataclasses import replace

from unit.memory import subjects

from rlhf_core.memory.advice import advise
from rlhf_core.memory.assign import assigned
from rlhf_core.memory.estimate import make_plan
from rlhf_core.memory.table import as_json, one_line, text

EIGHT = {"compute": {"launch": {stage: {"processes": 8} for stage in ("sft", "reward", "referee", "critic", "ppo")}}}


def test_the_settings_advised_for_each_stage_make_it_fit() -> None:
    plan = make_plan(subjects.large(80, **EIGHT))
    assert not plan.fits
    advice = advise(plan)
    too_large = {stage.stage for stage in plan.stages if stage.peak.use.total > (plan.limit or 0)}
    assert {one.stage for one in advice} == too_large and "ppo" in too_large
    for one in advice:
        assert one.fits and one.steps
        params = plan.recipe.params
        for step in one.steps:
            params = assigned(params, step.changes)
            again = make_plan(replace(plan.recipe, params=params), [one.stage])
            assert again.peak == step.after.peak.use.total
        assert again.fits


def test_nothing_that_is_advised_can_be_left_out() -> None:
    plan = make_plan(subjects.large(80, **EIGHT))
    for one in advise(plan):
        for left_out in one.steps:
            params = plan.recipe.params
            for step in one.steps:
                params = params if step is left_out else assigned(params, step.changes)
            assert not make_plan(replace(plan.recipe, params=params), [one.stage]).fits


def test_on_one_gpu_nothing_is_sharded() -> None:
    changes = {path for one in advise(make_plan(subjects.large(80))) for step in one.steps for path in step.changes}
    assert not [path for path in changes if path.endswith("processes")]
    frozen = [
        step.changes.get("compute.launch.ppo.frozen")
        for one in advise(make_plan(subjects.large(80)))
        for step in one.steps
    ]
    assert "sharded" not in frozen


def test_no_advice_where_it_fits_or_nothing_is_known() -> None:
    assert advise(make_plan(subjects.large(2000))) == ()
    unknown = make_plan(replace(subjects.large(80), params=subjects.params()))
    assert unknown.fits and unknown.limit is None and advise(unknown) == ()


def test_what_cannot_fit_at_all_is_said_so() -> None:
    plan = make_plan(subjects.large(8), ["ppo"])
    (advice,) = advise(plan)
    assert not advice.fits
    assert "more or larger GPUs, or a smaller model" in text(plan, [advice])
    line = one_line(plan, [advice])
    assert line.startswith("ppo does not fit: ") and line.endswith("smaller model") and "\n" not in line


def test_where_it_cannot_fit_only_what_lowers_the_peak_is_advised() -> None:
    plan = make_plan(subjects.large(30, **EIGHT))
    short = [one for one in advise(plan) if not one.fits]
    assert {one.stage for one in short} >= {"critic"}
    for one in short:
        reached = one.steps[-1].after.peak.use.total if one.steps else 0
        for left_out in one.steps:
            params = plan.recipe.params
            for step in one.steps:
                params = params if step is left_out else assigned(params, step.changes)
            assert make_plan(replace(plan.recipe, params=params), [one.stage]).peak > reached
        paths = [tuple(step.changes) for step in one.steps]
        assert len(set(paths)) == len(paths)


def test_table_and_json_say_the_same() -> None:
    plan = make_plan(subjects.large(80, **EIGHT), ["critic", "ppo"])
    advice = advise(plan)
    shown, found = text(plan, advice), as_json(plan, advice)
    assert found["stage"] == "ppo" and found["peak"] == plan.peak and not found["fits"]
    assert found["stages"]["ppo"]["phases"]["step"]["total"] == next(
        phase.use.total
        for stage in plan.stages
        for phase in stage.phases
        if (stage.stage, phase.name) == ("ppo", "step")
    )
    assert f"peak {plan.peak / 2**30:.1f} GiB per GPU: ppo, {found['phase']}. It DOES NOT FIT" in shown
    for role in ("policy", "critic", "reference", "reward", "referee"):
        assert f"\n  {role} " in shown
    assert found["advice"]["ppo"]["fits"] and all(
        path in shown for path in found["advice"]["ppo"]["steps"][0]["changes"]
    )
