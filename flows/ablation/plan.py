"""The jobs of an ablation: one workspace for what the variants of a seed share, one per variant and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.graph import read_graph
from flows.dvc_repo.recipe import TRIALS
from rlhf_core.config.ablation.ablation import ABLATION_FILE, Ablation, check_recipes, load_ablation
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.config.loading.overlay import DEFAULT_PROFILE, merge, overlays_of, parse_assignment, workspace_name
from rlhf_core.config.loading.recipe import profiles_of, recipe_folder
from rlhf_core.errors import ConfigError

FOLDER = "ablation"
SHARED = "shared"
TRAINER, GOAL = "ppo", "evaluate"


@dataclass(frozen=True)
class AblationRequest:
    """What the command line asks for; empty ``variants`` or ``seeds`` mean all of the file's."""

    profile: str | None = None
    sets: tuple[str, ...] = ()
    file: Path | None = None
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The folder name of this ablation: the same for the same profile and overrides."""
        return workspace_name(self.profile or DEFAULT_PROFILE, self.sets)

    def is_part_of(self, ablation: Ablation) -> bool:
        """Whether variants or seeds of the file are left out; results of a part never replace those of the whole."""
        return bool(self.variants) or bool(self.seeds and set(ablation.seeds) - set(self.seeds))


@dataclass(frozen=True)
class AblationJob:
    """Stages (``targets``) to bring up to date in ``workspace``, whose recipe is that of the base with ``sets``.

    The job without a variant is the part that all variants of the seed share.
    """

    variant: str | None
    seed: int
    workspace: Path
    sets: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name of the job in messages."""
        return f"{self.variant or 'shared stages'}, seed {self.seed}"


@dataclass(frozen=True)
class AblationPlan:
    """All jobs of an ablation, the shared parts first, and the ``folder`` for the results."""

    ablation: Ablation
    base: Path
    profile: str | None
    folder: Path
    jobs: tuple[AblationJob, ...]


def parse_names(text: str | None) -> tuple[str, ...]:
    """Split ``a,b`` into names."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """Split ``1,2`` into whole numbers without duplicates; raise ``ConfigError`` for anything else."""
    names = parse_names(text)
    if wrong := [name for name in names if not name.isdecimal()]:
        raise ConfigError(f"--seeds {text}: '{wrong[0]}' is not a seed; write whole numbers, such as --seeds 1,2,3")
    return tuple(dict.fromkeys(int(name) for name in names))


def definition(base: Path, request: AblationRequest) -> Ablation:
    """Load the ablation of the request from its file, the workspace's ablation.yaml or the project's, and check it.

    Raises:
        ConfigError: the file, a variant or a parameter is wrong.
    """
    own = base / ABLATION_FILE
    path = request.file or (own if own.is_file() else recipe_folder() / ABLATION_FILE)
    ablation = load_ablation(path)
    for name in request.variants:
        ablation.variant(name)
    text = (base / PARAMS_FILE).read_text(encoding="utf-8")
    text = merge(text, overlays_of(text, profiles_of(base), request.profile, request.sets))
    recipe = dict(yaml_text.plain(yaml_text.parse(text, PARAMS_FILE)))
    check_recipes(ablation, recipe, dict(map(parse_assignment, request.sets)), str(path))
    return ablation


def make_plan(base: Path, request: AblationRequest, ablation: Ablation) -> AblationPlan:
    """Return the jobs of the request. ``base`` must be a DVC root: the stages before PPO are read from its graph.

    Overrides apply in this order: profile, the file's ``common``, ``--set``, the seed, the variant's own. So a variant
    always differs from its base by what it names.
    """
    targets = shared_targets(base)
    workspaces = base / TRIALS / FOLDER / request.name
    common = [*assignments(ablation.common), *request.sets]
    seeds = request.seeds or ablation.seeds
    names = [name for name in ablation.names if not request.variants or name in request.variants]

    def job(variant: str | None, seed: int) -> AblationJob:
        own = assignments(ablation.overrides(variant)) if variant else []
        sets = (*common, f"seed={seed}", *own)
        workspace = workspaces / (variant or SHARED) / f"seed-{seed}"
        return AblationJob(variant, seed, workspace, sets, (GOAL,) if variant else targets)

    jobs = [job(None, seed) for seed in seeds] + [job(name, seed) for name in names for seed in seeds]
    results = f"{request.name}-part" if request.is_part_of(ablation) else request.name
    return AblationPlan(ablation, base, request.profile, base / FOLDER / results, tuple(jobs))


def shared_targets(base: Path) -> tuple[str, ...]:
    """Return the stages before PPO in DVC's graph; raise ``ConfigError`` if it lacks PPO or the evaluation."""
    graph = read_graph(base)
    for stage in (TRAINER, GOAL):
        if stage not in graph:
            raise ConfigError(f"{base / 'dvc.yaml'} has no stage '{stage}', which an ablation needs")
    return graph[TRAINER].after


def assignments(changes: Mapping[str, Any]) -> list[str]:
    """Write each change as ``section.key=value``, the value as JSON, which is YAML."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def describe(ablation: Ablation, names: Sequence[str]) -> str:
    """Describe the variants and the figures, one line each."""
    width = max(len(name) for name in ablation.names)
    selected = [name for name in ablation.names if not names or name in names]
    variants = [f"{name.ljust(width)}  {ablation.variant(name).about}" for name in selected]
    figures = [f"{figure.name.ljust(width)}  {figure.title}" for figure in ablation.figures]
    return "\n".join(["variants", *(f"  {line}" for line in variants), "figures", *(f"  {line}" for line in figures)])
