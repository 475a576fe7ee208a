"""The verdict of a run as several tests show it."""

from __future__ import annotations

from flows.pipeline.verdict import KlEstimate, RunVerdict
from rlhf_core.evaluation.verdict import JudgeResult, Standing

VERDICT = RunVerdict(
    standing=Standing.BETTER,
    opponent="champion version 3",
    judges=(JudgeResult("gold", 0.71, 0.66, 0.76, 320, 103, 0.684),),
    kl=KlEstimate(1.9, 1.7, 2.1),
    not_compared_because="",
    registered="policy version 4",
    promotion="version 4 is champion: better by every judge",
    report="report.html",
    next_command="rlhf chat",
    next_hint="talk to the champion",
)
