"""Shares of categories in a mixture of training rows."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _leave_room(shares: dict[str, float]) -> dict[str, float]:
    wrong = next((name for name, share in shares.items() if not 0 < share < 1), None)
    if wrong is not None:
        raise ValueError(f"the share of {wrong} is {shares[wrong]:g}; it must be above 0 and below 1")
    if sum(shares.values()) >= 1:
        raise ValueError(f"the shares add up to {sum(shares.values()):g}, which leaves nothing to other categories")
    return shares


# By category its share of the rows; rows of all other categories fill the rest, each once in an epoch.
CategoryShares = Annotated[dict[str, float], AfterValidator(_leave_room)]
