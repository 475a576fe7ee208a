"""How long each stage takes on GPUs: its passes by their roofline, over the shares of it that were
measured.

Shares and host work are those of one H100 (docs/gpus.md), of models of two widths. What several
ranks send to each other is an assumption, and nothing of it is taken to be hidden. Source of the
bytes: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.config.params import Params
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.roofline import BYTES, Device, Roofline
from rlhf_extras.memory.sharding import planned_precision
from rlhf_extras.memory.workload import (
    PAIRED,
    DataShape,
    Work,
    critic_rollouts,
    ppo_iteration,
    work_of_stage,
)

# Measured on an H100 just before the shares: products in bfloat16, in TF32 and in float32, and
# copies.
H100_FLOPS = {"bfloat16": 730e12, "tf32": 405e12, "float32": 51e12}
H100_BANDWIDTH = 2.8e12
# Shares of the roofline by the model's width; those of a width between them are interpolated.
SHARES = {
    1024: {"generation": 0.36, "forward": 0.40, "scalar": 0.44, "update": 0.40},
    4096: {"generation": 0.65, "forward": 0.64, "scalar": 0.69, "update": 0.63},
}
HOST_SECONDS = 0.0014  # for each reply, outside of the phases
# Assumed: bytes per second that a GPU sends while it receives as many, within a machine and between
# machines.
LINK, NETWORK = 300e9, 50e9


@dataclass(frozen=True)
class StageTime:
    """One stage on GPUs.

    Attributes:
        stage: Its name.
        ranks: Processes, one on each GPU.
        rows: Rows of one optimiser step, or of the evaluation.
        tokens: Tokens of them on the busiest rank.
        step: Seconds of an iteration of PPO, a rollout of the critic, or an optimiser step, by
            phase.
        steps: How many there are.
        seconds: All of the stage.
    """

    stage: str
    ranks: int
    rows: int
    tokens: float
    step: Mapping[str, float]
    steps: float
    seconds: float

    @property
    def rows_per_rank(self) -> int:
        """Rows of the busiest rank."""
        return -(-self.rows // self.ranks)

    @property
    def idle(self) -> float:
        """The share of all ranks' time in a step that goes to waiting, or to rows of weight 0."""
        return 1 - self.rows / (self.ranks * self.rows_per_rank)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        derived = {"rows_per_rank": self.rows_per_rank, "idle_share": self.idle}
        return vars(self) | derived | {"step": dict(self.step)}


def h100(params: Params) -> Device:
    """The measured limits of an H100 in the precision of the planned weights."""
    precision: str = planned_precision(params)
    if precision == "float32" and params.compute.tf32:
        precision = "tf32"
    return Device(f"H100 in {precision}", H100_FLOPS[precision], H100_BANDWIDTH)


def stage_times(
    params: Params,
    architecture: Architecture,
    data: DataShape,
    stages: Sequence[str],
    device: Device | None = None,
) -> list[StageTime]:
    """Project the time of each of ``stages``.

    Args:
        params: The settings.
        architecture: The starting model.
        data: Lengths of rows, and their numbers.
        stages: Names of stages that run a model.
        device: The limits of each GPU; by default :func:`h100`.
    """
    launches = {str(name): launch for name, launch in params.compute.launch.items()}
    found = []
    for stage in stages:
        launch = launches.get(stage, LaunchConfig())
        projection = _Projection(params, architecture, stage, launch, device or h100(params))
        found.append(projection.project(data))
    return found


