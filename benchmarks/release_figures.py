"""Run the demo for some seeds, and write its figures for README's table and docs/results.md.

    python -m benchmarks.release_figures --seeds 1,2,3          # runs, and appends a row a seed
    python -m benchmarks.release_figures --read workspaces/demo-…  # appends the row of a finished run
    python -m benchmarks.release_figures --table                # prints the rows as Markdown

Rounding differs by processor and threads, and so do runs; ``MKL_CBWR``, ``OPENBLAS_CORETYPE`` and
the like are taken from the environment and written beside the figures.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.loading import load_params
from rlhf_core.config.profiles import workspace_name
from rlhf_core.storage.files import read_json

FILE = Path(__file__).parent / "results" / "release.csv"
ROUNDING = ("MKL_CBWR", "OPENBLAS_CORETYPE", "OMP_NUM_THREADS")
CATEGORIES = ("fact", "context", "howto", "harmful")
BOUNDS = ("", "_low95", "_high95")
READERS = ("reward", "referee", "judge")


def processor() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.is_file()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.processor()


def figures(workspace: Path) -> dict[str, Any]:
    """What a finished run of the demo shows: gates, right replies, win rates with 95 % bounds,
    drift, perplexity of plain text and probes.
    """
    params = load_params(workspace)
    method: str = params.policy.method
    if method == "ppo" and params.ppo.advantage.critic_free:
        method = params.ppo.advantage.estimator
    row: dict[str, Any] = {"seed": params.seed, "method": method}
    for gate in ("reward", "policy"):
        report = workspace / "gates" / f"{gate}.json"
        row[f"gate_{gate}"] = read_json(report)["passed"] if report.is_file() else None
    for reader in READERS:
        metrics = read_json(workspace / "metrics" / f"{reader}.json")
        for kind in ("world_fact", "world_story", "pleasantry_appended"):
            row[f"{reader}_{kind}"] = metrics.get("probes", {}).get(kind)
    evaluated = workspace / "metrics" / "evaluation.json"
    if not evaluated.is_file():
        return row
    evaluation = read_json(evaluated)
    for side in ("sft", "policy"):
        row[f"{side}_gold"] = evaluation[side]["gold"]
        row[f"{side}_perplexity_pretrain"] = evaluation[side]["perplexity_pretrain"]
        for category in CATEGORIES:
            row[f"{side}_right_{category}"] = (
                evaluation["category"].get(category, {}).get(f"{side}_right")
            )
    for judge in ("gold", "judge"):
        compared = evaluation["comparison"][judge]
        for rate in ("win_rate", "lc_win_rate"):
            for bound in BOUNDS:
                row[f"{judge}_{rate}{bound}"] = compared.get(f"{rate}{bound}")
    row["kl"] = evaluation.get("kl")
    return row


def run_demo(seed: int) -> dict[str, Any]:
    """Run the demo with a seed in a workspace of its own, and return its figures."""
    setting = f"seed={seed}"
    started = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "--profile", "demo", "--set", setting],
        check=False,
    )
    seconds = round(time.perf_counter() - started)
    workspace = Path("workspaces") / workspace_name("demo", [setting])
    return figures(workspace) | {"exit": ran.returncode, "seconds": seconds}


def append(row: Mapping[str, Any]) -> None:
    """Add a row with what rounding depends on; columns are those of the file and what is new in the
    row.
    """
    rows: list[Mapping[str, Any]] = list(read_rows())
    where = {"processor": processor(), **{name: os.environ.get(name, "") for name in ROUNDING}}
    rows.append({**where, **{name: shorter(value) for name, value in row.items()}})
    columns = list(dict.fromkeys(name for each in rows for name in each))
    with FILE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def shorter(value: Any) -> Any:
    """A figure to four digits."""
    return round(value, 4) if isinstance(value, float) else value


def read_rows() -> list[dict[str, str]]:
    """The rows of the file, none where there is no file."""
    if not FILE.is_file():
        return []
    with FILE.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def table() -> str:
    """The rows as a Markdown table: what replies get right before any rate."""
    lines = [
        "| seed | method | right: facts, stories, how-to, refusals of harm (SFT → policy) | gold | judge | KL | gate |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in read_rows():
        right = ", ".join(
            f"{share(row, 'sft', name)} → {share(row, 'policy', name)}" for name in CATEGORIES
        )
        rates = " | ".join(rate_of(row, judge) for judge in ("gold", "judge"))
        passed = "passed" if row.get("gate_policy") == "True" else "stopped"
        lines.append(
            f"| {row['seed']} | {row.get('method') or 'ppo'} | {right} | {rates} | {two_digits(row.get('kl'))} | {passed} |"
        )
    return "\n".join(lines)


def share(row: Mapping[str, str], side: str, category: str) -> str:
    """The share of right replies of a side in a category."""
    return two_digits(row.get(f"{side}_right_{category}"))


def rate_of(row: Mapping[str, str], judge: str) -> str:
    """A win rate with its interval, and that at equal lengths."""
    plain, equal = (
        [two_digits(row.get(f"{judge}_{rate}{bound}")) for bound in BOUNDS]
        for rate in ("win_rate", "lc_win_rate")
    )
    return f"{plain[0]} ({plain[1]} to {plain[2]}); at equal lengths {equal[0]} ({equal[1]} to {equal[2]})"


def two_digits(text: str | None) -> str:
    """A figure with two digits, or a dash where there is none."""
    return f"{float(text):.2f}" if text else "–"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="", help="seeds to run, separated by commas")
    parser.add_argument(
        "--read", type=Path, action="append", default=[], help="a workspace whose run is finished"
    )
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    options = parser.parse_args()
    for workspace in options.read:
        append(figures(workspace))
    for seed in filter(None, options.seeds.split(",")):
        append(run_demo(int(seed)))
    if options.table:
        print(table())


if __name__ == "__main__":
    main()
