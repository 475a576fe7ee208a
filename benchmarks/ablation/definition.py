"""The ablation study: variants of PPO-max, their metrics, and what is concluded from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params
from rlhf_core.config.model import Strict
from rlhf_core.config.problems import describe, nearest
from rlhf_core.config.profiles import overridden
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """An end value of a run. ``ratio`` metrics are compared as factors, on a log scale, values
    below ``floor`` counting as ``floor``; ``share`` metrics lie in [0, 1]; ``plain`` ones are
    compared by their difference."""

    label: str
    kind: Literal["plain", "share", "ratio"] = "plain"
    floor: float = 0.01


@dataclass(frozen=True)
class Curve:
    """A figure of ``history/ppo.jsonl`` over the iterations."""

    label: str
    log: bool = False


METRICS = {
    "gold": Metric("gold score"),
    "gold_gain": Metric("gold − SFT's"),
    "gold_win_rate": Metric("win rate by gold", "share"),
    "reward_gain": Metric("reward − SFT's, SD"),
    "gold_gain_cut": Metric("gold − SFT's, replies that do not end"),
    "reward_gain_cut": Metric("reward − SFT's, SD, replies that do not end"),
    "referee_gain": Metric("referee's score − SFT's, SD"),
    "referee_win_rate": Metric("win rate by the referee", "share"),
    "judge_gain": Metric("judge's score − SFT's, SD"),
    "judge_win_rate": Metric("win rate by the judge", "share"),
    "judge_lc_win_rate": Metric("win rate by the judge at equal lengths", "share"),
    "kl": Metric("KL, nats per sequence", "ratio", floor=0.05),
    "gold_per_nat": Metric("gold − SFT's, per nat"),
    "length": Metric("tokens per reply", "ratio"),
    "repetition": Metric("repeated trigrams", "share"),
    "missing_eos": Metric("missing end", "share"),
    "distinct_2": Metric("distinct bigrams", "share"),
    "perplexity_reference": Metric("perplexity under SFT", "ratio"),
    "perplexity": Metric("perplexity under itself", "ratio"),
    "perplexity_preferred": Metric("perplexity of preferred replies over SFT's", "ratio"),
    "perplexity_pretrain": Metric("perplexity of plain text over SFT's", "ratio"),
    "sampled_tokens": Metric("sampled tokens", "ratio"),
    "gate_missed": Metric("conditions of the policy gate that fail"),
    "entropy": Metric("entropy, nats per token"),
    "explained_variance_early": Metric("explained variance, first iterations"),
    "reward_jitter_early": Metric("jitter of the reward, first third"),
    "reward_jitter_late": Metric("jitter of the reward, last third"),
}

CURVES = {
    "reward_mean": Curve("reward (raw score)"),
    "reward_tail": Curve("reward: median - 5th percentile"),
    "win_rate": Curve("win rate by the referee"),
    "kl": Curve("KL, nats per sequence", log=True),
    "length": Curve("tokens per reply"),
    "repetition": Curve("repeated trigrams"),
    "missing_eos": Curve("missing end"),
    "distinct_2": Curve("distinct bigrams"),
    "perplexity": Curve("perplexity under itself"),
    "perplexity_reference": Curve("perplexity under SFT", log=True),
    "entropy": Curve("entropy, nats per token"),
    "explained_variance": Curve("explained variance"),
    "value_loss": Curve("value loss", log=True),
    "clip_fraction": Curve("share of clipped ratios"),
    "policy_grad_norm": Curve("gradient norm of the policy", log=True),
}


ABLATION_FILE = "ablation.yaml"
LEVELS = ("gold_gain", "reward_gain", "gold_win_rate", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
          "entropy", "perplexity_reference")  # fmt: skip
DIFFERENCES = ("gold", "reward_gain", "referee_win_rate", "kl", "length", "repetition", "missing_eos",
               "perplexity_reference")  # fmt: skip


class Variant(Strict):
    """A recipe with something changed. ``base`` is a variant that stands above (null: the recipe
    itself); ``drop`` turns switches off, ``add`` on again, ``change`` sets parameters by their
    dotted path."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    about: str
    base: str | None = None
    add: tuple[str, ...] = Field(default=(), strict=False)
    drop: tuple[str, ...] = Field(default=(), strict=False)
    change: dict[str, Any] = {}


class Expectation(Strict):
    """``metric`` of variant ``of`` is higher or lower than that of variant ``than`` (or than a
    number) by more than ``by``, or the same ``within`` a tolerance. For a ratio metric ``by`` and
    ``within`` are factors, else differences.
    """

    metric: str
    of: str
    relation: Literal["higher", "lower", "same"] = Field(alias="is")
    than: str | float
    by: float | None = None
    within: float | None = None

    @model_validator(mode="after")
    def _margin_of_its_relation(self) -> Expectation:
        if (self.relation == "same") != (self.within is not None):
            raise ValueError("'within' goes with 'is: same', and 'is: same' needs it")
        if self.relation == "same" and self.by is not None:
            raise ValueError("'by' goes with 'is: higher' or 'is: lower'")
        return self


class Claim(Strict):
    """One sentence and the expectations that it stands for: it holds when all of them do."""

    says: str
    expects: tuple[Expectation, ...] = Field(strict=False, min_length=1)


