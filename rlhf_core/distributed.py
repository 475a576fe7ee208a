"""The ranks (processes) that train one model together. With one process every function here changes nothing.

Ranks run the same code on the same global batches; they differ in which rows they compute (``data/sharding.py``) and
meet here to add up what they found. Values travel as tensors or JSON, never as pickles.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A rank may wait this long for one that measures or saves; dead ranks are noticed by the launcher, in seconds.
PATIENCE = timedelta(minutes=60)


def active() -> bool:
    """Whether this process is one of several that belong together."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if active() else 0


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if active() else 1


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return rank() == 0


def device() -> torch.device:
    """Where this process computes: its own GPU where there is one (``RLHF_DEVICE=cpu`` forbids it), else the CPU."""
    if os.environ.get("RLHF_DEVICE") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def joined() -> Iterator[None]:
    """Join the group that the launcher's environment describes for the length of the block; alone without one."""
    if active() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield
        return
    backend = "gloo"
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    # After an error the group is left as it is: the others may never answer a farewell.
    yield
    if active():
        dist.destroy_process_group()


class RestIsForFirst(BaseException):
    """Ends a rank whose share of a stage is done; whoever runs the stage expects it."""


def first_goes_on() -> None:
    """End the common work: the first rank goes on alone, the others raise :class:`RestIsForFirst`. For all ranks."""
    if size() == 1:
        return
    others = not is_first()
    dist.barrier()
    dist.destroy_process_group()
    if others:
        raise RestIsForFirst


def add(tensor: Tensor) -> Tensor:
    """``tensor`` becomes its sum over all ranks, in place."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def totals(figures: Mapping[str, float]) -> dict[str, float]:
    """Every figure summed over all ranks, which must name the same ones; names that end in ``_max``: the largest."""
    if size() == 1:
        return dict(figures)
    names = sorted(figures)
    sums = torch.tensor([figures[name] for name in names], dtype=torch.float64)
    largest = sums.clone()
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    values = {n: float(m if n.endswith("_max") else s) for n, s, m in zip(names, sums, largest, strict=True)}
    return {name: values[name] for name in figures}


def anywhere(flag: bool) -> bool:
    """Whether ``flag`` holds on any rank."""
    return totals({"_max": float(flag)})["_max"] > 0


def from_first(value: Any) -> Any:
    """The first rank's ``value`` (JSON; numbers survive exactly, NaN included), on every rank."""
    return _from(0, value) if size() > 1 else value


def gather_items(items: Sequence[Any]) -> list[Any]:
    """JSON items that the ranks hold in turn, as :func:`share` deals them out, as one list in order on every rank."""
    if size() == 1:
        return list(items)
    lists = [_from(source, list(items)) for source in range(size())]
    return [lists[i % size()][i // size()] for i in range(sum(map(len, lists)))]


def _from(source: int, value: Any) -> Any:
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    dist.broadcast(length, source)
    if rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, source)
    return json.loads(content.numpy().tobytes())


def tensors_from_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first rank's CPU ``tensors`` by name, on every rank; what the others hand in is ignored."""
    if size() == 1:
        return dict(tensors)
    headers = from_first([[name, str(t.dtype).split(".")[1], list(t.shape)] for name, t in tensors.items()])
    received = {}
    for name, dtype, shape in headers:
        tensor = tensors[name].contiguous() if is_first() else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, 0)
        received[name] = tensor
    return received


def gather_rows(rows: Tensor, total: int, fill: float = 0) -> Tensor:
    """Rows that the ranks hold in turn (rank r has r, r + size, ...) as one tensor in order: (b, ...) -> (total, ...).

    Ranks may have different widths; narrower rows are filled up on the right with ``fill``.
    """
    if size() == 1:
        return rows
    trailing = rows.shape[1:]
    widths = torch.tensor(trailing, dtype=torch.long)
    if widths.numel():
        dist.all_reduce(widths, dist.ReduceOp.MAX)
    most = math.ceil(total / size())
    shape = [most, *widths.tolist()]
    mine = rows.new_full(shape, fill)
    mine[tuple(slice(0, n) for n in rows.shape)] = rows
    sent = mine.to(torch.uint8) if mine.dtype == torch.bool else mine
    parts = [torch.empty_like(sent) for _ in range(size())]
    dist.all_gather(parts, sent.contiguous())
    # Row i of rank r is row i * size + r of the whole.
    return torch.stack(parts, dim=1).flatten(0, 1)[:total].to(rows.dtype)


def share(items: Any) -> Any:
    """This rank's part of a sequence or tensor: every ``size``-th item from its own number on, each on one rank."""
    return items[rank() :: size()]


def require_group() -> None:
    """Make a group of one where there is none: DeepSpeed needs a group even for a single process."""
    if active():
        return
    store = dist.HashStore()
    backend = "gloo" if device().type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=PATIENCE)
