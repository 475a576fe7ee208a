"""The stages of dvc.yaml in their order, what dvc.lock records, and what DVC finds changed.

DVC runs in a child process: ``python -m flows.dvc_repo.graph WORKSPACE`` prints the graph as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flows.supervision.processes import run_module
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.errors import ConfigError, RlhfError


def dvc_status(workspace: Path, stages: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``dvc status`` as ``{stage: [change, …]}``, empty when everything is up to date.

    Raises:
        RlhfError: DVC fails.
    """
    result = run_module(workspace, "dvc", "status", "--json", *stages)
    if result.exit_code:
        raise RlhfError(f"dvc status failed in {workspace}: {result.error_line}")
    status: dict[str, Any] = json.loads(result.stdout or "{}")
    return status


def describe_changes(changes: Any) -> str:
    """Describe one stage's entry of ``dvc status``:
    ``models/policy modified, metrics/ppo.json deleted``.
    """
    descriptions = []
    for change in changes:
        kinds = change.values() if isinstance(change, dict) else [change]
        for states in kinds:
            if not isinstance(states, dict):
                descriptions.append(str(states))
                continue
            for path, state in states.items():
                if isinstance(state, dict):  # of parameters, by their names
                    for key, of_key in state.items():
                        descriptions.append(f"{path}:{key} {of_key}")
                else:
                    descriptions.append(f"{path} {state}".strip())
    return ", ".join(descriptions)


@dataclass(frozen=True)
class StageNode:
    """A stage of dvc.yaml. Paths are relative to the workspace.

    Attributes:
        after: the stages whose outputs it reads.
        cached_inputs: those of its inputs that DVC's cache keeps.
        carried_inputs: its other inputs, parameter files included, and the .dvc files of those in
            the cache.
        shareable: whether another workspace with the same cache finds the outputs by the hashes of
            the inputs.
    """

    name: str
    after: tuple[str, ...]
    command: str
    outputs: tuple[str, ...]
    cached_inputs: tuple[str, ...] = ()
    carried_inputs: tuple[str, ...] = ()
    shareable: bool = False


def all_before(graph: Mapping[str, StageNode], stage: str) -> set[str]:
    """The stages that must be done before ``stage``, directly or through others."""
    before: set[str] = set()
    waiting = [stage]
    while waiting:
        node = graph[waiting.pop()]
        new = set(node.after) - before
        before |= new
        waiting += new
    return before


def read_graph(workspace: Path) -> dict[str, StageNode]:
    """Return the stages by name: each after those that it needs, else as dvc.yaml lists them.

    Raises:
        ConfigError: dvc.yaml is invalid; the message is DVC's.
    """
    result = run_module(workspace, "flows.dvc_repo.graph", str(workspace))
    if result.exit_code:
        raise ConfigError(f"{workspace / 'dvc.yaml'}: {result.error_line}")
    last_line = result.stdout.splitlines()[-1]
    nodes = TypeAdapter(list[StageNode]).validate_json(last_line)
    return {node.name: node for node in nodes}


def dvc_graph(workspace: Path) -> list[StageNode]:
    """Read the stages with DVC, which is imported here, in the order of :func:`read_graph`."""
    import networkx
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        graph = repo.index.graph
        recipe = (workspace / "dvc.yaml").resolve()
        position = {stage: number for number, stage in enumerate(repo.index.stages)}
        first_to_last = networkx.lexicographical_topological_sort(
            graph.reverse(), key=position.__getitem__
        )
        names = {}
        for stage in first_to_last:
            if stage.cmd and Path(stage.path).resolve() == recipe:
                names[stage] = stage.name
        nodes = []
        for stage, name in names.items():
            before = [names[other] for other in graph.successors(stage) if other in names]
            cached, carried = _inputs(repo, stage, workspace)
            commands = [stage.cmd] if isinstance(stage.cmd, str) else stage.cmd
            node = StageNode(
                name=name,
                after=tuple(sorted(before)),
                command=" && ".join(commands),
                outputs=tuple(map(str, stage.outs)),
                cached_inputs=cached,
                carried_inputs=carried,
                shareable=_is_in_run_cache(stage),
            )
            nodes.append(node)
        return nodes


