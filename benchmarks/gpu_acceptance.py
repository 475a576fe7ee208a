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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.storage.files import atomic_write_json

ROOT = Path(__file__).resolve().parents[1]
PRETENDED = ROOT / "tests/pretended_gpu"
SECONDS = 540.0
PREEMPTED = 75
# Limits of an H100 that a healthy one reaches.
LEAST_FLOPS, LEAST_BANDWIDTH = 500e12, 2.4e12
# Shares of the measured limits: generation of its roofline, the update of the limit of matrix
# products.
LEAST_GENERATION, LEAST_UPDATE = 0.3, 0.35
PLAN_TOLERANCE, JUDGED_MIB = 0.1, 1024  # of phases that hold as much
TIMES_GENERATE = 1.0  # tokens per second of our sampler over those of transformers' generate

CPU_STAGES = ("collect", "validate")
GPU_STAGES = ("base", "sft", "reward", "referee", "judge", "critic", "ppo", "evaluate")
SMALL = (
    "collect.world.demonstrations=1200", "collect.world.preferences=1500", "base.layers=1", "sft.steps=8",
    "reward.steps=8", "referee.steps=8", "judge.steps=8", "critic.max_rollouts=1", "critic.batch_size=8",
    "ppo.iterations=5", "ppo.batch_size=8", "ppo.max_new_tokens=8", "ppo.checkpoint.every=1", "evaluate.prompts=8",
)  # fmt: skip
ADAPTERS = (
    "base.dtype=bfloat16", "reward.lora.rank=4", "critic.lora.rank=4", "ppo.policy_lora.rank=4",
    "ppo.critic_lora.rank=4",
)  # fmt: skip
LARGE_BATCH = ("ppo.batch_size=256", "ppo.minibatches=1", "ppo.micro_batch_tokens=16384")
THROUGHPUT = ("seconds", "tokens_per_second", "peak_bytes", "sampler_against_trainer")
DATA = "data"  # the workspace whose data all others take
SIDE_BY_SIDE = max(len(os.sched_getaffinity(0)) // 3, 1)
LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
WIDTHS = {
    "0.5 B": (32000, 1024, 4096, 28, 16, 8),
    "7 B, 4 layers": (32000, 4096, 11008, 4, 32, 32),
    "dry": (512, 32, 48, 1, 2, 2),
}


class StepFailed(Exception):
    """A command of a step failed."""


@dataclass
class Acceptance:
    """One run: its folder, what is left of the time, and whether a GPU is only pretended.

    Attributes:
        work: Workspaces and models of this run.
        dry: Whether there is no GPU.
        vllm: The Python of an environment with vLLM, if there is one.
        ends: When the time is up, by the monotonic clock.
        making_data: Held while the data of all workspaces are made.
        faults: What the step found wrong.
    """

    work: Path
    dry: bool
    vllm: Path | None
    ends: float
    making_data: threading.Lock = field(default_factory=threading.Lock)
    faults: list[str] = field(default_factory=list)

    def python(
        self, *words: str | Path, pretended: bool = True, expected: int = 0, **extra: str
    ) -> str:
        """Run a Python module; returns its output.

        Args:
            words: The module and its arguments.
            pretended: Whether it runs on the pretended GPU where there is no other.
            expected: The exit code that counts as success.
            extra: Further variables of the environment.

        Raises:
            StepFailed: It ended with another code, or the time is up.
        """
        ended = self._ended(self.started(*words, pretended=pretended, **extra), words)
        if ended[0] != expected:
            raise StepFailed(
                f"{' '.join(map(str, words))} exited {ended[0]}, not {expected}: {ended[1][-1500:]}"
            )
        return ended[1]

    def evaluated(self, imports: str, expression: str) -> Any:
        """The JSON value of a Python expression in a process of its own, so that this one keeps off
        the GPU.
        """
        program = f"import json; {imports}; print(json.dumps({expression}))"
        return json.loads(self.python("-c", program, pretended=False).splitlines()[-1])

    def started(
        self, *words: str | Path, pretended: bool = True, **extra: str
    ) -> subprocess.Popen[str]:
        """Start a Python module, or the program after ``-c``."""
        how = [str(PRETENDED)] if self.dry and pretended else [] if words[0] == "-c" else ["-m"]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = (
            os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | extra
        )
        return subprocess.Popen(
            [sys.executable, *how, *map(str, words)], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _ended(
        self, process: subprocess.Popen[str], words: Sequence[str | Path]
    ) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=max(self.ends - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise StepFailed(
                f"{' '.join(map(str, words))} did not end before the time was up"
            ) from None
        return process.returncode, output

    def require(self, holds: bool, fault: str) -> None:
        """Note ``fault`` unless ``holds``."""
        if not holds:
            self.faults.append(fault)

    def workspace(self, name: str, *settings: str) -> Path:
        """A workspace of the smoke profile, made smaller, with validated data."""
        folder = self.work / name
        if name != DATA:
            with self.making_data:
                if not (self.work / DATA).is_dir():
                    made = self.workspace(DATA)
                    for stage in CPU_STAGES:
                        self.stage(stage, made)
        words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        self.python("flows.cli", "init", folder, "--profile", "smoke", *words, pretended=False)
        (folder / "gates").mkdir(exist_ok=True)
        for gate in ("sft", "reward"):  # a few steps make no model that passes one
            (folder / f"gates/{gate}.pass").touch()
        if name != DATA:
            shutil.copytree(self.work / DATA / "data", folder / "data", dirs_exist_ok=True)
        return folder

    def config(self, name: str) -> Path:
        """The ``config.json`` of one of :data:`WIDTHS`."""
        path = self.work / f"{name}.json"
        path.write_text(json.dumps(LLAMA | dict(zip(SIZES, WIDTHS[name], strict=True))))
        return path

    def stage(self, name: str, workspace: Path, pretended: bool = True, expected: int = 0) -> None:
        """Run a stage."""
        self.python(
            "rlhf_core", "stage", name, "--workspace", workspace,
            pretended=pretended and name not in CPU_STAGES, expected=expected,
        )  # fmt: skip


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
    code, output = run._ended(process, words)
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
    """A PPO iteration at the widths of 0.5 B, and at those of 7 B with four layers."""
    found = {}
    for name in WIDTHS:
        if (name == "dry") != run.dry:
            continue
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


Step = Callable[[Acceptance], dict[str, Any]]
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


@dataclass
class Results:
    """What the steps found, in the order of :data:`STEPS`, written to a file after each."""

    output: Path
    dry: bool
    steps: dict[str, Any] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def of(self, name: str, run: Acceptance) -> None:
        """Run a step."""
        own, started, found = replace(run, faults=[]), time.monotonic(), dict[str, Any]()
        try:
            found = STEPS[name](own)
        except (StepFailed, OSError, KeyError, ValueError) as error:
            own.faults.append(f"{type(error).__name__}: {error}")
        taken = round(time.monotonic() - started, 1)
        with self.writing:
            self.steps[name] = {
                "passed": not own.faults,
                "seconds": taken,
                "faults": own.faults,
                "found": found,
            }
            self.steps = {each: self.steps[each] for each in STEPS if each in self.steps}
            atomic_write_json(self.output, {"dry": self.dry, "steps": self.steps})
            print(f"{name}: {'pass' if not own.faults else 'FAIL'} after {taken} s", flush=True)


def main() -> int:
    """Run all steps, print the table, and exit 0, or 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_acceptance", description=__doc__
    )
    parser.add_argument(
        "--dry", action="store_true", help="without a GPU: is this command itself in order?"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-acceptance.json"), metavar="FILE")
    parser.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument(
        "--only", action="append", choices=STEPS, metavar="STEP", help="may be repeated"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="after which steps are broken off: 540, and an hour with --dry",
    )
    given = parser.parse_args()
    seconds = given.seconds or (3600.0 if given.dry else SECONDS)
    asked, results, began = given.only or STEPS, Results(given.output, given.dry), time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        run = Acceptance(Path(work), given.dry, given.vllm_python, began + seconds)
        # Without a GPU one after another, since a step may need what others have made.
        with ThreadPoolExecutor(1 if given.dry else SIDE_BY_SIDE) as pool:
            list(
                pool.map(partial(results.of, run=run), [name for name in CORRECT if name in asked])
            )
        for name in MEASURED:
            if name in asked:
                results.of(name, run)
    Console().print(_table(results.steps, given.dry))
    print(f"{time.monotonic() - began:.0f} s; all that was found: {given.output}")
    return 0 if all(each["passed"] for each in results.steps.values()) else 1


def _table(results: dict[str, Any], dry: bool) -> Table:
    title = "GPU acceptance" + (" on a pretended GPU; speed is not judged" if dry else "")
    table = Table("step", "seconds", "", "what was wrong", title=title)
    for name, each in results.items():
        wrong = "\n".join(fault.strip().splitlines()[-1][:100] for fault in each["faults"])
        table.add_row(name, f"{each['seconds']:.0f}", "pass" if each["passed"] else "FAIL", wrong)
    return table


if __name__ == "__main__":
    sys.exit(main())
