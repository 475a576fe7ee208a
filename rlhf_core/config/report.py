"""The one-file HTML report."""

from __future__ import annotations

from pydantic import PositiveInt

from rlhf_core.config.model import StageConfig


class ReportConfig(StageConfig):
    title: str = "RLHF pipeline report"
    replies: PositiveInt = 16
