"""What preference pairs are enough for, before anything is trained.

The check before SFT refuses what this finds short, and ``rlhf init``, ``rlhf doctor``, ``rlhf plan``
and ``rlhf data validate`` say it beforehand: ``rlhf_core/stages/pair_supply.py`` reads the pairs for
all of them.

Power is the probability that a condition holds where a gain of a stated size is real. Conditions
whose spread no number of pairs tells beforehand are left to ``rlhf gate --power``, after a first
evaluation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from rlhf_core.config.base import is_pretrained
from rlhf_core.config.data import SplitConfig
from rlhf_core.config.gates import Condition
from rlhf_core.config.params import Params
from rlhf_core.data.pair_counts import READERS, PairLengths, ReaderCounts
from rlhf_core.data.statistics import wilson_bounds
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR
from rlhf_core.gates import describe_bound
from rlhf_core.training.reward.evaluation import FEWEST_BALANCED_PAIRS, expected_calibration_error

# The gains that the power of conditions is stated for.
RIGHT = 0.7  # a reward model that ranks this share of length-balanced pairs as people did
WINS = 0.6  # a policy that wins this share of prompts against SFT
# Share of replies in which SFT and a policy that is no worse differ in whether they end.
DIFFERING = 0.1
LIKELY = 0.8
BALANCED = "_length_balanced"


@dataclass(frozen=True)
class ConditionPower:
    """The probability that a condition holds where the stated gain is real.

    Attributes:
        gate: The gate that asks for it.
        metric: Its metric.
        bound: Its bound, such as ``≥ 0.6``.
        measured_on: How many pairs or prompts it is measured on.
        unit: Pairs or prompts.
        power: The probability.
    """

    gate: str
    metric: str
    bound: str
    measured_on: int
    unit: str
    power: float


@dataclass(frozen=True)
class Forecast:
    """What a number of pairs is enough for.

    Attributes:
        pairs: How many there are, or of how many the rest is said.
        are_all: Whether these are all pairs of the files.
        is_estimate: Whether lengths are estimated, since the starting model's tokenizer is not here.
        is_toy: Whether the starting model is made from nothing.
        longer_preferred: Share of pairs of unequal length whose longer reply is preferred.
        counts: Pairs by reader and split, and how many can be balanced.
        split: The shares that they come from.
        adapted: Whether the test share is larger than the settings', for want of pairs.
        short: What the data gate, a stage or the reward gate would refuse, in the order of a run.
        data_gate: How else the data gate would fail, if it would.
        no_room: Which prompts the stage base would refuse, if it would.
        too_long: By limit, such as ``max_tokens, 256 (reward, judge)``, how many of the pairs are
            over it, or equal as tokens, and left out.
        is_refused: Whether a run would be refused for certain; an estimate may be wrong.
        more_pairs: How many more pairs like these, refused ones among them, may do and how many
            will; None where no number does.
        setting: Another share that would do with the same pairs, such as
            ``validate.split.validation: 0.15``; empty if none does.
        powers: The power of each condition that depends on the number of pairs.
        others: How many further conditions there are.
    """

    pairs: int
    are_all: bool
    is_estimate: bool
    is_toy: bool
    longer_preferred: float | None
    counts: ReaderCounts
    split: SplitConfig
    adapted: bool
    short: Sequence[str]
    data_gate: str
    no_room: str
    too_long: Mapping[str, int]
    is_refused: bool
    more_pairs: tuple[int, int] | None
    setting: str
    powers: Sequence[ConditionPower]
    others: int

    @property
    def refusal(self) -> str:
        """Why the pairs do not suffice and what would do, in one line; empty where they may."""
        return self.conclusion if self.is_refused else ""

    @property
    def exit_code(self) -> int:
        """What a command that says this ends with: pairs that a run refuses are a wrong input."""
        return EXIT_USER_ERROR if self.is_refused else EXIT_OK

    @property
    def weak(self) -> list[str]:
        """The metrics of conditions that a real gain may well fail."""
        return [power.metric for power in self.powers if power.power < LIKELY]

    @property
    def _counted(self) -> str:
        """How many pairs there are, and how many of them are too long."""
        most = max(self.too_long.values(), default=0)
        left_out = f" ({most:,} of them too long)" if most else ""
        return f"{self.pairs:,} pairs{left_out}"

    @property
    def conclusion(self) -> str:
        """What the pairs are enough for, in one line."""
        if self.short:
            verb = "do not suffice" if self.is_refused else "may not suffice"
            reason = self.short[0]
            if len(self.short) > 1:
                reason += f" (and {len(self.short) - 1} more, which `rlhf data validate` names)"
            remedy = "more pairs like these would not do"
            if self.more_pairs is not None:
                few, many = self.more_pairs
                asked = f"{few:,} to {many:,}" if few < many else f"{many:,}"
                remedy = f"about {asked} more pairs would do"
            if self.setting:
                remedy += f", or {self.setting}"
            parts = [f"{self._counted} {verb}: {reason}", remedy]
            parts += [f"and {text}" for text in (self.data_gate, self.no_room) if text]
            return "; ".join(parts)
        if self.data_gate or self.no_room:
            return "; and ".join(filter(None, (self.data_gate, self.no_room)))
        text = f"{self._counted} suffice for every stage"
        if self.weak:
            text += f", but a real gain may well fail {', '.join(self.weak)}"
        return f"{text}; what models learn from them, the gates judge"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self) | {"split": self.split.model_dump(), "conclusion": self.conclusion}


def forecast(
    lengths: PairLengths,
    params: Params,
    data_gate: str = "",
    no_room: str = "",
    *,
    are_all: bool = True,
    kept: float = 1.0,
) -> Forecast:
    """Say what pairs are enough for under the settings of a workspace.

    Args:
        data_gate: How the data gate would fail, if that is known.
        no_room: Which prompts the stage base would refuse, likewise.
        are_all: Whether there are no further pairs.
        kept: The share of the pairs in the files that validation does not refuse.
    """
    split = lengths.adapted(params.validate_.split)
    counts = lengths.counts(split)
    short = list(_shortages(lengths, params))
    is_estimate = lengths.tokens is None
    # What a low estimate finds short, a high one may not.
    surely_short = any(_shortages(replace(lengths, hopeful=True), params)) if short else False
    unequal = np.count_nonzero(lengths.differences)
    too_many_refused = kept < 1 - params.validate_.max_quarantined
    is_refused = surely_short or bool(data_gate or no_room)
    if short and not too_many_refused:
        data_gate = ""  # it lacks rows, as is said already
    longer_preferred = None
    if unequal:
        longer_preferred = float(np.count_nonzero(lengths.differences > 0) / unequal)
    powers = list(_powers(params, counts, lengths.test_prompts(split)))
    conditions = len(params.gates.reward or ()) + len(params.gates.policy)
    return Forecast(
        pairs=len(lengths),
        are_all=are_all,
        is_estimate=is_estimate,
        is_toy=not is_pretrained(params.base.source),
        longer_preferred=longer_preferred,
        counts=counts,
        split=split,
        adapted=split.test != params.validate_.split.test,
        short=short,
        data_gate=data_gate,
        no_room=no_room,
        too_long=_too_long(lengths, params),
        is_refused=is_refused,
        more_pairs=_more_pairs(lengths, params, kept) if short else None,
        setting=_share_that_would_do(lengths, params) if short else "",
        powers=powers,
        others=conditions - len(powers),
    )


def _too_long(lengths: PairLengths, params: Params) -> dict[str, int]:
    """Return by limit how many of all pairs the readers with that limit leave out."""
    readers_of: dict[tuple[str, int], list[str]] = {}
    for reader, longest in lengths.longest.items():
        is_models = longest < getattr(params, reader).max_tokens
        name = "the model's positions" if is_models else "max_tokens"
        readers_of.setdefault((name, longest), []).append(reader)
    counted = {}
    for (name, longest), readers in readers_of.items():
        limit = f"{name}, {longest} ({', '.join(readers)})"
        counted[limit] = int(np.count_nonzero(lengths.dropped[readers[0]]))
    return counted


def _limit(lengths: PairLengths, params: Params, reader: str) -> str:
    """Name what bounds the pairs of a reader: its setting, or the model's positions."""
    setting = getattr(params, reader).max_tokens
    longest = lengths.longest.get(reader, setting)
    if longest < setting:
        return f"the model's {longest} positions"
    return f"{reader}.max_tokens {longest}"


