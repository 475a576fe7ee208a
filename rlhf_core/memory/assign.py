"""Settings changed by path, checked as if they had been written in params.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config.loading.load import Params, check_params


def assigned(params: Params, changes: Mapping[str, Any]) -> Params:
    """``params`` with each ``section.key`` of ``changes``; ``ConfigError`` when the result contradicts itself."""
    document = params.model_dump(mode="json", by_alias=True)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = document
        for part in parents:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    return check_params(document, "parameters")