class FigurePlan(Strict):
    """One picture: ``curves`` over the iterations and ``ends`` with intervals, of ``variants``; and
    what it claims.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    variants: tuple[str, ...] = Field(strict=False, min_length=1)
    curves: tuple[str, ...] = Field(strict=False)
    ends: tuple[str, ...] = Field(strict=False)
    claims: tuple[Claim, ...] = Field(default=(), strict=False)


class Ablation(Strict):
    """``reference`` is the variant that all are compared with. ``common`` holds for every variant:
    cost and watching, never the method. A switch names the parameters that turn a part of the
    recipe off. ``levels`` and ``differences`` are the columns of the two tables."""

    seeds: tuple[int, ...] = Field(strict=False, min_length=1)
    reference: str
    common: dict[str, Any] = {}
    switches: dict[str, dict[str, Any]] = {}
    variants: tuple[Variant, ...] = Field(strict=False, min_length=1)
    figures: tuple[FigurePlan, ...] = Field(default=(), strict=False)
    levels: tuple[str, ...] = Field(default=LEVELS, strict=False)
    differences: tuple[str, ...] = Field(default=DIFFERENCES, strict=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Variants in the order of the file."""
        return tuple(variant.name for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """The variant of that name; ``ConfigError`` with the nearest name when there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ConfigError(f"no variant '{name}'; {nearest(name, self.names)}")

    def dropped(self, name: str) -> tuple[str, ...]:
        """The switches that are off in a variant, its bases' included."""
        variant = self.variant(name)
        inherited = self.dropped(variant.base) if variant.base else ()
        return tuple(switch for switch in inherited if switch not in variant.add) + variant.drop

    def overrides(self, name: str) -> dict[str, Any]:
        """Parameters by dotted path that make the variant out of the recipe, ``common`` not
        included.
        """
        changes: dict[str, Any] = {}
        for switch in self.dropped(name):
            changes |= self.switches[switch]
        return changes | self._changed(name)

    def _changed(self, name: str) -> dict[str, Any]:
        variant = self.variant(name)
        return (self._changed(variant.base) if variant.base else {}) | variant.change


def load_ablation(path: Path) -> Ablation:
    """The checked definition in ``path``; ``ConfigError`` names what is unknown and the nearest
    valid name.
    """
    try:
        ablation = Ablation.model_validate(yaml_text.plain(yaml_text.read(path)))
    except ValidationError as error:
        raise ConfigError(describe(str(path), error, Ablation, "")) from error
    try:
        _check_variants(ablation)
        _check_figures(ablation)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return ablation


def check_recipes(
    ablation: Ablation, document: Mapping[str, Any], sets: Mapping[str, Any], name: str
) -> None:
    """Every variant over the recipe ``document`` is a valid params.yaml; ``ConfigError`` names
    variant and path.
    """
    common = overridden(document, dict(ablation.common) | dict(sets))
    check_params(common, f"{name}: common")
    for variant in ablation.variants:
        check_params(
            overridden(common, ablation.overrides(variant.name)),
            f"{name}: variant '{variant.name}'",
        )


def _check_variants(ablation: Ablation) -> None:
    above: list[str] = []
    for variant in ablation.variants:
        where = f"variant '{variant.name}'"
        if variant.name in above:
            raise ConfigError(f"{where} is defined twice")
        if variant.base is not None:
            _known(variant.base, above, f"{where}: base", "variant above it")
        inherited = ablation.dropped(variant.base) if variant.base else ()
        for switch in (*variant.add, *variant.drop):
            _known(switch, ablation.switches, f"{where}: switch", "switch")
        if off := [switch for switch in variant.drop if switch in inherited]:
            raise ConfigError(f"{where} drops '{off[0]}', which its base has dropped already")
        if on := [switch for switch in variant.add if switch not in inherited]:
            raise ConfigError(f"{where} adds '{on[0]}', which its base has not dropped")
        above.append(variant.name)
    _known(ablation.reference, above, "reference", "variant")


def _check_figures(ablation: Ablation) -> None:
    for name in (*ablation.levels, *ablation.differences):
        _known(name, METRICS, "levels, differences: metric", "metric")
    seen: set[str] = set()
    for figure in ablation.figures:
        where = f"figure '{figure.name}'"
        if figure.name in seen:
            raise ConfigError(f"{where} is defined twice")
        seen.add(figure.name)
        for name in figure.variants:
            _known(name, ablation.names, f"{where}: variant", "variant")
        for name in figure.curves:
            _known(name, CURVES, f"{where}: curve", "curve")
        for name in figure.ends:
            _known(name, METRICS, f"{where}: metric", "metric")
        for expectation in (e for claim in figure.claims for e in claim.expects):
            _check_expectation(ablation, expectation, where)


def _check_expectation(ablation: Ablation, expectation: Expectation, where: str) -> None:
    _known(expectation.metric, METRICS, f"{where}: metric", "metric")
    for name in (expectation.of, expectation.than):
        if isinstance(name, str):
            _known(name, ablation.names, f"{where}: variant", "variant")
    margins = [m for m in (expectation.by, expectation.within) if m is not None]
    if METRICS[expectation.metric].kind == "ratio" and any(margin <= 0 for margin in margins):
        raise ConfigError(
            f"{where}: '{expectation.metric}' is compared as a ratio; give 'by' or 'within' as a factor"
        )
    if expectation.within is not None and expectation.within <= 0:
        raise ConfigError(f"{where}: 'within' must be above 0 (got {expectation.within})")


def _known(name: str, valid: Iterable[str], where: str, what: str) -> None:
    names = list(valid)
    if name not in names:
        raise ConfigError(f"{where} '{name}' is no {what}; {nearest(name, names)}")
