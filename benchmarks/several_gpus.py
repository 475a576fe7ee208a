"""The acceptance of several GPUs of one machine: what their ranks do together, in ten minutes.

Without GPUs as many processes on the CPU take their place, at tiny sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.table import Table

from benchmarks.acceptance import ROOT, Acceptance, Step, StepFailed, StepSkipped, kill_tree
from benchmarks.harness import distance

SECONDS = 600.0
LEAST_BUS = 200e9  # bytes per second of a large sum; H100s with NVLink reach over twice as many
STEP_TOLERANCE = 1e-4  # of a step's changes in float32
TRAINING_TOLERANCE = 0.02  # of those of some dozen steps by Adam
RANK_TIMEOUT = 20  # seconds after which a hung rank is ended
LATE_RANK = "1"
SHORT_TRAINING = (
    "collect.world.demonstrations=300", "collect.world.preferences=300", "collect.world.pretrain=100",
    "base.dtype=float32", "compute.tf32=false", "sft.steps=40", "sft.checkpoint.every=5", "sft.eval_every=40",
)  # fmt: skip
GPU_LARGE = ("ppo.minibatches=1", "ppo.micro_batch_tokens=16384", "base.dtype=bfloat16")
CPU_SMALL = ("ppo.minibatches=1", "base.dtype=float32")
SHARDED = ("compute.launch.ppo.engine=deepspeed", "compute.launch.ppo.frozen=sharded")
THROUGHPUT: dict[str, tuple[str, Sequence[str]]] = {
    "Qwen2.5-0.5B, local": ("Qwen2.5-0.5B", ()),
    "7 B with 4 layers, ZeRO 2": ("7 B, 4 layers", (*SHARDED, "compute.launch.ppo.zero=2")),
    "7 B with 4 layers, ZeRO 3": ("7 B, 4 layers", (*SHARDED, "compute.launch.ppo.zero=3")),
}
DRY_THROUGHPUT: dict[str, tuple[str, Sequence[str]]] = {
    "dry, ZeRO 2": ("dry", (*SHARDED, "compute.launch.ppo.zero=2"))
}
SERVER_SECONDS = 180.0


def results_file(gpus: int, dry: bool) -> Path:
    """Where the findings on so many GPUs go."""
    return ROOT / "benchmarks/results" / f"gpus-{gpus}{'-dry' if dry else ''}.json"


def collectives(run: Acceptance) -> dict[str, Any]:
    """How fast the ranks sum and gather tensors: by NCCL, or by gloo without GPUs."""
    sizes = ("1", "8") if run.dry else ("1", "64", "1024")
    output = run.work / "collectives.json"
    _ranks(run, "benchmarks.collectives", output, "--mib", *sizes)
    found: dict[str, Any] = json.loads(output.read_text())
    if not run.dry:
        run.require(found["backend"] == "nccl", f"the backend is {found['backend']}, not nccl")
        largest = found["all_reduce"][f"{sizes[-1]} MiB"]["bus"]
        run.require(
            largest >= LEAST_BUS,
            f"a sum moves {largest / 1e9:.0f} GB/s on the bus, at least {LEAST_BUS / 1e9:.0f} wanted",
        )
    return found


def same_step(run: Acceptance) -> dict[str, Any]:
    """A step of PPO's policy and critic, by plain torch and ZeRO 1 to 3, against that of one rank."""
    rows = 2 * run.gpus + 1  # no share is even
    sizes = ("dry", "8") if run.dry else ("120 M", "128")
    folder = run.work / "step"
    folder.mkdir()
    _ranks(
        run, "benchmarks.rank_checks", folder, "--config", run.config(sizes[0]), "--rows", str(rows),
        "--tokens", sizes[1],
    )  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "step.json").read_text())
    for engine, each in found.items():
        for model in ("policy", "critic"):
            apart = each[model]
            run.require(
                apart <= STEP_TOLERANCE,
                f"{engine}: the {model}'s step is {apart:.2g} of its size from that of one rank",
            )
    return found


