"""The checks of ``rlhf doctor``: each is a finding with a level and, unless all is well, what to do."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class DoctorCheck:
    """``level`` is ok, warn or fail; ``remedy`` is empty where nothing needs to be done."""

    level: str
    name: str
    finding: str
    remedy: str = ""
