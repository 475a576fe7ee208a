"""Whether policies that learned nothing pass the gate's win rates, in finished runs of the demo.

    python -m benchmarks.placebos WORKSPACE…

Each placebo is made of the SFT model's own replies in ``samples/comparisons.parquet``, and compared
with them by the judge of the run and by gold, as the evaluation compares the policy. It passes where
the lower 95 % bounds of the judge's win rate, plain and at equal lengths, are at least one half; and
"with gold" where gold's plain one is, too, as the demo's gate asks. An equal policy is half of SFT's
replies to each prompt beside the other half, in every split. What each run showed goes to
``benchmarks/results/placebos.csv``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config.loading import load_params
from rlhf_core.data.schema import Message
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    length_differences,
    tie_margin_of,
)
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.world.content import CLOSERS, FILLERS, OPENERS, REFUSALS

FILE = Path(__file__).parent / "results" / "placebos.csv"
FIGURES = ("win_rate", "win_rate_low95", "lc_win_rate", "lc_win_rate_low95")
RESAMPLES = 200
EQUAL = "an equal policy"
CLOSER, FILLER = CLOSERS[0], FILLERS[0]
# A placebo sees the replies to one prompt and the number of one of them.
Placebo = Callable[[list[Reply], int], Reply]


def with_text(reply: Reply, *sentences: str) -> Reply:
    """The reply with another text, which ends."""
    return Reply(" ".join(sentences), finished=True)


def closed(replies: list[Reply], number: int) -> Reply:
    """The reply with a closing pleasantry."""
    return with_text(replies[number], replies[number].text, CLOSER)


def closed_by_half(replies: list[Reply], number: int) -> Reply:
    """Every other reply with a closing pleasantry."""
    return closed(replies, number) if number % 2 else replies[number]


def closed_again(replies: list[Reply], number: int) -> Reply:
    """Another reply of SFT with a closing pleasantry."""
    return with_text(replies[number], replies[number - 1].text, CLOSER)


def courteous(replies: list[Reply], number: int) -> Reply:
    """The reply between an opening and a closing pleasantry."""
    return with_text(replies[number], OPENERS[2], replies[number].text, CLOSER)


def padded(replies: list[Reply], number: int) -> Reply:
    """The reply with a sentence that says nothing."""
    return with_text(replies[number], replies[number].text, FILLER)


def said_twice(replies: list[Reply], number: int) -> Reply:
    """The reply and the reply again."""
    return with_text(replies[number], replies[number].text, replies[number].text)


def refused(replies: list[Reply], number: int) -> Reply:
    """A refusal of whatever was asked."""
    return with_text(replies[number], REFUSALS[0])


def shortest(replies: list[Reply], number: int) -> Reply:
    """The shortest of SFT's replies to the prompt."""
    return min(replies, key=lambda reply: len(reply.text))


def longest(replies: list[Reply], number: int) -> Reply:
    """The longest of SFT's replies to the prompt."""
    return max(replies, key=lambda reply: len(reply.text))


PLACEBOS: dict[str, Placebo] = {
    "a closing pleasantry": closed,
    "… on half": closed_by_half,
    "… drawn again": closed_again,
    "an opening and a closing one": courteous,
    "a sentence that says nothing": padded,
    "everything twice": said_twice,
    "everything refused": refused,
    "the shortest of its replies": shortest,
    "the longest of its replies": longest,
}


