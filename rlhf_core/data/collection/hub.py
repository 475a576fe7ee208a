"""Data sets from the Hugging Face hub, by ``hub:owner/name[/config][@revision][:split]``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlhf_core.data.readers.content import Record
from rlhf_core.errors import DataError, first_line

PREFIX = "hub:"
HUB_ID = re.compile(
    r"hub:(?P<name>[^/@:\s]+(?:/[^/@:\s]+)?)(?:/(?P<config>[^/@:\s]+))?(?:@(?P<revision>[^@:\s]+))?(?::(?P<split>.+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
# A path of this form is looked up on the hub alone: a local folder of the name is not taken for the data set.
HUB_PATH = "hf://datasets/{}"
BATCH_ROWS = 2048


@dataclass(frozen=True)
class HubId:
    """A data set on the hub; without a revision its newest commit, without a configuration its only or default one."""

    name: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class OpenSource:
    """The records of a source, which can be read once.

    Attributes:
        where: What messages call the source.
        path: The file that is read, for a URL a copy of it; None for a hub id.
        unread: Rows of a hub data set that a limit leaves out; None if the hub does not say how many.
        revision: The commit of a hub data set; empty if a cached copy does not say.
    """

    records: Iterator[Record]
    where: str
    path: Path | None = None
    unread: int | None = 0
    revision: str = ""


def parse_hub_id(spec: str) -> HubId:
    """Return the parts of a hub id; :class:`DataError` where it is none."""
    match = HUB_ID.fullmatch(spec)
    if match is None:
        raise DataError(f"{spec!r} is not a hub id; write hub:owner/name, or hub:owner/name/config@revision:split")
    return HubId(match["name"], match["config"], match["revision"], match["split"] or "train")


def load_hub_records(spec: str, limit: int | None = None) -> OpenSource:
    """Load the first ``limit`` records of a hub data set; with a limit no more than these are downloaded.

    Without one the data set is downloaded to the cache, and its records are read from there some thousand at a time.
    With ``HF_HUB_OFFLINE=1`` they come from the cached copy. Only data is loaded, never a repository's own code.

    Raises:
        DataError: The id, the revision or the split does not exist, the cached copy is of another revision, or the
            network fails.
    """
    hub_id = parse_hub_id(spec)
    from huggingface_hub import HfApi, constants, is_offline_mode

    from rlhf_core.hub import require_hub

    require_hub(spec, DataError)
    online = not is_offline_mode()
    if not online and hub_id.revision and not COMMIT.fullmatch(hub_id.revision):
        raise DataError(f"{spec}: with HF_HUB_OFFLINE, name the commit itself: {hub_id.revision} cannot be looked up")
    from datasets import load_dataset_builder

    try:
        commit = hub_id.revision
        if online:
            about: Any = HfApi(endpoint=constants.ENDPOINT).dataset_info(hub_id.name, revision=commit)
            commit = str(about.sha)
        builder = load_dataset_builder(HUB_PATH.format(hub_id.name), hub_id.config, revision=commit)
        if commit and builder.hash != commit:
            raise DataError(f"the cached copy is of the commit {builder.hash}")
        if limit is not None and online:
            rows: Iterator[Any] = iter(list(islice(builder.as_streaming_dataset(split=hub_id.split), limit)))
            known = (builder.info.splits or {}).get(hub_id.split)
            total = known.num_examples if known else None
        else:
            builder.download_and_prepare()
            data = builder.as_dataset(split=hub_id.split)
            total = len(data)
            rows = _stored_rows(data if limit is None else data.select(range(min(limit, total))))
        first = next(rows, None)
    except Exception as error:  # The library raises many unrelated types.
        raise DataError(
            f"{spec}: cannot load the data set ({first_line(error)}); check the id, the revision, the split and the "
            "network"
        ) from error
    if first is None:
        raise DataError(f"{spec} has no rows; name a split that has: hub:{hub_id.name}:SPLIT")
    resolved = str(builder.hash or "")
    records = (Record(position, row) for position, row in enumerate(chain([first], rows), 1))
    unread = 0 if limit is None else None if total is None else max(total - limit, 0)
    return OpenSource(records, spec, unread=unread, revision=resolved if COMMIT.fullmatch(resolved) else "")


def _stored_rows(data: Any) -> Iterator[Any]:
    """Yield the rows of a data set that is stored on this machine."""
    from rlhf_core.data.tables import table_slices

    for table in data.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for part in table_slices(table, BATCH_ROWS):
            yield from part.to_pylist()
