"""`rlhf plan` as a user calls it, and the check before a job is submitted."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flows.pipeline import preflight
from flows.pipeline.preflight import memory_refusal
from flows.supervision.processes import CommandResult
from rlhf_core.cli import app
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError
from rlhf_extras.memory import command
from rlhf_extras.memory.command import (
    MemoryExceeded,
    PlanRequest,
    gib,
    plan_json,
    plan_text,
    too_large_together,
)
from rlhf_extras.memory.sequence_lengths import LongestSequences, SequenceLengths
from rlhf_extras.memory.stage_plan import BFLOAT16_ALLOWANCE, PROCESS_BASE, StagePlan

ROOT = recipe_folder()


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: object, **others: object) -> None:
        raise AssertionError("a plan must not need the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-360m", "paper-7b", "paper-13b"])
def test_the_large_profiles_fit_the_gpus_they_are_written_for(name: str) -> None:
    plans = PlanRequest(ROOT, name).plans()
    inputs = plans[0].inputs
    assert inputs.limit is not None and all(plan.fits for plan in plans)
    # And they are no smaller than they need be: half the memory would not do.
    memory = inputs.params.plan.gpu_memory_gb
    assert memory is not None
    half = inputs.with_changes({"plan.gpu_memory_gb": memory / 2})
    assert not all(replace(plan, inputs=half).fits for plan in plans)
    tables = [
        line for line in plan_text(plans, {}).splitlines() if re.match(r"  |[GM]iB per GPU", line)
    ]
    assert len(tables) > 20 and max(map(len, tables)) <= 80  # the columns of a terminal


def workspace(folder: Path, params: str) -> Path:
    (folder / "params.yaml").write_text(params)
    return folder


@pytest.mark.slow
def test_the_command_prints_a_table_or_json_and_its_code_says_whether_it_fits(
    tmp_path: Path,
) -> None:
    place = str(workspace(tmp_path, "seed: 1\n"))
    runner = CliRunner()
    fits = runner.invoke(app, ["plan", "--workspace", place, "--gpu-memory", "4", "--stage", "sft"])
    assert fits.exit_code == 0 and "It fits" in fits.output
    options = [
        "--set",
        "base.source=huggyllama/llama-7b",
        "--bf16",
        "--gpus",
        "8",
        "--zero-stage",
        "3",
        "--json",
    ]
    large = runner.invoke(
        app, ["plan", "--workspace", place, "--gpu-memory", "24", "--stage", "ppo", *options]
    )
    assert large.exit_code == EXIT_USER_ERROR
    document = json.loads(large.output)
    layout = document["stages"]["ppo"]["placement"]
    assert (layout["gpus"], layout["zero"], layout["precision"]) == (
        8,
        3,
        "bfloat16",
    ) and not document["fits"]


def test_the_whole_process_on_a_cpu_is_stated_beside_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sft,) = PlanRequest(workspace(tmp_path, "seed: 1\n"), stages=["sft"]).plans()
    freed = min(sft.peak, 256 << 20)
    assert sft.process == sft.peak + PROCESS_BASE + freed
    line = f"the whole process: {gib(sft.process)}"
    parts = f"  libraries {gib(PROCESS_BASE)}; freed memory kept {gib(freed)}"
    lines = plan_text([sft], {}).splitlines()
    assert lines[lines.index(line) + 1] == parts
    assert "sft on this machine's CPU, plain torch" in lines
    assert [said for said in lines if "GPU" in said] == [
        "Give --gpu-memory (GiB) to learn whether a GPU of that memory would do"
    ]
    assert plan_json([sft], {})["stages"]["sft"]["process"] == sft.process
    low = replace(sft, layout=replace(sft.layout, precision="bfloat16"))
    assert low.process == sft.process + BFLOAT16_ALLOWANCE
    written = plan_text([low], {})
    assert (
        f"{parts}; bfloat16 allowance {gib(BFLOAT16_ALLOWANCE)}" in written
        and max(map(len, written.splitlines())) <= 80
    )
    # A plan for GPUs of known memory, for several processes, or for the GPU of this machine, says
    # nothing of it.
    on_gpu = replace(sft, inputs=sft.inputs.with_changes({"plan.gpu_memory_gb": 16}))
    assert "the whole process" not in plan_text([on_gpu], {})
    several = replace(sft, layout=replace(sft.layout, gpus=2))
    assert several.process is None and "the whole process" not in plan_text([several], {})
    assert replace(sft, layout=replace(sft.layout, engine="deepspeed")).process is None
    assert not sft.roles[0].variant.on_gpu
    monkeypatch.setattr("rlhf_core.runtime.distributed.device", lambda: torch.device("cuda"))
    (of_machine,) = PlanRequest(workspace(tmp_path, "seed: 1\n"), stages=["sft"]).plans()
    assert of_machine.process is None and of_machine.peak < sft.peak, "of which norms keep less"


@pytest.mark.parametrize(
    ("parallel", "share", "group"),
    [
        (1, 0.4, ""),
        (2, 0.4, ""),
        (3, 0.4, "reward and referee and judge"),
        (2, 0.6, "reward and referee"),
        (1, 0.6, ""),
        (2, 1.1, ""),  # no stage fits by itself, which is said already
    ],
)
def test_stages_that_run_at_once_and_do_not_fit_together_are_named(
    tmp_path: Path, parallel: int, share: float, group: str
) -> None:
    root = workspace(
        tmp_path, f"seed: 1\nflow: {{parallel: {parallel}}}\nplan: {{gpu_memory_gb: 16}}\n"
    )
    (sft,) = PlanRequest(root, stages=["sft"]).plans()
    limit = sft.inputs.limit
    assert limit is not None
    held = replace(sft.phases["update"], other=0)
    size = int(share * limit) - (held.total - held.weights)
    phases = {"update": replace(held, weights=size)}
    plans = [replace(sft, stage=stage, phases=phases) for stage in ("reward", "referee", "judge")]
    said = too_large_together(plans)
    assert said.startswith(f"At once {group} need") if group else not said
    assert not said or said in plan_text(plans, {})


def test_a_judge_beside_a_large_ppo_is_too_large_together(tmp_path: Path) -> None:
    root = workspace(tmp_path, "seed: 1\nflow: {parallel: 2}\nplan: {gpu_memory_gb: 16}\n")
    (sft,) = PlanRequest(root, stages=["sft"]).plans()
    limit = sft.inputs.limit
    assert limit is not None

    def plan(stage: str, share: float) -> StagePlan:
        held = sft.phases["update"]
        size = int(share * limit) - (held.total - held.weights)
        return replace(sft, stage=stage, phases={"update": replace(held, weights=size)})

    shares = {"reward": 0.4, "referee": 0.4, "judge": 0.4, "critic": 0.5, "ppo": 0.7}
    said = too_large_together([plan(stage, share) for stage, share in shares.items()])
    assert said.startswith("At once judge and ppo need")


def test_the_option_for_prompts_goes_before_the_workspaces_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = workspace(tmp_path, "plan: {prompt_tokens: 50, ptx_tokens: 90}\n")
    rows = LongestSequences(((30, 10),))
    measured = SequenceLengths(20, rows, rows, rows, "the workspace's own data")
    monkeypatch.setattr(command, "lengths_of_workspace", lambda *unused: measured)
    for tokens, expected in ((None, measured), (70, replace(measured, prompt=70))):
        (plan,) = PlanRequest(root, stages=["sft"], prompt_tokens=tokens).plans()
        assert plan.inputs.lengths == expected


def test_only_a_workspace_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named folder is not replaced by a workspace above it; the current one is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_WORKSPACE", raising=False)
    inside = tmp_path / "docs"
    inside.mkdir()

    def refused(message: str, *options: str) -> None:
        with pytest.raises(RlhfError, match=message) as refusal:
            CliRunner().invoke(app, ["plan", *options], catch_exceptions=False)
        assert refusal.value.exit_code == EXIT_USER_ERROR and "\n" not in str(refusal.value)

    refused("is not in a workspace", "--profile", "paper-7b")
    workspace(tmp_path, "seed: 1\n")
    for folder in (inside, tmp_path / "typo"):
        refused(f"{folder} is no workspace", "--workspace", str(folder))
    monkeypatch.setenv("RLHF_WORKSPACE", str(inside))
    refused(f"{inside} is no workspace")
    monkeypatch.delenv("RLHF_WORKSPACE")
    monkeypatch.chdir(inside)
    assert (
        CliRunner().invoke(app, ["plan", "--stage", "sft"], catch_exceptions=False).exit_code == 0
    )


@pytest.mark.slow
def test_the_check_refuses_only_what_it_knows_cannot_fit(tmp_path: Path) -> None:
    known = workspace(tmp_path, "plan: {gpu_memory_gb: 1.05}\n")
    with pytest.raises(
        MemoryExceeded,
        match=r"^ppo does not fit: [0-9.]+ GiB of tensors in .* on 1 GPU of 1.05 GiB",
    ):
        PlanRequest(known, stages=["ppo"]).check()
    assert (
        PlanRequest(known, stages=["report"]).check()
        == "not checked: no memory is planned for report"
    )
    assert "not checked" in PlanRequest(workspace(tmp_path, "seed: 1\n"), stages=["ppo"]).check()
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    other = workspace(
        tmp_path,
        f"plan: {{gpu_memory_gb: 1}}\nbase: {{source: {tmp_path}, allow_high_learning_rates: true}}\n",
    )
    assert PlanRequest(other, stages=["ppo"]).check().startswith("not checked: ")


def test_a_missing_package_for_adapters_is_no_reason_to_refuse_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    adapted = workspace(tmp_path, "plan: {gpu_memory_gb: 80}\nreward: {lora: {rank: 3}}\n")
    assert (
        PlanRequest(adapted, stages=["reward"])
        .check()
        .startswith("not checked: lora is set, but peft is not")
    )
    with pytest.raises(RlhfError, match="peft is not installed"):
        PlanRequest(adapted, stages=["reward"]).plans()


def test_adapters_are_asked_for_only_where_there_are_some(tmp_path: Path) -> None:
    place = workspace(tmp_path, "policy: {method: dpo}\n")
    lora = PlanRequest(place, stages=["ppo"], lora_rank=8).params.ppo
    assert lora.policy_lora is not None and lora.policy_lora.rank == 8 and lora.critic_lora is None


def in_this_process(workspace: Path, module: str, *arguments: str) -> CommandResult:
    """`rlhf plan` without another interpreter; the real one is in
    tests/integration/test_flows_run.py.
    """
    assert module == "flows.cli"
    result = CliRunner().invoke(app, arguments)
    error = f"rlhf: {result.exception}" if isinstance(result.exception, RlhfError) else ""
    return CommandResult(EXIT_USER_ERROR if error else result.exit_code, result.stdout, error)


@pytest.mark.slow
def test_a_job_that_cannot_fit_is_refused_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "run_module", in_this_process)
    place = workspace(tmp_path, "plan: {gpu_memory_gb: 1.05}\n")
    outcome = memory_refusal(place, "ppo")
    assert outcome is not None and outcome.exit_code == EXIT_USER_ERROR and not outcome.retryable
    assert outcome.message.startswith("ppo does not fit: ") and "\n" not in outcome.message
    workspace(place, "plan: {gpu_memory_gb: 80}\n")
    assert memory_refusal(place, "sft") is None
    workspace(place, "seed: 1\n")
    assert memory_refusal(place, "ppo") is None


def test_a_stage_that_is_up_to_date_needs_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*unused: object) -> None:
        raise AssertionError("it needs no plan")

    monkeypatch.setattr(preflight, "dvc_status", lambda *unused: {})
    monkeypatch.setattr(preflight, "run_module", refuse)
    assert memory_refusal(workspace(tmp_path, "plan: {gpu_memory_gb: 1.05}\n"), "ppo") is None


def test_a_server_on_the_same_gpu_is_told_its_share(tmp_path: Path) -> None:
    """Without sleeping it shares the GPU at the peak, else only while it samples; the trainer's own
    cache is gone.
    """
    recipe = (
        "seed: 1\nplan: {gpu_memory_gb: 24}\nppo: {importance_sampling_correction: {mode: always}, "
    )
    server = "sampler: {kind: vllm, python: python, sleep: %s}}\n"
    local, awake, asleep = (
        PlanRequest(workspace(tmp_path, recipe + rest), stages=("ppo",)).plans()
        for rest in ("sampler: {kind: local}}\n", server % "false", server % "true")
    )
    (own,), (beside,), (sleeping,) = local, awake, asleep
    limit = beside.inputs.limit
    assert own.phases["generation"].kv_cache > 0 == beside.phases["generation"].kv_cache
    assert own.sampler_share is None and limit is not None
    gpu = 24 * 2**30
    assert beside.sampler_share == pytest.approx((limit - beside.peak) / gpu)
    assert sleeping.sampler_share == pytest.approx(
        (limit - sleeping.phases["generation"].total) / gpu
    )
    assert "at most --gpu-memory-utilization 0.9" in plan_text(asleep, {})
    assert plan_json(awake, {})["stages"]["ppo"]["sampler_share"] == beside.sampler_share
