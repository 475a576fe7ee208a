"""A pretended GPU: tensors that say they are on ``cuda:0`` and compute on the CPU, and counts of
what a GPU pays for.

It finds what only a machine with a GPU would: tensors of two devices in one operation, moves that
were forgotten, NumPy of a device's tensors, random numbers of the wrong generator. It counts
launches, waits of the host and bytes between host and device. It knows nothing of CUDA's kernels,
rounding, memory, streams or speed. Layers that recompute their attention (gradient checkpointing)
abort in the backward pass, and DeepSpeed was not tried.

PyTorch's PrivateUse1 key is opened as a backend in Python. A tensor of the device wraps one of the
host. A function mode puts that backend where code says "cuda", and a dispatch mode checks devices
as CUDA does and computes on the host.

    with pretended_gpu() as counts: ...                      # in a test
    python tests/pretended_gpu MODULE ARGUMENTS…   # a program
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

ROOT = Path(__file__).resolve().parents[2]
SHOWN = torch.device("cuda", 0)


class Counts:
    """What was counted, by the phase of an iteration; "" outside of any."""

    def __init__(self) -> None:
        self.phase, self.paused = "", False
        self.of_thread = (
            threading.local()
        )  # whose `phase` goes before: other threads work while one replays a graph
        self.clear()

    def clear(self) -> None:
        self.launches: dict[str, Counter[str]] = {}  # phase -> operation -> launches
        self.waits: dict[str, Counter[str]] = {}  # phase -> why and where -> waits of the host
        self.bytes: dict[str, Counter[str]] = {}  # phase -> "to device" or "to host" -> bytes

    def add(self, kind: str, what: str, amount: int = 1) -> None:
        if not self.paused:
            what = f"{what} at {_caller()}" if kind == "waits" else what
            phase = getattr(self.of_thread, "phase", self.phase)
            getattr(self, kind).setdefault(phase, Counter())[what] += amount

    def move(self, tensor: torch.Tensor, to: str, waits: bool) -> None:
        self.add("bytes", to, tensor.numel() * tensor.element_size())
        if waits:
            self.add("waits", f"copy {to}")

    def total(self, kind: str, *phases: str) -> int:
        """The sum of ``launches``, ``waits`` or ``bytes``, of the given phases or of all."""
        held = getattr(self, kind)
        return sum(sum(held[phase].values()) for phase in held if not phases or phase in phases)

    def named(self, phase: str) -> Any:
        return mock.patch.object(self, "phase", phase)

    def uncounted(self) -> Any:
        return mock.patch.object(self, "paused", True)


def _caller() -> str:
    """The line of the project that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and "/site-packages/" not in path and path != __file__:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


COUNTS = Counts()


class Backend(_DummyBackendModule):
    active = False  # only inside of the block

    def is_available(self) -> bool:
        return self.active

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return RANDOM.get_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        RANDOM.set_state(state)


MODULE = Backend()
_setup_privateuseone_for_python_backend(rename="pretended", backend_module=MODULE)
BACKEND = torch.device("pretended", 0)


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended GPU; ``host`` has its values."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            host.stride(),
            host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=BACKEND,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    device = property(lambda self: SHOWN)
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __reduce_ex__(self, _: Any) -> Any:
        raise RuntimeError("a tensor of the device was pickled")

    def tolist(self) -> Any:
        COUNTS.move(self, "to host", waits=True)
        return self.host.tolist()

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) can be deep-copied"
            )
        copied = memo[id(self)] = DeviceTensor(self.host.clone())
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        return copied

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.host!r})"


def on_device(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def says_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).partition(":")[0] in (
        "cuda",
        "pretended",
    )


