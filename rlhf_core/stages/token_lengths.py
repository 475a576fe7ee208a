"""The tokenizer that counts the tokens of data before anything is trained."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config.base import is_pretrained
from rlhf_core.errors import ModelError, first_line, is_exhausted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.config.params import Params


WANTED = "give a model's folder, a .gguf file or a hub id"
HUB_PREFIX = "hub:"  # of data sets
BASE = Path("models") / "base"
TOKENIZER_CONFIG = "tokenizer_config.json"


def load_counting_tokenizer(source: str, base: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``source``, with a chat template as from stage base.

    Args:
        source: A folder with a tokenizer (weights are not needed), a ``.gguf`` file, or a hub id.
        base: The folder that relative paths start at.

    Raises:
        ModelError: It does not exist or has no usable tokenizer.
    """
    if not source.strip():
        raise ModelError(f"the name of the tokenizer is empty; {WANTED}")
    path = base / Path(os.path.expanduser(source))
    if source.startswith(HUB_PREFIX) and not path.exists():
        raise ModelError(
            f"{source}: {HUB_PREFIX} is for data sets; name the tokenizer as {source.removeprefix(HUB_PREFIX)}"
        )
    # Imported here: these load torch and transformers, which takes seconds.
    from rlhf_core.models.foreign import prepare_tokenizer, require_openable
    from rlhf_core.models.io import is_local
    from rlhf_core.models.readers import is_model_file, model_reader

    if not path.exists() and (is_local(source) or is_model_file(source)):
        raise ModelError(f"the tokenizer {source} does not exist; {WANTED}")
    require_openable(path if path.exists() else source)
    if path.is_dir():
        tokenizer = _load_folder(path, source)
    elif path.exists():
        tokenizer = model_reader(path).read_tokenizer(path)
    else:
        tokenizer = _load_from_hub(source)
    # Rows are counted, not run; the library would warn of longer ones.
    tokenizer.model_max_length = sys.maxsize
    prepare_tokenizer(tokenizer, source)
    return tokenizer


def _load_folder(path: Path, source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, which messages call ``source``."""
    from transformers import AutoTokenizer

    from rlhf_core.models.folder_check import TOKENIZER_FILES
    from rlhf_core.models.io import quiet

    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False
            )
    except Exception as error:  # whatever a library makes of damaged files
        if is_exhausted(error):
            raise
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"the folder {source} has no tokenizer ({TOKENIZER_FILES[0]}); {WANTED}"
            ) from error
        raise ModelError(
            f"{source} has no readable tokenizer: {first_line(error)}; give a complete folder"
        ) from error
    # What the library makes where the vocabulary is missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"the tokenizer in {source} has no vocabulary ({TOKENIZER_FILES[0]}); give a complete folder"
        )
    return tokenizer


def _load_from_hub(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HFValidationError

    from rlhf_core.models.causal_lm import load_tokenizer

    try:
        return load_tokenizer(source)
    except HFValidationError as error:
        raise ModelError(
            f"the tokenizer {source!r} is no file here and no hub id (owner/name); {WANTED}"
        ) from error
    except ModelError as error:
        if error.__cause__ is None or not isinstance(error.__cause__, (OSError, ValueError)):
            raise
        where = "is not in the cache (HF_HUB_OFFLINE is set)"
        if not is_offline_mode():
            where = "cannot be loaded from the hub: it is not there, has no tokenizer, or you have no access to it"
        raise ModelError(f"the tokenizer {source} {where}; {WANTED}") from error


def local_starting_model(params: Params, base: Path) -> str | None:
    """Return where the starting model is on this machine; nothing is fetched.

    Args:
        base: The folder that relative paths start at.

    Returns:
        Its folder or file as settings name it, or the folder of a hub id in the cache. None where
        it is not here, or is made from nothing.
    """
    source = params.base.source
    if not is_pretrained(source):
        return None
    if (base / Path(os.path.expanduser(source))).exists():
        return source
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # it is no hub id
        file = try_to_load_from_cache(source, TOKENIZER_CONFIG, revision=params.base.revision)
        if isinstance(file, str):
            return str(Path(file).parent)
    return None


def model_positions(path: Path) -> int | None:
    """Return how many positions the model in a folder or GGUF file has; None where it is not said.

    The weights are not needed: a folder may hold a tokenizer alone.
    """
    from transformers import AutoConfig

    from rlhf_core.models.architecture import positions_of
    from rlhf_core.models.io import quiet
    from rlhf_core.models.readers import is_model_file, model_reader

    if path.is_file() and is_model_file(path):
        config = model_reader(path).read_config(path)
    elif (path / "config.json").is_file():
        try:
            with quiet():
                config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # whatever a library makes of a damaged file
            if is_exhausted(error):
                raise
            raise ModelError(
                f"{path}/config.json is not readable: {first_line(error)}; give a complete folder"
            ) from error
    else:
        return None
    return positions_of(config)
