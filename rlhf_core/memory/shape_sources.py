"""Where a starting model's shape comes from: the settings, a folder, the table of published sizes, or the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ModelError
from rlhf_core.memory.known_shapes import KNOWN
from rlhf_core.memory.shapes import Shape, shape_of_config


def starting_shape(base: BaseConfig, root: Path, config_file: Path | None = None) -> Shape:
    """Shape of the model that ``base`` names, relative folders starting at ``root``.

    ``config_file`` is a config.json that takes its place. Only a hub id that the table does not know is asked for on
    the hub, for its config.json alone. ``ModelError`` when no shape can be found.
    """
    if config_file is not None:
        return _read(config_file)
    if base.source == "scratch":
        return _scratch(base, root / "models" / "base" / "config.json")
    folder = root / Path(base.source).expanduser()
    if folder.is_dir():
        return shape_of_folder(folder)
    return KNOWN.get(base.source) or _from_hub(base.source, base.revision)


def shape_of_folder(folder: Path) -> Shape:
    """The shape of a model folder; ``ModelError`` where its config.json is missing or of another family."""
    return _read(folder / "config.json")


def _scratch(base: BaseConfig, built: Path) -> Shape:
    """The settings' shape; its vocabulary is known exactly once the base stage has run with the same settings."""
    declared = Shape(
        vocabulary=base.vocab_size,
        hidden=base.hidden_size,
        intermediate=base.intermediate_size,
        layers=base.layers,
        heads=base.heads,
        kv_heads=base.heads,
        head_dim=base.hidden_size // base.heads,
        tied=True,
        positions=base.max_positions,
    )
    found = _read(built) if built.is_file() else declared
    return found if replace(found, vocabulary=declared.vocabulary) == declared else declared


def _read(file: Path) -> Shape:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as a model's config.json ({error})") from error
    return shape_of_config(config, str(file))


def _from_hub(source: str, revision: str | None) -> Shape:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(source, "config.json", revision=revision)
    except Exception as error:  # the hub client raises its own, OSError and ValueError
        first = str(error).strip().split("\n", 1)[0]
        raise ModelError(
            f"the shape of {source} is unknown here and its config.json cannot be fetched ({first}); give one with "
            f"--config FILE, or name one of {', '.join(sorted(KNOWN))}"
        ) from error
    return _read(Path(file))