# What a GPU does without a launch; views are found by their schema.
NO_LAUNCH = {
    *("detach", "detach_", "alias", "lift", "lift_fresh", "view", "_unsafe_view", "_reshape_alias", "empty"),
    *("empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "is_same_size", "sym_size"),
    *("_has_compatible_shallow_copy_type", "_local_scalar_dense", "resolve_conj", "resolve_neg"),
}  # fmt: skip
# What the host waits for, because a size or a value depends on what the device computed.
WAITS = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "repeat_interleave"),
    *("bincount", "histc", "_local_scalar_dense"),
}  # fmt: skip
# Further operations that take numbers of the host (tensors of no dimension) beside tensors of the
# device.
TAKES_NUMBERS = {
    *("fill_", "where", "masked_fill", "masked_fill_", "copy_", "lerp", "lerp_", "clamp", "clamp_", "index_fill_"),
    *("isin", "addcmul", "addcdiv", "_foreach_mul", "_foreach_mul_", "_foreach_add_", "index_put", "index_put_"),
}  # fmt: skip
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
RANDOM = torch.Generator()  # the device's generator, apart from the host's


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check devices, count, and compute on the host."""
    flat, spec = _pytree.tree_flatten((args, kwargs))
    own = [value for value in flat if on_device(value)]
    given = kwargs.get("device")
    to_device = bool(own) if given is None else says_device(given)
    if not own and not to_device:
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    hosts = [value for value in flat if isinstance(value, torch.Tensor) and not on_device(value)]
    if name == "_to_copy":
        if hosts:
            COUNTS.move(hosts[0], "to device", waits=not kwargs.get("non_blocking"))
        elif not to_device:
            COUNTS.move(own[0], "to host", waits=not kwargs.get("non_blocking"))
        else:
            COUNTS.add("launches", name)
    elif name == "copy_" and hosts:
        waits = not (len(args) > 2 and args[2])
        if hosts[0].is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if hosts[0] is not args[1] or args[1].dim():
            COUNTS.move(args[1], "to device" if hosts[0] is args[1] else "to host", waits)
    else:
        _check(func, name, own, hosts, args)
        looks = name == "index" and any(
            on_device(each) and each.dtype == torch.bool for each in args[1]
        )
        if name in WAITS or looks:
            COUNTS.add("waits", name)
        if not func.is_view and name not in NO_LAUNCH:
            COUNTS.add("launches", name)
    generator = next((value for value in flat if isinstance(value, torch.Generator)), None)
    if generator is not None and to_device:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name in ("set_", "resize_", "resize_as_"):
        raise NotImplementedError(f"the pretended device does not know {name}")
    held = [value.host if on_device(value) else value for value in flat]
    host_args, host_kwargs = _pytree.tree_unflatten(held, spec)
    if given is not None and to_device:
        host_kwargs["device"] = torch.device("cpu")
    random = torch.Tag.nondeterministic_seeded in func.tags and to_device
    with _device_generator() if random else nullcontext():
        result = func(*host_args, **host_kwargs)
    if name == "_local_scalar_dense" or not to_device:  # such as empty_like(…, device="meta")
        return result
    # In inference mode a view of a normal tensor is a normal one.
    normal = (
        func.is_view and own and torch.is_inference_mode_enabled() and not own[0].is_inference()
    )
    with torch.inference_mode(False) if normal else nullcontext():
        return _wrapped(result, own, hosts)


def _check(
    func: Any, name: str, own: list[Any], hosts: list[torch.Tensor], args: tuple[Any, ...]
) -> None:
    """Raise the error that CUDA would where tensors of the host are among those of the device."""
    if not own or not hosts:
        return
    wrong = hosts
    if name in INDEXED:
        if not on_device(args[0]):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        for index in args[1]:
            if isinstance(index, torch.Tensor) and not on_device(index):
                COUNTS.move(index, "to device", waits=True)
        wrong = [
            value for value in args[2:3] if isinstance(value, torch.Tensor) and not on_device(value)
        ]
    numbers_too = torch.Tag.pointwise in func.tags or name in TAKES_NUMBERS
    if any(value.is_meta or value.dim() or not numbers_too for value in wrong):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            f"{wrong[0].device}! (when checking argument of {name})"
        )


def _wrapped(result: Any, own: list[Any], hosts: list[torch.Tensor]) -> Any:
    """Results as tensors of the device; what an operation has changed in place is the tensor that
    it was.
    """
    if isinstance(result, list | tuple):
        parts = [_wrapped(each, own, hosts) for each in result]
        return type(result)(parts) if type(result) in (list, tuple) else type(result)(*parts)
    if not isinstance(result, torch.Tensor):
        return result
    changed = next((each for each in own if each.host is result), None)
    changed = next((each for each in hosts if each is result), changed)
    return DeviceTensor(result) if changed is None else changed


@contextmanager
def _device_generator() -> Iterator[None]:
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(RANDOM.get_state())
    try:
        yield
    finally:
        RANDOM.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


class OnDevice(TorchDispatchMode):
    """Runs every operation by :func:`run`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode an operation made of others arrives whole, and a GPU launches its parts.
        if torch.is_inference_mode_enabled():
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return run(func, args, kwargs or {})


