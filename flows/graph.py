"""The stages and their order, as DVC itself sees them. Nothing here writes an order down a second time.

DVC is asked in a process of its own: ``python -m flows.graph WORKSPACE`` prints the graph as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.asking import ask
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class StageNode:
    """A stage of dvc.yaml: the stages it waits for, its command, its outputs (paths relative to the workspace)."""

    name: str
    after: tuple[str, ...]
    command: str
    outputs: tuple[str, ...]


def read_graph(workspace: Path) -> dict[str, StageNode]:
    """Stages by name, in an order in which they could run; ``ConfigError`` in DVC's words if dvc.yaml is wrong."""
    printed, complaint = ask(workspace, "-m", "flows.graph", str(workspace))
    if complaint:
        raise ConfigError(f"{workspace / 'dvc.yaml'}: {complaint}")
    nodes = json.loads(printed.splitlines()[-1])
    return {n["name"]: StageNode(n["name"], tuple(n["after"]), n["command"], tuple(n["outputs"])) for n in nodes}


def dvc_graph(workspace: Path) -> list[dict[str, Any]]:
    """The graph read with DVC (imported here only): ``[{name, after, command, outputs}]`` in topological order."""
    import networkx
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        graph = repo.index.graph
        stages = [s for s in reversed(list(networkx.lexicographical_topological_sort(graph, key=str))) if s.cmd]
        own = {s: s.name for s in stages if Path(s.path).resolve() == (workspace / "dvc.yaml").resolve()}
        return [
            {
                "name": name,
                "after": sorted(own[n] for n in networkx.descendants(graph, stage) if n in own),
                "command": stage.cmd if isinstance(stage.cmd, str) else " && ".join(stage.cmd),
                "outputs": [str(out) for out in stage.outs],
            }
            for stage, name in own.items()
        ]


def main(workspace: str) -> int:
    """Print the graph; one line of explanation on stderr and status 1 if DVC cannot read it."""
    try:
        print(json.dumps(dvc_graph(Path(workspace))))
    except Exception as error:  # DVC's exceptions have no common base that is part of its interface
        text = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"{text}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
