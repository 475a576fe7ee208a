"""What preference pairs are enough for, before anything is trained.

``rlhf init``, ``rlhf doctor``, ``rlhf plan`` and ``rlhf data validate`` say it of files or clean
data, with lengths in characters; the check before SFT says it of the tokens that reward models are
trained on.

Power is the probability that a condition holds where a gain of a stated size is real. Conditions
whose spread no number of pairs tells beforehand are left to ``rlhf gate --power``, after a first
evaluation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlhf_core.config.data import CollectConfig, SplitConfig
from rlhf_core.config.gates import Condition
from rlhf_core.config.params import Params
from rlhf_core.data.clusters import wilson_bounds
from rlhf_core.data.collection.sources import (
    SourceFile,
    annotation_sources,
    source_chunks,
    source_files,
)
from rlhf_core.data.pair_counts import READERS, PairLengths, ReaderCounts, SplitPairs, pair_lengths
from rlhf_core.data.schema import Preference, read_kind
from rlhf_core.errors import DataError
from rlhf_core.gates import describe_bound
from rlhf_core.storage.files import read_json, sha256_file
from rlhf_core.training.reward.evaluation import FEWEST_BALANCED_PAIRS, expected_calibration_error

# The gains that the power of conditions is stated for.
RIGHT = 0.7  # a reward model that ranks this share of length-balanced pairs as people did
WINS = 0.6  # a policy that wins this share of prompts against SFT
# Share of replies in which SFT and a policy that is no worse differ in whether they end.
DIFFERING = 0.1
# Of files at most so many pairs are read: with more nothing is short.
MOST_PAIRS = 100_000
TOKENS, CHARACTERS = "tokens", "characters"
# Balanced by characters and by tokens, not quite the same pairs are left.
ROOM = 1.1
LIKELY = 0.8
BALANCED = "_length_balanced"


@dataclass(frozen=True)
class Shortfall:
    """A split with too few pairs for a stage or a condition, and what would do.

    Attributes:
        reason: What asks for how many, and how many there are.
        pairs_that_would_do: About how many pairs there should be in all.
        setting: Another share that would do with the same pairs, such as
            ``validate.split.validation: 0.15``.
    """

    reason: str
    pairs_that_would_do: int
    setting: str = ""


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
        unit: What their lengths are in: characters or tokens.
        longer_preferred: Share of pairs of unequal length whose longer reply is preferred.
        counts: Pairs by reader and split, and how many can be balanced.
        split: The shares that they come from.
        adapted: Whether the test share is larger than the settings', for want of pairs.
        shortfalls: What a stage or the reward gate would refuse.
        powers: The power of each condition that depends on the number of pairs.
        others: How many further conditions there are.
    """

    pairs: int
    are_all: bool
    unit: str
    longer_preferred: float | None
    counts: ReaderCounts
    split: SplitConfig
    adapted: bool
    shortfalls: Sequence[Shortfall]
    powers: Sequence[ConditionPower]
    others: int

    @property
    def refusal(self) -> str:
        """Why the pairs do not suffice and what would do, in one line; empty where they do."""
        if not self.shortfalls:
            return ""
        worst = max(self.shortfalls, key=lambda shortfall: shortfall.pairs_that_would_do)
        remedy = f"about {_more(worst.pairs_that_would_do, self.pairs):,} more pairs would do"
        settings = {shortfall.setting for shortfall in self.shortfalls}
        if worst.setting and len(settings) == 1:
            remedy += f", or {worst.setting}"
        return f"{self.pairs:,} pairs do not suffice: {worst.reason}; {remedy}"

    @property
    def weak(self) -> list[str]:
        """The metrics of conditions that a real gain may well fail."""
        return [power.metric for power in self.powers if power.power < LIKELY]

    @property
    def conclusion(self) -> str:
        """What the pairs are enough for, in one line."""
        if self.refusal:
            return self.refusal
        text = f"{self.pairs:,} pairs suffice for every stage"
        if self.weak:
            text += f", but a real gain may well fail {', '.join(self.weak)}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self) | {"split": self.split.model_dump(), "conclusion": self.conclusion}


