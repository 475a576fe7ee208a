"""Run the demo for some seeds, or read finished runs, and keep a row of figures for each.

    python -m benchmarks.release_figures --seeds 1,2,3          # runs
    python -m benchmarks.release_figures --read workspaces/demo-…  # reads a finished run

``benchmarks.release_pages`` makes the tables of the pages from the rows. Rounding differs by
processor and threads, and so do runs; ``MKL_CBWR``, ``OPENBLAS_CORETYPE`` and the like are taken
from the environment and written beside the figures. The newest row is the last, in place
of one of the same seed, method and rounding.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import workspace_name
from rlhf_core.storage.files import read_json
from rlhf_core.tracking.stage_run import tracking_uri

FILE = Path(__file__).parent / "results" / "release.csv"
# Of the demo whose reward models learned at a higher rate, from fewer comparisons of content.
BEFORE = FILE.with_name("release_before.csv")
ROUNDING = ("MKL_CBWR", "OPENBLAS_CORETYPE", "OMP_NUM_THREADS")
CATEGORIES = ("fact", "context", "howto", "harmful")
PROBES = ("world_fact", "world_story", "values_swapped", "pleasantry_appended")
BOUNDS = ("", "_low95", "_high95")
READERS = ("reward", "referee", "judge")
COMPARED_BY = ("gold", "judge", "referee", "reward")
# What is said of each side of the comparison.
OF_A_SIDE = ("gold", "length", "perplexity_preferred", "perplexity_pretrain")
NEARLY_EQUAL = 3  # characters
# Rows with the same values here are of one run, made once more.
KEY = ("processor", *ROUNDING, "use", "seed", "method")
Row = Mapping[str, Any]


def processor() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def figures(workspace: Path) -> list[dict[str, Any]]:
    """What a finished run of the demo shows: gates, right replies, win rates with 95 % bounds,
    drift, perplexities and probes; and a row for the best of n replies, where they were compared.
    """
    params = load_params(workspace)
    method: str = params.policy.method
    if method == "ppo" and params.ppo.advantage.critic_free:
        method = params.ppo.advantage.estimator
    row: dict[str, Any] = {"seed": params.seed, "method": method} | record_of(workspace)
    for gate in ("reward", "policy"):
        report = workspace / "gates" / f"{gate}.json"
        row[f"gate_{gate}"] = read_json(report)["passed"] if report.is_file() else None
    for reader in READERS:
        probes = read_json(workspace / "metrics" / f"{reader}.json").get("probes", {})
        for kind in PROBES:
            row[f"{reader}_{kind}"] = probes.get(kind)
    evaluated = workspace / "metrics" / "evaluation.json"
    if not evaluated.is_file():
        return [row]
    evaluation = read_json(evaluated)
    row["replies_per_prompt"] = params.evaluate.replies_per_prompt
    for bound in BOUNDS:
        row[f"kl{bound}"] = evaluation.get(f"kl{bound}")
    for side in ("sft", "policy"):
        for name in OF_A_SIDE:
            row[f"{side}_{name}"] = evaluation[side][name]
        for category in CATEGORIES:
            of_category = evaluation["category"].get(category, {})
            row[f"{side}_right_{category}"] = of_category.get(f"{side}_right")
        row[f"{side}_gold_howto"] = evaluation["category"].get("howto", {}).get(f"{side}_gold")
    row |= rates(evaluation["comparison"])
    row |= rates_of_nearly_equal(workspace, evaluation["comparison"])
    best = evaluation.get("best_of_n")
    if best is None:
        return [row]
    alternative = {"seed": params.seed, "method": f"best_of_{best['n']}"}
    alternative |= {"policy_gold": best["gold"], "kl": best["kl_bound"]}
    alternative["tokens_per_reply"] = best["sampled_tokens_per_reply"]
    return [row, alternative | rates(best["comparison"])]


def rates(comparison: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Win rates by each judge, plain and at equal lengths, with their bounds."""
    return {
        f"{judge}_{rate}{bound}": comparison[judge].get(f"{rate}{bound}")
        for judge in COMPARED_BY
        for rate in ("win_rate", "lc_win_rate")
        for bound in BOUNDS
    }


