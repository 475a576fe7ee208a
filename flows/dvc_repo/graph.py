"""The stages of dvc.yaml and their order, as DVC itself reads them.

DVC runs in a child process: ``python -m flows.dvc_repo.graph WORKSPACE`` prints the graph as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.supervision.python_module import run_module
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class StageNode:
    """A stage of dvc.yaml. Paths are relative to the workspace.

    Attributes:
        after: the stages that must be done before it, directly or indirectly.
        inputs: the files and folders it reads.
        params: the names it reads from each parameter file.
        cache: the DVC cache that keeps its outputs.
        shareable: whether another workspace with the same cache finds the outputs by the hashes of the inputs.
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
    """Return the stages by name, in an order in which they can run.

    Raises:
        ConfigError: dvc.yaml is invalid; the message is DVC's.
    """
    result = run_module(workspace, "flows.dvc_repo.graph", str(workspace))
    if result.exit_code:
        raise ConfigError(f"{workspace / 'dvc.yaml'}: {result.error_line}")
    graph = {}
    for fields in json.loads(result.stdout.splitlines()[-1]):
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        graph[values["name"]] = StageNode(**values)
    return graph


def dvc_graph(workspace: Path) -> list[StageNode]:
    """Read the stages with DVC, which is imported here, in topological order."""
    import networkx
    from dvc.dependency import ParamsDependency
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        graph = repo.index.graph
        stages = [s for s in reversed(list(networkx.lexicographical_topological_sort(graph, key=str))) if s.cmd]
        names = {s: s.name for s in stages if Path(s.path).resolve() == (workspace / "dvc.yaml").resolve()}
        return [
            StageNode(
                name=name,
                after=tuple(sorted(names[n] for n in networkx.descendants(graph, stage) if n in names)),
                command=stage.cmd if isinstance(stage.cmd, str) else " && ".join(stage.cmd),
                outputs=tuple(str(out) for out in stage.outs),
                inputs=tuple(str(dep) for dep in stage.deps if not isinstance(dep, ParamsDependency)),
                params={str(dep): dep.params for dep in stage.deps if isinstance(dep, ParamsDependency)},
                cache=repo.cache.local_cache_dir,
                shareable=_is_in_run_cache(stage),
            )
            for stage, name in names.items()
        ]


def _is_in_run_cache(stage: Any) -> bool:
    """Whether DVC's run cache keeps the stage: its inputs and outputs are local, and no output persists."""
    if stage.always_changed or stage.frozen or not stage.deps or not stage.outs:
        return False
    local = all(file.protocol == "local" for file in [*stage.deps, *stage.outs])
    return local and not any(out.persist for out in stage.outs)


def main(workspace: str) -> int:
    """Print the graph; if DVC cannot read it, print one line of explanation to stderr and return 1."""
    try:
        print(json.dumps([asdict(node) for node in dvc_graph(Path(workspace))]))
    except Exception as error:  # DVC's exceptions have no common base class in its public interface
        sys.stderr.write(f"{' '.join(str(error).split()) or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