def _shortages(lengths: PairLengths, params: Params) -> Iterator[str]:
    """Yield what the data gate, a stage or the reward gate would refuse, in the order of a run."""
    fewest = params.validate_.min_rows
    if len(lengths) < fewest:
        yield f"validate.min_rows asks for {fewest}"
    elif lengths.prompts < fewest and not params.collect.files.prompts:
        yield f"validate.min_rows asks for {fewest} prompts, and they have {lengths.prompts}"
    counts = lengths.counts(lengths.adapted(params.validate_.split))
    for reader, splits in counts.items():
        config = getattr(params, reader)
        for name, found in splits.items():
            if name == "test" and reader != "reward":
                continue  # the test pairs are common
            if not found.pairs:
                lost = ""
                if found.dropped:
                    lost = (
                        f", for all {found.dropped} exceed {_limit(lengths, params, reader)} or have "
                        "equal replies"
                    )
                yield f"the {reader} model has no {name} pair{lost}"
            fewest = config.batch.min_pairs
            usable = found.balanced + found.equal
            if name == "train" and config.length_balance == "sampling" and usable < fewest:
                yield (
                    f"{reader}.length_balance: sampling leaves {usable} of {found.pairs} training pairs, "
                    f"fewer than the {fewest} of a batch ({reader}.batch.min_pairs)"
                )
    if params.gates.mode != "enforce":
        return
    asked: dict[tuple[str, str], str] = {}
    for condition in params.gates.reward or ():
        reader, name, measure = _measured(condition)
        if measure.startswith((f"accuracy{BALANCED}", f"ece{BALANCED}")):
            asked.setdefault((reader, name), condition.metric)
    for (reader, name), metric in asked.items():
        found = counts[reader][name]
        if found.balanced < FEWEST_BALANCED_PAIRS:
            yield (
                f"the reward gate asks for {metric}, but {found.pairs} {name} pairs leave {found.balanced} when "
                f"lengths are balanced, and {FEWEST_BALANCED_PAIRS} are needed"
            )