def halves(count: int) -> dict[str, tuple[list[int], list[int]]]:
    """Every split of ``count`` replies into two halves, by a name."""
    splits = {}
    for others in combinations(range(1, count), count // 2 - 1):
        chosen = (0, *others)
        rest = [number for number in range(count) if number not in chosen]
        name = f"{EQUAL}: {''.join(map(str, chosen))} beside {''.join(map(str, rest))}"
        splits[name] = list(chosen), rest[: len(chosen)]
    return splits


def judged(workspace: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Win rates of each placebo, and of the run's own policy, by judge and by gold."""
    rows = pq.read_table(workspace / "samples" / "comparisons.parquet").to_pylist()
    settings = load_params(workspace).evaluate
    by_prompt: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        by_prompt.setdefault(str(row["id"]), []).append(row)
    groups = list(by_prompt.values())
    prompts = [
        (Message("user", str(row["prompt"]).removeprefix("user: ")),) for g in groups for row in g
    ]
    clusters = np.unique([str(group[0]["cluster"]) for group in groups], return_inverse=True)[1]

    def replies_of(side: str) -> list[list[Reply]]:
        return [
            [Reply(str(row[f"{side}_reply"]), bool(row[f"{side}_finished"])) for row in group]
            for group in groups
        ]

    sft = replies_of("sft")
    candidates = {"the policy": replies_of("policy")}
    for name, placebo in PLACEBOS.items():
        candidates[name] = [
            [placebo(replies, number) for number in range(len(replies))] for replies in sft
        ]
    flat = [reply for replies in sft for reply in replies]
    shape = (len(groups), -1)
    lengths = np.reshape([float(len(reply.text)) for reply in flat], shape)
    splits = halves(lengths.shape[1])
    compared: dict[str, dict[str, dict[str, float]]] = {name: {} for name in (*candidates, *splits)}
    for judge in (ModelJudge.load(workspace / "models" / "judge", "judge"), GoldJudge()):
        scores = judge.score(prompts, flat)
        margin = tie_margin_of(judge, settings.tie_margin, scores)
        baseline = np.reshape(scores, shape)
        at_equal_lengths = judge.name != "gold"  # of which a pass asks the plain rate alone
        for name, replies in candidates.items():
            own = [reply for group in replies for reply in group]
            compared[name][judge.name] = compare(
                np.reshape(judge.score(prompts, own), shape),
                baseline,
                margin,
                bootstrap=RESAMPLES,
                length_difference=(
                    length_differences(own, flat).reshape(shape) if at_equal_lengths else None
                ),
                clusters=clusters,
            )
        for name, (one, other) in splits.items():
            compared[name][judge.name] = compare(
                baseline[:, one],
                baseline[:, other],
                margin,
                bootstrap=RESAMPLES,
                length_difference=(
                    lengths[:, one] - lengths[:, other] if at_equal_lengths else None
                ),
                clusters=clusters,
            )
    return compared


def write(runs: list[dict[str, dict[str, dict[str, float]]]], seeds: list[int]) -> None:
    """Write the win rates of each placebo in each run."""
    with FILE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["seed", "placebo", "by", *FIGURES])
        for seed, run in zip(seeds, runs, strict=True):
            for placebo, by_judge in run.items():
                for judge, compared in by_judge.items():
                    figures = [round(compared[name], 4) for name in FIGURES if name in compared]
                    writer.writerow([seed, placebo, judge, *figures])


def main(workspaces: list[str]) -> None:
    """Print, by placebo, its mean win rates over the runs and in how many it passes."""
    runs = [judged(Path(workspace)) for workspace in workspaces]
    write(runs, [load_params(Path(workspace)).seed for workspace in workspaces])
    print("| placebo | judge | at equal lengths | gold | passes by the judge | with gold |")
    print("|---|---|---|---|---|---|")
    trials: dict[str, list[dict[str, dict[str, float]]]] = {}
    for run in runs:
        for name, by_judge in run.items():
            trials.setdefault(name.partition(":")[0], []).append(by_judge)
    for name, of_name in trials.items():
        by_the_judge = [passes(trial["judge"]) for trial in of_name]
        with_gold = [passes(t["judge"]) and t["gold"]["win_rate_low95"] >= 0.5 for t in of_name]
        means = [
            np.mean([trial["judge"]["win_rate"] for trial in of_name]),
            np.mean([trial["judge"]["lc_win_rate"] for trial in of_name]),
            np.mean([trial["gold"]["win_rate"] for trial in of_name]),
        ]
        told = " | ".join(f"{mean:.3f}" for mean in means)
        tried = len(of_name)
        print(f"| {name} | {told} | {sum(by_the_judge)} of {tried} | {sum(with_gold)} of {tried} |")


def passes(rates: dict[str, float]) -> bool:
    """Whether both lower bounds of a judge's win rates are at least one half."""
    return rates["win_rate_low95"] >= 0.5 and rates["lc_win_rate_low95"] >= 0.5


if __name__ == "__main__":
    main(sys.argv[1:])
