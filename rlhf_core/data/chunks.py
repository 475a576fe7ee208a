"""Chunks of data: bounded by rows and by bytes, since one long row may take as much memory as thousands of others."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

# A chunk is complete with so many bytes of texts. A stage holds its rows in a few forms at once, each as large.
CHUNK_BYTES = 32 * 2**20
Item = TypeVar("Item")


def chunked(
    items: Iterable[Item], most: int, size: Callable[[Item], int], most_bytes: int | None = None
) -> Iterator[list[Item]]:
    """Yield items in lists, each complete with ``most`` of them or ``most_bytes`` bytes, whichever comes first.

    Args:
        size: Bytes of an item.
        most_bytes: By default ``CHUNK_BYTES``.
    """
    limit = CHUNK_BYTES if most_bytes is None else most_bytes
    chunk: list[Item] = []
    held = 0
    for item in items:
        chunk.append(item)
        held += size(item)
        if len(chunk) >= most or held >= limit:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def drained(items: list[Item]) -> Iterator[Item]:
    """Yield the items of a list, none of which is held any longer than it is needed; the list is empty then."""
    waiting = deque(items)
    items.clear()
    while waiting:
        yield waiting.popleft()


def bytes_in_memory(value: Any) -> int:
    """Return the bytes that a value takes: a text, or what dictionaries, lists and dataclasses hold, however deep."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif is_dataclass(item):
            waiting.extend(vars(item).values())
    return total


def rows_within(most_bytes: int, rows: int, size: int) -> int:
    """Return how many of ``rows`` rows of ``size`` bytes together fit into ``most_bytes`` on average; at least one."""
    return max(1, rows * most_bytes // max(size, most_bytes))


def table_slices(table: pa.Table, most: int, most_bytes: int | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a table in slices of at most ``most`` rows and about ``most_bytes`` bytes, without copying.

    A slice has more than twice the bytes only if it is one row. By default ``most_bytes`` is ``CHUNK_BYTES``.
    """
    limit = CHUNK_BYTES if most_bytes is None else most_bytes
    rows = max(1, min(most, rows_within(limit, table.num_rows, table.nbytes)))
    for start in range(0, table.num_rows, rows):
        part = table.slice(start, rows)
        if part.num_rows > 1 and part.nbytes > 2 * limit:
            yield from table_slices(part, most, limit)
        else:
            yield part
