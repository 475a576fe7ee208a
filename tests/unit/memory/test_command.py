"""`rlhf plan` as a user calls it, and the check before a job is submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.pipeline.preflight import memory_refusal
from rlhf_core.cli import app
from rlhf_core.config.loading.recipe import recipe_folder
from rlhf_core.errors import EXIT_USER_ERROR
from rlhf_core.memory.command import MemoryExceeded, Request, check, plan_of
from rlhf_core.memory.options import Options

ROOT = recipe_folder()


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: object, **others: object) -> None:
        raise AssertionError("a plan must not need the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)


@pytest.mark.parametrize("name", ["smollm2-360m", "paper-7b", "paper-13b"])
def test_the_large_profiles_fit_the_gpus_they_are_written_for(name: str) -> None:
    plan = plan_of(Request(ROOT, name))
    assert plan.limit is not None and plan.fits
    # And they are no smaller than they need be: half the memory would not do.
    memory = plan.recipe.params.plan.gpu_memory_gb
    assert memory is not None and not plan_of(Request(ROOT, name, options=Options(gpu_memory=memory / 2))).fits


def workspace(folder: Path, params: str) -> Path:
    (folder / "params.yaml").write_text(params)
    return folder


def test_the_command_prints_a_table_or_json_and_its_code_says_whether_it_fits(tmp_path: Path) -> None:
    place = str(workspace(tmp_path, "seed: 1\n"))
    runner = CliRunner()
    fits = runner.invoke(app, ["plan", "--workspace", place, "--gpu-memory", "4"])
    assert fits.exit_code == 0 and "It fits" in fits.output
    options = ["--set", "base.source=huggyllama/llama-7b", "--bf16", "--gpus", "8", "--zero-stage", "3", "--json"]
    large = runner.invoke(app, ["plan", "--workspace", place, "--gpu-memory", "24", "--stage", "ppo", *options])
    assert large.exit_code == EXIT_USER_ERROR
    found = json.loads(large.output)
    placed = found["stages"]["ppo"]["placement"]
    assert (placed["gpus"], placed["zero"], placed["precision"]) == (8, 3, "bfloat16") and not found["fits"]


def test_the_check_refuses_only_what_it_knows_cannot_fit(tmp_path: Path) -> None:
    known = workspace(tmp_path, "plan: {gpu_memory_gb: 1.05}\n")
    with pytest.raises(MemoryExceeded, match=r"^ppo does not fit: 0\.4 GiB of tensors in .* on 1 GPU of 1.05 GiB"):
        check(Request(known, stages=["ppo"]))
    assert check(Request(known, stages=["report"])) == "not checked: no memory is planned for report"
    assert "not checked" in check(Request(workspace(tmp_path, "seed: 1\n"), stages=["ppo"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    other = workspace(tmp_path, f"plan: {{gpu_memory_gb: 1}}\nbase: {{source: {tmp_path}}}\n")
    assert check(Request(other, stages=["ppo"])).startswith("not checked: ")


def test_a_job_that_cannot_fit_is_refused_before_it_is_submitted(tmp_path: Path) -> None:
    place = workspace(tmp_path, "plan: {gpu_memory_gb: 1.05}\n")
    outcome = memory_refusal(place, "ppo")
    assert outcome is not None and outcome.exit_code == EXIT_USER_ERROR and not outcome.retryable
    assert outcome.message.startswith("ppo does not fit: ") and "\n" not in outcome.message
    workspace(place, "plan: {gpu_memory_gb: 80}\n")
    assert memory_refusal(place, "ppo") is None
    workspace(place, "seed: 1\n")
    assert memory_refusal(place, "ppo") is None
