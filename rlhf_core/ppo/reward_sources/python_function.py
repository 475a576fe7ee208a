"""A rule-based reward: a Python function of the user's."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards

Function = Callable[[list[list[dict[str, str]]], list[str]], Any]


class PythonFunction:
    """Calls ``function(prompts, replies)`` once per rollout, on each rank with its share of the replies.

    Same replies must give same scores for an exact resume.
    """

    def __init__(self, function: Function, who: str) -> None:
        self.function, self.who = function, who
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """(B,).

        Raises:
            DataError: The function raised, or did not return one finite number per reply.
        """
        prompts = [[{"role": m.role, "content": m.content} for m in prompt] for prompt in replies.prompts]
        texts = list(replies.texts)
        try:
            scores = self.function(prompts, texts)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{Path(last.filename).name}, line {last.lineno}"
            raise DataError(f"{self.who} raised {type(error).__name__}: {error} ({line})") from error
        return checked_rewards(scores, replies, self.who)


def load_function(target: str, workspace: Path, who: str) -> Function:
    """Import the function of ``package.module:function``.

    The workspace's folder is searched last, so that a file in it never takes the place of an installed module.

    Raises:
        ConfigError: It cannot be imported, or is no function.
    """
    module, _, name = target.partition(":")
    if str(workspace) not in sys.path:
        sys.path.append(str(workspace))
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise ConfigError(
            f"{who}: cannot import {module} ({type(error).__name__}: {error}); it must be installed, on PYTHONPATH or "
            f"in {workspace}"
        ) from error
    if not callable(function):
        what = "nothing" if function is None else f"a {type(function).__name__}"
        raise ConfigError(f"{who}: {name} is {what} in {module}; a function f(prompts, replies) is needed")
    return function
