"""Where PPO's raw scores come from (``ppo.reward.sources``): models, services and functions.

Critic pre-training scores with the same list, since values live in its units. The default is the
reward model that the pipeline trained. docs/train.md, "Use other reward sources", shows each kind
at work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from rlhf_core.config.model import FunctionName, OfKind
from rlhf_core.errors import ConfigError
from rlhf_core.plugins import REWARD_SOURCES

OWN_MODEL = "models/reward"
TEMPLATES = ("chat", "pair", "reply")


class SourceConfig(OfKind):
    """What the sources of rewards have in common; a package enters a subclass of it.

    Its group is ``rlhf.reward_sources``.

    Attributes:
        weight: Times the source's score enters the sum; it may be negative, for a penalty.
        name: What metrics and errors call the source: by default its kind, numbered where several
            have the same.
    """

    group = REWARD_SOURCES
    makes = "make_scorer"
    weight: float = 1.0
    name: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$")

    @classmethod
    def own_kinds(cls) -> tuple[type[OfKind], ...]:
        return (ModelSource, EnsembleSource, ClassifierSource, FunctionSource)

    def make_scorer(self, workspace: Path) -> Callable[[Any], Sequence[float | None]]:
        """Return what scores replies, which a package defines.

        It takes ``rlhf_core.ppo.reward_sources.source.Replies``, of which it reads ``prompts``,
        ``texts``, ``finished`` and ``columns``, and returns a number for each; None for one that
        cannot be scored, which no reply may be where an attribute ``may_decline`` is false. Each
        rank asks for its share of the replies. An attribute ``metrics``, if there is one, has
        further numbers about the newest batch.

        Args:
            workspace: The folder that relative paths start at.
        """
        raise NotImplementedError

    @model_validator(mode="after")
    def _counts(self) -> SourceConfig:
        if self.weight == 0:
            raise ValueError(
                "weight 0 scores every reply for nothing; give a weight, or take the source out"
            )
        return self


class ModelSource(SourceConfig):
    """A reward model with the policy's tokenizer, read at the last response token.

    Nothing is tokenised again. Of the pipeline's own models only ``models/reward`` may score: the
    referee selects the policy and the judge judges it, which must not be trained on either.

    Attributes:
        path: Folder, relative to the workspace.
    """

    kind: Literal["model"] = "model"
    path: str = Field(default=OWN_MODEL, min_length=1)


class EnsembleSource(SourceConfig):
    """``mean - k * std`` over reward models with the policy's tokenizer: doubt lowers the score.

    The standard deviation is that of the population.

    Attributes:
        paths: Their folders, relative to the workspace.
        k: How much doubt lowers the score.
        center: Takes each member relative to its own mean on up to 256 demonstrations, since a
            score trained on pairs has no origin; `false` compares raw scores, for members that
            share an origin (`reward.centering`).
    """

    kind: Literal["ensemble"] = "ensemble"
    paths: tuple[str, ...] = Field(strict=False)
    k: NonNegativeFloat = 1.0
    center: bool = True

    @model_validator(mode="after")
    def _several(self) -> EnsembleSource:
        if len(set(self.paths)) < 2 or len(set(self.paths)) < len(self.paths):
            raise ValueError(
                "an ensemble needs two or more different paths; for one model use kind model"
            )
        return self


class ClassifierSource(SourceConfig):
    """Any Hugging Face sequence classifier, which reads the text with its own tokenizer.

    Attributes:
        model: Folder (relative to the workspace) or hub id.
        revision: Commit, tag or branch of a hub id.
        template: Makes its text: `chat` its own chat template over prompt and reply, `pair` prompt
            and reply as two segments, `reply` the reply alone, or any text with `{reply}` and, if
            wanted, `{prompt}`.
        label: Index or name of the label that counts; needed where there are several.
        output: Its logit, or its probability.
        batch_size: Texts of one pass.
        max_tokens: Longest text; null: the model's limit. Longer ones lose their beginning, never
            the end of the reply; the share of them is logged.
    """

    kind: Literal["classifier"] = "classifier"
    model: str = Field(min_length=1)
    revision: str | None = None
    template: str = "chat"
    label: int | str | None = None
    output: Literal["logit", "probability"] = "logit"
    batch_size: PositiveInt = 16
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _template_shows_the_reply(self) -> ClassifierSource:
        if self.template not in TEMPLATES and "{reply}" not in self.template:
            raise ValueError(
                f"template must be one of {', '.join(TEMPLATES)}, or a text that contains {{reply}}"
            )
        return self


class FunctionSource(SourceConfig):
    """A python function ``f(prompts, replies) -> list[float | None]``, plain or ``async``.

    A prompt is a list of ``{"role", "content"}``, a reply its text; None says that a reply cannot
    be scored. It runs with your rights, like any code you start.

    Attributes:
        target: `package.module:function`, importable from the environment or from the workspace's
            folder.
        call: `batch`: called once per rollout (by each rank with its share); `single`: `f(prompt,
            reply)` for each.
        timeout_seconds: Bounds a call; null: no bound. A single reply that takes longer cannot be
            scored, a batch that does ends the run.
    """

    kind: Literal["function"] = "function"
    target: FunctionName
    call: Literal["batch", "single"] = "batch"
    timeout_seconds: PositiveFloat | None = None


RewardSource = SerializeAsAny[SourceConfig]


def refuse_own_model(folder: Path, who: str, workspace: Path) -> None:
    """Refuse the pipeline's other models, above all referee and judge, as rewards.

    Raises:
        ConfigError: ``folder`` is one of them.
    """
    if folder.resolve().is_relative_to((workspace / OWN_MODEL).parent.resolve()):
        raise ConfigError(
            f"{who}: {folder} is one of the pipeline's own models, of which only {OWN_MODEL} may score: the policy "
            "must not be trained on what selects and judges it; keep other reward models in a folder of their own"
        )


def source_names(sources: tuple[RewardSource, ...]) -> tuple[str, ...]:
    """Return the name of each source: its own, or its kind, numbered from the second on."""
    seen: Counter[str] = Counter()
    names = []
    for source in sources:
        seen[source.kind] += source.name is None
        number = f"_{seen[source.kind]}" if seen[source.kind] > 1 else ""
        names.append(source.name or f"{source.kind}{number}")
    return tuple(names)


def _consistent(sources: tuple[RewardSource, ...]) -> tuple[RewardSource, ...]:
    if not sources:
        raise ValueError("nothing would score the replies; name at least one source")
    total = math.fsum(source.weight for source in sources)
    if total <= 0:
        raise ValueError(
            f"the weights sum to {total:g}: penalties must not outweigh what is rewarded; raise the others"
        )
    names = source_names(sources)
    if len(set(names)) < len(names):
        raise ValueError(f"two sources have the same name ({', '.join(names)}); give each its own")
    return sources


RewardSources = Annotated[
    tuple[RewardSource, ...], Field(strict=False), AfterValidator(_consistent)
]
DEFAULT_SOURCES: tuple[RewardSource, ...] = (ModelSource(),)