def _measured(condition: Condition) -> tuple[str, str, str]:
    """Return reader, split and measure of a metric such as ``judge.test_accuracy``."""
    first, _, rest = condition.metric.partition(".")
    reader, metric = (first, rest) if first in READERS else ("reward", condition.metric)
    if metric.startswith("test_"):
        return reader, "test", metric.removeprefix("test_")
    return reader, "validation", metric


# Pairs that further ones may be like are drawn so many times: how many fall into a split is chance,
# and what few pairs show of the rest is uncertain.
DRAWS_OF_PAIRS = 30
MAYBE, SURELY = 0.1, 0.95  # of the draws
MOST_TIMES = 64  # more pairs than so many times those at hand are not sought
TELLS_APART = 1.6  # two totals further apart than this are said as a range


def _more_pairs(lengths: PairLengths, params: Params, kept: float) -> tuple[int, int] | None:
    """Return how many more pairs may do and how many will, of which a share is kept; rounded up.

    Both are the same where the pairs at hand tell it well enough. None if no number would do.
    """
    if not len(lengths):
        return params.validate_.min_rows, params.validate_.min_rows
    fewest = _least_total(lengths, params, len(lengths), MAYBE)
    enough = _least_total(lengths, params, fewest, SURELY) if fewest else None
    if fewest is None or enough is None:
        return None
    if enough < TELLS_APART * fewest:
        fewest = enough
    few, many = (math.ceil((total - len(lengths)) / kept) for total in (fewest, enough))
    return _rounded_up(few), _rounded_up(many)


