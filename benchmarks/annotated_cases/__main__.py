"""Measure every arm of every seed, and print one table of values and one of paired differences."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console

from benchmarks.annotated_cases import __doc__ as description
from benchmarks.annotated_cases.arms import SeedExperiment, Sizes, train_unannotated
from benchmarks.annotated_cases.results import (
    ARMS,
    add_result,
    difference_table,
    load_results,
    result_table,
    write_summary,
)
from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import load_section
from rlhf_core.errors import RlhfError


def main() -> int:
    """Run the experiment; results that are in ``--output`` already are kept. Return 2 for a wrong input."""
    given = _parser().parse_args()
    try:
        _measure(given)
    except RlhfError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.annotated_cases", description=description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--seeds", type=int, nargs="+", help="make a workspace of --profile for each seed")
    source.add_argument("--workspaces", type=Path, nargs="+", metavar="DIR", help="finished workspaces, one per seed")
    parser.add_argument("--profile", default="demo", help="of the workspaces that are made")
    parser.add_argument("--output", type=Path, default=Path("workspaces/annotated-cases"), help="folder of all results")
    parser.add_argument("--cases", type=_positive, default=500, help="pairs in each of the two sets")
    parser.add_argument("--prompts", type=_positive, default=5000, help="at most so many training prompts")
    parser.add_argument("--replies", type=_positive, default=4, help="of each model to each prompt")
    parser.add_argument("--held-out", type=_positive, default=1000, help="at most so many held-out prompts")
    parser.add_argument("--ppo", action="store_true", help="train and measure policies too")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _measure(given: argparse.Namespace) -> None:
    sizes = Sizes(given.cases, given.prompts, given.replies, given.held_out)
    file = given.output / "results.jsonl"
    workspaces = _workspaces(given)
    for seed, workspace in workspaces.items():
        if given.seeds and _unmeasured(file, seed, given.ppo):
            train_unannotated(workspace, given.profile, seed)
        experiment = SeedExperiment(workspace.resolve(), given.output.resolve() / f"seed-{seed}", sizes, given.ppo)
        experiment.check()
        for arm in _unmeasured(file, seed, given.ppo):
            add_result(file, experiment.measure(arm))
    results = [result for result in load_results(file) if result.seed in workspaces]
    console = Console(width=140)
    console.print(result_table(results))
    console.print(difference_table(results))
    write_summary(given.output / "summary.json", results)


def _workspaces(given: argparse.Namespace) -> dict[int, Path]:
    """Return the unannotated workspace by seed."""
    if given.seeds:
        return {seed: given.output / f"seed-{seed}" / "none" for seed in given.seeds}
    workspaces: dict[int, Path] = {}
    for folder in given.workspaces:
        seed = load_section(folder, "collect", CollectConfig).seed
        if seed in workspaces:
            raise RlhfError(f"{workspaces[seed]} and {folder} have the same seed, {seed}; name one workspace per seed")
        workspaces[seed] = folder
    return workspaces


def _unmeasured(file: Path, seed: int, ppo: bool) -> list[str]:
    """Return the arms of a seed without a result, or, where policies are asked for, without one of its policy."""
    measured = {
        result.arm
        for result in load_results(file)
        if result.seed == seed and (not ppo or "policy_gold" in result.metrics)
    }
    return [arm for arm in ARMS if arm not in measured]


if __name__ == "__main__":
    sys.exit(main())
