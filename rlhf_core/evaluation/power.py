"""What the sizes at hand can show: whether a policy that is no worse would pass the margins of gates and promotion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.gates import LOSSES, GatesConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import DataError
from rlhf_core.evaluation.losses import ERRORS_PER_MARGIN, PairedLoss
from rlhf_core.evaluation.promotion import MEASUREMENTS
from rlhf_core.storage.files import read_json

EVALUATION = Path("metrics") / "evaluation.json"


@dataclass(frozen=True)
class MarginPower:
    """A margin beside the error of what it bounds.

    Attributes:
        setting: Where the margin is set.
        name: The loss that it bounds.
        margin: How much worse a policy may be.
        loss: What was measured; None where the evaluation has no such loss.
    """

    setting: str
    name: str
    margin: float
    loss: PairedLoss | None

    @property
    def errors(self) -> float:
        """The margin in standard errors; 0 where there are none."""
        if self.loss is None or not math.isfinite(self.loss.error):
            return 0.0
        return self.margin / max(self.loss.error, 1e-12)

    @property
    def suffices(self) -> bool:
        """Whether an equal policy passes with 98 %."""
        return self.errors >= ERRORS_PER_MARGIN

    @property
    def clusters_needed(self) -> int | None:
        """How many questions would do, with as many replies to each; None where that cannot be said."""
        if self.loss is None or not self.errors:
            return None
        return math.ceil(self.loss.clusters * (ERRORS_PER_MARGIN / self.errors) ** 2)


def power_of(workspace: Path) -> list[MarginPower]:
    """Return the margins of ``gates.policy`` and ``registry.non_inferiority`` with what the last evaluation measured.

    Raises:
        DataError: There is no evaluation yet, or it has no losses.
    """
    path = workspace / EVALUATION
    if not path.is_file():
        raise DataError(f"{path} does not exist, so no error is known; run the pipeline up to the stage evaluate")
    measured: Mapping[str, Any] = read_json(path).get(LOSSES) or {}
    losses = {name: PairedLoss(**{"loss_high95": None, **values}) for name, values in measured.items()}
    rows = [
        MarginPower("gates.policy", condition.metric, condition.worse_by_less_than, losses.get(condition.metric))
        for condition in load_section(workspace, "gates", GatesConfig).policy
        if condition.worse_by_less_than is not None
    ]
    margins = load_section(workspace, "registry", RegistryConfig).non_inferiority
    return rows + [
        MarginPower(f"registry.non_inferiority.{kind}", name, margin, losses[name])
        for kind, names in MEASUREMENTS.items()
        if (margin := getattr(margins, kind)) is not None
        for name in names
        if name in losses
    ]


def describe_power(rows: list[MarginPower]) -> str:
    """Return a line for each margin: its error, and whether it can be shown or how many questions would do."""
    if not rows:
        return "no condition of gates.policy is of the kind worse_by_less_than, and no promotion margin is measured"
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        if row.loss is None:
            says = "not measured by the last evaluation, so the gate fails"
        elif row.suffices:
            says = "an equal policy passes"
        elif row.clusters_needed is None:
            says = "too few: one question alone shows nothing"
        else:
            says = f"too few: {row.clusters_needed} questions would do, or more replies to each where these differ"
        size = "" if row.loss is None else f", {row.loss.replies} replies to {row.loss.clusters} questions"
        lines.append(
            f"{row.name:<{width}}  margin {row.margin:g} is {row.errors:.1f} standard errors{size}: {says}  "
            f"({row.setting})"
        )
    short = sum(not row.suffices for row in rows)
    lines.append(
        f"a margin of {ERRORS_PER_MARGIN} standard errors is kept by an equal policy with 98 %: "
        + ("all margins can be shown" if not short else f"{short} of {len(rows)} margins cannot be shown")
    )
    return "\n".join(lines)