def _rounded_up(count: int) -> int:
    step: int = 10 ** max(math.floor(math.log10(count)) - 1, 0)
    if count >= 100:
        step *= 5
    return math.ceil(count / step) * step


def _least_total(lengths: PairLengths, params: Params, few: int, often: float) -> int | None:
    """Return about the fewest pairs in all, more than ``few``, that do in a share of the draws."""
    enough = 2 * few
    while not _would_do(lengths, params, enough, often):
        if enough >= MOST_TIMES * len(lengths):
            return None
        few, enough = enough, 2 * enough
    while enough - few > max(enough // 20, 5):
        between = (few + enough) // 2
        if _would_do(lengths, params, between, often):
            enough = between
        else:
            few = between
    return enough


def _would_do(lengths: PairLengths, params: Params, total: int, often: float) -> bool:
    needed = math.ceil(often * DRAWS_OF_PAIRS)
    held = failed = 0
    while held < needed and failed <= DRAWS_OF_PAIRS - needed:
        generator = np.random.Generator(np.random.Philox(key=[held + failed, total]))
        if any(_shortages(lengths.grown(total, generator), params)):
            failed += 1
        else:
            held += 1
    return held >= needed


def _share_that_would_do(lengths: PairLengths, params: Params) -> str:
    """Return the smallest share, in steps of .05, by which nothing is short; empty if none is."""
    checks = params.validate_
    for name in ("validation", "test"):
        for hundredths in range(5, 50, 5):
            share = hundredths / 100
            if share <= getattr(lengths.adapted(checks.split), name):
                continue
            split = checks.split.model_copy(update={name: share})
            if split.test + split.validation >= 0.6:
                continue
            changed = checks.model_copy(update={"split": split})
            if not any(_shortages(lengths, params.model_copy(update={"validate_": changed}))):
                return f"validate.split.{name}: {share:g}"
    return ""


def _powers(params: Params, counts: ReaderCounts, test_prompts: int) -> Iterator[ConditionPower]:
    """Yield the power of each condition whose measure is a share of pairs or of prompts."""
    for condition in params.gates.reward or ():
        reader, split, measure = _measured(condition)
        is_agreement = condition.metric == "agreement.share"
        found = counts[reader]["test" if is_agreement else split]
        count = found.balanced if BALANCED in measure else found.pairs
        power = _reward_power(condition, "accuracy" if is_agreement else measure, count)
        if power is not None:
            bound = describe_bound(condition)
            yield ConditionPower("reward", condition.metric, bound, count, "pairs", power)
    prompts = min(params.evaluate.prompts, test_prompts)
    for condition in params.gates.policy:
        power = _policy_power(condition, prompts)
        if power is not None:
            bound = describe_bound(condition)
            yield ConditionPower("policy", condition.metric, bound, prompts, "prompts", power)


def _reward_power(condition: Condition, measure: str, count: int) -> float | None:
    plain = measure.replace(BALANCED, "")
    if plain == "ece" and condition.at_most is not None:
        return _power_of_calibration(count, condition.at_most)
    if plain not in ("accuracy", "accuracy_low95") or condition.at_least is None:
        return None
    if BALANCED in measure and count < FEWEST_BALANCED_PAIRS:
        return 0.0
    bound = condition.at_least

    def holds(right: int) -> bool:
        share = right / count
        if plain == "accuracy_low95":
            share, _ = wilson_bounds(share, count)
        return share >= bound

    fewest = bisect_left(range(count + 1), True, key=holds) if count else 1
    return float(stats.binom.sf(fewest - 1, count, RIGHT))


def _policy_power(condition: Condition, prompts: int) -> float | None:
    if not prompts:
        return 0.0
    if condition.metric.endswith("win_rate_low95") and condition.at_least is not None:
        error = math.sqrt(WINS * (1 - WINS) / prompts)
        return float(stats.norm.cdf((WINS - condition.at_least) / error - stats.norm.ppf(0.975)))
    if condition.metric == "missing_ends" and condition.worse_by_less_than is not None:
        error = math.sqrt(DIFFERING / prompts)
        return float(stats.norm.cdf(condition.worse_by_less_than / error - stats.norm.ppf(0.95)))
    return None


DRAWS = 200
MOST_SIMULATED = 1000  # with more pairs the error is smaller still
MARGINS = 1.17  # the spread of normal margins whose mean confidence is RIGHT


@cache
def _power_of_calibration(count: int, bound: float) -> float:
    """Return how often well calibrated margins have an error within the bound, by simulation."""
    if count < FEWEST_BALANCED_PAIRS:
        return 0.0
    count = min(count, MOST_SIMULATED)
    generator = np.random.Generator(np.random.Philox(key=[count, 0]))
    held = 0
    for _ in range(DRAWS):
        size = np.abs(generator.normal(0.0, MARGINS, count))
        is_right = generator.random(count) < 1.0 / (1.0 + np.exp(-size))
        held += expected_calibration_error(np.where(is_right, size, -size)) <= bound
    return held / DRAWS


def as_text(found: Forecast) -> str:
    """Return the forecast as lines: pairs by reader, power of conditions, and what follows."""
    opening = f"forecast for {'' if found.are_all else 'the first '}{found.pairs:,} pairs"
    if found.longer_preferred is not None:
        opening += f"; the longer reply is preferred in {found.longer_preferred:.0%}"
    unit = "in tokens of the starting model"
    if found.is_toy:
        unit = "in tokens of a toy that is made from nothing"
    if found.is_estimate:
        unit = "an estimate: without the starting model's tokenizer, by characters and words"
    lines = [
        opening,
        f"  pairs of each model, and in brackets those left when lengths are balanced ({unit}):",
        f"  {'':<9}{'train':>18}{'validation':>18}{'test, common':>18}",
    ]
    for reader, splits in found.counts.items():
        line = f"  {reader:<9}"
        for name in ("train", "validation", "test"):
            cell = f"{splits[name].pairs:,} ({splits[name].balanced:,})"
            line += f"{cell:>18}"
        lines.append(line)
    if found.adapted:
        lines.append(
            f"  so few pairs need a larger test share: {found.split.test:g} (validate.split.fewest_balanced)"
        )
    for limit, count in found.too_long.items():
        if count:
            lines.append(f"  {count:,} pairs are left out, over {limit} or equal as tokens")
    if found.short or found.data_gate or found.no_room:
        lines += [f"  short: {reason}" for reason in found.short[1:]]
        return "\n".join([*lines, f"  {found.conclusion}"])
    lines.append(
        f"  in how many of 100 cases a condition holds if the reward model is right in {RIGHT:.0%} of pairs and the "
        f"policy wins {WINS:.0%}:"
    )
    conditions = [f"{power.metric} {power.bound}" for power in found.powers]
    width = max(map(len, conditions), default=0)
    for condition, power in zip(conditions, found.powers, strict=True):
        measured_on = f"{power.measured_on:,} {power.unit}"
        lines.append(f"  {condition:<{width}}  {100 * power.power:>3.0f}   on {measured_on}")
    if found.others:
        lines.append(
            f"  {found.others} further conditions: `rlhf gate --power` after a first evaluation"
        )
    return "\n".join([*lines, f"  {found.conclusion}"])


def seed_of(params: Params) -> int:
    """Return the seed that rows are split by: the section's own, else that of the whole file."""
    checks = params.validate_
    return checks.seed if "seed" in checks.model_fields_set else params.seed
