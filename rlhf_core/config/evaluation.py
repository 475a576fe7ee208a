"""Evaluation and report: the policy against SFT on held-out prompts, by every judge there is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from rlhf_core.config.model import FunctionName, SamplingConfig, StageConfig, Strict, check_endpoint
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.sampler import LocalSamplerConfig, SamplerConfig
from rlhf_core.plugins import EVALUATIONS, EXTRAS, JUDGES
from rlhf_core.storage.data_files import is_url

LLM = "llm"  # the judge of ``evaluate.llm_judge``
OWN_JUDGES = ("reward", "referee", "judge", "gold", "checker", LLM)
TEMPLATE_FIELDS = ("{conversation}", "{reply_a}", "{reply_b}")


class LlmBudgetConfig(Strict):
    """The most that the answers of one comparison may use; null: no limit.

    Answers of earlier runs are included.

    Attributes:
        tokens: Tokens of questions and answers together.
        money: Cost, in the currency of the prices.
        prompt_price: Per million tokens of questions.
        completion_price: Per million tokens of answers.
    """

    tokens: PositiveInt | None = None
    money: PositiveFloat | None = None
    prompt_price: NonNegativeFloat = 0.0
    completion_price: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _money_needs_prices(self) -> LlmBudgetConfig:
        if self.money is not None and self.prompt_price == self.completion_price == 0:
            raise ValueError(
                "money needs prompt_price or completion_price, per million tokens, to be counted"
            )
        return self

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to keep."""
        return self.tokens is not None or self.money is not None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what so many tokens cost; 0 without prices."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


class LlmJudgeConfig(Strict):
    """A language model behind an OpenAI-compatible endpoint that compares replies.

    Attributes:
        base_url: Address before `/chat/completions`.
        model: Name of the model there.
        token_env: Environment variable with the bearer token, which itself never stands in
            params.yaml.
        template: Text of a question, with `{conversation}`, `{reply_a}` and `{reply_b}`; null: the
            built-in one.
        response_format: Asks the endpoint to enforce JSON, where it can.
        max_tokens: Longest answer.
        max_junk: Largest share of pairs without a usable answer at which the comparison counts.
        concurrency: Requests that wait for their answers at once.
        requests_per_minute: Most requests of a minute.
        timeout_seconds: Bounds connecting, and the whole request after it.
        retries: How often a request is repeated that fails to connect, breaks off, times out, is
            answered with more than 8 MiB or with 408, 425, 429 or 5xx; it waits 0.5 s, 1 s, 2 s …
            (at most 30 s; or as the answer's Retry-After says, up to 60 s).
        budget: The most that the answers may use.
    """

    base_url: str
    model: str = Field(min_length=1)
    token_env: str | None = None
    template: str | None = None
    response_format: Literal["text", "json_object", "json_schema"] = "text"
    max_tokens: PositiveInt = 256
    max_junk: float = Field(default=0.1, ge=0, lt=1)
    concurrency: PositiveInt = 4
    requests_per_minute: PositiveFloat | None = None
    timeout_seconds: PositiveFloat = 60.0
    retries: NonNegativeInt = 5
    budget: LlmBudgetConfig = LlmBudgetConfig()

    @model_validator(mode="after")
    def _consistent(self) -> LlmJudgeConfig:
        check_endpoint(self.base_url, self.token_env, "base_url")
        if self.template is not None:
            missing = [name for name in TEMPLATE_FIELDS if name not in self.template]
            if missing:
                raise ValueError(f"template must contain {', '.join(missing)}")
        return self


