"""Changes of a model folder that tests make before it is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Damage = Callable[[Path], None]


def edit(file: str, **values: object) -> Damage:
    """Set values of a JSON file."""

    def damage(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def in_shards(folder: Path, second: object) -> None:
    """Split the weights in two; the index calls the second part ``second``."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    first, rest = sorted(tensors)[:1], sorted(tensors)[1:]
    save_file({name: tensors[name] for name in first}, folder / "a.safetensors", {"format": "pt"})
    save_file({name: tensors[name] for name in rest}, folder / "b.safetensors", {"format": "pt"})
    names = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, second)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
