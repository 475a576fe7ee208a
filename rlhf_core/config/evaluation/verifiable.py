"""Prompts with required properties of the reply, which are checked instead of judged."""

from __future__ import annotations

import re

from pydantic import Field, PositiveFloat, model_validator

from rlhf_core.config.model import Strict

FUNCTION = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


class VerifiableConfig(Strict):
    """``path`` is a file of JSON lines, relative to the workspace: a prompt and what its reply must be in each.

    ``functions`` gives names to Python functions ``f(prompt, reply) -> bool``, each ``package.module:function``, which
    a line may require by name. They run with your rights, like any code you start; a file alone runs nothing.

    ``timeout_seconds`` bounds the check of one property of one reply.
    """

    path: str = Field(min_length=1)
    functions: dict[str, str] = {}
    timeout_seconds: PositiveFloat = Field(default=60.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _written_as_module_and_function(self) -> VerifiableConfig:
        wrong = [target for target in self.functions.values() if not re.fullmatch(FUNCTION, target)]
        if wrong:
            raise ValueError(f"a function is written package.module:function, not {wrong[0]!r}")
        return self
