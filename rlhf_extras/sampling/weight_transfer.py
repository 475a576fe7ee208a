"""Weights broadcast to the GPUs of a vLLM server by NCCL, without files.

This is the trainer's side of vLLM's weight transfer.

The trainer's first rank and all workers of the server make one group. Weights go one after the
other, in the order of the layers, so that under ZeRO 3 the trainer holds one of them gathered at a
time, and the server the parts of one fused layer. vLLM's side is its backend ``nccl`` (0.32).
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.cuda import nccl
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError, RlhfError, first_line
from rlhf_core.models.adapters import (
    INNER_LAYER,
    WithoutAdapters,
    adapted_layers,
    adapted_parameter,
    merged_weight,
    unadapted_weight,
)
from rlhf_core.runtime import distributed

Result = TypeVar("Result")


def plain_weights(policy: PreTrainedModel) -> dict[str, Any]:
    """The weights of a model by the names that they have without adapters.

    Returns:
        Tensors, which ZeRO 3 may have emptied, and layers with adapters, of which weights have to
        be merged.
    """
    weights = dict[str, Any]()
    layers: dict[str, list[Any]] = {}  # those of one module are within each other
    for name, layer in adapted_layers(policy):
        layers.setdefault(name.replace(INNER_LAYER, ""), []).append(layer)
    for key, tensor in policy.state_dict(keep_vars=True).items():
        parts = key.split(".")
        owner = next(
            (name for end in range(len(parts)) if (name := ".".join(parts[:end])) in layers), None
        )
        if owner is None:
            weights[key] = tensor
            continue
        for layer in layers[owner]:
            weights[f"{owner}.{adapted_parameter(layer)}"] = layer
        plain = key.replace(INNER_LAYER, "")
        if ".lora_" not in key and plain not in weights:
            weights[plain] = tensor
    return weights


@torch.no_grad()
def as_tensor(weight: Any) -> Tensor:
    """A value of :func:`plain_weights`, merged if it is a layer with adapters."""
    return weight.detach() if isinstance(weight, Tensor) else merged_weight(weight)


class CheckpointWeights:
    """A model's weights one at a time, as its files have them.

    They have the names of the files, and what the model fuses is apart.

    Attributes:
        described: Names and empty tensors, in the order of iteration.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        """Take the weights of ``policy``, whole or sharded.

        A sharded one is a ``training.engine.deepspeed.ShardedModel``.

        Raises:
            ModelError: Its files have a weight that is made of several of the model's.
        """
        self.policy = policy
        first = dict[int, tuple[str, Any]]()  # tied weights are one, under the first of their names
        for name, weight in plain_weights(policy).items():
            first.setdefault(id(weight), (name, weight))
        self.weights = dict(first.values())
        empty = {name: _described(weight) for name, weight in self.weights.items()}
        self.described: list[tuple[str, Tensor]] = []
        for name, tensor in empty.items():
            self.described += self._in_files(name, tensor)
        one_by_one = {(name, tensor.shape) for name, tensor in self.described}
        as_saved = {(name, tensor.shape) for name, tensor in _in_files(policy, empty).items()}
        if one_by_one != as_saved:
            raise ModelError(
                f"files of {policy.config.model_type} models have weights that are made of several of the model's, "
                "which cannot be sent one by one: set sampler.weights to files"
            )

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors of ``described`` on the device. All ranks must take all of them."""
        for name, tensor in self._whole():
            parts = self._in_files(name, tensor)
            del tensor  # or it would still be there while the next one is gathered
            while parts:
                yield parts.pop(0)[1].contiguous()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        if (gathered := getattr(self.policy, "gathered", None)) is not None:
            yield from gathered(self.weights)
            return
        for name, weight in self.weights.items():
            compute = partial(as_tensor, weight)
            yield (
                name,
                self.policy.run(compute) if isinstance(self.policy, WithoutAdapters) else compute(),
            )

    def _in_files(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return list(_in_files(self.policy, {name: tensor}).items())


def _described(weight: Any) -> Tensor:
    """An empty tensor of the whole weight's shape and precision."""
    tensor = weight if isinstance(weight, Tensor) else unadapted_weight(weight)
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")


