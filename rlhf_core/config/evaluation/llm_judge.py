"""The LLM judge: a language model behind an OpenAI-compatible endpoint that compares two replies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config.evaluation.endpoint import check_endpoint
from rlhf_core.config.model import Strict

TEMPLATE_FIELDS = ("{conversation}", "{reply_a}", "{reply_b}")


class LlmBudgetConfig(Strict):
    """The most that the answers of one comparison may use, those of earlier runs included; null: no limit.

    ``prompt_price`` and ``completion_price`` are per million tokens, in the currency of ``money``.
    """

    tokens: PositiveInt | None = None
    money: PositiveFloat | None = Field(default=None, allow_inf_nan=False)
    prompt_price: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    completion_price: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _money_needs_prices(self) -> LlmBudgetConfig:
        if self.money is not None and self.prompt_price == self.completion_price == 0:
            raise ValueError("money needs prompt_price or completion_price, per million tokens, to be counted")
        return self

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to keep."""
        return self.tokens is not None or self.money is not None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what so many tokens cost; 0 without prices."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


class LlmJudgeConfig(Strict):
    """``base_url`` ends before ``/chat/completions``; ``token_env`` names the environment variable whose value is sent
    as bearer token. The value itself never stands in params.yaml.

    ``template`` is the text of a question, with ``{conversation}``, ``{reply_a}`` and ``{reply_b}``; null: the built-in
    one. ``response_format`` asks the endpoint to enforce JSON, where it can. ``max_tokens`` limits an answer.
    ``max_junk`` is the largest share of the pairs of different replies without a usable answer at which the comparison
    counts.

    ``concurrency`` requests wait for their answers at once. ``timeout_seconds`` bounds connecting, each wait for data,
    and the time from an answer's first byte to its last. A request that fails to connect, breaks off, times out, is
    answered with more than 8 MiB or with 408, 425, 429 or 5xx is repeated up to ``retries`` times, waiting 0.5 s, 1 s,
    2 s … (at most 30 s; or as the answer's Retry-After says, up to 60 s).
    """

    base_url: str
    model: str = Field(min_length=1)
    token_env: str | None = None
    template: str | None = None
    response_format: Literal["text", "json_object", "json_schema"] = "text"
    max_tokens: PositiveInt = 256
    max_junk: float = Field(default=0.1, ge=0, lt=1)
    concurrency: PositiveInt = 4
    requests_per_minute: PositiveFloat | None = Field(default=None, allow_inf_nan=False)
    timeout_seconds: PositiveFloat = Field(default=60.0, allow_inf_nan=False)
    retries: NonNegativeInt = 5
    budget: LlmBudgetConfig = LlmBudgetConfig()

    @model_validator(mode="after")
    def _no_secrets(self) -> LlmJudgeConfig:
        check_endpoint(self.base_url, self.token_env, "base_url")
        return self

    @model_validator(mode="after")
    def _template_shows_both_replies(self) -> LlmJudgeConfig:
        missing = [name for name in TEMPLATE_FIELDS if self.template is not None and name not in self.template]
        if missing:
            raise ValueError(f"template must contain {', '.join(missing)}")
        return self