class Translated(TorchFunctionMode):
    """Puts the backend where code names the device "cuda", and does what PyTorch does before it
    dispatches.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "cuda":
            return args[0].to(BACKEND, **kwargs)
        if name in ("tensor", "as_tensor", "new_tensor"):
            return _of_numbers(func, name, args, kwargs)
        if name in ("__getitem__", "__setitem__") and on_device(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            # A list of numbers becomes a tensor of the host first, and the host waits for its copy.
            moved = tuple(
                torch.tensor(each).to(BACKEND) if isinstance(each, list) else each for each in index
            )
            return func(args[0], moved if isinstance(args[1], tuple) else moved[0], *args[2:])
        if name == "scaled_dot_product_attention" and any(
            map(on_device, (*args, *kwargs.values()))
        ):
            return _attention(*args, **kwargs)
        if name == "rms_norm" and on_device(args[0]):
            COUNTS.add("launches", name)
            with COUNTS.uncounted():
                return func(*args, **kwargs)
        if (
            name == "bmm" and (dtype := kwargs.pop("out_dtype", None)) is not None
        ):  # of which a CPU has no kernel
            COUNTS.add("launches", name)
            with COUNTS.uncounted():
                return func(*(each.to(dtype) for each in args), **kwargs)
        if name == "is_pinned":
            return getattr(args[0], "_pinned", False)
        if name == "pin_memory":
            if on_device(args[0]):
                raise RuntimeError(
                    "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
                )
            return _pinned(args[0].clone())
        if (
            name == "__set__"
            and on_device(args[0])
            and getattr(func, "__self__", None) is torch.Tensor.data
        ):
            if not on_device(args[1]):
                raise NotImplementedError(
                    "the data of a device's tensor were set to those of the host"
                )
            with torch._C.DisableTorchFunction():
                func(*args)
            args[0].host = args[1].host
            return None
        pinned = kwargs.pop("pin_memory", False)
        named = [says_device(each) and (name == "to" or type(each) is not str) for each in args]
        args = tuple(BACKEND if device else each for each, device in zip(args, named, strict=True))
        if says_device(kwargs.get("device")):
            kwargs["device"] = BACKEND
        made = func(*args, **kwargs)
        return _pinned(made) if pinned else made


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor._pinned = True
    return tensor


def _of_numbers(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A tensor of Python's numbers, which is made on the host and copied."""
    if name == "new_tensor":
        kwargs = {"device": args[0].device, "dtype": args[0].dtype} | kwargs
        func, args = torch.tensor, args[1:]
    device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    gradient = kwargs.pop("requires_grad", False)
    device = torch.get_default_device() if device is None else device
    if on_device(args[0]):
        made = args[0].to(device, kwargs.get("dtype"))
    else:
        made = func(*args, **kwargs).to(BACKEND if says_device(device) else device)
    return (_pinned(made) if pinned else made).requires_grad_(gradient)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One kernel forward and one backward, counted by whether there is a mask, which flash
    attention does not take.
    """
    given = [each for each in (query, key, value, attn_mask) if each is not None]
    if not all(map(on_device, given)) or len({each.dtype for each in given[:3]}) > 1:
        raise RuntimeError(
            "Expected query, key, value and attn_mask to have the same dtype and to be on one device"
        )
    COUNTS.add("launches", "attention" if attn_mask is None else "attention with a mask")
    with COUNTS.uncounted():
        if enable_gqa:
            key, value = (
                each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value)
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                ~attn_mask, float("-inf")
            )
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class Stream:
    """The one stream of the device."""

    def synchronize(self) -> None:
        COUNTS.add("waits", "synchronize")


PROPERTIES = SimpleNamespace(
    name="Pretended GPU", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
)
MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
IGNORED = (
    "init",
    "_lazy_init",
    "set_device",
    "reset_peak_memory_stats",
    "empty_cache",
    "ipc_collect",
)


def _cuda() -> dict[str, Any]:
    """What takes the place of functions of ``torch.cuda``."""
    return {
        **dict.fromkeys(IGNORED, lambda *_, **__: None),
        **dict.fromkeys(MEMORY, lambda *_, **__: 0),
        **dict.fromkeys(("device", "device_of", "stream"), nullcontext),
        "current_stream": lambda *_: Stream(),
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all"), lambda seed: RANDOM.manual_seed(int(seed))
        ),
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: COUNTS.add("waits", "synchronize"),
        "get_rng_state": lambda *_: RANDOM.get_state(),
        "get_rng_state_all": lambda: [RANDOM.get_state()],
        "set_rng_state": lambda state, *_: RANDOM.set_state(state),
        "set_rng_state_all": lambda states: RANDOM.set_state(states[0]),
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30),
    }


def _swapped(one: torch.Tensor, other: torch.Tensor, swap: Any = torch.utils.swap_tensors) -> None:
    """Where a parameter stays on the device, others may refer to it: what it holds changes
    alone.
    """
    if on_device(one) and on_device(other) and one.dtype == other.dtype:
        one.host = other.host
    elif one is not other:
        swap(one, other)


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph: work that counts as one launch, and in which the host must not wait."""

    def replay() -> None:
        COUNTS.of_thread.phase = "graph"
        try:
            work()
        finally:
            del COUNTS.of_thread.phase
        COUNTS.launches.pop("graph", None)
        COUNTS.add("launches", "graph")
        if waits := COUNTS.waits.pop("graph", None):
            raise AssertionError(f"the host waits in a graph: {dict(waits)}")

    return replay


