"""The tokenizer of a workspace and the longest sequences that its training keeps, where they are on this machine."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.loading import Params, load_params
from rlhf_core.data.inspection.describe import TokenLimit, TokenLimits
from rlhf_core.errors import ModelError, first_line
from rlhf_core.stages.token_lengths.counting_tokenizer import load_counting_tokenizer

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
        source: A folder, a GGUF file or a hub id; see :func:`~rlhf_core.stages.token_lengths.counting_tokenizer`.
        base: The folder that relative paths start at.

    Raises:
        ModelError: It has no usable tokenizer, or its config.json is damaged.
    """
    tokenizer = load_counting_tokenizer(source, base)
    bound = model_positions(base / Path(source).expanduser())
    limits = {
        "preferences": TokenLimit("reward.max_tokens", params.reward.max_tokens, bound),
        "demonstrations": TokenLimit("sft.max_tokens", params.sft.max_tokens, bound),
    }
    return TokenLimits(tokenizer, source, limits)


def model_positions(path: Path) -> int | None:
    """Return how many positions the model of a folder or GGUF file has; None where that is not said there.

    The weights are not needed: a folder may hold a tokenizer alone.
    """
    from transformers import AutoConfig

    from rlhf_core.models.io import quiet
    from rlhf_core.models.starting.gguf import gguf_config, is_gguf

    if path.is_file() and is_gguf(path):
        config = gguf_config(path)
    elif (path / "config.json").is_file():
        try:
            with quiet():
                config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # whatever a library comes upon in a file that is damaged or of another kind
            raise ModelError(
                f"{path}/config.json is not readable: {first_line(error)}; give a complete folder"
            ) from error
    else:
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return None if positions is None else int(positions)
