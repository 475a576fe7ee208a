"""By how much log-probabilities of sampler and trainer may differ: what the precision of the computation explains."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.models.precision import Precision


@dataclass(frozen=True)
class RoundingLimits:
    """The most that rounding explains, in nats.

    Attributes:
        mean: Mean absolute difference of log-probabilities per token.
        token: Beyond it a single token differs much.
        share: Share of tokens that may.
        growth: By how much the mean of the later halves of replies may exceed that of the earlier halves.
    """

    mean: float
    token: float
    share: float
    growth: float


LIMITS: dict[Precision, RoundingLimits] = {
    "float64": RoundingLimits(mean=1e-7, token=1e-6, share=0.001, growth=1e-7),
    "float32": RoundingLimits(mean=2e-4, token=2e-3, share=0.001, growth=1e-4),
    "tf32": RoundingLimits(mean=0.01, token=0.1, share=0.01, growth=0.005),
    "bfloat16": RoundingLimits(mean=0.06, token=0.5, share=0.01, growth=0.03),
}
