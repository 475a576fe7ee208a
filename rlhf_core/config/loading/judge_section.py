"""The judge's section in files that were written before there was a judge."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any


def add_judge(document: MutableMapping[str, Any]) -> None:
    """Give the judge the referee's settings where ``document`` sets the referee and says nothing of the judge.

    Files of earlier versions do. The demo's settings, which the judge would have else, suit no other model. The launch
    settings are completed likewise.
    """
    compute = document.get("compute")
    launch = compute.get("launch") if isinstance(compute, dict) else None
    for section in (document, launch):
        if isinstance(section, dict) and "referee" in section and "judge" not in section:
            section["judge"] = copy.deepcopy(section["referee"])
