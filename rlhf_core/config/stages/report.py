"""The one-file HTML report."""

from __future__ import annotations

from pydantic import PositiveInt

from rlhf_core.config.model import StageConfig


class ReportConfig(StageConfig):
    """``alternatives`` is a file of ``rlhf compare --output`` in the workspace, whose runs the report shows beside this
    one; nothing is shown where it does not exist.
    """

    title: str = "RLHF pipeline report"
    replies: PositiveInt = 16
    alternatives: str = "alternatives.json"