def _in_files(policy: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` as ``save_pretrained`` would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    written: dict[str, Tensor] = revert_weight_conversion(policy, weights)
    return written


class Group(Protocol):
    """Connects the trainer, its member 0, with the workers of a server.

    ``id`` (128 bytes) tells them where to meet.
    """

    id: bytes

    def join(self, size: int) -> None:
        """Meet the other ``size`` - 1 members, which may take as long as they do."""

    def broadcast(self, weight: Tensor) -> None:
        """Send a contiguous tensor to all of them; it may be freed afterwards."""


class NcclGroup:
    """A group by PyTorch's own NCCL, on a stream of its own.

    What it waits for holds up nothing else.
    """

    def __init__(self) -> None:
        self._device = distributed.device()
        if self._device.type != "cuda":
            raise RlhfError(
                "sampler.weights nccl sends from a GPU, and this trainer has none: set it to files"
            )
        self.id: bytes = nccl.unique_id()
        self._stream, self._members = torch.cuda.Stream(self._device), list[Any]()

    def join(self, size: int) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._members = [nccl.init_rank(size, self.id, 0)]
            # vLLM's workers add up one number as soon as they have met.
            nccl.all_reduce([torch.zeros(1, device=self._device)], comms=self._members)
        self._stream.synchronize()

    def broadcast(self, weight: Tensor) -> None:
        # That may still compute it.
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            nccl.broadcast([weight], comms=self._members)
        self._stream.synchronize()


class Requests(Protocol):
    """What a transfer asks of the server's client."""

    def post_once(self, path: str, body: dict[str, Any] | None = None) -> object:
        """Post to ``path``; ``RlhfError`` unless it says that it did."""

    def workers(self) -> int:
        """The processes among which the server divides its model and copies of it."""

    def require_alive(self) -> None:
        """Raise ``RlhfError`` unless the server says that it is well."""


ALIVE_EVERY = 5.0  # seconds


@contextmanager
def errors_of_nccl() -> Iterator[None]:
    """Raise what NCCL says as an ``RlhfError``."""
    try:
        yield
    except RuntimeError as error:
        raise RlhfError(f"weights cannot be sent by NCCL: {first_line(error)}") from error


class WeightTransfer:
    """Sends weights to one server. Rank 0 alone has it.

    A server that ends or refuses is noticed, though NCCL itself would wait for it for ever:
    whatever waits for the server does so in a thread that nobody waits for.

    Args:
        server: Its client.
        seconds: Bounds the wait for one weight.
        group: NCCL's by default.

    Raises:
        RlhfError: The workers cannot be met.
    """

    def __init__(self, server: Requests, seconds: float, group: Group | None = None) -> None:
        self.server, self.seconds = server, seconds
        with errors_of_nccl():
            self.group = group or NcclGroup()
        # The group of a run that was killed.
        self.server.post_once("/shutdown_weight_transfer_engine")
        size = server.workers() + 1
        meeting = base64.b64encode(self.group.id).decode()
        settings = {
            "rank_offset": 1,
            "world_size": size,
            "nccl_unique_id_b64": meeting,
            "packed": False,
        }
        self._post("/init_weight_transfer_engine", {"init_info": settings})
        self._do(partial(self.group.join, size))
        self._answer.result()

    def begin(self, weights: CheckpointWeights) -> None:
        """Have the server wait for ``weights``; ``RlhfError`` if it does not."""
        names, tensors = zip(*weights.described, strict=True)
        precisions = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        told = {"names": names, "dtype_names": precisions, "shapes": shapes}
        self.server.post_once("/start_weight_update")
        self._post("/update_weights", {"update_info": told})

    def send(self, weight: Tensor) -> None:
        """Send the next one; ``RlhfError`` if the server has given up."""
        self._do(partial(self.group.broadcast, weight))

    def finish(self) -> None:
        """Wait until the server has them all."""
        self._answer.result()
        self.server.post_once("/finish_weight_update")

    def close(self) -> None:
        """Leave the group, if the server still answers."""
        with suppress(RlhfError):
            self.server.post_once("/shutdown_weight_transfer_engine")

    def _post(self, path: str, body: dict[str, Any]) -> None:
        """Ask for what the server does together with this side."""
        self._answer: Future[Any] = in_background(partial(self.server.post_once, path, body))

    def _do(self, work: Callable[[], None]) -> None:
        """Do this side's part, unless the server fails before it is done."""
        done: Future[Any] = in_background(work)
        deadline = time.monotonic() + self.seconds
        while not done.done():
            # The server may have answered that it expects weights before they came.
            wait(
                {done} if self._answer.done() else {done, self._answer},
                ALIVE_EVERY,
                FIRST_COMPLETED,
            )
            if self._answer.done() and not done.done():
                self._answer.result()
                self.server.require_alive()
            if time.monotonic() > deadline:
                raise RlhfError(
                    f"vLLM's server has taken no weight for {self.seconds:g} s (sampler.timeout_seconds)"
                )
        with errors_of_nccl():
            done.result()


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Do ``work`` in a thread that does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
