"""What the answers of the LLM judge used, and whether the budget allows another."""

from __future__ import annotations

import threading

from rlhf_core.config.evaluation import LlmBudgetConfig
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.llm.endpoint import Completion


class UsageMeter:
    """Counts tokens and money; several threads may share it."""

    def __init__(self, budget: LlmBudgetConfig) -> None:
        self.budget = budget
        self.prompt_tokens = self.completion_tokens = 0
        self._lock = threading.Lock()

    @property
    def cost(self) -> float:
        """Money, 0 without prices."""
        return self.budget.cost(self.prompt_tokens, self.completion_tokens)

    def add(self, completion: Completion) -> None:
        """Count an answer.

        Raises:
            DataError: There is a budget, and the endpoint does not say what the answer used.
        """
        if completion.refused:
            return
        if self.budget.is_limited and None in (completion.prompt_tokens, completion.completion_tokens):
            raise DataError("the endpoint does not say how many tokens it used, so evaluate.llm_judge.budget "
                            "cannot be kept; take the budget out")  # fmt: skip
        with self._lock:
            self.prompt_tokens += completion.prompt_tokens or 0
            self.completion_tokens += completion.completion_tokens or 0

    def require_budget(self) -> None:
        """Allow another request.

        Raises:
            DataError: The budget is spent.
        """
        tokens, budget = self.prompt_tokens + self.completion_tokens, self.budget
        if budget.tokens is not None and tokens >= budget.tokens:
            raise DataError(f"the budget of {budget.tokens:,} tokens is spent ({tokens:,} used); raise "
                            "evaluate.llm_judge.budget.tokens to go on")  # fmt: skip
        if budget.money is not None and self.cost >= budget.money:
            raise DataError(f"the budget of {budget.money:g} is spent ({self.cost:.4g} used); raise "
                            "evaluate.llm_judge.budget.money to go on")  # fmt: skip
