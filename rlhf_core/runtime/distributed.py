"""Collective operations over the ranks that train one model together; no-ops with one process.

Ranks run the same code on the same global batches. They differ in the rows they compute
(``data/batches.py``) and reduce their results here. Values travel as tensors or JSON, never as
pickles.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.runtime.rank_marks import MarkFile
from rlhf_core.storage.files import LockFile, own_temporary_folder

# How long a rank waits for another that evaluates or saves. The launcher notices dead ranks within
# seconds, and ends late ones first (``compute.launch.STAGE.rank_timeout``).
TIMEOUT = timedelta(minutes=60)
SLACK_SECONDS = 120.0
BUCKET_BYTES = 25_000_000
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MARKS = MarkFile()


def active() -> bool:
    """Whether this process belongs to an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Rank of this process, from 0."""
    return dist.get_rank() if active() else 0


def world_size() -> int:
    """Number of ranks; 1 outside a process group."""
    return dist.get_world_size() if active() else 1


def is_rank_zero() -> bool:
    """Whether this is rank 0, the one that writes files."""
    return rank() == 0


def device() -> torch.device:
    """Return where this process computes: its own GPU where there is one, else the CPU.

    ``RLHF_DEVICE=cpu`` forbids GPUs.
    """
    if os.environ.get("RLHF_DEVICE") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _require_no_gpu()
        return torch.device("cpu")
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise ConfigError(f"process {rank + 1} has no GPU, there are {count}: lower processes")
    # cuDNN's attention takes 57 ms (H100) to plan for each new length, and a sampled token is one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", rank)


def _require_no_gpu() -> None:
    """Refuse the CPU where PyTorch cannot use the GPU that there is: it would take days."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or not NVIDIA_DRIVER.is_file():
        return
    driver = NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    raise ConfigError(
        f"this machine has a GPU that PyTorch for CUDA {torch.version.cuda} cannot use (driver: {driver.strip()}): "
        "update the driver or install PyTorch for an older CUDA, or set RLHF_DEVICE=cpu to do without the GPU"
    )


@contextmanager
def process_group(rank_timeout: float = TIMEOUT.total_seconds()) -> Iterator[None]:
    """Join the process group that the launcher's environment describes, inside the block.

    Args:
        rank_timeout: Seconds that its ranks wait for a late one; the launcher acts before they do.
    """
    if active() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield
        return
    backend = "gloo"
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "cpu:gloo,cuda:nccl"
    MARKS.open(int(os.environ["RANK"]))
    with MARKS.waiting("the start"):
        timeout = timedelta(seconds=rank_timeout + SLACK_SECONDS)
        dist.init_process_group(backend, timeout=timeout)
    yield
    # On an error destroy_process_group is skipped: it can hang when peers have died.
    if active():
        dist.destroy_process_group()


@contextmanager
def one_of_machine_at_a_time() -> Iterator[None]:
    """Let the ranks of this machine in one by one.

    Host memory then holds one copy of a model on its way. Where no lock can be had, as where the
    folder for temporary files is full or another user has made this user's own folder in it, the
    ranks go on at the same time: turns only save memory.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= 1:
        yield
        return
    with ExitStack() as stack:
        with suppress(OSError, RlhfError):
            # The ranks' common launcher tells jobs apart.
            path = own_temporary_folder() / f"turn-{os.getppid()}"
            stack.enter_context(LockFile(path)).acquire()
        yield


class NonzeroRankReleased(BaseException):
    """Raised on ranks other than 0 when rank 0 continues alone; the stage runner expects it."""


def release_nonzero_ranks() -> None:
    """Dissolve the process group: only rank 0 goes on.

    The others raise :class:`NonzeroRankReleased`. Every rank must call it.
    """
    if world_size() == 1:
        return
    others = not is_rank_zero()
    with MARKS.waiting("a barrier"):
        dist.barrier()
    dist.destroy_process_group()
    if others:
        raise NonzeroRankReleased


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks, in place; returns it."""
    if world_size() > 1:
        with MARKS.waiting("a sum"):
            dist.all_reduce(tensor)
    return tensor


