"""Where ``rlhf data convert`` writes the rows that it refuses."""

from __future__ import annotations

from pathlib import Path

REFUSED_SUFFIX = ".refused.jsonl"


def refused_file_of(output: Path) -> Path:
    """Return the file of refused rows beside a converted one: ``pairs.refused.jsonl`` beside ``pairs.jsonl``."""
    return output.with_name(output.stem + REFUSED_SUFFIX)