@dataclass(frozen=True)
class _Projection:
    """One stage's passes on the GPUs that its launch settings name."""

    params: Params
    architecture: Architecture
    stage: str
    launch: LaunchConfig
    device: Device

    @property
    def roofline(self) -> Roofline:
        """Of a rank."""
        return Roofline(
            self.architecture,
            planned_precision(self.params),
            self.launch.gradient_checkpointing,
            self.launch.ranks,
        )

    def project(self, data: DataShape) -> StageTime:
        """Project the whole stage, and its step."""
        work = work_of_stage(self.params, self.stage, data)
        step, steps = self._step(work, data)
        trained = [one for one in step if one.kind == "train"] or step
        largest = max(trained, key=lambda one: (not one.scalar, one.rows * one.prompt))
        tokens = self.roofline.rows(largest) * (largest.prompt + largest.reply)
        return StageTime(
            self.stage,
            self.launch.ranks,
            largest.rows,
            tokens,
            self.phases(step),
            steps,
            sum(self.phases(work).values()),
        )

    def _step(self, work: Sequence[Work], data: DataShape) -> tuple[Sequence[Work], float]:
        """The passes of one step, and how many steps the stage makes."""
        if self.stage == "ppo" and self.params.policy.method == "ppo":
            return ppo_iteration(self.params, data), self.params.ppo.iterations
        if self.stage == "critic":
            return critic_rollouts(self.params, data, 1), self.params.critic.max_rollouts
        updates = [one for one in work if one.kind == "train" and one.times > 0]
        if not updates:
            return work, 1
        steps = updates[0].times
        return [Work(**{**vars(one), "times": one.times / steps}) for one in updates], steps

    def phases(self, work: Sequence[Work]) -> dict[str, float]:
        """Seconds by phase, with the host's work and what is sent as phases of their own."""
        found: dict[str, float] = {}
        host = sending = 0.0
        for one in work:
            seconds = self.roofline.seconds(one, self.device) / self._share(one)
            found[one.phase] = found.get(one.phase, 0.0) + seconds
            sending += self._sending(one)
            if one.kind == "sample":
                host += HOST_SECONDS * one.times * self.roofline.rows(one)
        return found | {
            name: value for name, value in (("host", host), ("sending", sending)) if value
        }

    def _share(self, work: Work) -> float:
        """The share of the roofline that such passes reach in a model of this width."""
        name = {"sample": "generation", "train": "update", "read": "forward"}[work.kind]
        if work.kind == "read" and work.scalar and work.phase != "forward":
            name = "scalar"
        (narrow, low), (wide, high) = ((width, shares[name]) for width, shares in SHARES.items())
        width = self.roofline.model(work).width
        place = math.log(width / narrow) / math.log(wide / narrow)
        return low + (high - low) * min(max(place, 0.0), 1.0)

    def _sending(self, work: Work) -> float:
        """Seconds in which a rank sends gradients and weights of a pass, of which a ring takes
        (N - 1) / N of a tensor through each rank. Adapters are small beside weights.
        """
        ranks, model = self.launch.ranks, self.roofline.model(work)
        if ranks == 1 or work.kind == "sample":
            return 0.0
        passes = -(-self.roofline.rows(work) // self._rows_of_pass(work))
        if work.kind == "read":
            tensors = passes if self.launch.frozen == "sharded" else 0
        elif work.adapters:
            tensors = 0
        else:
            # Gradients are reduced and scattered, and weights gathered: once a step, or at each
            # pass from the stages on that shard them.
            tensors = {0: 2, 1: 2, 2: passes + 1, 3: 3 * passes}[self.launch.zero or 0]
        held = model.linear + model.idle + (0 if work.scalar else model.head)
        size = BYTES[self.roofline.precision] * held
        link = LINK if self.launch.nodes == 1 else NETWORK
        return work.times * tensors * size * (ranks - 1) / ranks / link

    def _rows_of_pass(self, work: Work) -> int:
        """Most rows of one pass of a rank."""
        length = math.ceil(work.prompt + work.reply)
        if self.stage in ("critic", "ppo") and self.params.policy.method == "ppo":
            ppo = self.params.ppo
            return MicroBatchLimits(ppo.micro_batch_size, ppo.micro_batch_tokens).most_rows(length)
        if self.stage in PAIRED:
            return work.rows  # a rank's share is one pass
        if self.stage == "evaluate":
            return self.params.evaluate.batch_size
        sections = {"sft": self.params.sft, "base": self.params.base.pretraining}
        section: Any = sections.get(self.stage) or getattr(
            self.params.policy, self.params.policy.method, None
        )
        return getattr(section, "micro_batch_size", None) or work.rows


def times_text(found: Sequence[StageTime], device: Device, source: str) -> str:
    """Return the table of stages and the seconds of a step by phase."""
    lines = [
        f"time on GPUs like an H100: {device.flops / 1e12:.0f} TFLOP/s and {device.bandwidth / 1e12:.1f} TB/s, of "
        f"which phases reach the measured shares (docs/gpus.md);",
        f"  between ranks {LINK / 1e9:.0f} GB/s within a machine and {NETWORK / 1e9:.0f} between machines, none of "
        f"it hidden, by assumption; rows of {source}",
        f"  {'stage':<9}{'ranks':>6}{'rows a step':>13}{'a rank':>8}{'idle':>6}{'tokens a rank':>15}{'s a step':>10}"
        f"{'steps':>7}{'hours':>8}",
    ]
    for one in found:
        lines.append(
            f"  {one.stage:<9}{one.ranks:>6}{one.rows:>13,}{one.rows_per_rank:>8,}{one.idle:>6.0%}{one.tokens:>15,.0f}"
            f"{sum(one.step.values()):>10.2f}{one.steps:>7,.0f}{one.seconds / 3600:>8.2f}"
        )
    for one in found:
        if len(one.step) > 1:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.step.items())
            lines.append(f"  {one.stage}, seconds a step: {parts}")
    hours = sum(one.seconds for one in found) / 3600
    lines.append(f"  {hours:.1f} hours in all, one stage after another")
    return "\n".join(lines)
