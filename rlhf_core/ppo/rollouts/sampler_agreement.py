"""Do sampler and trainer agree about the sampled tokens? (algorithms.md §9, trap 1)

Both compute the log-probability of every sampled token with the same weights, the sampler token by token with a
key-value cache, the trainer in one pass. Beyond rounding they must agree, or PPO's ratios are wrong from the first step
on. Rounding scatters: single tokens may differ by a lot where the mean does not, and the longest reply of a run has the
largest difference of all. So the mean, the share of tokens that differ much and the growth along the reply decide,
each against what the precision of the computation explains. Shapes: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_core.errors import RlhfError
from rlhf_core.models.precision import Precision
from rlhf_core.ppo.losses.loss_reduction import masked_mean
from rlhf_core.ppo.metrics import MetricRecord
from rlhf_core.sampling.rounding_limits import LIMITS

# Halves of fewer tokens than these differ by chance.
COMPARABLE_TOKENS = 32


@dataclass(frozen=True)
class SamplerAgreement(MetricRecord):
    """By how much the sampler's log-probabilities of sampled tokens differ from the trainer's, before any update.

    Attributes:
        sampling_logp_difference_mean: Mean absolute difference per token.
        sampling_logp_difference_share: Share of tokens that differ by more than ``RoundingLimits.token``.
        sampling_logp_difference_growth: That mean in the later half of each reply minus that in the earlier half; 0 in
            a rollout of too few tokens to compare them.
        sampler_gap: The largest difference.
    """

    sampling_logp_difference_mean: float
    sampling_logp_difference_share: float
    sampling_logp_difference_growth: float
    sampler_gap: float

    @staticmethod
    def of(sampler: Tensor, trainer: Tensor, mask: Tensor, precision: Precision) -> SamplerAgreement:
        """Compare the log-probabilities (B, T) of sampler and trainer at response tokens."""
        if not bool(mask.any()):
            return SamplerAgreement(0.0, 0.0, 0.0, 0.0)
        difference = (sampler - trainer).double().abs().masked_fill(~mask, 0.0)
        positions = mask.cumsum(dim=1)  # of response tokens, from 1
        later = mask & (2 * positions > mask.sum(dim=1, keepdim=True))
        earlier = mask & ~later
        comparable = int(earlier.sum()) >= COMPARABLE_TOKENS
        return SamplerAgreement(
            sampling_logp_difference_mean=float(masked_mean(difference, mask)),
            sampling_logp_difference_share=float(masked_mean((difference > LIMITS[precision].token).double(), mask)),
            sampling_logp_difference_growth=(
                float(masked_mean(difference, later) - masked_mean(difference, earlier)) if comparable else 0.0
            ),
            sampler_gap=float(difference.max()),
        )


def require_agreement(agreement: SamplerAgreement, precision: Precision) -> None:
    """Refuse to train where sampler and trainer differ by more than rounding.

    Raises:
        RlhfError: They do, or a log-probability is not finite.
    """
    limits = LIMITS[precision]
    compared = {
        "on average by": (agreement.sampling_logp_difference_mean, limits.mean),
        f"by more than {limits.token:g} nats in a share of": (agreement.sampling_logp_difference_share, limits.share),
        "towards the end of replies by a further": (agreement.sampling_logp_difference_growth, limits.growth),
    }
    beyond = [
        f"{what} {value:.3g} (at most {limit:g})" for what, (value, limit) in compared.items() if not value <= limit
    ]
    if beyond:
        raise RlhfError(
            f"the sampler's log-probabilities differ from the trainer's {', '.join(beyond)}, more than the rounding of "
            f"{precision} explains: the distribution that samples is not the one that is scored; check that the model "
            "handles left padding, position ids and a key-value cache, and that its weights are finite"
        )
