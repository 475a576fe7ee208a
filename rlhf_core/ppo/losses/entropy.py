"""The entropy term of the policy's loss: a bonus, or MOSS-RLHF's target form (algorithms.md §6; paper, section 5.3.2).

Off in PPO-max. Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_core.config.stages.ppo import EntropyConfig
from rlhf_core.ppo.losses.loss_reduction import StepSize, masked_sum


def entropy_sign(config: EntropyConfig, mean_entropy: float | None) -> float:
    """Sign of the entropy in the loss: -1 for a bonus ``-w * H``, that of ``H - target`` for ``w * |H - target|``.

    |H - target| is a function of the mean over the whole step, so that ``mean_entropy`` (nats per token, None where no
    one measured it) must be known before the step's first micro-batch.
    """
    if config.kind == "target" and mean_entropy is not None:
        return 1.0 if mean_entropy > config.target else -1.0
    return -1.0 if config.kind == "bonus" else 0.0


def entropy_term(entropies: Tensor, mask: Tensor, size: StepSize, weight: float) -> Tensor:
    """``weight * H`` of a micro-batch's entropies (B, T), a scalar; H is the mean over the tokens of the whole step."""
    return weight * masked_sum(entropies, mask) / size.tokens
