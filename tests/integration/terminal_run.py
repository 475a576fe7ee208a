"""A scripted run on the real display, for tests: waits for the file ``step-N`` of its workspace
before step N.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flows.commands.display import Display, open_display
from flows.commands.run_state import print_verdict
from flows.pipeline.events import PhaseStarted, RunEnded, RunPlanned, StageEnded, StageStarted
from flows.pipeline.verdict import RunVerdict
from flows.stage import StageOutcome
from rlhf_core.evaluation.report.headline import ReleaseDecision
from rlhf_core.evaluation.report.note import KlEstimate
from rlhf_core.evaluation.verdict import JudgeResult, Standing

STAGES = (
    "collect",
    "validate",
    "base",
    "sft",
    "reward",
    "referee",
    "gate-reward",
    "critic",
    "ppo",
    "evaluate",
)
PROGRESS = "ppo: {}/90 {} s reward 0.3418 kl 1.894 length 22.56\n"
VERDICT = RunVerdict(
    standing=Standing.NOT_SHOWN_BETTER,
    opponent="champion version 3",
    judges=(
        JudgeResult("gold", 0.52, 0.47, 0.57, 320, 103),
        JudgeResult("judge", 0.6, 0.55, 0.65, 320, 103),
    ),
    kl=KlEstimate(1.9, 1.7, 2.1),
    failure="",
    registered="rlhf-reward-model version 1 (as before); rlhf-policy version 4",
    release=ReleaseDecision(
        state="open",
        headline="Not released: rlhf-policy version 4 was not promoted",
        registered="",
        reason="not above 0.5 with 95 % confidence by gold: gold win rate 0.520 (at least 0.470)",
        conditions=(),
        decided="",
        champion="",
        next_command="rlhf chat models/policy",
        next_hint="talk to the new policy",
        as_of="",
    ),
    report="report.html",
)


def steps(workspace: Path, display: Display) -> Iterator[None]:
    """Go through a run: a phase, the plan, finished stages, two running ones, a match, the end."""
    logs = workspace / ".rlhf" / "logs"
    logs.mkdir(parents=True)
    yield
    display.line("Prefect UI http://127.0.0.1:4200 (while this runs)")
    display.event(RunPlanned(STAGES))
    for number, stage in enumerate(STAGES[:-2]):
        display.event(StageStarted(stage, None, 1000.0 + number))
        action = "ran" if number else "cached"
        outcome = StageOutcome(
            stage, action, started=1000.0, ended=1051.0 if number else 1002.0, work_seconds=40.0
        )
        display.event(StageEnded(outcome))
    display.event(StageStarted("ppo", "gpu-pool", time.time()))
    yield
    for iteration in (30, 31, 45):
        with (logs / "ppo.log").open("a") as log:
            log.write(PROGRESS.format(iteration, iteration + 3))
    yield
    display.event(
        StageEnded(StageOutcome("ppo", "ran", started=1000.0, ended=1099.0, work_seconds=90.0))
    )
    display.event(StageEnded(StageOutcome.failed("evaluate", "a message that is long " * 10, 1)))
    display.event(PhaseStarted("promotion", log="match"))
    (logs / "match.log").write_text("match: 34/640 5 s\n")
    yield
    display.event(RunEnded("Completed", "10 stages ran"))
    yield


def main(workspace: Path) -> None:
    with open_display(workspace, "starting Prefect") as display:
        for number, _ in enumerate(steps(workspace, display)):
            while not (workspace / f"step-{number}").exists():
                display.tick()
                time.sleep(0.02)
    print_verdict(VERDICT, workspace)
    print("the end")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
