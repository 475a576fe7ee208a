"""Do the health rules speak before the damage is done? ``python -m benchmarks.early_warning vanilla 12 13 14``.

For each seed a workspace of its own is trained up to the critic, then PPO runs with rules that only report. Beside it,
and unseen by it, the gold judge scores the policy's replies to fixed validation prompts every few iterations. Printed
are the iteration of the first finding that would have stopped the run, and the first iteration at which the upper 95 %
bound of the paired difference (gold - SFT's gold) lies below zero.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rlhf_core.tracking import Tracker
from rlhf_core.training.run_context import RunContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from rlhf_core.ppo.trainer import Trainer

EVERY, PROMPTS = 2, 256


class Enough(Exception):
    """Both iterations are known; the rest of the run would tell nothing more."""


@dataclass
class Watcher(Tracker):
    """A tracker that measures gold beside the run: ``difference`` gives (mean, upper 95 % bound)."""

    difference: Callable[[], tuple[float, float]] = lambda: (math.nan, math.nan)
    trainer: Trainer | None = None
    damaged: int | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Called by the trainer after each iteration, before its findings stop anything."""
        if step is None or step % EVERY:
            return
        mean, high = self.difference()
        self.curve.append((step, mean, high))
        if self.damaged is None and high < 0:
            self.damaged = step
        if self.damaged is not None and self.warned is not None:
            raise Enough

    @property
    def warned(self) -> int | None:
        """The iteration of the first finding that stops a run whose rules are enforced."""
        health = self.trainer.health if self.trainer is not None else None
        findings = health.findings if health is not None else []
        return next((int(f["iteration"]) for f in findings if f["action"] != "warn"), None)


def prepare(profile: str, seed: int, folder: Path) -> None:
    """The workspace of one seed, trained up to the critic; what is already there is kept."""
    settings = [f"seed={seed}", "ppo.health.mode=report"]
    if not folder.exists():
        sets = [part for setting in settings for part in ("--set", setting)]
        subprocess.run(["rlhf", "init", str(folder), "--profile", profile, *sets], check=True, stdout=sys.stderr)
    subprocess.run(["dvc", "repro", "--quiet", "critic"], cwd=folder, check=True, stdout=sys.stderr)


def watch(folder: Path) -> Watcher:
    """Run PPO in the workspace's ``work/`` with gold measured beside it."""
    import torch

    from rlhf_core.api.ppo import PpoInputs, assemble
    from rlhf_core.config.loading import load_section
    from rlhf_core.config.ppo import PpoConfig
    from rlhf_core.data.schema import Prompt, read_rows
    from rlhf_core.evaluation.comparisons.comparison import compare
    from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN, GoldJudge
    from rlhf_core.evaluation.replies import on_policy_replies
    from rlhf_core.evaluation.statistics import clusters_of
    from rlhf_core.models.starting.base import load_tokenizer
    from rlhf_core.sampling.distribution import Sampling
    from rlhf_core.stages import ppo
    from rlhf_core.stages.policy import read_training_prompts
    from rlhf_core.stages.runtime.contract import Paths
    from rlhf_core.training.rng import derive_seed, seed_everything

    torch.set_num_threads(1)
    config = load_section(folder, "ppo", PpoConfig)
    inputs = Paths({key: folder / path for key, path in ppo.STAGE.inputs.items()})
    watcher = Watcher()
    tokenizer = load_tokenizer(inputs.sft)
    parts = PpoInputs(
        config, inputs.sft, tokenizer, read_training_prompts(inputs.clean, tokenizer), inputs.reward, inputs.critic,
        inputs.base, inputs.referee,
        ppo.validation_prompts(inputs.clean)[: config.selection.prompts],
        ppo.read_ptx_texts(config, inputs.clean, tokenizer),
    )  # fmt: skip
    seed_everything(config.seed)
    trainer = watcher.trainer = assemble(parts, RunContext(folder / "work" / "early-warning", watcher))
    rows = sorted(read_rows(inputs.clean / "prompts" / "validation.parquet", Prompt), key=lambda row: row.id)[:PROMPTS]
    prompts, seed = [row.prompt for row in rows], derive_seed(config.seed, "early", "warning")

    sampling = Sampling.for_rollouts(tokenizer, config.rollout)

    def gold(model: PreTrainedModel) -> list[float]:
        replies = on_policy_replies(model, tokenizer, prompts, sampling, seed).replies
        return GoldJudge().score(prompts, replies)

    policy = trainer.learner.pair.policy
    before = gold(policy)

    def difference() -> tuple[float, float]:
        found = compare(gold(policy), before, GOLD_TIE_MARGIN, 500, config.seed, clusters=clusters_of(rows))
        high = found.get("mean_difference_high95")
        return found["mean_difference"], math.inf if high is None else high

    watcher.difference = difference
    with contextlib.suppress(Enough):
        trainer.run()
    return watcher


def main() -> int:
    """Measure every seed and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", choices=("vanilla", "demo"))
    parser.add_argument("seeds", type=int, nargs="+")
    given = parser.parse_args()
    for seed in given.seeds:
        folder = Path("workspaces") / f"early-{given.profile}-{seed}"
        prepare(given.profile, seed, folder)
        watcher = watch(folder)
        lowest = min((mean for _, mean, _ in watcher.curve), default=math.nan)
        print(
            f"{given.profile} seed {seed}: would stop at {watcher.warned}, damage shows at {watcher.damaged}, "
            f"iterations {watcher.curve[-1][0] if watcher.curve else 0}, lowest gold - SFT's {lowest:+.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
