"""Third parties whose replies SFT and policy are compared with."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.model import Strict


class OpponentConfig(Strict):
    """``path`` is a file of JSON lines with ``prompt`` (a text or messages) and ``reply``, relative to the workspace.

    ``name`` is what metrics and report call the opponent.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w -]*$", max_length=40)
    path: str = Field(min_length=1)