@contextmanager
def pretended_gpu() -> Iterator[Counts]:
    """Have a GPU inside the block, in threads that begin there too; the counts begin at zero."""
    from rlhf_core.ppo.trainer import PhaseClock
    from rlhf_core.sampling.generation import GRAPHS

    if find_spec("bitsandbytes") is not None:
        # It loads its library when it is imported, as peft does for adapters: that for CUDA needs
        # cuBLAS, which a machine without a GPU does not have.
        import bitsandbytes  # noqa: F401
    run_thread, phase = threading.Thread.run, PhaseClock.phase

    def run_with_modes(self: threading.Thread) -> None:
        with Translated(), OnDevice():
            run_thread(self)

    @contextmanager
    def named_phase(self: PhaseClock, name: str) -> Iterator[None]:
        with COUNTS.named(name), phase(self, name):
            yield

    COUNTS.clear()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in _cuda().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.dict(GRAPHS, {"cuda": _captured}))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swapped))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_modes))
        stack.enter_context(mock.patch.object(PhaseClock, "phase", named_phase))
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("RLHF_DEVICE", None)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        # Backward passes in the thread that asks for them, which has the modes.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mock.patch.object(MODULE, "active", True))
        for mode in (Translated(), OnDevice()):
            stack.enter_context(mode)
        yield COUNTS


def main() -> None:
    """Run a module as a program on the pretended GPU."""
    sys.argv = sys.argv[1:]
    with pretended_gpu():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
