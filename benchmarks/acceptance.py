"""One acceptance: its steps as processes of their own, their workspaces, and what they found.

What a step found goes to a file as soon as it has ended, and one table at the end says pass or
fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from flows.commands.init import create
from rlhf_core.storage.files import atomic_write_json
from rlhf_extras.memory.architecture import PUBLISHED_CONFIGS

ROOT = Path(__file__).resolve().parents[1]
PRETENDED = ROOT / "tests/pretended_gpu"
CPU_STAGES = ("collect", "validate")
SMALL = (
    "collect.world.demonstrations=1200", "collect.world.preferences=1500", "base.layers=1", "sft.steps=8",
    "reward.steps=8", "referee.steps=8", "judge.steps=8", "critic.max_rollouts=1", "critic.batch_size=8",
    "ppo.iterations=5", "ppo.batch_size=8", "ppo.max_new_tokens=8", "ppo.checkpoint.every=1", "evaluate.prompts=8",
)  # fmt: skip
DATA = "data"  # the workspace whose data all others take
LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"Qwen2.5-0.5B": PUBLISHED_CONFIGS["Qwen/Qwen2.5-0.5B"]}
for name, sizes in {
    "0.5 B": (32000, 1024, 4096, 28, 16, 8),
    "7 B, 4 layers": (32000, 4096, 11008, 4, 32, 32),
    "120 M": (32000, 768, 2048, 10, 12, 12),
    "vllm": (2048, 256, 512, 2, 4, 4),
    "dry": (512, 32, 48, 1, 2, 2),
}.items():
    SHAPES[name] = LLAMA | dict(zip(SIZES, sizes, strict=True))


class StepFailed(Exception):
    """A command of a step failed."""


class StepSkipped(Exception):
    """A step cannot be made here, for the reason that it gives."""


@dataclass
class Acceptance:
    """One run: its folder, what is left of the time, and whether a GPU is only pretended.

    Attributes:
        work: Workspaces and models of this run.
        dry: Whether there is no GPU.
        gpus: How many GPUs are tried together; processes on the CPU where there is none.
        vllm: The Python of an environment with vLLM, if there is one.
        ends: When the time is up, by the monotonic clock.
        making: Held while a workspace is made, the first with the data of all others.
        faults: What the step found wrong.
    """

    work: Path
    dry: bool
    gpus: int
    vllm: Path | None
    ends: float
    making: threading.RLock = field(default_factory=threading.RLock)
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
        code, output = self.ended(self.started(*words, pretended=pretended, **extra), words)
        if code != expected:
            command = " ".join(map(str, words))
            raise StepFailed(f"{command} exited {code}, not {expected}: {output[-1500:]}")
        return output

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
        how = [] if words[0] == "-c" else ["-m"]
        if self.dry and pretended:
            how = [str(PRETENDED)]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = (
            os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | extra
        )
        return subprocess.Popen(
            [sys.executable, *how, *map(str, words)], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self, process: subprocess.Popen[str], words: Sequence[str | Path]) -> tuple[int, str]:
        """The exit code and the output of a process, once it has ended.

        Raises:
            StepFailed: The time is up; it and all that it has started are ended.
        """
        try:
            output, _ = process.communicate(timeout=max(self.ends - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
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
        """A workspace of the smoke profile, made smaller, with validated data.

        The first workspace's settings are those of the data.
        """
        folder = self.work / name
        with self.making:
            if name != DATA and not (self.work / DATA).is_dir():
                made = self.workspace(DATA, *settings)
                for stage in CPU_STAGES:
                    self.stage(stage, made)
            create(folder, profile="smoke", sets=(*SMALL, *settings), probe=False)
        (folder / "gates").mkdir(exist_ok=True)
        for gate in ("sft", "reward"):  # a few steps make no model that passes one
            (folder / f"gates/{gate}.pass").touch()
        if name != DATA:
            shutil.copytree(self.work / DATA / "data", folder / "data", dirs_exist_ok=True)
        return folder

    def config(self, name: str) -> Path:
        """The ``config.json`` of one of :data:`SHAPES`."""
        path = self.work / f"{name}.json"
        path.write_text(json.dumps(SHAPES[name]))
        return path

    def stage(self, name: str, workspace: Path, pretended: bool = True, expected: int = 0) -> None:
        """Run a stage."""
        self.python(
            "rlhf_core", "stage", name, "--workspace", workspace,
            pretended=pretended and name not in CPU_STAGES, expected=expected,
        )  # fmt: skip


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started; ranks outlive their launcher otherwise."""
    try:
        process = psutil.Process(pid)
        everyone = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for one in everyone:
        with suppress(psutil.NoSuchProcess):
            one.kill()


Step = Callable[[Acceptance], dict[str, Any]]


@dataclass
class Results:
    """What the steps found, in their order, written to a file after each.

    Attributes:
        output: The file.
        run: What every step is given.
        planned: The steps by their names.
        steps: What those that have ended found.
    """

    output: Path
    run: Acceptance
    planned: Mapping[str, Step]
    steps: dict[str, Any] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def of(self, name: str) -> None:
        """Run a step."""
        own, started, found = replace(self.run, faults=[]), time.monotonic(), dict[str, Any]()
        skipped = ""
        try:
            found = self.planned[name](own)
        except StepSkipped as reason:
            skipped = str(reason)
        except (StepFailed, OSError, KeyError, ValueError) as error:
            own.faults.append(f"{type(error).__name__}: {error}")
        taken = round(time.monotonic() - started, 1)
        with self.writing:
            self.steps[name] = {
                "passed": not own.faults,
                "skipped": skipped,
                "seconds": taken,
                "faults": own.faults,
                "found": found,
            }
            self.steps = {each: self.steps[each] for each in self.planned if each in self.steps}
            content = {"dry": self.run.dry, "gpus": self.run.gpus, "steps": self.steps}
            atomic_write_json(self.output, content)
            print(f"{name}: {verdict(self.steps[name])} after {taken} s", flush=True)

    @property
    def passed(self) -> bool:
        """Whether no step has failed."""
        return all(each["passed"] for each in self.steps.values())

    def table(self, title: str) -> Table:
        """One row a step."""
        table = Table("step", "seconds", "", "what was wrong", title=title)
        for name, each in self.steps.items():
            wrong = [fault.strip().splitlines()[-1][:100] for fault in each["faults"]]
            said = "\n".join(wrong) or each["skipped"]
            table.add_row(name, f"{each['seconds']:.0f}", verdict(each), said)
        return table


def verdict(step: Mapping[str, Any]) -> str:
    """Whether a step passed, in a word."""
    if step["skipped"]:
        return "skipped"
    return "pass" if step["passed"] else "FAIL"
