"""The exact sign test of a win rate (Dixon and Mood, 1946, "The Statistical Sign Test")."""

from __future__ import annotations

from scipy import stats


def sign_test(wins: int, ties: int, losses: int, bar: float = 0.5) -> float:
    """Return the probability of at least so many wins if the win rate (ties count half) were no more than ``bar``.

    Ties are set aside, as in the classical test at ½. For another bar the null hypothesis is the share of the decided
    prompts at which the win rate, with these ties, is ``bar``. The test is exact: unlike a bootstrap, it keeps its
    level with few prompts too.

    Args:
        wins: Prompts that the challenger wins.
        ties: Prompts that neither wins.
        losses: Prompts that the champion wins.
        bar: The win rate to be exceeded, in [0, 1].

    Returns:
        The one-sided p-value; 1 where nothing was decided, or where the bar cannot be exceeded.
    """
    decided = wins + losses
    if decided == 0:
        return 1.0
    share_at_bar = (bar * (decided + ties) - ties / 2) / decided
    if share_at_bar >= 1:
        return 1.0
    return float(stats.binomtest(wins, decided, max(share_at_bar, 0.0), alternative="greater").pvalue)