def faults(run: Acceptance) -> dict[str, Any]:
    """SFT on all ranks, of which one is killed, then one hangs; at last it ends, as on one rank."""
    ranks = (
        f"compute.launch.sft.processes={run.gpus}",
        f"compute.launch.sft.rank_timeout={RANK_TIMEOUT}",
    )
    several = run.workspace("several", *SHORT_TRAINING, *ranks)
    alone = run.workspace("alone", *SHORT_TRAINING)
    run.stage("base", several, pretended=False)
    shutil.copytree(several / "models", alone / "models", dirs_exist_ok=True)
    found: dict[str, Any] = {"killed": _struck(run, several, "killed")}
    words = ("rlhf_core", "stage", "sft", "--workspace", alone)
    reference = run.started(*words, pretended=False)  # while the ranks wait for the one that hangs
    try:
        found["hung"] = _struck(run, several, "hung")
    finally:
        code, output = run.ended(reference, words)
    if code:
        raise StepFailed(f"SFT on one rank exited {code}: {output[-1500:]}")
    run.stage("sft", several, pretended=False)
    found["apart"] = _apart(several, alone)
    run.require(
        found["apart"] <= TRAINING_TOLERANCE,
        f"the training moved the weights otherwise than one rank, by {found['apart']:.2g} of their way",
    )
    return found


def _struck(run: Acceptance, workspace: Path, fault: str) -> dict[str, Any]:
    """Run SFT, kill a rank behind the next checkpoint or let it hang, and check what is said of it.

    Returns how SFT ended.
    """
    began = time.monotonic()
    before = set(workspace.glob("work/sft/*/checkpoints/step-*"))
    words = ("rlhf_core", "stage", "sft", "--workspace", workspace)
    process = run.started(*words, pretended=False)
    pid = 0
    while process.poll() is None and time.monotonic() < run.ends:
        if set(workspace.glob("work/sft/*/checkpoints/step-*")) - before:
            pid = _process_of_rank(process.pid)
            if pid:
                os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            break
        time.sleep(0.01)
    code, output = run.ended(process, words)
    if not pid:
        raise StepFailed(f"SFT exited {code} before a rank could be struck: {output[-1500:]}")
    rank = f"rank {LATE_RANK} of {run.gpus}"
    said = f"{rank} was killed by SIGKILL" if fault == "killed" else f"for {rank} (process {pid}"
    run.require(code == 1, f"with a {fault} rank SFT exited {code}, not 1: {output[-300:]}")
    run.require(said in output, f"with a {fault} rank SFT did not say {said!r}: {output[-300:]}")
    run.require(not _lives(pid), f"the {fault} rank is still there")
    return {"exit": code, "seconds": round(time.monotonic() - began, 1)}


def _process_of_rank(launcher: int) -> int:
    """The process of :data:`LATE_RANK` below a launcher; 0 where there is none."""
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            if child.environ().get("RANK") == LATE_RANK:
                return child.pid
        except psutil.Error:
            continue
    return 0


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _apart(several: Path, alone: Path) -> float:
    """How far two trainings from the same base have moved its weights from each other, by the size
    of the way.
    """
    from safetensors.torch import load_file

    file = "model.safetensors"
    base = load_file(several / "models/base" / file)
    ways = []
    for workspace in (several, alone):
        trained = load_file(workspace / "models/sft" / file)
        ways.append({name: weight.float() - base[name].float() for name, weight in trained.items()})
    return distance(*ways)


def vllm_by_files(run: Acceptance) -> dict[str, Any]:
    """Iterations of PPO whose replies a vLLM server samples that the first rank starts."""
    arguments = ["--max-model-len", "64", "--enforce-eager"]
    if not run.dry:
        arguments += ["--gpu-memory-utilization", "0.2"]
    sampler = {"kind": "vllm", "python": str(_python_of_vllm(run)), "arguments": arguments}
    return _iterations_by_vllm(run, sampler, run.gpus)


def vllm_by_nccl(run: Acceptance) -> dict[str, Any]:
    """The same with a server on the last GPU, which gets the weights from the first one by NCCL."""
    python = _python_of_vllm(run)
    if run.dry:
        raise StepSkipped("NCCL needs GPUs")
    with _vllm_server(run, python) as url:
        sampler = {"kind": "vllm", "url": url, "weights": "nccl"}
        return _iterations_by_vllm(run, sampler, run.gpus - 1)


def _python_of_vllm(run: Acceptance) -> Path:
    if run.vllm is None:
        raise StepSkipped("--vllm-python names no environment with vLLM")
    return run.vllm


def _iterations_by_vllm(
    run: Acceptance, sampler: Mapping[str, Any], processes: int
) -> dict[str, Any]:
    settings = (
        f"ppo.sampler={json.dumps(sampler)}",
        "ppo.importance_sampling_correction.mode=always",
        "ppo.minibatches=1",
        f"base.dtype={'float32' if run.dry else 'bfloat16'}",
    )
    found = _throughput(run, "vllm", settings, processes, rows=8, tokens=16)
    return found | {"processes": processes}


