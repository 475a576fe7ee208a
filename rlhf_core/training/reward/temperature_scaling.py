"""Temperature scaling: one divisor of all margins after which their confidence matches how often they are right.

Guo et al., 2017, "On Calibration of Modern Neural Networks". It changes no ranking. PPO normalises rewards, so that the
divisor matters to readers of margins and of calibration only. ``margins`` is ``r_w - r_l`` over B pairs.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize

LIMITS = (0.01, 100.0)


def fitted_temperature(margins: np.ndarray) -> float:
    """Return the temperature T within ``LIMITS`` that minimises the ranking loss ``mean(log(1 + exp(-margin / T)))``.

    T lies at the upper limit where the margins are wrong as often as right, and at the lower one where they are never
    wrong. It must be fitted on pairs other than those it is measured on.
    """

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp(0.0, -margins / math.exp(log_temperature)).mean())

    lowest, highest = map(math.log, LIMITS)
    return math.exp(float(optimize.minimize_scalar(loss, bounds=(lowest, highest), method="bounded").x))
