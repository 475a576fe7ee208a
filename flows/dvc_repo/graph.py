"""The stages and their order, as DVC itself sees them. Nothing here writes an order down a second time.

DVC is asked in a process of its own: ``python -m flows.dvc_repo.graph WORKSPACE`` prints the graph as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.dvc_repo.query import query
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class StageNode:
    """A stage of dvc.yaml: the stages it waits for, its command, its outputs (paths relative to the workspace).

    ``inputs`` are the files and folders it reads, ``params`` the names it reads of each parameter file. ``cache`` is
    the DVC cache that keeps its outputs; when it is ``shareable``, whoever uses that cache finds them by its inputs.
    """

    name: str
    after: tuple[str, ...]
    command: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    params: Mapping[str, list[str]] = field(default_factory=dict)
    cache: str = ""
    shareable: bool = False


def read_graph(workspace: Path) -> dict[str, StageNode]:
    """Stages by name, in an order in which they could run; ``ConfigError`` in DVC's words if dvc.yaml is wrong."""
    printed, complaint = query(workspace, "-m", "flows.dvc_repo.graph", str(workspace))
    if complaint:
        raise ConfigError(f"{workspace / 'dvc.yaml'}: {complaint}")
    nodes = json.loads(printed.splitlines()[-1])
    return {node["name"]: _node(node) for node in nodes}


def _node(fields: dict[str, Any]) -> StageNode:
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return StageNode(**values)


def dvc_graph(workspace: Path) -> list[dict[str, Any]]:
    """The graph read with DVC (imported here only): the fields of :class:`StageNode`, in topological order."""
    import networkx
    from dvc.dependency import ParamsDependency
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
                "inputs": [str(dep) for dep in stage.deps if not isinstance(dep, ParamsDependency)],
                "params": {str(dep): dep.params for dep in stage.deps if isinstance(dep, ParamsDependency)},
                "cache": repo.cache.local_cache_dir,
                "shareable": _in_run_cache(stage),
            }
            for stage, name in own.items()
        ]


def _in_run_cache(stage: Any) -> bool:
    """Whether DVC's run cache takes the stage: local inputs and outputs, none of them kept between runs."""
    if stage.always_changed or stage.frozen or not stage.deps or not stage.outs:
        return False
    local = all(file.protocol == "local" for file in [*stage.deps, *stage.outs])
    return local and not any(out.persist for out in stage.outs)


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
