"""The door of forecasts: what packages say of a run before it starts, beside its pairs.

A forecast is an entry point of ``rlhf.forecasts``: a function like :class:`RunForecast`.
``rlhf init``, ``rlhf doctor`` and ``rlhf data validate`` give its line. The plan of memory and the
hours on this machine are such; they come with the extras.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.config.params import Params
from rlhf_core.errors import first_line
from rlhf_core.plugins import FORECASTS, load_plugin, plugins_of
from rlhf_core.stages.pair_supply import DataSupply

HOURS = "hours"


@dataclass(frozen=True)
class ForecastLine:
    """What one forecast says.

    Attributes:
        conclusion: All of it in one line.
        remedy: What to do, where the run would not end well; empty where it may.
        details: The same as JSON values.
    """

    conclusion: str
    remedy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The conclusion, and what to do."""
        return f"{self.conclusion}; {self.remedy}" if self.remedy else self.conclusion

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**self.details, "conclusion": self.conclusion, "remedy": self.remedy}


class RunForecast(Protocol):
    """Says something of a run under ``params``, or None where there is nothing to say.

    Relative paths of models start at ``folder``, which need not be a workspace yet.
    """

    def __call__(self, folder: Path, params: Params, supply: DataSupply) -> ForecastLine | None: ...


def run_forecasts(
    folder: Path, params: Params, supply: DataSupply, *, probe: bool = True
) -> dict[str, ForecastLine]:
    """Return by name what the installed forecasts say.

    A run does not depend on them, so one that fails costs its line.

    Args:
        probe: Ask also for the hours, which passes are tried for.
    """
    found = {}
    for name in sorted(plugins_of(FORECASTS)):
        if name == HOURS and not probe:
            continue
        try:
            line = load_plugin(FORECASTS, name)(folder, params, supply)
        except (Exception, SystemExit) as error:  # whatever the code of others raises
            line = ForecastLine(f"it is left out: {first_line(error)}")
        if line is not None:
            found[name] = line
    return found


def lines_text(lines: Mapping[str, ForecastLine]) -> str:
    """Return a line of text for each."""
    return "\n".join(f"forecast of {name}: {line.text}" for name, line in lines.items())