def forecast(
    lengths: PairLengths, params: Params, unit: str = CHARACTERS, counts: ReaderCounts | None = None
) -> Forecast:
    """Say what pairs are enough for under the settings of a workspace.

    Args:
        counts: Pairs by reader and split where they are split already; else they are split as the
            settings say.
    """
    split = lengths.adapted(params.validate_.split)
    counts = counts or lengths.counts(split)
    unequal = np.count_nonzero(lengths.differences)
    longer_preferred = None
    if unequal:
        longer_preferred = float(np.count_nonzero(lengths.differences > 0) / unequal)
    powers = list(_powers(params, counts, lengths.test_prompts(split)))
    conditions = len(params.gates.reward or ()) + len(params.gates.policy)
    return Forecast(
        pairs=len(lengths),
        are_all=len(lengths) != MOST_PAIRS,
        unit=unit,
        longer_preferred=longer_preferred,
        counts=counts,
        split=split,
        adapted=split.test != params.validate_.split.test,
        shortfalls=list(_shortfalls(lengths, params, split, counts, unit)),
        powers=powers,
        others=conditions - len(powers),
    )


def clean_pairs(clean: Path, seed: int) -> PairLengths:
    """Read all pairs of a folder of clean data, with lengths in characters.

    Raises:
        DataError: A file is missing or damaged.
    """
    files = []
    for user in READERS.values():
        files += [clean / user / "train.parquet", clean / user / "validation.parquet"]
    files.append(clean / READERS["reward"] / "test.parquet")
    return pair_lengths((read_kind(file, Preference) for file in files), seed)


def pair_files(config: CollectConfig, base: Path) -> list[SourceFile]:
    """Return the files of pairs, annotated ones among them; relative paths start at ``base``.

    Raises:
        DataError: A source matches no file.
    """
    annotated = annotation_sources(config.annotations, base)
    return source_files([*config.files.preferences, *annotated], base)


def source_pairs(config: CollectConfig, base: Path, seed: int) -> PairLengths | None:
    """Read the pairs of local files as ``collect`` does; None where a source is elsewhere.

    Raises:
        DataError: A file is missing, or it cannot be read as pairs.
    """
    files = pair_files(config, base)
    if not files or any(file.path is None for file in files):
        return None
    most = MOST_PAIRS if config.limit is None else min(config.limit, MOST_PAIRS)
    rows: dict[str, tuple[str, int]] = {}
    for file in files:
        left = file.options.cap
        for part in source_chunks(file, Preference.KIND):
            for row in part.rows[:left]:
                rows[row["id"]] = row["group"], len(row["chosen"]) - len(row["rejected"])
            if left is not None:
                left = max(left - len(part.rows), 0)
            if left == 0 or len(rows) >= most:
                break
    kept = list(rows.values())[:most]
    differences = np.array([difference for _, difference in kept], dtype=np.int64)
    return PairLengths([group for group, _ in kept], differences, seed)


def _shortfalls(
    lengths: PairLengths, params: Params, split: SplitConfig, counts: ReaderCounts, unit: str
) -> Iterator[Shortfall]:
    """Yield what the data gate, a stage or the reward gate would refuse, in the order of a run."""
    if len(lengths) < params.validate_.min_rows:
        reason = f"validate.min_rows asks for {params.validate_.min_rows}"
        yield Shortfall(reason, params.validate_.min_rows)
    largest = split
    if split.fewest_balanced:
        largest = split.model_copy(update={"test": max(split.test, split.most_test)})
    for reader, splits in counts.items():
        for name, found in splits.items():
            if name == "test" and reader != "reward":
                continue  # the test pairs are common
            if not found.pairs:
                reason = f"the {reader} model has no {name} pair"
                # So many on average that hardly any hash leaves none.
                yield Shortfall(reason, math.ceil(5 / _share(reader, name, largest)))
            config = getattr(params, reader)
            fewest = config.batch.min_pairs
            usable = found.balanced + found.equal
            if name == "train" and config.length_balance == "sampling" and usable < fewest:
                reason = (
                    f"{reader}.length_balance: sampling leaves {usable} of {found.pairs} training pairs, "
                    f"fewer than the {fewest} of a batch ({reader}.batch.min_pairs)"
                )
                now, later = (_share(reader, name, shares) for shares in (split, largest))
                yield Shortfall(reason, _total(lengths, found, fewest, now, later))
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
            reason = (
                f"the reward gate asks for {metric}, but {found.pairs} {name} pairs leave {found.balanced} when "
                f"lengths are balanced, and {FEWEST_BALANCED_PAIRS} are needed"
            )
            needed = FEWEST_BALANCED_PAIRS
            if name == "test":  # whose share grows only where so many can be balanced
                needed = max(needed, split.fewest_balanced)
            now, later = (_share(reader, name, shares) for shares in (split, largest))
            total = _total(lengths, found, needed, now, later)
            yield Shortfall(reason, total, _share_that_would_do(lengths, split, reader, name, unit))


