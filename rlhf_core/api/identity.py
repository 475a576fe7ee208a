"""What identifies a run: hashes of its settings, rows, weights and reward function.

A folder of partial state is resumed only by the run that left it there: a policy trained by other
weights or another reward would pass for the one that was asked for.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokens import TokenTable
from rlhf_core.errors import CheckpointError, DataError, RlhfError
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import FileHashes, atomic_write_json, read_json
from rlhf_core.training.run_context import RunContext

FILE, HASHES = "run.json", "hashes.json"
RESUME_KEY = "resume_key"  # an attribute by which a reward function says itself what it computes
UNKNOWN = "unknown"  # in place of the hash of a value whose content cannot be told
GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
LIBRARIES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
Parts = dict[str, str]  # the hash of each part of an input


class Unrecognisable(Exception):
    """A value whose content cannot be told, such as an open connection."""


def claim_folder(context: RunContext, name: str, inputs: Mapping[str, Any]) -> None:
    """Write down in ``context.work`` which run it belongs to.

    Args:
        context: The run's surroundings.
        name: What is trained.
        inputs: Everything that the run depends on, by the name that the caller knows it by.

    Raises:
        RlhfError: The folder holds the state of another run, or one that cannot be told from this.
    """
    path, hashes = context.work / FILE, FileHashes(context.work / HASHES)
    compared = {} if context.named_by_content else inputs
    claim = {
        "run": name,
        "inputs": {key: parts_of(value, hashes) for key, value in compared.items()},
    }
    if path.is_file():
        try:
            earlier = read_json(path)
        except DataError as error:
            raise CheckpointError(f"{path} is damaged; delete the folder to start over") from error
        _require_same(earlier, claim, context.work)
    atomic_write_json(path, claim)
    if distributed.is_rank_zero():
        hashes.save()


def _require_same(saved: dict[str, Any], claim: dict[str, Any], work: Path) -> None:
    remedy = "give each run a folder of its own, or remove this one"
    if saved.get("run") != claim["run"]:
        raise RlhfError(f"{work} holds a run of {saved.get('run')}: {remedy}")
    before, now = saved["inputs"], claim["inputs"]
    changed, unknown = [], []
    for key in now.keys() | before.keys():
        old, new = before.get(key, {}), now.get(key, {})
        for part in sorted(old.keys() | new.keys()):
            label = f"{key} ({part})" if part else key
            if UNKNOWN in (old.get(part), new.get(part)):
                unknown.append(label)
            elif old.get(part) != new.get(part):
                changed.append(label)
    if changed:
        listed = ", ".join(changed)
        raise RlhfError(
            f"{work} holds a run with other settings, data or models, namely {listed}: {remedy}"
        )
    if unknown:
        raise RlhfError(
            f"{work} holds a run that may have had another {', '.join(unknown)}, whose content cannot be compared: "
            f"{remedy}; or let the reward function say what it computes by an attribute {RESUME_KEY}, such as a version"
        )


def parts_of(value: Any, hashes: FileHashes) -> Parts:
    """Return the hash of each part of ``value``.

    The parts of a function are its code and every value that it reads; all else is one part
    without a name.
    """
    if callable(value) and not isinstance(value, nn.Module):
        key = getattr(value, RESUME_KEY, None)
        if key is not None:
            return {RESUME_KEY: Content(hashes).of(key)}
        return {part: _hash_or_unknown(read, hashes) for part, read in _parts_of_callable(value)}
    return {"": _hash_or_unknown(value, hashes)}


def _hash_or_unknown(value: Any, hashes: FileHashes) -> str:
    try:
        return Content(hashes).of(value)
    except Unrecognisable:
        return UNKNOWN


def _parts_of_callable(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield by name what a function computes with, or what a callable object does and holds."""
    if isinstance(value, MethodType):
        yield "its object", value.__self__
        value = value.__func__
    if isinstance(value, FunctionType):
        yield "code", value.__code__
        yield from values_read(value)
        return
    yield "its object", value
    called = vars(type(value)).get("__call__")
    if isinstance(called, FunctionType):
        yield "code", called.__code__
        yield from values_read(called)


def values_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield by name a function's defaults, and the variables and globals that it reads."""
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"default {number}", value
    for name, value in sorted((function.__kwdefaults__ or {}).items()):
        yield f"default {name}", value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, None
    for name in sorted(set(_global_names(function.__code__))):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in GLOBAL_READS:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


