"""The tokenizer of a workspace and the longest sequences that its training keeps, where they are on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_core.config.loading.load import load_params
from rlhf_core.data.inspect import TokenLimit, TokenLimits

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
    # Imported here: these load torch and transformers, which takes seconds and is for nothing without a model.
    from rlhf_core.models.base import fitting_length, load_tokenizer
    from rlhf_core.stages.base import prepare_tokenizer

    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = sys.maxsize  # rows are measured here, not run; the library would warn of longer ones
    prepare_tokenizer(tokenizer, str(source))
    positions = fitting_length(sys.maxsize, folder)
    bound = None if positions == sys.maxsize else positions
    limits = {
        "preferences": TokenLimit("reward.max_tokens", params.reward.max_tokens, bound),
        "demonstrations": TokenLimit("sft.max_tokens", params.sft.max_tokens, bound),
    }
    return TokenLimits(tokenizer, str(source), limits)
