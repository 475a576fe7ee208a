"""A rule-based reward: a Python function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlhf_core.errors import DataError
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards
from rlhf_core.runtime.user_function import describe_failure

SIGNATURE = "f(prompts, replies)"
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
            raise DataError(f"{self.who} {describe_failure(error)}") from error
        return checked_rewards(scores, replies, self.who)
