"""Token ids of data files: encoded in batches, kept as Arrow lists, memory-mapped and shared by ranks and stages."""

from pathlib import Path

TOKENS = Path(".rlhf") / "tokens"  # folder of the token cache in a workspace
RECORD = "entry.json"  # what an entry of it was made of; its modification time is when the entry was last read