def rates_of_nearly_equal(
    workspace: Path, comparison: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Win rates among pairs of replies whose lengths differ by few characters."""
    table = pq.read_table(workspace / "samples" / "comparisons.parquet").to_pandas()
    difference = table["policy_reply"].str.len() - table["sft_reply"].str.len()
    near = table[difference.abs() <= NEARLY_EQUAL]
    found = {}
    for judge in ("gold", "judge"):
        gain = near[f"policy_{judge}"] - near[f"sft_{judge}"]
        tied = gain.abs() <= comparison[judge]["tie_margin"]
        found[f"{judge}_nearly_equal"] = float(np.where(tied, 0.5, gain > 0).mean())
    return found


def record_of(workspace: Path) -> dict[str, Any]:
    """The package's commits that trained and evaluated, and the seconds of all stages, as recorded."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(workspace))
    experiments = [found.experiment_id for found in client.search_experiments()]
    # The oldest first: of a stage that ran again, the last counts.
    runs = client.search_runs(experiments, order_by=["attributes.start_time ASC"])
    stages = {
        run.data.tags["rlhf.stage"]: run
        for run in runs
        if "rlhf.stage" in run.data.tags and run.info.end_time
    }
    commits = {
        name: stages[stage].data.tags.get("rlhf.package_commit") if stage in stages else None
        for name, stage in (("trained_by", "ppo"), ("evaluated_by", "evaluate"))
    }
    milliseconds = sum(run.info.end_time - run.info.start_time for run in stages.values())
    return commits | {"seconds_of_stages": round(milliseconds / 1000)}


def run_demo(seed: int) -> Path:
    """Run the demo with a seed in a workspace of its own, and return that."""
    setting = f"seed={seed}"
    command = [sys.executable, "-m", "flows.cli", "run", "--profile", "demo", "--set", setting]
    subprocess.run(command, check=False)
    return Path("workspaces") / workspace_name("demo", [setting])


def keep(new: Iterable[Row], use: str) -> None:
    """Write rows to the file, with what rounding depends on, in place of those of the same run."""
    where = {"processor": processor(), **{name: os.environ.get(name, "") for name in ROUNDING}}
    rows = {key_of(row): row for row in read_rows()}
    for row in new:
        entry = where | {"use": use} | {name: shorter(value) for name, value in row.items()}
        rows.pop(key_of(entry), None)
        rows[key_of(entry)] = entry
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    with FILE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def key_of(row: Row) -> tuple[str, ...]:
    """What tells a run from others."""
    return tuple(str(row[name]) for name in KEY)


def shorter(value: Any) -> Any:
    """A figure to four digits."""
    return round(value, 4) if isinstance(value, float) else value


def read_rows(file: Path | None = None) -> list[dict[str, str]]:
    """The rows of the file, by default those of today's demo; none where there is no file."""
    file = file or FILE
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="", help="seeds to run, separated by commas")
    parser.add_argument(
        "--read", type=Path, action="append", default=[], help="a workspace whose run is finished"
    )
    parser.add_argument(
        "--use",
        choices=("tuned", "fresh", "again"),
        default="tuned",
        help="what the seed is: settings were chosen on it, it was named before, or it ran before with another rounding",
    )
    parser.add_argument("--method", help="the name of a method that is PPO with other settings")
    options = parser.parse_args()
    named = {"method": options.method} if options.method else {}
    for workspace in options.read:
        keep([row | named for row in figures(workspace)], options.use)
    for seed in filter(None, options.seeds.split(",")):
        keep(figures(run_demo(int(seed))), options.use)


if __name__ == "__main__":
    main()
