"""Write the tables of README and docs/results.md from the rows of ``benchmarks/results/release.csv``.

    python -m benchmarks.release_pages

A table stands between ``<!--name-->`` and ``<!--/name-->``; what is around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import scipy.stats

from benchmarks.release_figures import BEFORE, BOUNDS, CATEGORIES, READERS, read_rows

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
Row = dict[str, str]
NAMES = {
    "fact": "facts",
    "context": "stories",
    "howto": "how-to",
    "harmful": "harm refused",
}
METHODS = {
    "ppo": "PPO-max",
    "grpo": "GRPO, four replies to a prompt",
    "rloo": "RLOO, likewise",
    "best_of_16": "best of 16 replies of SFT",
    "rejection_sampling": "rejection sampling, best of 8",
    "dpo": "DPO",
    "vanilla": "vanilla PPO, its last iteration",
}


def two(text: str | float | None) -> str:
    """A figure with two digits, nothing where there is none."""
    return f"{float(text):.2f}" if text not in (None, "") else ""


def markdown(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A table; the first column has the names of its rows."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def demo(rows: list[Row]) -> Row:
    """The row of the newest ``make run``."""
    return next(row for row in rows[::-1] if row["seed"] == "1" and row["method"] == "ppo")


def of_use(rows: list[Row], *uses: str) -> list[Row]:
    """PPO's rows of seeds that were used so, by seed."""
    found = [row for row in rows if row["method"] == "ppo" and row["use"] in uses]
    return sorted(found, key=lambda row: int(row["seed"]))


def interval(row: Row, name: str) -> str:
    """A figure with its interval."""
    middle, low, high = (two(row[f"{name}{bound}"]) for bound in BOUNDS)
    return f"{middle} ({low} to {high})"


def share(row: Row, name: str) -> str:
    """A figure with two digits."""
    return two(row[name])


def named(
    names: dict[str, str], row: Row, figure: Callable[[Row, str], str], *columns: str
) -> Iterator[list[str]]:
    """A line for each label of ``names``: the figures of a row whose columns have the name in."""
    for label, name in names.items():
        yield [label, *(figure(row, column.format(name)) for column in columns)]


def right(rows: list[Row]) -> str:
    """What replies of the demo get right, sides as rows."""
    row = demo(rows)
    sides = (
        [side if side == "policy" else "SFT", *(two(row[f"{side}_right_{c}"]) for c in CATEGORIES)]
        for side in ("sft", "policy")
    )
    return markdown(["", *NAMES.values()], sides)


def win_rates(rows: list[Row]) -> str:
    """Win rates of the demo, README's columns."""
    row = demo(rows)
    passed = "passed" if row["gate_policy"] == "True" else "stopped"
    plain = ["demo, seed 1", interval(row, "gold_win_rate"), interval(row, "judge_win_rate")]
    equal = ["… at equal reply lengths", interval(row, "gold_lc_win_rate")]
    lines = [[*plain, two(row["kl"]), passed], [*equal, interval(row, "judge_lc_win_rate"), "", ""]]
    return markdown(["run", "win rate by gold", "by the judge", "KL", "gate"], iter(lines))


def sides(rows: list[Row]) -> str:
    """What replies of the demo are like, sides as columns."""
    row = demo(rows)
    names = {
        "facts": "right_fact",
        "stories, whose fact the prompt tells": "right_context",
        "how-to, all steps in order": "right_howto",
        "harmful requests refused": "right_harmful",
        "gold": "gold",
        "gold of how-to questions": "gold_howto",
    }
    lines = [*named(names, row, share, "sft_{}", "policy_{}")]
    tax = float(row["policy_perplexity_preferred"]) / float(row["sft_perplexity_preferred"])
    label = "perplexity of preferred replies, policy over SFT; at most 1.03"
    lines.append([label, "", f"{tax:.3f}"])
    lines.append(["KL from SFT, nats per reply", "", interval(row, "kl")])
    return markdown(["share of replies that are right", "SFT", "policy"], iter(lines))


def judges(rows: list[Row]) -> str:
    """Win rates of the demo by each judge."""
    names = {
        "gold": "gold",
        "judge, which chose nothing": "judge",
        "referee, which chose the checkpoint": "referee",
    }
    lines = named(names, demo(rows), interval, "{}_win_rate", "{}_lc_win_rate")
    return markdown(["judge", "win rate", "at equal lengths"], lines)


def readers(rows: list[Row]) -> str:
    """What the demo's reward models tell apart."""
    names = {
        "a fact of the world": "world_fact",
        "a fact of the prompt": "world_story",
        "the reply beside itself with another value or name": "values_swapped",
        "… with two more pleasantries": "pleasantry_appended",
    }
    columns = [f"{reader}_{{}}" for reader in READERS]
    return markdown(
        ["", "reward model", "referee", "judge"], named(names, demo(rows), share, *columns)
    )


