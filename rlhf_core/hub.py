"""The Hugging Face hub that models and data sets are named on: whether it answers at all."""

from __future__ import annotations

import httpx
from huggingface_hub import constants, is_offline_mode

from rlhf_core.errors import RlhfError

# Seconds. The library waits ten for each file and tries six times, which adds up to minutes.
TIMEOUT = 10.0


def require_hub(wanted: str, error_class: type[RlhfError]) -> None:
    """Ask the hub for any answer before ``wanted`` is loaded from it. Nothing is asked with
    ``HF_HUB_OFFLINE=1``.

    Raises:
        RlhfError: It does not answer within ``TIMEOUT`` seconds; of class ``error_class``.
    """
    if is_offline_mode():
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise error_class(
            f"{wanted} cannot be loaded: the hub {constants.ENDPOINT} does not answer ({reason}); check the network "
            "and HF_ENDPOINT (and the name, if it should be a path here), or set HF_HUB_OFFLINE=1 to use a copy in the "
            "cache"
        ) from error
