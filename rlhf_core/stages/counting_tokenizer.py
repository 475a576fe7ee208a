"""The tokenizer that lengths of data are counted with: that of a folder, a GGUF file or a hub id, without its model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_counting_tokenizer(source: str, base: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``source``, with the chat template that stage base would give its model.

    Args:
        source: A folder with a tokenizer (weights are not needed), a ``.gguf`` file, or a hub id.
        base: The folder that relative paths start at.

    Raises:
        ModelError: It does not exist or has no usable tokenizer.
    """
    # Imported here: these load torch and transformers, which takes seconds and is for nothing without a tokenizer.
    from transformers import AutoTokenizer

    from rlhf_core.models.base import load_tokenizer
    from rlhf_core.models.gguf import is_gguf, load_gguf_tokenizer
    from rlhf_core.models.io import is_local, quiet
    from rlhf_core.stages.base import prepare_tokenizer

    path = base / Path(source).expanduser()
    if not path.exists() and (is_local(source) or is_gguf(source)):
        raise ModelError(f"the tokenizer {source} does not exist; give a model's folder, a .gguf file or a hub id")
    if path.is_dir():
        try:
            with quiet():
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # whatever a library comes upon in files that are damaged or of another kind
            first_line = str(error).strip().split("\n", 1)[0].rstrip(": ") or type(error).__name__
            raise ModelError(f"{source} has no readable tokenizer: {first_line}; give a complete folder") from error
    else:
        tokenizer = load_gguf_tokenizer(path) if path.exists() else load_tokenizer(source)
    tokenizer.model_max_length = sys.maxsize  # rows are counted, not run; the library would warn of longer ones
    prepare_tokenizer(tokenizer, source)
    return tokenizer
