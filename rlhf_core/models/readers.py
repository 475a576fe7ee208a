"""Single files that hold a model, such as GGUF: packages read them, by the suffix of their name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhf_core.errors import ModelError
from rlhf_core.plugins import MODEL_READERS, known_plugins, load_plugin, model_plugins

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class ModelReader(Protocol):
    """What an entry of ``rlhf.model_readers`` has, a module or an object, named by the suffix.

    Each raises ``ModelError`` in one line for a file that it cannot read.
    """

    def read_config(self, file: Path) -> PretrainedConfig:
        """Return the configuration, without reading the weights."""

    def read_tokenizer(self, file: Path) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which pads on the left, without reading the weights."""

    def read_model(
        self, file: Path, dtype: torch.dtype | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a plain causal language model on this process's device, and its tokenizer."""


def is_model_file(source: str | Path) -> bool:
    """Whether ``source`` names a file that holds a model rather than a folder or a hub id."""
    return bool(model_plugins(source))


def model_reader(file: Path) -> ModelReader:
    """Return what reads ``file``.

    Raises:
        ModelError: No package reads such files.
        PluginError: It is not installed, or cannot be imported.
    """
    plugins = model_plugins(file)
    if not plugins:
        known = ", ".join(f".{name}" for name in known_plugins(MODEL_READERS))
        raise ModelError(f"{file} is neither a folder nor a file that holds a model ({known})")
    reader: ModelReader = load_plugin(*plugins[0])
    return reader