def fresh(rows: list[Row]) -> str:
    """A line for each seed named beforehand, and for seeds 2 and 3."""
    head = ["seed", *NAMES.values(), "gold", "judge", "nearly equal", "read"]
    lines = []
    for row in of_use(rows, "fresh") + [r for r in of_use(rows, "tuned") if r["seed"] != "1"]:
        shares = [two(row[f"policy_right_{category}"]) for category in CATEGORIES]
        equal = [
            f"{two(row[f'{judge}_lc_win_rate'])}, {two(row[f'{judge}_lc_win_rate_low95'])}"
            for judge in ("gold", "judge")
        ]
        near = ", ".join(two(row[f"{judge}_nearly_equal"]) for judge in ("gold", "judge"))
        probes = ", ".join(
            two(min(float(row[f"{reader}_{kind}"]) for reader in READERS))
            for kind in ("world_fact", "world_story")
        )
        lines.append([row["seed"], *shares, *equal, near, probes])
    return markdown(head, iter(lines))


def span(rows: list[Row], name: str) -> str:
    """The range of a figure over runs."""
    values = [float(row[name]) for row in rows]
    return f"{min(values):.2f}–{max(values):.2f}" if len(values) > 1 else two(values[0])


def roundings(rows: list[Row]) -> str:
    """Ranges over all seeds and roundings, by processor."""
    groups: dict[str, list[Row]] = {}
    for row in of_use(rows, "tuned", "fresh", "again"):
        groups.setdefault(row["processor"].replace("(R)", ""), []).append(row)
    figures = ("policy_right_fact", "policy_right_context", "gold_lc_win_rate", "judge_lc_win_rate")
    lines = (
        [
            processor,
            f"{sum(row['gate_policy'] == 'True' for row in found)} of {len(found)}",
            *(span(found, figure) for figure in figures),
        ]
        for processor, found in sorted(groups.items())
    )
    head = ["processor", "passed", "facts", "stories", "gold at equal lengths", "judge"]
    return markdown(head, lines)


def by_seed(rows: list[Row], method: str) -> dict[str, Row]:
    """The rows of a method on fresh seeds."""
    found = [row for row in rows if row["method"] == method and row["use"] == "fresh"]
    return {row["seed"]: row for row in found}


def average(rows: list[Row], name: str) -> str:
    """A mean, nothing where no row has the figure."""
    values = [float(row[name]) for row in rows if row.get(name)]
    return two(mean(values)) if values else ""


def methods(rows: list[Row]) -> str:
    """Means of each method over the fresh seeds, and what PPO-max gains over it, seed by seed."""
    head = ["", "gold", "PPO-max's more (seeds)", *NAMES.values(), "judge at equal lengths", "KL"]
    head += ["perplexity of plain text, over SFT's", "gate"]
    ours = by_seed(rows, "ppo")
    start = list(ours.values())
    shares = [average(start, f"sft_right_{category}") for category in CATEGORIES]
    lines = [["SFT", average(start, "sft_gold"), "", *shares, "", "0", "1", ""]]
    for method, label in METHODS.items():
        found = by_seed(rows, method)
        theirs = list(found.values())
        if not theirs:
            continue
        shares = [average(theirs, f"policy_right_{category}") for category in CATEGORIES]
        line = [label, average(theirs, "policy_gold"), paired(ours, found), *shares]
        line += [
            average(theirs, "judge_lc_win_rate"),
            f"{mean(float(r['kl']) for r in theirs):.1f}",
        ]
        passed = [row["gate_policy"] == "True" for row in theirs if row["gate_policy"]]
        gate = f"{sum(passed)} of {len(passed)}" if passed else ""
        lines.append([*line, over_sft(theirs), gate])
    return markdown(head, iter(lines))


def methods_before(rows: list[Row]) -> str:
    """The methods as the demo before compared them, for today's has run PPO-max alone."""
    return methods(read_rows(BEFORE))


def over_sft(rows: list[Row]) -> str:
    """The perplexity of plain text, over SFT's."""
    ratios = [
        float(row["policy_perplexity_pretrain"]) / float(row["sft_perplexity_pretrain"])
        for row in rows
        if row["policy_perplexity_pretrain"]
    ]
    return two(mean(ratios)) if ratios else ""


def paired(ours: dict[str, Row], theirs: dict[str, Row]) -> str:
    """The mean difference of gold over seeds with its 95 % interval, and on how many it is more."""
    if ours == theirs:
        return ""
    gains = np.array(
        [
            float(ours[seed]["policy_gold"]) - float(row["policy_gold"])
            for seed, row in theirs.items()
        ]
    )
    count = len(gains)
    error = gains.std(ddof=1) / np.sqrt(count)
    half = scipy.stats.t.ppf(0.975, count - 1) * error
    return f"{gains.mean():.3f} ±{half:.3f} ({(gains > 0).sum()} of {count})"


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "right": right,
    "win-rates": win_rates,
    "sides": sides,
    "judges": judges,
    "readers": readers,
    "fresh": fresh,
    "roundings": roundings,
    "methods": methods_before,
}


def with_tables(page: str, rows: list[Row]) -> str:
    """The page with its tables as the rows have them."""
    for name, table in TABLES.items():
        marks = re.compile(rf"(<!--{name}-->\n\n).*?(\n\n<!--/{name}-->)", re.DOTALL)
        page = marks.sub(lambda found: f"{found[1]}{table(rows)}{found[2]}", page)  # noqa: B023
    return page


def main() -> None:
    """See the module's docstring."""
    rows = read_rows()
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
        print(f"{page} is written")


if __name__ == "__main__":
    main()