def _inputs(repo: Any, stage: Any, workspace: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs that DVC's cache keeps, and the files that must be carried otherwise."""
    from dvc.dependency import ParamsDependency
    from dvc.exceptions import OutputNotFoundError

    cached: set[str] = set()
    carried: set[str] = set()
    for dep in stage.deps:
        try:
            outputs = repo.find_outs_by_path(dep.fs_path, recursive=True, strict=False)
        except OutputNotFoundError:
            outputs = []
        for out in outputs:
            if out.use_cache:
                cached.add(out.fs_path)
            else:
                carried.add(out.fs_path)
            if out.stage.path.endswith(".dvc"):
                carried.add(out.stage.path)
        if isinstance(dep, ParamsDependency) or not outputs:
            carried.add(dep.fs_path)

    def relative(paths: set[str]) -> tuple[str, ...]:
        from_workspace = [os.path.relpath(path, workspace) for path in paths]
        return tuple(sorted(from_workspace))

    return relative(cached), relative(carried)


def _is_in_run_cache(stage: Any) -> bool:
    """Whether DVC's run cache brings a stage to another host: all is local, all outputs cached."""
    if stage.always_changed or stage.frozen or not stage.deps or not stage.outs:
        return False
    files = [*stage.deps, *stage.outs]
    are_local = all(file.protocol == "local" for file in files)
    are_cached = all(out.use_cache and not out.persist for out in stage.outs)
    return are_local and are_cached


LOCK_FILE = "dvc.lock"


@dataclass(frozen=True)
class RecordedStage:
    """The last successful run of a stage.

    Attributes:
        inputs: Hash of each file or folder that it read, by its path.
        outputs: Hash of each one that it wrote.
        params: Values of params.yaml by the dotted name that dvc.yaml gives them.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)


def recorded_stages(workspace: Path) -> dict[str, RecordedStage]:
    """Return what dvc.lock records of each stage by name; empty before the first has run."""
    lock = workspace / LOCK_FILE
    if not lock.is_file():
        return {}
    status = lock.stat()
    version = status.st_ino, status.st_size, status.st_mtime_ns
    return dict(_recorded_stages(lock, version))


@lru_cache(maxsize=4)
def _recorded_stages(lock: Path, _: tuple[int, ...]) -> Mapping[str, RecordedStage]:
    """Read a file of that inode, size and time. It is read several times in a registration, and
    slowly: 0.2 s.
    """
    content = plain(read(lock)) or {}
    recorded = {}
    for name, stage in (content.get("stages") or {}).items():
        params = stage.get("params") or {}
        recorded[name] = RecordedStage(
            inputs=_hashes(stage.get("deps")),
            outputs=_hashes(stage.get("outs")),
            params=params.get("params.yaml") or {},
        )
    return recorded


def recorded_hash(workspace: Path, path: str) -> str | None:
    """Return the hash that dvc.lock records for the output ``path``, or None."""
    for stage in recorded_stages(workspace).values():
        if path in stage.outputs:
            return stage.outputs[path]
    return None


def _hashes(entries: Any) -> dict[str, str]:
    hashes = {}
    for entry in entries or []:
        if "md5" in entry:
            hashes[entry["path"]] = str(entry["md5"])
    return hashes


def main(workspace: str) -> int:
    """Print the graph; if DVC cannot read it, explain that on stderr and return 1."""
    try:
        nodes = dvc_graph(Path(workspace))
        print(json.dumps([asdict(node) for node in nodes]))
    except Exception as error:  # DVC's exceptions have no common base class in its public interface
        message = " ".join(str(error).split())
        sys.stderr.write(f"{message or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