@contextmanager
def _vllm_server(run: Acceptance, python: Path) -> Iterator[str]:
    """A server with random weights on the last GPU; yields its address."""
    folder, log = run.work / "served", run.work / "vllm.log"
    imports = "from transformers import AutoConfig, AutoModelForCausalLM"
    model = (
        f"AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(run.config('vllm'))!r}))"
    )
    run.evaluated(imports, f"bool({model}.save_pretrained({str(folder)!r}))")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        python.parent / "vllm", "serve", folder, "--host", "127.0.0.1", "--port", port, "--load-format", "dummy",
        "--served-model-name", "policy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--max-model-len", "64",
        "--weight-transfer-config", '{"backend": "nccl"}',
    ]  # fmt: skip
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": str(run.gpus - 1),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait_for(url, server, log, min(time.monotonic() + SERVER_SECONDS, run.ends))
        yield url
    finally:
        kill_tree(server.pid)
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path, ends: float) -> None:
    while time.monotonic() < ends and server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.RequestError:
            time.sleep(0.5)
    said = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    raise StepFailed(f"vLLM's server has not answered: {said}")


def throughput(run: Acceptance) -> dict[str, Any]:
    """An iteration of PPO on all ranks, by engine and phase."""
    found = {}
    for name, (shape, engine) in (DRY_THROUGHPUT if run.dry else THROUGHPUT).items():
        settings = (*(CPU_SMALL if run.dry else GPU_LARGE), *engine)
        rows, tokens = (2, 8) if run.dry else (256, 256)
        found[name] = _throughput(run, shape, settings, run.gpus, rows, tokens)
    return found


def _throughput(
    run: Acceptance, shape: str, settings: Sequence[str], processes: int, rows: int, tokens: int
) -> dict[str, Any]:
    """Tokens per second of each GPU by phase, with ``rows`` replies on each of ``processes``."""
    output = run.work / "throughput.json"
    words = []
    for setting in (f"ppo.batch_size={processes * rows}", *settings):
        words += ["--set", setting]
    # The first GPUs: a server may have the last one.
    visible = {} if run.dry else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes)))}
    _ranks(
        run, "benchmarks.ppo_throughput", "--config", run.config(shape), "--output", output, "--iterations", "1",
        "--prompt", str(tokens), "--reply", str(tokens), *words, processes=processes, **visible,
    )  # fmt: skip
    each = json.loads(output.read_text())
    speeds = {}
    for phase in ("generation", "forward", "rewards", "update", "iteration"):
        made = rows * tokens if phase == "generation" else 2 * rows * tokens
        speeds[phase] = made / each["seconds"][phase]
    return {
        "tokens_per_second_per_gpu": speeds,
        "seconds": each["seconds"],
        "peak_bytes": each["peak_bytes"],
        "sampler_against_trainer": each["sampler_against_trainer"],
    }


def _ranks(
    run: Acceptance, *words: str | Path, processes: int | None = None, **environment: str
) -> None:
    """Run a module on all ranks."""
    # The ranks meet on loopback, whatever this machine's name stands for.
    meeting = (
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    )
    count = str(processes or run.gpus)
    run.python(
        "torch.distributed.run", *meeting, "--nproc-per-node", count, "-m", *words,
        pretended=False, expected=0, **environment,
    )  # fmt: skip


STEPS: dict[str, Step] = {
    "sums and gatherings": collectives,
    "a step as on one rank": same_step,
    "a killed rank, a hung rank, and the end": faults,
    "vLLM by files": vllm_by_files,
    "vLLM by NCCL": vllm_by_nccl,
    "PPO throughput": throughput,
}


def tables(steps: Mapping[str, Any]) -> list[Table]:
    """What was measured: the bandwidth of collectives, and tokens per second of each GPU."""
    measured = []
    speeds = steps.get("sums and gatherings", {}).get("found", {})
    bus = Table("operation", "tensor", "GB/s on the bus", title=f"By {speeds.get('backend')}")
    for operation in ("all_reduce", "all_gather"):
        for size, each in speeds.get(operation, {}).items():
            bus.add_row(operation, size, f"{each['bus'] / 1e9:.1f}")
    if bus.rows:
        measured.append(bus)
    trained = steps.get("PPO throughput", {}).get("found", {})
    phases = Table("model, engine", "phase", "seconds", "tokens/s per GPU", title="PPO")
    for name, each in trained.items():
        for phase, taken in each["seconds"].items():
            speed = each["tokens_per_second_per_gpu"].get(phase)
            phases.add_row(name, phase, f"{taken:.3f}", "" if speed is None else f"{speed:.0f}")
    if phases.rows:
        measured.append(phases)
    return measured
