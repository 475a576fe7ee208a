"""What an ablation has to run: one workspace for what the variants of a seed share, one per variant and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.graph import read_graph
from flows.workspace.recipe import TRIALS
from rlhf_core.config.ablation.ablation import ABLATION_FILE, Ablation, check_recipes, load_ablation
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.config.loading.overlay import DEFAULT_PROFILE, merge, parse_assignment, profile_text, workspace_name
from rlhf_core.config.loading.recipe import profiles_of, recipe_folder
from rlhf_core.errors import ConfigError

FOLDER = "ablation"
SHARED = "shared"
TRAINER, GOAL = "ppo", "evaluate"


@dataclass(frozen=True)
class AblationRequest:
    """What the command line asks for. ``variants`` and ``seeds`` empty: all of the file's."""

    profile: str | None = None
    sets: tuple[str, ...] = ()
    file: Path | None = None
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Folder name of this ablation: the same for the same profile and overrides."""
        return workspace_name(self.profile or DEFAULT_PROFILE, self.sets)

    def is_part_of(self, ablation: Ablation) -> bool:
        """Whether variants or seeds of the file are left out. A part's results never replace those of the whole."""
        return bool(self.variants) or bool(self.seeds and set(ablation.seeds) - set(self.seeds))


@dataclass(frozen=True)
class AblationJob:
    """Bring ``targets`` up to date in ``workspace``, whose recipe is the base's with ``sets`` in turn.

    ``variant`` None is the part that all variants of the seed share; it comes first."""

    variant: str | None
    seed: int
    workspace: Path
    sets: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def title(self) -> str:
        """What a person reads."""
        return f"{self.variant or 'what all share'}, seed {self.seed}"


@dataclass(frozen=True)
class AblationPlan:
    """All jobs, those of the shared parts first; results go to ``folder``."""

    ablation: Ablation
    base: Path
    profile: str | None
    folder: Path
    jobs: tuple[AblationJob, ...]


def parse_names(text: str | None) -> tuple[str, ...]:
    """``a,b`` as names."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """``1,2`` as numbers, each once; ``ConfigError`` for anything else."""
    names = parse_names(text)
    if wrong := [name for name in names if not name.isdecimal()]:
        raise ConfigError(f"--seeds {text}: '{wrong[0]}' is no seed; write whole numbers, such as --seeds 1,2,3")
    return tuple(dict.fromkeys(int(name) for name in names))


def definition(base: Path, request: AblationRequest) -> Ablation:
    """The ablation of the request: the named file, the workspace's ablation.yaml, or the project's. Fully checked."""
    own = base / ABLATION_FILE
    path = request.file or (own if own.is_file() else recipe_folder() / ABLATION_FILE)
    ablation = load_ablation(path)
    for name in request.variants:
        ablation.variant(name)
    check_recipes(ablation, _recipe(base, request.profile), dict(map(parse_assignment, request.sets)), str(path))
    return ablation


def make_plan(base: Path, request: AblationRequest, ablation: Ablation) -> AblationPlan:
    """The jobs of the request. ``base`` must be a DVC root: what comes before PPO is read from its graph.

    Overrides apply in this order: profile, the file's ``common``, ``--set``, the seed, the variant's own: a variant
    always differs from its base by what it names.
    """
    targets = shared_targets(base)
    place = base / TRIALS / FOLDER / request.name
    common = [*assignments(ablation.common), *request.sets]
    seeds = request.seeds or ablation.seeds
    names = [name for name in ablation.names if not request.variants or name in request.variants]

    def job(variant: str | None, seed: int) -> AblationJob:
        own = assignments(ablation.overrides(variant)) if variant else []
        sets = (*common, f"seed={seed}", *own)
        return AblationJob(
            variant, seed, place / (variant or SHARED) / f"seed-{seed}", sets, (GOAL,) if variant else targets
        )

    jobs = [job(None, seed) for seed in seeds] + [job(name, seed) for name in names for seed in seeds]
    results = f"{request.name}-part" if request.is_part_of(ablation) else request.name
    return AblationPlan(ablation, base, request.profile, base / FOLDER / results, tuple(jobs))


def shared_targets(base: Path) -> tuple[str, ...]:
    """The stages before PPO, from DVC's own graph; ``ConfigError`` when it lacks PPO or the evaluation."""
    graph = read_graph(base)
    for stage in (TRAINER, GOAL):
        if stage not in graph:
            raise ConfigError(f"{base / 'dvc.yaml'} has no stage '{stage}', which an ablation needs")
    return graph[TRAINER].after


def assignments(changes: Mapping[str, Any]) -> list[str]:
    """``section.key=value`` of each change; JSON is YAML."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def describe(ablation: Ablation, names: Sequence[str]) -> str:
    """The variants with what makes them, and the figures, one line each."""
    width = max(len(name) for name in ablation.names)
    shown = [name for name in ablation.names if not names or name in names]
    lines = [f"{name.ljust(width)}  {ablation.variant(name).about}" for name in shown]
    figures = [f"{figure.name.ljust(width)}  {figure.title}" for figure in ablation.figures]
    return "\n".join(["variants", *(f"  {line}" for line in lines), "figures", *(f"  {line}" for line in figures)])


def _recipe(base: Path, profile: str | None) -> dict[str, Any]:
    """The recipe's plain parameters under a profile."""
    overlays = [(f"profile {profile}", profile_text(profiles_of(base), profile))] if profile else []
    text = merge((base / PARAMS_FILE).read_text(encoding="utf-8"), overlays)
    return dict(yaml_text.plain(yaml_text.parse(text, PARAMS_FILE)))
