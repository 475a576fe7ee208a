"""The tokenizer of a workspace and the longest sequences that its training keeps, where they are on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_core.config.loading.load import Params, load_params
from rlhf_core.data.inspect import TokenLimit, TokenLimits
from rlhf_core.stages.counting_tokenizer import load_counting_tokenizer

SCRATCH = "scratch"


def local_token_limits(workspace: Path) -> TokenLimits | None:
    """Return the tokenizer and limits of ``workspace``; None if neither ``base.source`` nor models/base is a folder.

    Nothing is downloaded. A tokenizer made from nothing depends on the data, so that other data would change it.

    Raises:
        RlhfError: params.yaml is wrong, or the model folder is incomplete.
    """
    params = load_params(workspace)
    source = Path(params.base.source).expanduser()
    if params.base.source == SCRATCH or not (workspace / source).is_dir():
        source = Path("models") / "base"
    folder = workspace / source
    if not folder.is_dir():
        return None
    return token_limits(params, str(source), workspace)


def token_limits(params: Params, source: str, base: Path) -> TokenLimits:
    """Return the tokenizer of ``source`` with the limits of ``params``, and those of the model in its folder.

    Args:
        source: A folder, a GGUF file or a hub id; see :func:`~rlhf_core.stages.counting_tokenizer`.
        base: The folder that relative paths start at.

    Raises:
        ModelError: It has no usable tokenizer, or the model folder is incomplete.
    """
    tokenizer = load_counting_tokenizer(source, base)
    folder = base / Path(source).expanduser()
    bound = None
    if (folder / "config.json").is_file():
        from rlhf_core.models.base import fitting_length

        positions = fitting_length(sys.maxsize, folder)
        bound = None if positions == sys.maxsize else positions
    limits = {
        "preferences": TokenLimit("reward.max_tokens", params.reward.max_tokens, bound),
        "demonstrations": TokenLimit("sft.max_tokens", params.sft.max_tokens, bound),
    }
    return TokenLimits(tokenizer, source, limits)