def _measured(condition: Condition) -> tuple[str, str, str]:
    """Return reader, split and measure of a metric such as ``judge.test_accuracy``."""
    first, _, rest = condition.metric.partition(".")
    reader, metric = (first, rest) if first in READERS else ("reward", condition.metric)
    if metric.startswith("test_"):
        return reader, "test", metric.removeprefix("test_")
    return reader, "validation", metric


def _share(reader: str, split: str, config: SplitConfig) -> float:
    """Return the share of all pairs that one split of a reader gets on average."""
    if split == "test":
        return config.test
    of_reader = {
        "judge": config.judge,
        "referee": (1 - config.judge) * config.referee,
        "reward": (1 - config.judge) * (1 - config.referee),
    }
    of_split = {
        "validation": config.validation,
        "train": 1 - config.validation - config.test,
    }
    return of_reader[reader] * of_split[split]


FEW = 20  # of fewer pairs left, the share of all pairs says more than their number


def _total(lengths: PairLengths, found: SplitPairs, needed: int, now: float, later: float) -> int:
    """Return about how many pairs in all would leave ``needed`` balanced ones in a split.

    Args:
        now: The share of all pairs that is in the split.
        later: The share that could be.
    """
    # Rather too many than a refusal that comes again: how many of further pairs fall into the split
    # is chance.
    if found.balanced >= FEW:
        likely = min(found.balanced * later / now, needed - 1)
        room = math.sqrt(max(needed - likely, 1.0))
        return math.ceil(len(lengths) * (needed + room) / likely)
    count = max(len(lengths), 1)
    rate = max(lengths.balanced, 1) / count
    # Of few pairs the rate is uncertain too, and a split is balanced in strata of its own.
    rate = max(rate - math.sqrt(rate * (1 - rate) / count), 1 / count)
    return math.ceil((needed + 2 * math.sqrt(needed) + 2) / (rate * later))


def _more(total: int, pairs: int) -> int:
    """Return how many pairs are missing, as a round number."""
    missing = max(total - pairs, 1)
    step: int = 10 ** max(math.floor(math.log10(missing)) - 1, 0)
    if missing >= 100:
        step *= 5
    return math.ceil(missing / step) * step


def _share_that_would_do(
    lengths: PairLengths, config: SplitConfig, reader: str, split: str, unit: str
) -> str:
    """Return the smallest share, in steps of .05, that leaves enough pairs; empty if none does."""
    needed = FEWEST_BALANCED_PAIRS * (ROOM if unit == CHARACTERS else 1.0)
    for hundredths in range(5, 50, 5):
        share = hundredths / 100
        if share <= getattr(config, split):
            continue
        tried = config.model_copy(update={split: share})
        if tried.test + tried.validation >= 0.6:
            continue
        if lengths.counts(tried)[reader][split].balanced >= needed:
            return f"validate.split.{split}: {share:g}"
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
    lines = [
        opening,
        f"  pairs of each model, and in brackets those left when lengths (in {found.unit}) are balanced:",
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
    if found.shortfalls:
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


def forecast_of_files(base: Path, params: Params) -> Forecast | None:
    """Forecast for the files that settings name; relative paths start at ``base``.

    Returns:
        None where no pairs are named, as for the synthetic world, or where they cannot be read
        here: they are elsewhere, or still missing.
    """
    if params.collect.source == "world" or not params.collect.files.preferences:
        return None
    try:
        lengths = source_pairs(params.collect, base, seed_of(params))
    except DataError:
        return None
    return None if lengths is None else forecast(lengths, params)


def forecast_of_workspace(
    workspace: Path, params: Params, base: Path | None = None
) -> Forecast | None:
    """Forecast for the clean data of a workspace, or for its files where these have changed.

    Args:
        base: The folder that relative paths of files start at; by default the workspace.

    Returns:
        None where no pairs are named, or they cannot be read here.
    """
    base = base or workspace
    if params.collect.source == "files" and params.collect.files.preferences:
        with suppress(DataError):
            if _is_collected(workspace, params.collect, base):
                return forecast(clean_pairs(workspace / "data" / "clean", seed_of(params)), params)
    return forecast_of_files(base, params)


def _is_collected(workspace: Path, config: CollectConfig, base: Path) -> bool:
    """Return whether collected data is of the files as they are now.

    What is elsewhere is taken to be unchanged.
    """
    manifest = read_json(workspace / "data" / "raw" / "manifest.json")
    collected = {file["sha256"] for file in manifest["kinds"]["preferences"]["files"]}
    files = pair_files(config, base)
    here = {sha256_file(file.path) for file in files if file.path is not None}
    if manifest["limit"] != config.limit:
        return False
    if all(file.path for file in files):
        return here == collected
    return here <= collected