class Content:
    """Hashes values by their content; :class:`Unrecognisable` where that cannot be told."""

    def __init__(self, hashes: FileHashes) -> None:
        self.hashes = hashes
        self.hash = hashlib.sha256()
        self.open: set[int] = set()  # the values inside which this one is

    def of(self, value: Any) -> str:
        """Return the hex digest of ``value``."""
        self.add(value)
        return self.hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add one value."""
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | enum.Enum
        ):
            self._text(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self.open:
            self._text("a value around this one")
            return
        self.open.add(id(value))
        try:
            self._add_compound(value)
        finally:
            self.open.discard(id(value))

    def _text(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        self.hash.update(len(encoded).to_bytes(8, "little") + encoded)

    def _all(self, kind: str, values: Sequence[Any]) -> None:
        self._text(f"{kind} of {len(values)}")
        for value in values:
            self.add(value)

    def _add_compound(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._text(type(value).__qualname__)
            for name, tensor in value.state_dict().items():
                self._text(name)
                self._add_tensor(tensor)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._text(f"array {value.dtype} {value.shape}")
            self.hash.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Path):
            self._add_path(value)
        elif isinstance(value, TokenTable):
            for name in value.id_columns:
                self._add_ids(value.column(name))
        elif isinstance(value, TrainingPrompts):
            self._add_ids(value.ids)
            self.add(dict(value.columns))
        elif isinstance(value, BaseModel):
            self._text(value.model_dump_json())
        elif isinstance(value, PreTrainedTokenizerBase):
            self.add([sorted(value.get_vocab().items()), str(value.chat_template)])
        elif isinstance(value, Mapping):
            self._all("mapping", [*value.keys(), *value.values()])
        elif isinstance(value, set | frozenset):
            self._text(f"set of {len(value)}")
            self._text(" ".join(sorted(Content(self.hashes).of(item) for item in value)))
        elif isinstance(value, list | tuple):
            self._all(type(value).__name__, value)
        elif isinstance(value, re.Pattern):
            self.add([value.pattern, value.flags])
        else:
            self._add_code_or_object(value)

    def _add_code_or_object(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._text(f"module {value.__name__}")
        elif isinstance(value, CodeType):
            self.hash.update(value.co_code)
            self._all(
                "code", [value.co_names, value.co_varnames, value.co_freevars, value.co_consts]
            )
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self.add([value.__self__, value.__func__])
        elif isinstance(value, type | BuiltinFunctionType):
            self._add_named(value)
        elif is_dataclass(value):
            self._text(type(value).__qualname__)
            self._all("fields", [getattr(value, field.name) for field in fields(value)])
        else:
            self._add_reduced(value)

    def _add_function(self, function: FunctionType) -> None:
        """Add a library's function by name, since the environment fixes it; others by code."""
        if function.__code__.co_filename.startswith(LIBRARIES):
            self._text(f"{function.__module__}.{function.__qualname__}")
            return
        self._text("function")
        self.add(function.__code__)
        for name, value in values_read(function):
            self._text(name)
            self.add(value)

    def _add_named(self, value: Any) -> None:
        """Add a class by name, its own functions too unless a library's, and what it is bound to."""
        self._text(f"{value.__module__}.{value.__qualname__}")
        self.add(getattr(value, "__self__", None))
        module = sys.modules.get(value.__module__ or "")
        of_library = str(getattr(module, "__file__", None) or LIBRARIES[0]).startswith(LIBRARIES)
        if isinstance(value, type) and (not of_library or value.__module__ == "__main__"):
            for name, own in sorted(vars(value).items()):
                if isinstance(own, FunctionType):
                    self._text(name)
                    self.add(own)

    def _add_reduced(self, value: Any) -> None:
        """Add an object by what a copy of it would be made from."""
        try:
            made_of = value.__reduce_ex__(4)
        except Exception as error:  # a lock, a socket, a model of another library
            raise Unrecognisable(type(value).__name__) from error
        if isinstance(made_of, str):
            self._text(made_of)
            return
        maker, arguments, *rest = made_of
        state, items, pairs = ([*rest, None, None, None])[:3]
        self.add([maker, arguments, state, list(items or ()), list(pairs or ())])

    def _add_tensor(self, tensor: Tensor) -> None:
        self._text(f"tensor {tuple(tensor.shape)} {tensor.dtype}")
        if tensor.device.type == "meta":
            raise Unrecognisable("a tensor without values")
        flat = tensor.detach().cpu().contiguous().flatten()
        self.hash.update(flat.view(torch.uint8).numpy().tobytes())

    def _add_path(self, path: Path) -> None:
        if path.is_file():
            self._text(self.hashes.of(path))
            return
        if not path.is_dir():
            self._text(str(path))
            return
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            self._text(str(file.relative_to(path)))
            self._text(self.hashes.of(file))

    def _add_ids(self, rows: Iterable[Sequence[int]]) -> None:
        """Add rows of token ids."""
        for row in rows:
            self.hash.update(np.asarray([len(row), *row], dtype=np.int64).tobytes())
