"""Where a workspace keeps the token ids of its data files."""

from __future__ import annotations

from pathlib import Path

TOKENS = Path(".rlhf") / "tokens"
RECORD = "entry.json"  # what an entry was made of; changed last when the entry was last read
