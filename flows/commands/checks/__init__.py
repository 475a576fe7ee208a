"""The checks of ``rlhf doctor``: machine, services, workspace."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check; ``remedy`` says what to do and is empty if nothing needs to be done."""

    level: str
    name: str
    finding: str
    remedy: str = ""