def all_reduce_sums(tensors: Sequence[Tensor]) -> None:
    """Sum every tensor over all ranks, in place.

    They travel in flat buckets of 25 MB, with a collective operation for each. Ranks must agree on
    shapes and order.
    """
    if world_size() == 1:
        return
    bucket: list[Tensor] = []
    for position, tensor in enumerate(tensors):
        bucket.append(tensor)
        following = tensors[position + 1] if position + 1 < len(tensors) else None
        full = sum(each.nbytes for each in bucket) >= BUCKET_BYTES
        kind = (tensor.dtype, tensor.device)
        if full or following is None or (following.dtype, following.device) != kind:
            flat = torch.cat([each.reshape(-1) for each in bucket])
            with MARKS.waiting("a sum"):
                dist.all_reduce(flat)
            parts = flat.split([each.numel() for each in bucket])
            shaped = [part.view_as(each) for part, each in zip(parts, bucket, strict=True)]
            torch._foreach_copy_(bucket, shaped)
            bucket = []


def reduce_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sum every metric over all ranks.

    Names that end in ``_max`` take the maximum, or NaN if a rank has it. Ranks must agree on the
    names.
    """
    if world_size() == 1:
        return dict(metrics)
    names = sorted(metrics)
    sums = torch.tensor([metrics[name] for name in names], dtype=torch.float64)
    largest = sums.clone()
    with MARKS.waiting("a sum of metrics"):
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    # A maximum with NaN depends on the order of its arguments; a sum does not.
    largest = torch.where(sums.isnan(), sums, largest)
    values = {}
    for name, total, maximum in zip(names, sums, largest, strict=True):
        values[name] = float(maximum if name.endswith("_max") else total)
    return {name: values[name] for name in metrics}


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on at least one rank."""
    return largest_of_ranks(int(flag)) > 0


def largest_of_ranks(count: int) -> int:
    """Return the largest ``count`` of all ranks, on every rank."""
    if world_size() == 1:
        return count
    largest = torch.tensor([count])
    with MARKS.waiting("a comparison"):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank, as JSON: floats survive exactly, NaN too."""
    if world_size() == 1:
        return value
    with MARKS.waiting("a message"):
        return _from(0, value)


def gather_items(items: Sequence[Any]) -> list[Any]:
    """Undo :func:`shard_for_rank` for a list of JSON values, on every rank."""
    lists = every_rank(list(items))
    total = sum(map(len, lists))
    return [lists[i % len(lists)][i // len(lists)] for i in range(total)]


def _from(source: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    dist.broadcast(length, source, group)
    if rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    return json.loads(content.numpy().tobytes())


def background_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for another thread than the main one.

    Its collectives may run beside those of the main thread. Every rank must call it. It lives as
    long as the process group; None with one process.
    """
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size() > 1 else None


def every_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON values of all ranks in their order, on every rank."""
    if world_size() == 1:
        return [value]
    with nullcontext() if group else MARKS.waiting("a message"):  # a group has its own thread
        return [_from(source, value, group) for source in range(world_size())]


def gather_rows(rows: Tensor, total: int, fill: float = 0) -> Tensor:
    """Undo :func:`shard_for_rank` for rows of a tensor: (b, ...) -> (total, ...) on every rank.

    Ranks may have different widths; narrower rows are padded on the right with ``fill``.
    """
    if world_size() == 1:
        return rows
    trailing = rows.shape[1:]
    widths = torch.tensor(trailing, dtype=torch.long)
    if widths.numel():
        with MARKS.waiting("rows"):
            dist.all_reduce(widths, dist.ReduceOp.MAX)
    most = math.ceil(total / world_size())
    shape = [most, *widths.tolist()]
    mine = rows.new_full(shape, fill)
    mine[tuple(slice(0, n) for n in rows.shape)] = rows
    sent = mine.to(torch.uint8) if mine.dtype == torch.bool else mine
    parts = [torch.empty_like(sent) for _ in range(world_size())]
    with MARKS.waiting("rows"):
        dist.all_gather(parts, sent.contiguous())
    # Row i of rank r is row i * size + r of the whole.
    return torch.stack(parts, dim=1).flatten(0, 1)[:total].to(rows.dtype)


def shard_for_rank(items: Any, of: int | None = None) -> Any:
    """Return the items of a sequence at rank, rank + world_size, ... for this rank, or that of ``of``."""
    return items[rank() if of is None else of :: world_size()]


def require_group() -> None:
    """Initialise a group of one where there is none, which DeepSpeed needs for one process too."""
    if active():
        return
    store = dist.HashStore()
    backend = "gloo" if device().type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
