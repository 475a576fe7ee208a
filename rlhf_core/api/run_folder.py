"""Where a run of this package keeps its partial state, and whose state that is."""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from rlhf_core.api.inputs import require_type
from rlhf_core.data.token_tables import TokenTable
from rlhf_core.errors import RlhfError
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.storage.files import atomic_write_json, read_json
from rlhf_core.training.run_context import RunContext

FILE = "run.json"


@contextmanager
def run_context(context: RunContext | None, name: str, *inputs: Any) -> Iterator[RunContext]:
    """The given context, or one whose folder is removed when the block ends.

    Args:
        context: Where to keep partial state; None for a temporary folder.
        name: What is trained.
        inputs: Everything that the run depends on: settings, rows, models, functions.

    Raises:
        RlhfError: The folder holds the state of another run.
    """
    require_type(context, RunContext, "context")
    if context is None:
        with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
            yield RunContext(Path(folder))
        return
    claim = {"run": name, "inputs": [digest(value) for value in inputs]}
    path = context.work / FILE
    if path.is_file() and (other := read_json(path)) != claim:
        what = f"of {other['run']}" if other.get("run") != name else "with other settings, data or models"
        raise RlhfError(f"{context.work} holds a run {what}: give each run a folder of its own, or remove this one")
    atomic_write_json(path, claim)
    yield context


def digest(value: Any) -> str:
    """A hash of settings, rows, a model's weights or a function's source text."""
    content = hashlib.sha256()
    if isinstance(value, nn.Module):
        for name, tensor in value.state_dict().items():
            content.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Path):
        # By content it would be read as a whole at every start; a stage's folder is named by that anyway.
        files = sorted(
            (str(file.relative_to(value)), file.stat().st_size) for file in value.rglob("*") if file.is_file()
        )
        content.update(repr(files).encode())
    elif isinstance(value, TokenTable):
        for name in value.id_columns:
            _add_ids(content, value.column(name))
    elif isinstance(value, TrainingPrompts):
        _add_ids(content, value.ids)
    elif isinstance(value, BaseModel):
        content.update(value.model_dump_json().encode())
    elif callable(value):
        try:
            content.update(inspect.getsource(value).encode())
        except (OSError, TypeError):
            content.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    else:
        content.update(repr(value).encode())
    return content.hexdigest()


def _add_ids(content: Any, rows: Iterable[Sequence[int]]) -> None:
    """Add rows of token ids to a hash."""
    for row in rows:
        content.update(np.asarray([len(row), *row], dtype=np.int64).tobytes())
