"""``python -m benchmarks.gpu_acceptance``: whether all works on the GPU of this machine, in at most
nine minutes.

Every step is a process of its own on random models. Those that measure no speed run side by side,
as many as the cores allow. What a step found goes to ``gpu-acceptance.json`` as soon as it has
ended, and one table at the end says pass or fail. With ``--dry`` no GPU is needed: stages and tests
run on the pretended one of ``tests/pretended_gpu``, the rest on the CPU at tiny sizes, and speed is
not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import several_gpus
from benchmarks.acceptance import Acceptance, Results, Step

SECONDS = 540.0
PREEMPTED = 75
# Limits of an H100 that a healthy one reaches.
LEAST_FLOPS, LEAST_BANDWIDTH = 500e12, 2.4e12
# Shares of the measured limits: generation of its roofline, the update of the limit of matrix
# products.
LEAST_GENERATION, LEAST_UPDATE = 0.3, 0.35
PLAN_TOLERANCE, JUDGED_MIB = 0.1, 1024  # of phases that hold as much
MEASURED_SHAPES = ("Qwen2.5-0.5B", "0.5 B", "7 B, 4 layers")
TIMES_GENERATE = 1.0  # tokens per second of our sampler over those of transformers' generate

GPU_STAGES = ("base", "sft", "reward", "referee", "judge", "critic", "ppo", "evaluate")
ADAPTERS = (
    "base.dtype=bfloat16", "reward.lora.rank=4", "critic.lora.rank=4", "ppo.policy_lora.rank=4",
    "ppo.critic_lora.rank=4",
)  # fmt: skip
LARGE_BATCH = ("ppo.batch_size=256", "ppo.minibatches=1", "ppo.micro_batch_tokens=16384")
THROUGHPUT = ("seconds", "tokens_per_second", "peak_bytes", "sampler_against_trainer")
SIDE_BY_SIDE = max(len(os.sched_getaffinity(0)) // 3, 1)


def doctor(run: Acceptance) -> dict[str, Any]:
    """The environment, the driver, and the device that PyTorch computes on."""
    report = run.python("flows.cli", "doctor", pretended=False)
    device = run.evaluated("from rlhf_core.runtime.distributed import device", "str(device())")
    run.require(run.dry or device.startswith("cuda"), f"PyTorch computes on: {device}")
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text(encoding="utf-8").partition("\n")[0] if driver.is_file() else None
    return {"device": device, "driver": version, "doctor": report.strip().splitlines()[-1:]}


def limits(run: Acceptance) -> dict[str, Any]:
    """What the GPU reaches in bfloat16 matrix products and in copies of its memory."""
    imports = "import torch; from benchmarks.harness import measured_device"
    dtype = "float32" if run.dry else "bfloat16"  # which most CPUs emulate
    found: dict[str, Any] = run.evaluated(imports, f"vars(measured_device(torch.{dtype}))")
    flops, bandwidth = found["flops"], found["bandwidth"]
    if not run.dry:
        run.require(
            flops >= LEAST_FLOPS,
            f"{flops / 1e12:.0f} TFLOP/s, at least {LEAST_FLOPS / 1e12:.0f} wanted",
        )
        run.require(
            bandwidth >= LEAST_BANDWIDTH, f"{bandwidth / 1e12:.2f} TB/s, at least 2.4 wanted"
        )
    return found


def gpu_tests(run: Acceptance) -> dict[str, Any]:
    """The tests that are marked ``gpu``."""
    pretended = {"RLHF_PRETENDED_GPU": "1"} if run.dry else {}
    output = run.python(
        "pytest", "-m", "gpu", "-n0", "-q", "tests/gpu", pretended=False, expected=0, **pretended
    )
    return {"result": output.strip().splitlines()[-1]}


def stages_float32(run: Acceptance) -> dict[str, Any]:
    """All stages from the data to the evaluation in float32."""
    workspace = run.workspace("float32")
    for name in GPU_STAGES:
        run.stage(name, workspace)
    found = json.loads((workspace / "metrics/ppo.json").read_text(encoding="utf-8"))
    return {"iterations": found["iterations"], "skipped_steps": found["skipped_steps"]}


def stages_adapters(run: Acceptance) -> dict[str, Any]:
    """The same in bfloat16 with adapters; PPO gets a SIGTERM after its first checkpoint, and goes
    on from there.
    """
    workspace = run.workspace("adapters", *ADAPTERS)
    for name in GPU_STAGES[: GPU_STAGES.index("ppo")]:
        run.stage(name, workspace)
    words = ("rlhf_core", "stage", "ppo", "--workspace", workspace)
    process = run.started(*words)
    while process.poll() is None and not any((workspace / "work").rglob("checkpoints/*/*")):
        if time.monotonic() > run.ends:
            break
        time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    code, output = run.ended(process, words)
    run.require(
        code == PREEMPTED, f"PPO exited {code} at SIGTERM, not {PREEMPTED}: {output[-300:]}"
    )
    for name in ("ppo", "evaluate"):
        run.stage(name, workspace)
    found = json.loads((workspace / "metrics/ppo.json").read_text(encoding="utf-8"))
    run.require(found["iterations"] == 5, f"{found['iterations']} iterations in the end, not 5")
    return {"exit_at_sigterm": code, "iterations": found["iterations"]}


def deepspeed(run: Acceptance) -> dict[str, Any]:
    """SFT by DeepSpeed's three stages in bfloat16, with a checkpoint, and the model released and
    saved at the end.
    """

    def trained(zero: int) -> float:
        engine = (
            "compute.launch.sft.engine=deepspeed",
            f"compute.launch.sft.zero={zero}",
            "sft.checkpoint.every=4",
        )
        target = run.workspace(f"zero{zero}", "base.dtype=bfloat16", *engine)
        run.stage("base", target, pretended=False)
        began = time.monotonic()
        run.stage("sft", target, pretended=False)
        return round(time.monotonic() - began, 1)

    with ThreadPoolExecutor(min(3, SIDE_BY_SIDE)) as pool:
        return {
            "seconds": dict(
                zip(("zero 1", "zero 2", "zero 3"), pool.map(trained, (1, 2, 3)), strict=True)
            )
        }


def memory(run: Acceptance) -> dict[str, Any]:
    """What phases hold, that of saving among them, beside what `rlhf plan` says."""
    # Whole stages of the tiny workspace where there is no GPU: phases of larger models take minutes
    # on a CPU.
    stages = (
        ("--workspace", run.work / "float32", "--stage", "sft", "--stage", "ppo") if run.dry else ()
    )
    output = run.python("benchmarks.memory", *stages, pretended=False)
    rows = re.findall(r"^(\w[\w: -]*?) +([\d.]+) +([\d.]+)  ([+-][\d.]+)%$", output, re.MULTILINE)
    found = {
        name: {"planned_mib": float(plan), "measured_mib": float(own)}
        for name, plan, own, _ in rows
    }
    run.require(bool(found), "no phase was measured")
    for name, plan, own, off in rows if not run.dry else ():
        wrong = abs(float(off)) / 100 > PLAN_TOLERANCE and max(float(plan), float(own)) > JUDGED_MIB
        run.require(not wrong, f"{name}: {plan} MiB planned, {own} measured")
    return found


def throughput(run: Acceptance) -> dict[str, Any]:
    """A PPO iteration of models of 0.5 B with a large and a small vocabulary, and of four layers of 7 B."""
    found = {}
    for name in ("dry",) if run.dry else MEASURED_SHAPES:
        config, output = run.config(name), run.work / f"{name}-shares.json"
        batch = ("ppo.batch_size=4", "ppo.max_new_tokens=8") if run.dry else LARGE_BATCH
        dtype = "base.dtype=float32" if run.dry else "base.dtype=bfloat16"
        words = [word for each in (dtype, *batch) for word in ("--set", each)]
        tokens = "8" if run.dry else "256"
        run.python(
            "benchmarks.ppo_throughput", "--config", config, "--output", output,
            "--iterations", "1", "--prompt", tokens, "--reply", tokens, *words, pretended=False,
        )  # fmt: skip
        each = json.loads(output.read_text())
        generation, update = each["roofline_shares"]["generation"], each["matmul_shares"]["update"]
        if not run.dry:
            run.require(
                generation >= LEAST_GENERATION,
                f"{name}: generation at {generation:.2f} of its roofline",
            )
            run.require(
                update >= LEAST_UPDATE,
                f"{name}: update at {update:.2f} of the matrix products' limit",
            )
        found[name] = {key: each[key] for key in THROUGHPUT} | {
            "generation_of_roofline": generation, "update_of_matmul": update,
        }  # fmt: skip
    return found


def sampling(run: Acceptance) -> dict[str, Any]:
    """Our sampler beside transformers' ``generate``, and beside vLLM where its environment is
    given.
    """
    folder, config = run.work / "sampled", run.config("dry" if run.dry else "0.5 B")
    imports = (
        "import torch; from transformers import AutoConfig, AutoModelForCausalLM; "
        "from rlhf_core.models.causal_lm import train_tokenizer; from rlhf_core.runtime.distributed import device; "
        "torch.set_default_device(device())"
    )
    model = f"AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(config)!r}), dtype=torch.bfloat16)"
    made = f"(train_tokenizer(['some words'] * 9, 300), {model})"
    run.evaluated(imports, f"[bool(each.save_pretrained({str(folder)!r})) for each in {made}]")
    words = [
        "--dtype",
        "bfloat16",
        "--rows",
        "8" if run.dry else "64",
        "--reply",
        "16" if run.dry else "64",
    ]
    words += ["--vllm-python", str(run.vllm)] if run.vllm else []
    output = run.python("benchmarks.sampling", folder, *words, pretended=False)
    found = {
        name: float(speed)
        for name, speed in re.findall(r"^(\w+) +(\d+) +\d+", output, re.MULTILINE)
    }
    ratio = found["rlhf"] / found["transformers"]
    run.require(
        run.dry or ratio >= TIMES_GENERATE, f"{ratio:.2f} times the tokens per second of generate"
    )
    return {"tokens_per_second": found}


CORRECT: dict[str, Step] = {
    "doctor and driver": doctor,
    "tests marked gpu": gpu_tests,
    "stages in float32": stages_float32,
    "stages in bfloat16 with adapters, one SIGTERM": stages_adapters,
    "DeepSpeed ZeRO 1, 2, 3": deepspeed,
    "memory against the plan": memory,
}
MEASURED: dict[str, Step] = {
    "limits of the device": limits,
    "PPO throughput": throughput,
    "sampling": sampling,
}
STEPS = CORRECT | MEASURED


def main() -> int:
    """Run all steps, print the table, and exit 0, or 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_acceptance", description=__doc__
    )
    parser.add_argument(
        "--dry", action="store_true", help="without a GPU: is this command itself in order?"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="several: what they do together, in place of the steps of one",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the findings go, as JSON"
    )
    parser.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--only", action="append", metavar="STEP", help="may be repeated")
    parser.add_argument(
        "--seconds",
        type=float,
        help="after which steps are broken off: 540, 600 on several GPUs, and an hour with --dry",
    )
    given = parser.parse_args()
    several = given.gpus > 1
    steps = several_gpus.STEPS if several else STEPS
    asked = given.only or list(steps)
    if unknown := set(asked) - steps.keys():
        parser.error(f"--only knows no step {sorted(unknown)[0]!r}: name one of {', '.join(steps)}")
    limit = several_gpus.SECONDS if several else SECONDS
    seconds = given.seconds or (3600.0 if given.dry else limit)
    output = given.output or Path("gpu-acceptance.json")
    if several and given.output is None:
        output = several_gpus.results_file(given.gpus, given.dry)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        run = Acceptance(Path(work), given.dry, given.gpus, given.vllm_python, began + seconds)
        results = Results(output, run, steps)
        together = [name for name in CORRECT if name in asked and not several]
        # Without a GPU one after another, since a step may need what others have made.
        with ThreadPoolExecutor(1 if given.dry else SIDE_BY_SIDE) as pool:
            list(pool.map(results.of, together))
        for name in steps:
            if name in asked and name not in together:
                results.of(name)
    what = "GPU acceptance" if not several else f"Acceptance of {given.gpus} GPUs"
    title = what + (" without a GPU; speed is not judged" if given.dry else "")
    console = Console(record=True)
    console.print(results.table(title))
    if several:
        for table in several_gpus.tables(results.steps):
            console.print(table)
        output.with_suffix(".txt").write_text(console.export_text())
    print(f"{time.monotonic() - began:.0f} s; all that was found: {output}")
    return 0 if results.passed else 1


if __name__ == "__main__":
    sys.exit(main())
