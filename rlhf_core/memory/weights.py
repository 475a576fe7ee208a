"""Bytes of a model's weights on one GPU: trained ones whole or sharded, frozen ones by where they are kept."""

from __future__ import annotations

from rlhf_core.memory.placement import Placement

# DeepSpeed's stage 3 may keep this many gathered parameters alive (its default ``stage3_max_live_parameters``).
MAX_LIVE_PARAMETERS = 1_000_000_000


def trained_weights(parameters: int, placement: Placement) -> int:
    """Weights of a trained model that stay on each GPU: all of them, under ZeRO-3 a share, offloaded none."""
    if placement.zero == 3:
        return 0 if placement.offload_parameters else placement.share(parameters) * placement.element
    return parameters * placement.element


def gathered_weights(parameters: int, placement: Placement, whole: bool) -> int:
    """What ZeRO-3 gathers on top while a trained model runs: ``whole`` for sampling and evaluation, else by layers."""
    return _live(parameters, whole) * placement.element if placement.zero == 3 else 0


def frozen_weights(parameters: int, placement: Placement) -> int:
    """Weights of a frozen model that stay on each GPU."""
    if placement.frozen == "offload" or (placement.frozen == "sharded" and placement.offload_parameters):
        return 0
    kept = placement.share(parameters) if placement.frozen == "sharded" else parameters
    return kept * placement.element


def brought_in(parameters: int, placement: Placement) -> int:
    """What a frozen model of host memory needs while rollouts or selection are under way, at work or not."""
    return parameters * placement.element if placement.frozen == "offload" else 0


def gathered_by_layers(parameters: int, placement: Placement) -> int:
    """What a sharded frozen model gathers while it runs."""
    return _live(parameters, False) * placement.element if placement.frozen == "sharded" else 0


def _live(parameters: int, whole: bool) -> int:
    return parameters if whole else min(parameters, MAX_LIVE_PARAMETERS)
