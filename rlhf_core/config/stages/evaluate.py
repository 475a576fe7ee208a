"""Evaluation: the policy against SFT on held-out prompts, by every judge there is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rlhf_core.config.evaluation.llm_judge import LlmJudgeConfig
from rlhf_core.config.evaluation.multiple_choice import MultipleChoiceConfig
from rlhf_core.config.evaluation.opponents import OpponentConfig
from rlhf_core.config.evaluation.verifiable import VerifiableConfig
from rlhf_core.config.model import SamplingConfig, StageConfig, Strict
from rlhf_core.config.stages.ppo import PpoConfig


class HeldOutPerplexityConfig(Strict):
    """Perplexity of held-out preferred replies and pretraining text (alignment tax): at most ``rows`` of each, none for
    0, at most ``max_tokens`` tokens of a row, and rows up to ``total_tokens``, which bounds the time.
    """

    rows: NonNegativeInt = 256
    max_tokens: PositiveInt = 1024
    total_tokens: PositiveInt = 32768


class SafetyConfig(Strict):
    """Safety prompts, for data that are not of the synthetic world: at most ``prompts`` harmful ones and as many benign
    ones, none for 0, each asked ``replies_per_prompt`` times. There are 202 of each. ``max_new_tokens`` is short, since
    the first sentences show a refusal.
    """

    prompts: NonNegativeInt = 200
    replies_per_prompt: PositiveInt = 1
    max_new_tokens: PositiveInt = 48


class EvaluateConfig(StageConfig):
    """``tie_margin`` is the difference of judge scores, as a share of the spread of SFT's, up to which a pair is a tie
    (the gold judge has a unit and a margin of its own). ``sampling`` makes the replies that are judged;
    ``max_new_tokens`` limits the unfiltered ones that KL and perplexity are measured on. ``batch_size`` replies are
    sampled and judged together: it bounds memory, and every reply keeps its own random numbers.

    Each of the ``prompts``, and of the regression set, gets ``replies_per_prompt`` replies of each model, which narrows
    every interval where held-out prompts are few; bounds and tests still count different questions.

    With ``best_of_n`` the reward model also picks the best of so many replies of SFT to each prompt, for the judges to
    compare with the policy's and SFT's (0: off). ``llm_judge`` lets a language model compare the replies too,
    ``verifiable`` adds prompts whose replies are checked, ``multiple_choice`` questions that both models answer,
    ``opponents`` replies of third parties that both models are compared with. ``groups`` says which categories or
    sources of prompts are helpful and which harmless, beside those that are known.
    """

    prompts: PositiveInt = 256
    replies_per_prompt: PositiveInt = 1
    best_of_n: NonNegativeInt = 0
    sampling: SamplingConfig = SamplingConfig()
    kl_samples: PositiveInt = 256
    batch_size: PositiveInt = 64
    max_new_tokens: PositiveInt = 64
    tie_margin: float = Field(default=0.05, ge=0)
    bad_cases: PositiveInt = 20
    bootstrap: PositiveInt = 2000
    perplexity: HeldOutPerplexityConfig = HeldOutPerplexityConfig()
    safety: SafetyConfig = SafetyConfig()
    llm_judge: LlmJudgeConfig | None = None
    verifiable: VerifiableConfig | None = None
    multiple_choice: MultipleChoiceConfig | None = None
    opponents: tuple[OpponentConfig, ...] = Field(default=(), strict=False)
    groups: dict[str, Annotated[str, Field(pattern=r"^[\w -]*$")]] = {}

    @model_validator(mode="after")
    def _more_than_one_to_choose_from(self) -> EvaluateConfig:
        if self.best_of_n == 1:
            raise ValueError("best_of_n 1 is SFT itself: use 2 or more, such as 16, or 0 to leave it out")
        return self

    @model_validator(mode="after")
    def _opponents_have_names_of_their_own(self) -> EvaluateConfig:
        names = [opponent.name for opponent in self.opponents]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"two opponents are called {repeated!r}; give each a name of its own")
        return self

    @property
    def untracked_files(self) -> dict[str, tuple[str, ...]]:
        """Paths and globs of files that the evaluation reads and no stage writes, by what is in them."""
        return {
            "verifiable prompts": () if self.verifiable is None else (self.verifiable.path,),
            "multiple-choice questions": () if self.multiple_choice is None else self.multiple_choice.patterns,
            "opponents' replies": tuple(opponent.path for opponent in self.opponents),
        }


class EvaluateStageConfig(EvaluateConfig):
    """The stage's settings with PPO's beside them: of ``ppo`` only the training distribution is read, temperature and
    minimum length, which KL and perplexity are measured under."""

    ppo: PpoConfig = PpoConfig()
