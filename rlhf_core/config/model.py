"""What the sections of params.yaml share: strict models, optimisers, checkpoints, adapters."""

from __future__ import annotations

import re
from abc import abstractmethod
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticKnownError

from rlhf_core.plugins import PluginError, known_plugins, lacks, load_plugin, plugins_of
from rlhf_core.storage.data_files import carries_credentials


class Strict(BaseModel):
    """Settings that are frozen and strict: no unknown key, no ``"3"`` for ``3``, no infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class OfKind(Strict):
    """Settings that their ``kind`` tells apart: the pipeline's own, and those of installed packages.

    A field of a class that leaves ``kind`` open takes each of them. A package enters a subclass
    under the name of its kind in ``group``, in a module that is imported when settings name it. It
    defines the method that ``makes`` names; of the pipeline's own kinds that is never asked.
    """

    group: ClassVar[str]
    makes: ClassVar[str]
    kind: str

    @classmethod
    @abstractmethod
    def own_kinds(cls) -> tuple[type[OfKind], ...]:
        """Return the pipeline's own classes."""

    @classmethod
    def kinds(cls) -> list[type[OfKind]]:
        """Return the pipeline's own classes, and those of packages that can be imported."""
        kinds = [*cls.own_kinds()]
        for name in plugins_of(cls.group):
            try:
                kinds.append(cls._plugged(name))
            except PluginError:  # said where settings name it
                continue
        return kinds

    @classmethod
    def is_open(cls) -> bool:
        """Whether ``kind`` is left open, so that another class checks the other settings."""
        return cls.model_fields["kind"].annotation is str

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """Group and name of the entry point that these settings are of; none of the own kinds."""
        return [] if type(self) in self.own_kinds() else [(self.group, self.kind)]

    @classmethod
    def _plugged(cls, name: str) -> type[OfKind]:
        plugged = load_plugin(cls.group, name)
        if not (isinstance(plugged, type) and issubclass(plugged, cls)):
            raise PluginError(f"{name} of {cls.group} is no {cls.__name__}")
        if get_args(plugged.model_fields["kind"].annotation) != (name,):
            raise PluginError(f"{name} of {cls.group} must declare kind: Literal[{name!r}]")
        made = getattr(plugged, cls.makes)
        if made is getattr(cls, cls.makes) or not callable(made):
            raise lacks(cls.group, name, cls.makes)
        return plugged

    @model_validator(mode="wrap")
    @classmethod
    def _by_its_kind(cls, given: Any, handler: Any) -> Any:
        if not cls.is_open() or not isinstance(given, dict):
            is_checked = isinstance(given, cls) and not type(given).is_open()
            return given if is_checked else handler(given)
        if "kind" not in given:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        kind, choices = given["kind"], cls.own_kinds()
        own_names = [kind_of(choice) for choice in choices]
        known = [*own_names, *known_plugins(cls.group)]
        if kind not in known:
            names = ", ".join(map(repr, known))
            context = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": names}
            raise PydanticKnownError("union_tag_invalid", context)
        if kind not in own_names:
            try:
                choices = (*choices, cls._plugged(kind))
            except PluginError as error:
                raise ValueError(str(error)) from error
        return _one_of(choices).validate_python(given)


def kind_of(model: type[BaseModel]) -> str:
    """Return what ``kind`` says in every value of ``model``; empty where it is left open."""
    field = model.model_fields.get("kind")
    kinds = get_args(field.annotation) if field is not None else ()
    return str(kinds[0]) if kinds else ""


@cache
def _one_of(choices: tuple[type[OfKind], ...]) -> TypeAdapter[Any]:
    """Return what checks settings of one of the kinds, and names the kind where they are wrong."""
    if len(choices) == 1:
        return TypeAdapter(choices[0])
    any_of_them: Any = Annotated[Union[choices], Field(discriminator="kind")]  # noqa: UP007
    return TypeAdapter(any_of_them)


class StageConfig(Strict):
    """Settings of one stage.

    Attributes:
        seed: Of this stage's random streams; that at the top of params.yaml where it is left out.
    """

    seed: int = Field(default=1, ge=0, lt=2**63)


class EpochLimit(Strict):
    """Settings of a training on fixed rows, which takes fewer steps where there are few of them.

    Attributes:
        steps: Optimiser steps.
        max_epochs: At most so many passes over the rows: of few, fewer steps are taken; null: no
            limit.
    """

    steps: NonNegativeInt
    max_epochs: PositiveInt | None = None

    def within_epochs(self, batches: int) -> Self:
        """Return the settings with the steps that are taken where an epoch has so many batches."""
        if self.max_epochs is None:
            return self
        return self.model_copy(update={"steps": min(self.steps, self.max_epochs * batches)})


