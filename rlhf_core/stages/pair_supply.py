"""The data of a run before it starts: what its pairs are enough for, and how long its rows are.

Files are collected and validated in a scratch folder, as the stages would, so that what is said of
them is what the stages find; they are read once for all that is said. Lengths are in tokens of the
starting model where it is on this machine; one that is made from nothing gets its tokenizer from
the same texts here as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.config.base import is_pretrained
from rlhf_core.config.data import CollectConfig, DataSource, FileSources
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import expectations_of
from rlhf_core.data.batches import usable_pairs
from rlhf_core.data.collection.raw_folder import read_raw
from rlhf_core.data.collection.sources import SourceFile, annotation_sources, source_files
from rlhf_core.data.dataset import data_metrics, write_clean
from rlhf_core.data.pair_counts import READERS, PairLengths, estimated_differences
from rlhf_core.data.schema import PairUser, Preference, Prompt, read_kind, read_rows
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.data.validation.set_rules import SET_RULES, apply_set_rules, check_set
from rlhf_core.data.validation.suites import read_suites
from rlhf_core.data.validation.tables import Validated
from rlhf_core.data.validation.tables import validate as validated_rows
from rlhf_core.errors import DataError, ModelError
from rlhf_core.forecast import Forecast, forecast, seed_of
from rlhf_core.gates import decide
from rlhf_core.models.adapters import adapted_weights
from rlhf_core.models.causal_lm import fitting_length, load_tokenizer
from rlhf_core.models.io import empty_model
from rlhf_core.stages import collect, validate
from rlhf_core.stages.prompt_room import refused_prompts
from rlhf_core.stages.row_tokens import (
    CLEAN,
    FOLDERS,
    OWN_DATA,
    RowLengths,
    RowTokens,
    trained_kinds,
)
from rlhf_core.stages.token_lengths import BASE, model_positions
from rlhf_core.storage.data_files import NothingMatches
from rlhf_core.storage.files import read_json, scratch_folder, sha256_file
from rlhf_core.training.reward.probes import probes_of

# Of files at most so many pairs are read: with more nothing is short, and power hardly grows.
MOST_PAIRS = 30_000


def clean_pairs(clean: Path, params: Params, counting: RowTokens | None) -> PairLengths:
    """Read all pairs of a folder of clean data, with their lengths.

    Raises:
        DataError: A file is missing or damaged, or a row cannot be written by the chat template.
    """
    files = []
    for user in READERS.values():
        files += [clean / user / "train.parquet", clean / user / "validation.parquet"]
    files.append(clean / PairUser.REWARD / "test.parquet")
    groups: list[str] = []
    estimates, differences = [], []
    dropped: dict[str, list[np.ndarray]] = {reader: [] for reader in READERS}
    for file in files:
        table = read_kind(file, Preference)
        groups += table.column("group").to_pylist()
        estimates.append(estimated_differences(table))
        if counting is None:
            continue
        tokens = counting.read(file, Preference.KIND)
        chosen, rejected = (tokens.column(name).lengths for name in ("chosen", "rejected"))
        differences.append(chosen.astype(np.int64) - rejected)
        unusable: dict[int, np.ndarray] = {}
        for reader, longest in counting.longest.items():
            if longest not in unusable:
                usable, _ = usable_pairs(tokens, longest)
                unusable[longest] = ~np.isin(np.arange(len(tokens)), usable.rows)
            dropped[reader].append(unusable[longest])
    of_all = np.concatenate(estimates, axis=1)
    if counting is None:
        return PairLengths.of(groups, seed_of(params), of_all)
    marked = {reader: np.concatenate(parts) for reader, parts in dropped.items()}
    tokens_apart = np.concatenate(differences)
    seed = seed_of(params)
    return PairLengths.of(groups, seed, of_all, tokens_apart, marked, counting.longest)


def pair_files(config: CollectConfig, base: Path) -> list[SourceFile]:
    """Return the files of pairs, annotated ones among them; relative paths start at ``base``.

    Raises:
        DataError: A source matches no file.
    """
    annotated = annotation_sources(config.annotations, base)
    return source_files([*config.files.preferences, *annotated], base)


@dataclass(frozen=True)
class CheckedFiles:
    """Files of settings after collection and validation in a scratch folder.

    Attributes:
        clean: The folder of clean data.
        validated: What validation found.
        failure: How the data gate would fail; empty where it would not.
        left_out: The kinds whose files are not on this machine, so that rows of them are not those
            of a run.
    """

    clean: Path
    validated: Validated
    failure: str
    left_out: frozenset[str]


@contextmanager
def checked_files(base: Path, params: Params, expectations: Path) -> Iterator[CheckedFiles]:
    """Collect and validate pairs, demonstrations and prompts, as the stages would.

    Demonstrations and prompts that are not on this machine are left out.

    Args:
        base: The folder that relative paths start at.
        expectations: The folder of expectations.

    Raises:
        DataError: A file cannot be read.
    """
    checks = params.validate_.model_copy(update={"seed": seed_of(params)})
    most = min(params.collect.limit or MOST_PAIRS, MOST_PAIRS)
    given = params.collect.files
    read = FileSources(
        preferences=given.preferences,
        demonstrations=_sources_here(given.demonstrations, base),
        prompts=_sources_here(given.prompts, base),
    )
    collected = params.collect.model_copy(update={"files": read, "limit": most})
    with scratch_folder("rlhf-pairs-") as folder:
        raw = folder / "raw"
        collect.collect(collected, base, raw)
        rows = read_raw(raw)
        suites = read_suites(expectations, checks, rows.derived)
        validated = validated_rows(rows, suites, folder)
        decided = {suites.severity(Preference.KIND, rule) for rule in SET_RULES}
        if not decided <= {"warn", None}:
            findings = check_set(validated.clean, checks, suites, rows.derived)
            apply_set_rules(validated, findings)
        split = validate.split_for(validated, checks)
        clean = folder / "clean"
        statistics = write_clean(clean, validated.clean, checks.seed, split)
        metrics = data_metrics(validated, statistics)
        # What files that are left out give, the stage checks.
        kinds = validate.collected_kinds(read_json(raw / "manifest.json"))
        asked = [kind for kind in kinds if read.of(kind) or not given.of(kind)]
        conditions = validate.gate_conditions(checks, asked)
        conditions += validate.rule_conditions(validated)
        decision = decide("data", conditions, metrics)
        failure = ""
        if not decision.passed:
            reason = validate.failure_of(decision, metrics)
            failure = f"{reason}; `rlhf data validate` says which rows are refused"
        left_out = frozenset(kind for kind in FOLDERS if given.of(kind) and not read.of(kind))
        yield CheckedFiles(clean, validated, failure, left_out)


def _sources_here(sources: Sequence[DataSource], base: Path) -> tuple[DataSource, ...]:
    """Return sources whose files are all on this machine; none where one is not."""
    with suppress(NothingMatches):
        if all(file.path is not None for file in source_files(sources, base)):
            return tuple(sources)
    return ()


@dataclass(frozen=True)
class DataSupply:
    """What is known of the data of a run before it starts.

    Attributes:
        pairs: What the pairs are enough for; None where none are named, as for the synthetic world,
            or where they are elsewhere, or still missing.
        refusal: Why a run without pairs would refuse its prompts, in one line; empty where it takes
            them, or where they are not on this machine.
        lengths: Tokens of the rows; None where they or the starting model's tokenizer are not here.
    """

    pairs: Forecast | None = None
    refusal: str = ""
    lengths: RowLengths | None = None


def supply_of_files(
    base: Path, params: Params, models: Path | None = None, expectations: Path | None = None
) -> DataSupply:
    """Read the files that settings name; relative paths start at ``base``.

    Args:
        models: The folder that a relative path of the starting model starts at; by default
            ``base``.
        expectations: The folder of expectations; by default that of
            ``models``.

    Raises:
        DataError: A file cannot be read, or the tokenizer cannot write a row.
        ModelError: The starting model's files have no usable tokenizer.
    """
    files = params.collect.files
    sources = [*files.prompts, *files.demonstrations]
    if files.preferences:
        sources = [*files.preferences, *annotation_sources(params.collect.annotations, base)]
    is_named = bool(files.preferences) or not params.collect.pairs
    if params.collect.source == "world" or not is_named or not _sources_here(sources, base):
        return DataSupply()
    models = models or base
    with checked_files(base, params, expectations or expectations_of(models)) as found:
        if files.preferences:
            return _supply_of_pairs(found, params, models)
        is_made = not is_pretrained(params.base.source)
        cannot_count = Prompt.KIND in found.left_out or (is_made and files.pretrain)
        if found.failure or cannot_count:
            return DataSupply(refusal=found.failure)
        counting = RowTokens.here(params, models, found.clean)
        refusal = _without_room(found.clean, params, counting)
        return DataSupply(None, refusal, _row_lengths(found, params, counting))


def _supply_of_pairs(found: CheckedFiles, params: Params, models: Path) -> DataSupply:
    counting = RowTokens.here(params, models, found.clean)
    lengths = clean_pairs(found.clean, params, counting)
    no_room = ""
    if Prompt.KIND not in found.left_out:
        no_room = _without_room(found.clean, params, counting)
    checked = found.validated.kinds[Preference.KIND]
    kept = len(lengths) / checked.raw_rows if len(lengths) else 1.0
    pairs = forecast(lengths, params, found.failure, no_room, are_all=not checked.cut, kept=kept)
    return DataSupply(pairs, lengths=_row_lengths(found, params, counting))


def _row_lengths(
    found: CheckedFiles, params: Params, counting: RowTokens | None
) -> RowLengths | None:
    if counting is None:
        return None
    is_cut = any(checked.cut for checked in found.validated.kinds.values())
    source = "the first rows of the files" if is_cut else "the rows of the files"
    return counting.training_rows(found.clean, trained_kinds(params), source, found.left_out)


def _without_room(clean: Path, params: Params, counting: RowTokens | None) -> str:
    """Say which prompts of clean data leave no room for a reply, where that can be told."""
    if counting is None:
        return ""
    lengths = counting.prompts(clean)
    return refused_prompts(
        clean, lengths, counting.positions, params.base, params.ppo.max_new_tokens
    )


def supply_of_workspace(
    workspace: Path, params: Params, base: Path | None = None, models: Path | None = None
) -> DataSupply:
    """Read the clean data of a workspace, or its files where these have changed or have no pairs.

    Args:
        base: The folder that relative paths of files start at; by default the workspace.
        models: The folder that a relative path of the starting model starts at; likewise.

    Raises:
        DataError: A file cannot be read, or the tokenizer cannot write a row.
        ModelError: The starting model's files have no usable tokenizer.
    """
    base, models = base or workspace, models or workspace
    if params.collect.source == "files" and params.collect.files.preferences:
        with suppress(DataError):
            if _is_collected(workspace, params.collect, base):
                clean = workspace / CLEAN
                counting = RowTokens.here(params, models, clean, workspace)
                no_room = _without_room(clean, params, counting)
                pairs = forecast(clean_pairs(clean, params, counting), params, "", no_room)
                if counting is None:
                    return DataSupply(pairs)
                lengths = counting.training_rows(clean, trained_kinds(params), OWN_DATA)
                return DataSupply(pairs, lengths=lengths)
    return supply_of_files(base, params, models)


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


def require_pairs(workspace: Path) -> None:
    """Refuse pairs that a later stage or the reward gate would refuse after hours of training.

    Adapters for which the model has no layers are refused too, those of the critic among them.

    Raises:
        ModelError: The starting model has no layers for the adapters of one of them.
        DataError: No pair of a split is within ``max_tokens``, too few are left when lengths are
            balanced, or so few that a measure which the reward gate asks for is left out, a probe
            among them.
    """
    params = load_params(workspace)
    if not params.collect.pairs:
        return
    clean, init = workspace / CLEAN, workspace / BASE
    model = empty_model(AutoModelForCausalLM, AutoConfig.from_pretrained(init))
    for name, lora in params.later_adapters.items():
        try:
            adapted_weights(model, lora)
        except ModelError as error:
            raise ModelError(f"{name}.lora: {error}") from error
    tokenizer = load_tokenizer(init)
    counting = RowTokens(tokenizer, model_positions(init), params, workspace / TOKENS)
    found = forecast(clean_pairs(clean, params, counting), params)
    if found.refusal:
        raise DataError(found.refusal)
    asked: list[str] = []
    if params.gates.mode == "enforce":
        asked = [condition.metric for condition in params.gates.reward or ()]
    for reader in READERS:
        prefix = PROBED if reader == "reward" else f"{reader}.{PROBED}"
        own = [metric for metric in asked if metric.startswith(prefix)]
        if own:
            config = getattr(params, reader)
            rows = read_rows(clean / PairUser.REWARD / "test.parquet", Preference)
            longest = fitting_length(config.max_tokens, init)
            require_probes(own, probes_of(rows, tokenizer, longest, config.seed).absent)


PROBED = "probes."


def require_probes(asked: Sequence[str], absent: Mapping[str, str]) -> None:
    """Check that the probes behind metrics could be formed.

    Args:
        asked: The metrics.
        absent: By kind of probe, why it could not.

    Raises:
        DataError: One could not.
    """
    for metric in sorted(asked):
        for kind, reason in absent.items():
            if f"{PROBED}{kind}" in metric:
                raise DataError(
                    f"the reward gate asks for {metric}, but {reason}; add pairs, or take the "
                    "condition out of gates.reward"
                )