class MultipleChoiceConfig(Strict):
    """Multiple-choice questions that both models answer.

    Attributes:
        files: Paths or globs of questions in C-Eval's format, relative to the workspace: columns
            question, A, B, C, D and answer, and maybe id and explanation. The name of a file
            without `_dev`, `_val` or `_test` is its subject.
        score: With `letter` the choices stand below the question, and the likeliest letter is the
            answer; with `text` the question stands alone, and the answer is the choice whose text
            is likeliest per character.
        few_shot: Answered questions before each question.
        few_shot_files: Where those come from: the first of the file of the same subject, or of the
            only file.
    """

    files: tuple[str, ...] = Field(strict=False, min_length=1)
    score: Literal["letter", "text"] = "letter"
    few_shot: NonNegativeInt = 0
    few_shot_files: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("files", "few_shot_files")
    @classmethod
    def _on_this_machine(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        remote = [path for path in paths if is_url(path) or path.startswith("hub:")]
        if remote:
            raise ValueError(
                f"{remote[0]!r} is not on this machine; download the files and name their paths"
            )
        return paths

    @model_validator(mode="after")
    def _examples_have_a_source(self) -> MultipleChoiceConfig:
        if self.few_shot and not self.few_shot_files:
            raise ValueError(
                f"few_shot {self.few_shot} needs few_shot_files, such as [ceval/dev/*.csv]"
            )
        return self

    @property
    def patterns(self) -> tuple[str, ...]:
        """All paths and globs that the evaluation reads."""
        return self.files + (self.few_shot_files if self.few_shot else ())


class OpponentConfig(Strict):
    """Replies of a third party that both models are compared with.

    Attributes:
        name: What metrics and report call the opponent.
        path: File of JSON lines with `prompt` (a text or messages) and `reply`, relative to the
            workspace.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w -]*$", max_length=40)
    path: str = Field(min_length=1)


class VerifiableConfig(Strict):
    """Prompts whose replies are checked by rules.

    Attributes:
        path: File of JSON lines, relative to the workspace: a prompt and what its reply must be in
            each.
        functions: Names for Python functions `f(prompt, reply) -> bool`, each
            `package.module:function`, which a line may require by name. They run with your rights,
            like any code you start; a file alone runs nothing.
        timeout_seconds: Bounds the check of one property of one reply.
    """

    path: str = Field(min_length=1)
    functions: dict[str, FunctionName] = {}
    timeout_seconds: PositiveFloat = 60.0


class HeldOutPerplexityConfig(Strict):
    """Perplexity of held-out preferred replies and pretraining text (alignment tax).

    Attributes:
        rows: At most so many of each; 0: none.
        max_tokens: At most so many tokens of a row.
        total_tokens: Rows up to so many tokens together, which bounds the time.
    """

    rows: NonNegativeInt = 256
    max_tokens: PositiveInt = 1024
    total_tokens: PositiveInt = 32768


class SafetyConfig(Strict):
    """Safety prompts, for data that are not of the synthetic world.

    Attributes:
        prompts: At most so many harmful ones, of 202, and as many benign ones; 0: none.
        replies_per_prompt: Replies to each of them.
        max_new_tokens: Longest reply; the first sentences show a refusal.
    """

    prompts: NonNegativeInt = 200
    replies_per_prompt: PositiveInt = 1
    max_new_tokens: PositiveInt = 48


class EvaluateConfig(StageConfig):
    """The policy against SFT on held-out prompts.

    Attributes:
        prompts: Test prompts.
        replies_per_prompt: Replies of each model to each of them and of the regression set, which
            narrows every interval where held-out prompts are few; bounds and tests still count
            different questions.
        best_of_n: Judges also compare the best of n replies of SFT, chosen by the reward model; 0:
            off.
        sampling: Makes the replies that are judged.
        sampler: Who samples all of these replies, in matches too.
        kl_samples: Unfiltered replies that KL and perplexity are measured on.
        batch_size: Replies sampled and judged together; it bounds memory, and changes replies by
            rounding alone.
        max_new_tokens: Longest of the unfiltered replies.
        tie_margin: Difference of judge scores, as a share of the spread of SFT's, up to which a
            pair is a tie; the gold judge has a unit and a margin of its own.
        bad_cases: At most so many cases are written down in which the reward model prefers the
            policy's reply and the judge, or gold where there is one, SFT's.
        bootstrap: Resamples of an interval.
        perplexity: Perplexity of held-out text.
        safety: Safety prompts.
        llm_judge: Lets a language model compare the replies too.
        verifiable: Adds prompts whose replies are checked by rules.
        multiple_choice: Adds questions that both models answer.
        opponents: Replies of third parties that both models are compared with.
        evaluations: Further evaluations that installed packages give (docs/plugins.md), by name,
            each with its settings.
        judges: Judges that installed packages give, by name, each with its settings. They decide as
            the other judges do.
        groups: Which categories or sources of prompts are helpful and which harmless, beside those
            that are known.
    """

    prompts: PositiveInt = 256
    replies_per_prompt: PositiveInt = 1
    best_of_n: NonNegativeInt = 0
    sampling: SamplingConfig = SamplingConfig()
    sampler: SerializeAsAny[SamplerConfig] = LocalSamplerConfig()
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
    evaluations: dict[str, dict[str, Any]] = {}
    judges: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = {}
    groups: dict[str, Annotated[str, Field(pattern=r"^[\w -]*$")]] = {}

    @model_validator(mode="after")
    def _consistent(self) -> EvaluateConfig:
        if self.best_of_n == 1:
            raise ValueError(
                "best_of_n 1 is SFT itself: use 2 or more, such as 16, or 0 to leave it out"
            )
        if self.sampler.kind != "local" and self.sampling.repetition_penalty != 1.0:
            raise ValueError(
                f"sampler.kind {self.sampler.kind} does not have the repetition penalty of sampling, which leaves out "
                "the prompt's tokens: set sampling.repetition_penalty to 1.0, or sampler.kind to local"
            )
        names = [opponent.name for opponent in self.opponents]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two opponents are called {name!r}; give each a name of its own")
        for name in EXTRAS[EVALUATIONS]:
            if name in self.evaluations:
                raise ValueError(f"evaluations.{name} has a place of its own: evaluate.{name}")
        taken = next((name for name in self.judges if name in OWN_JUDGES), None)
        if taken is not None:
            raise ValueError(f"judges.{taken} is the name of a judge of the pipeline; rename yours")
        return self

    @property
    def named_evaluations(self) -> dict[str, Any]:
        """Settings of all evaluations that come by entry points, those of the extras first."""
        named: dict[str, Any] = {}
        if self.opponents:
            named["opponents"] = self.opponents
        if self.multiple_choice is not None:
            named["multiple_choice"] = self.multiple_choice
        return named | self.evaluations

    @property
    def named_judges(self) -> dict[str, Any]:
        """Settings of all judges that come by entry points, that of the extras last."""
        if self.llm_judge is None:
            return {**self.judges}
        return self.judges | {LLM: self.llm_judge}

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """Group and name of each plugin that the evaluation uses."""
        evaluations = [(EVALUATIONS, name) for name in self.named_evaluations]
        judges = [(JUDGES, name) for name in self.named_judges]
        return [*self.sampler.plugins, *evaluations, *judges]

    @property
    def untracked_files(self) -> dict[str, tuple[str, ...]]:
        """The paths and globs of files that no stage writes, by what is in them."""
        files: dict[str, tuple[str, ...]] = {}
        if self.verifiable is not None:
            files["verifiable prompts"] = (self.verifiable.path,)
        if self.multiple_choice is not None:
            files["multiple-choice questions"] = self.multiple_choice.patterns
        if self.opponents:
            files["opponents' replies"] = tuple(opponent.path for opponent in self.opponents)
        return files


class EvaluateStageConfig(EvaluateConfig):
    """The stage's settings with PPO's beside them.

    Of ``ppo`` only temperature and minimum length are read: KL and perplexity are measured on the
    training distribution.
    """

    ppo: PpoConfig = PpoConfig()


class ReportConfig(StageConfig):
    """The report.

    Attributes:
        title: Its title.
        replies: Replies that it shows side by side.
    """

    title: str = "RLHF pipeline report"
    replies: PositiveInt = 16