class OptimizerConfig(Strict):
    """AdamW and its learning-rate schedule.

    Attributes:
        lr: Peak learning rate; null: one that suits the model, whether new or pretrained, or
            adapters.
        betas: AdamW's decay rates of both moments.
        eps: AdamW's epsilon.
        weight_decay: AdamW's; norms and biases never decay.
        schedule: After warm-up: `constant`, `cosine` down to `final_ratio`, or MOSS-RLHF's
            `inverse_sqrt`.
        warmup: Linear warm-up as a share of all steps.
        final_ratio: Where the cosine ends, as a share of the peak. Paper: 10 % in SFT (5.1).
        max_grad_norm: Clips the global gradient norm; null: off. Paper: part of PPO-max (5.4), of
            minor importance (C.2). Shows in: policy_grad_norm, critic_grad_norm.
    """

    lr: PositiveFloat | None = None
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, le=1)
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: PositiveFloat | None = 1.0

    @property
    def peak(self) -> float:
        """The peak learning rate, once it is chosen where the settings leave it open."""
        assert self.lr is not None
        return self.lr


class CheckpointConfig(Strict):
    """How often the partial state of a training run is saved, and how many saves are kept.

    Attributes:
        every: Steps, rollouts or iterations between checkpoints.
        keep: Checkpoints kept; a rollback goes to one of them.
    """

    every: PositiveInt
    keep: PositiveInt = 2


class SamplingConfig(Strict):
    """Sampling at evaluation (paper, section 6.1): never used for rollouts.

    Attributes:
        temperature: Divides the logits.
        top_p: Share of probability that is sampled from.
        repetition_penalty: Makes tokens that the reply has already less likely.
        max_new_tokens: Longest reply.
    """

    temperature: PositiveFloat = 0.8
    top_p: float = Field(default=0.9, gt=0, le=1)
    repetition_penalty: PositiveFloat = 1.1
    max_new_tokens: PositiveInt = 64


def changed_field(model: Strict, *names: str) -> str:
    """Return the first of the fields ``names`` that is not at its default, or an empty string.

    Values are compared, not what the file spells out, so that a profile may repeat a default.
    """
    for name in names:
        if getattr(model, name) != type(model).model_fields[name].default:
            return name
    return ""


class LoraConfig(Strict):
    """LoRA (Hu et al. 2021): an adapted matrix W computes ``W x + alpha / rank * B A x``.

    Only A and B are trained. There is no drop-out: it would make PPO's trainer disagree with its
    sampler.

    Attributes:
        rank: Rank of A and B.
        alpha: Scale of the adapters, divided by `rank`.
        targets: Last names of adapted linear layers, such as `q_proj`, or of experts' matrices,
            such as `gate_up_proj`; none: all below the head. What stays frozen is said at the
            start.
        upper_layers: Adapts only so many layers next to the head: no gradient passes the ones
            below, so that a step costs about half with a third of the layers.
        quantize: `nf4` holds the frozen linear layers, but not experts, in 4 bits (QLoRA, Dettmers
            et al. 2023). They stay rounded: the model that is saved has the weights it was trained
            and judged with, in its own precision again.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = Field(default=(), strict=False)
    upper_layers: PositiveInt | None = None
    quantize: Literal["nf4"] | None = None

    def stacked_with(self, other: LoraConfig) -> LoraConfig:
        """Return the adapters that compute the sum of both, each with its scale in its ``B``."""
        rank = self.rank + other.rank
        targets: tuple[str, ...] = ()
        if self.targets and other.targets:
            targets = tuple(sorted({*self.targets, *other.targets}))
        upper_layers = None
        if self.upper_layers is not None and other.upper_layers is not None:
            upper_layers = max(self.upper_layers, other.upper_layers)
        return LoraConfig(
            rank=rank,
            alpha=rank,
            targets=targets,
            upper_layers=upper_layers,
            quantize=self.quantize,
        )


def _module_and_function(target: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        raise ValueError(f"a function is written package.module:function, not {target!r}")
    return target


FunctionName = Annotated[str, AfterValidator(_module_and_function)]

SECRET_PARAMETER = re.compile(
    r"(^|&)[^=&]*(key|token|secret|passw|signature|auth)[^=&]*=", re.IGNORECASE
)


def check_endpoint(url: str, token_env: str | None, name: str = "url") -> None:
    """Check an address, and the name of the variable that holds its bearer token.

    Called on the whole model, so that what may be a secret is not repeated in pydantic's error.

    Args:
        name: What messages call the address.

    Raises:
        ValueError: The address is not absolute or carries credentials, or the name cannot name a
            variable.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{name} must be an absolute http:// or https:// address")
    has_user = parts.username is not None
    if has_user or carries_credentials(url) or SECRET_PARAMETER.search(parts.query):
        raise ValueError(
            f"{name} carries credentials; put them in an environment variable and name it in token_env"
        )
    if token_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", token_env):
        raise ValueError("token_env is the name of an environment variable, never the token itself")
