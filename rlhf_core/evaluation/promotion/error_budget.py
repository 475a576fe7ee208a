"""A budget of error for repeated attempts on the same prompts: alpha spending.

Who tries often enough wins by luck at last: thirty independent attempts at 2.5 % each promote a model that is no better
with a probability of 53 %. Alpha spending gives attempt ``k`` the level ``budget · γ(k)`` with ``Σ γ(k) = 1``. By
Bonferroni's inequality all attempts together then promote wrongly with a probability of at most ``budget``, however
many there are and however they depend on one another (Foster and Stine, 2008, "α-investing: a procedure for sequential
control of expected false discoveries"; Tian and Ramdas, 2021, "Online control of the familywise error rate"). Here
``γ(k) = 1 / (k (k + 1))``, of which the first n add up to ``n / (n + 1)``.
"""

from __future__ import annotations


def level_of_attempt(budget: float, attempt: int) -> float:
    """Return the level of the test at attempt ``attempt``, counted from 1: half of ``budget`` at the first one."""
    if attempt < 1:
        raise ValueError(f"attempts are counted from 1, not {attempt}")
    return budget / (attempt * (attempt + 1))
