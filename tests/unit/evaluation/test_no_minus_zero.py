"""A value that rounds to zero is shown as zero: ``KL -0.00`` reads as a KL below zero, which would
be a bug in sampling.
"""

from __future__ import annotations

import re

import pytest

from flows.commands.run_state import RESULTS
from rlhf_core.evaluation.figures import format_interval, format_number
from rlhf_core.evaluation.report.note import KlEstimate, judged_facts
from rlhf_core.gates import number
from rlhf_core.runtime.progress import plain_number
from rlhf_extras.release.model_card import _kl

LITTLE = -0.0004
BY_POLICY = {"iteration": 3, "kl": LITTLE, "referee": {"win_rate": 0.5}}
LAST = {"iterations": 3, "last": {"kl": LITTLE, "reward_mean": LITTLE}}
SAMPLED = {"method": "rejection_sampling", "reward_sampled": LITTLE, "reward_kept": LITTLE}
DISPLAYS = {
    "report": lambda: format_number(LITTLE, 2),
    "ends of an interval": lambda: format_interval(LITTLE, LITTLE),
    "count of a gate": lambda: number(-0.0),
    "progress": lambda: plain_number(-0.0, 4),
    "note of a run": lambda: judged_facts([], [], KlEstimate(LITTLE, LITTLE, LITTLE), [])[0][1],
    "model card": lambda: _kl({"kl": LITTLE, "kl_low95": LITTLE, "kl_high95": LITTLE}),
    "selected checkpoint": lambda: RESULTS["ppo"][1]({"selected": BY_POLICY}),
    "last checkpoint": lambda: RESULTS["ppo"][1](LAST),
    "sampled replies": lambda: RESULTS["ppo"][1](SAMPLED),
    "critic": lambda: RESULTS["critic"][1]({"explained_variance": LITTLE}),
}


@pytest.mark.parametrize("display", DISPLAYS)
def test_what_rounds_to_zero_has_no_sign(display: str) -> None:
    said = DISPLAYS[display]()
    assert re.search(r"\b0", said) and not re.search(r"-0(\.0+)?\b", said), said
