"""``python -m benchmarks.ppo_throughput.scaling FILE``: tokens per second that a recipe would reach on several GPUs.

FILE is what ``python -m benchmarks.ppo_throughput --output`` wrote on one GPU: the limits of the device and the share
of its roofline that each phase reached. A phase of the recipe then takes its own roofline over that share. Added is
what data-parallel ranks send to each other, all of it waited for, or as much of it hidden behind the update as its
computation takes. Not in it: waiting for the rank with the longest replies, checkpoints, selection, other machines'
work. Source of the bytes: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 7.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.ppo_throughput.__main__ import ROOT, add_recipe, read_shares, request_of
from benchmarks.ppo_throughput.roofline import BYTES, PHASES, Device, Iteration, Model, launch_of_ppo
from rlhf_core.config.loading import Params
from rlhf_core.errors import RlhfError
from rlhf_core.memory.architecture import starting_architecture
from rlhf_core.memory.command import PlanOptions, params_of
from rlhf_core.models.precision import weights_precision
from rlhf_core.sampling.micro_batches import MicroBatchLimits


@dataclass(frozen=True)
class Traffic:
    """What each rank sends in an iteration, in bytes: sharded frozen models while scoring, gradients and weights."""

    forward: float
    rewards: float
    referee: float
    update: float

    @classmethod
    def of(cls, params: Params, iteration: Iteration, gpus: int) -> Traffic:
        """By ZeRO's stage and the placement of frozen models. A ring passes (N - 1) / N of a tensor through each rank.

        Adapters are small beside weights: their gradients are left out.
        """
        launch, ppo, ring = launch_of_ppo(params), params.ppo, (gpus - 1) / gpus
        size = BYTES[weights_precision(params.base.dtype)]

        def weights(model: Model) -> float:
            return ring * size * (model.linear + model.head)

        limits = MicroBatchLimits(ppo.micro_batch_size, ppo.micro_batch_tokens)
        rows = limits.most_rows(iteration.prompt + iteration.reply)
        passes = -(-iteration.rows // rows)
        gathered = passes if launch.frozen == "sharded" else 0
        trained = [iteration.policy] * (not iteration.adapters)
        trained += [iteration.critic] * (not iteration.critic_adapters and not iteration.critic_free)
        steps = ppo.epochs * ppo.minibatches
        # Micro-batches of one step, whose gradients ZeRO reduces one by one from stage 2 on.
        backwards = -(-iteration.rows // (ppo.minibatches * rows)) * steps
        # Gradients are reduced and scattered, and weights gathered: once a step, or around each pass.
        times = {0: 2 * steps, 1: 2 * steps, 2: backwards + steps, 3: 3 * backwards}[launch.zero or 0]
        return cls(
            forward=0.0 if iteration.adapters else gathered * weights(iteration.policy),
            rewards=gathered * weights(iteration.reward),
            referee=gathered * weights(iteration.referee) / iteration.referee_every if iteration.referee else 0.0,
            update=times * sum(map(weights, trained)),
        )


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration by phase: computing, and sending over a link."""

    tokens: int
    computing: Mapping[str, float]
    sending: Mapping[str, float]

    @property
    def slowest(self) -> float:
        """Tokens per second and GPU where nothing is sent while something is computed."""
        return self.tokens / (sum(self.computing.values()) + sum(self.sending.values()))

    @property
    def fastest(self) -> float:
        """Tokens per second and GPU where each phase computes and sends at once."""
        return self.tokens / sum(max(seconds, self.sending[name]) for name, seconds in self.computing.items())


def predict(
    iteration: Iteration, traffic: Traffic, device: Device, shares: Mapping[str, float], host: float, link: float
) -> Prediction:
    """The times of one of several ranks.

    Args:
        iteration: What the rank computes.
        traffic: What it sends.
        device: Limits of its GPU.
        shares: The share of its roofline that each phase reaches.
        host: Seconds of host work for each reply.
        link: Bytes per second that it sends while it receives as many.
    """
    computing = {name: seconds / shares[name] for name, seconds in iteration.roofline(device).items()}
    computing["referee"] = iteration.referee_flops() / device.flops / shares["rewards"]
    computing["host"] = host * iteration.rows
    sending = {"forward": traffic.forward, "rewards": traffic.rewards, "update": traffic.update}
    sending |= {"generation": 0.0, "referee": traffic.referee, "host": 0.0}
    return Prediction(iteration.tokens, computing, {name: size / link for name, size in sending.items()})


def main() -> int:
    """Print the prediction, and exit 0; 1 for settings that are refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_throughput.scaling", description=__doc__)
    parser.add_argument("shares", type=Path, metavar="FILE", help="what --output of benchmarks.ppo_throughput wrote")
    add_recipe(parser)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--link", type=float, default=300.0, help="GB/s that each GPU sends while it receives as many")
    given = parser.parse_args()
    try:
        params = params_of(request_of(given, PlanOptions(gpus=given.gpus)))
        architecture = starting_architecture(params.base, ROOT, given.config)
    except RlhfError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        device, shares, host = read_shares(given.shares)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{given.shares} is not what --output of benchmarks.ppo_throughput writes ({error})")
    iteration = Iteration.of(params, architecture, given.prompt, given.reply, given.gpus)
    found = predict(iteration, Traffic.of(params, iteration, given.gpus), device, shares, host, given.link * 1e9)
    Console().print(_table(found, f"{params.base.source} on {given.gpus} x {device.name}, computed, not measured"))
    return 0


def _table(found: Prediction, title: str) -> Table:
    table = Table("phase", "computing, s", "sending, s", title=title)
    for name in (*PHASES, "referee", "host"):
        table.add_row(name, f"{found.computing[name]:.2f}", f"{found.sending[name]:.2f}")
    table.caption = f"{found.slowest:.0f} to {found.fastest:.0f} tokens per second and GPU"
    return table


if __name__ == "__main__":
    sys.exit(main())
