"""``rlhf plan``: from a recipe and the command line's options to an estimate, and to what is printed of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import (
    PARAMS_FILE,
    Params,
    check_params,
    load_params,
    merge,
    overlays_of,
    overridden,
    profiles_of,
)
from rlhf_core.config.operations import Trained
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.memory.advice import adapter_settings, advise
from rlhf_core.memory.architecture import starting_architecture
from rlhf_core.memory.estimate import MemoryEstimate
from rlhf_core.memory.inputs import EstimateInputs
from rlhf_core.memory.report import estimate_json, estimate_text, refusal_line
from rlhf_core.memory.sequence_lengths import lengths_from_limits, lengths_of_workspace
from rlhf_core.memory.stages import STAGES, estimate_memory, planned_stages


class MemoryExceeded(RlhfError):
    """A stage cannot fit the GPUs that it is meant for."""


@dataclass(frozen=True)
class PlanOptions:
    """The command line's options, None where not given. ``bf16``: weights in bfloat16, or (False) float32."""

    gpus: int | None = None
    gpu_memory: float | None = None
    zero: int | None = None
    offload: str | None = None
    frozen: str | None = None
    gradient_checkpointing: bool | None = None
    bf16: bool | None = None
    lora_rank: int | None = None
    prompt_tokens: int | None = None

    def settings(self, params: Params, stages: Sequence[str]) -> dict[str, Any]:
        """The same as settings by path, of ``stages`` of ``params``. ZeRO, offloading and sharding imply DeepSpeed."""
        sharding = self.zero is not None or self.offload is not None or self.frozen == "sharded"
        launch = {
            "engine": "deepspeed" if sharding else None,
            "processes": self.gpus,
            "zero": self.zero,
            "offload": self.offload,
            "frozen": self.frozen,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        settings: dict[str, Any] = {
            "plan.gpu_memory_gb": self.gpu_memory,
            "plan.prompt_tokens": self.prompt_tokens,
            "base.dtype": None if self.bf16 is None else "bfloat16" if self.bf16 else "float32",
        }
        for stage in stages:
            if stage in get_args(Trained):
                settings |= {f"compute.launch.{stage}.{name}": value for name, value in launch.items()}
            settings |= {f"{path}.rank": self.lora_rank for path in adapter_settings(params, stage)}
        return {path: value for path, value in settings.items() if value is not None}


@dataclass(frozen=True)
class PlanRequest:
    """What to estimate.

    Attributes:
        root: The workspace.
        profile: An overlay on its params.yaml.
        sets: Assignments ``section.key=value`` over that.
        options: Those of the command line, which stand for settings too.
        stages: Only these; all where empty.
        config: A config.json in place of the starting model's.
    """

    root: Path
    profile: str | None = None
    sets: Sequence[str] = ()
    options: PlanOptions = field(default_factory=PlanOptions)
    stages: Sequence[str] = ()
    config: Path | None = None


def estimate_of(request: PlanRequest) -> MemoryEstimate:
    """Estimate what ``request`` asks for. Lengths come from the workspace's data, unless a profile or override may
    have changed what that data would be."""
    params = params_of(request)
    architecture = starting_architecture(params.base, request.root, request.config)
    lengths = None
    if not (request.profile or request.sets or request.config):
        lengths = lengths_of_workspace(request.root, params, architecture.positions)
    lengths = lengths or lengths_from_limits(params, architecture.positions)
    if request.options.prompt_tokens is not None:
        lengths = replace(lengths, prompt=request.options.prompt_tokens)
    inputs = EstimateInputs(params, architecture, lengths, request.root)
    return estimate_memory(inputs, request.stages)


def describe(estimate: MemoryEstimate, *, as_json: bool = False) -> str:
    """The whole estimate with advice, as a table or as JSON."""
    advice = advise(estimate)
    return json.dumps(estimate_json(estimate, advice), indent=2) if as_json else estimate_text(estimate, advice)


def check(request: PlanRequest) -> str:
    """One line that says that the stages fit, or that nothing is known against it; ``MemoryExceeded`` when they do not.

    Only what is known to be too large is refused: a stage that runs no model, a GPU of unknown memory or a model of
    unknown sizes passes.
    """
    params = params_of(request)
    stages = [stage for stage in request.stages if stage in planned_stages(params)]
    if request.stages and not stages:
        return f"not checked: no memory is planned for {', '.join(request.stages)}"
    if params.plan.gpu_memory_gb is None:
        return "not checked: plan.gpu_memory_gb is not set"
    try:
        estimate = estimate_of(replace(request, stages=stages))
    except ConfigError:
        raise
    except RlhfError as error:  # of an unknown model, or adapters without the package for them
        return f"not checked: {error}"
    if not estimate.fits:
        raise MemoryExceeded(refusal_line(estimate, advise(estimate)))
    names = ", ".join(stage.stage for stage in estimate.stages)
    return f"{names}: {estimate.peak / (estimate.limit or 1):.0%} of what tensors may take of a GPU"


def params_of(request: PlanRequest) -> Params:
    """The settings that ``request`` asks about."""
    load_params(request.root)  # what is wrong with the file itself is reported by its path
    recipe = (request.root / PARAMS_FILE).read_text(encoding="utf-8")
    overlays = overlays_of(recipe, profiles_of(request.root), request.profile, request.sets)
    recipe = merge(recipe, overlays, request.sets)
    document = yaml_text.plain(yaml_text.parse(recipe, PARAMS_FILE))
    settings = request.options.settings(check_params(document, "parameters"), request.stages or tuple(STAGES))
    return check_params(overridden(document, settings), "parameters")
