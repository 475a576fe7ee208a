"""Data sets from the Hugging Face hub, by ``hub:owner/name[:split]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.data.readers.containers import Record

PREFIX = "hub:"


def parse_hub_id(spec: str) -> tuple[str, str]:
    """Return ``(owner/name, split)`` of ``hub:owner/name[:split]``; the split is ``train`` where none is given."""
    name, _, split = spec.removeprefix(PREFIX).partition(":")
    if not name or name.count("/") > 1 or name.startswith("/") or name.endswith("/"):
        raise DataError(f"{spec!r} is not a hub id; write hub:owner/name or hub:owner/name:split")
    return name, split or "train"


def load_hub_records(spec: str, limit: int | None = None) -> tuple[list[Record], int]:
    """Load the first ``limit`` records of a hub data set, and how many it has in all.

    With ``HF_HUB_OFFLINE=1`` they come from the cached copy. Only data is loaded, never a repository's own code.

    Raises:
        DataError: The id or the split does not exist, or the network fails.
    """
    name, split = parse_hub_id(spec)
    from rlhf_core.data.readers.containers import Record
    from rlhf_core.hub import require_hub

    require_hub(spec, DataError)
    from datasets import Dataset, load_dataset

    try:
        data = load_dataset(name, split=split)
    except Exception as error:  # The library raises many unrelated types.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{spec}: cannot load the data set ({reason}); check the id, the split and the network"
        ) from error
    if not isinstance(data, Dataset) or len(data) == 0:
        raise DataError(f"{spec} has no rows; name a split that has: hub:{name}:SPLIT")
    total = len(data)
    if limit is not None:
        data = data.select(range(min(limit, len(data))))
    return [Record(position, row) for position, row in enumerate(data.to_list(), 1)], total
