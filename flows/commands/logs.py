"""``rlhf logs``: the end of a log of the workspace."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from flows.workspace.folder import PRIVATE
from rlhf_core.errors import RlhfError


def last_lines(workspace: Path, name: str, lines: int) -> str:
    """Return the last lines of ``.rlhf/logs/NAME.log``.

    Raises:
        RlhfError: there is no such log; the message names those that there are.
    """
    folder = workspace / PRIVATE / "logs"
    known = sorted(path.stem for path in folder.glob("*.log"))
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "nothing has run yet"
        raise RlhfError(f"{workspace} has no log of {name}; {there}")
    with (folder / f"{name}.log").open(encoding="utf-8", errors="replace") as stream:
        return "".join(deque(stream, lines)).rstrip("\n")
