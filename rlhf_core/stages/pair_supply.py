"""The pairs that reward models get, as the forecast and the check before SFT read them.

Files are collected and validated in a scratch folder, as the stages would, so that what is said of
them is what the stages find. Lengths are in tokens of the starting model where it is on this
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_core.config.data import CollectConfig, FileSources
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import expectations_of
from rlhf_core.data.batches import usable_pairs
from rlhf_core.data.collection.raw_folder import read_raw
from rlhf_core.data.collection.sources import SourceFile, annotation_sources, source_files
from rlhf_core.data.dataset import data_metrics, write_clean
from rlhf_core.data.pair_counts import READERS, PairLengths, estimated_differences
from rlhf_core.data.schema import ROW_TYPES, PairUser, Preference, read_kind, read_rows
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.data.validation.set_rules import SET_RULES, apply_set_rules, check_set
from rlhf_core.data.validation.suites import read_suites
from rlhf_core.data.validation.tables import validate as validated_rows
from rlhf_core.errors import DataError, ModelError
from rlhf_core.forecast import Forecast, forecast, seed_of
from rlhf_core.gates import decide
from rlhf_core.models.adapters import adapted_weights
from rlhf_core.models.causal_lm import fitting_length, load_tokenizer
from rlhf_core.models.io import empty_model
from rlhf_core.stages import collect, validate
from rlhf_core.stages.token_lengths import (
    BASE,
    load_counting_tokenizer,
    local_starting_model,
    model_positions,
)
from rlhf_core.storage.files import read_json, scratch_folder, sha256_file
from rlhf_core.training.reward.probes import probes_of

CLEAN = Path("data") / "clean"
# Of files at most so many pairs are read: with more nothing is short, and power hardly grows.
MOST_PAIRS = 30_000


class PairTokens:
    """Counts the tokens of pairs as a starting model would.

    Attributes:
        tokenizer: The model's.
        longest: By reader, the most tokens of a prompt with a reply.
        cache: Where tokens are kept; None keeps none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        positions: int | None,
        params: Params,
        cache: Path | None = None,
    ) -> None:
        self.tokenizer, self.cache = tokenizer, cache
        self.longest: dict[str, int] = {}
        for reader in READERS:
            most = getattr(params, reader).max_tokens
            self.longest[reader] = most if positions is None else min(most, positions)

    @classmethod
    def here(cls, params: Params, base: Path, workspace: Path | None = None) -> PairTokens | None:
        """Return those of the starting model, if it is on this machine and can be loaded.

        Args:
            base: The folder that relative paths start at.
            workspace: Whose models/base stands for a starting model that is not here.
        """
        source = local_starting_model(params, base)
        if source is None and workspace is not None and (workspace / BASE).is_dir():
            source = str((workspace / BASE).absolute())
        source = source or params.validate_.tokenizer
        if source is None:
            return None
        with suppress(ModelError):  # the stage base says what is wrong with it
            path = base / Path(os.path.expanduser(source))
            return cls(load_counting_tokenizer(source, base), model_positions(path), params)
        return None


def clean_pairs(clean: Path, params: Params, counting: PairTokens | None) -> PairLengths:
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
        tokens = read_tokens(counting.cache, file, Preference.KIND, counting.tokenizer)
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
    return PairLengths.of(groups, seed_of(params), of_all, np.concatenate(differences), marked)


def pair_files(config: CollectConfig, base: Path) -> list[SourceFile]:
    """Return the files of pairs, annotated ones among them; relative paths start at ``base``.

    Raises:
        DataError: A source matches no file.
    """
    annotated = annotation_sources(config.annotations, base)
    return source_files([*config.files.preferences, *annotated], base)


def forecast_of_files(
    base: Path, params: Params, models: Path | None = None, expectations: Path | None = None
) -> Forecast | None:
    """Forecast for the files that settings name; relative paths start at ``base``.

    Args:
        models: The folder that a relative path of the starting model starts at; by default
            ``base``.
        expectations: The folder of expectations; by default that of
            ``models``.

    Returns:
        None where no pairs are named, as for the synthetic world, or where they cannot be read
        here: they are elsewhere, or still missing.
    """
    if params.collect.source == "world" or not params.collect.files.preferences:
        return None
    checks = params.validate_.model_copy(update={"seed": seed_of(params)})
    most = min(params.collect.limit or MOST_PAIRS, MOST_PAIRS)
    pairs = FileSources(preferences=params.collect.files.preferences)
    collected = params.collect.model_copy(update={"files": pairs, "limit": most})
    try:
        if any(file.path is None for file in pair_files(params.collect, base)):
            return None
        with scratch_folder("rlhf-pairs-") as folder:
            raw = folder / "raw"
            collect.collect(collected, base, raw)
            rows = read_raw(raw)
            suites = read_suites(
                expectations or expectations_of(models or base), checks, rows.derived
            )
            validated = validated_rows(rows, suites, folder)
            decided = {suites.severity(Preference.KIND, rule) for rule in SET_RULES}
            if not decided <= {"warn", None}:
                findings = check_set(validated.clean, checks, suites, rows.derived)
                apply_set_rules(validated, findings)
            split = validate.split_for(validated, checks)
            clean = folder / "clean"
            statistics = write_clean(clean, validated.clean, checks.seed, split)
            metrics = data_metrics(validated, statistics)
            # What other files give, the stage checks.
            kinds = [Preference.KIND]
            kinds += [kind for kind in ROW_TYPES if not params.collect.files.of(kind)]
            conditions = validate.gate_conditions(checks, kinds)
            conditions += validate.rule_conditions(validated)
            decision = decide("data", conditions, metrics)
            lengths = clean_pairs(clean, params, PairTokens.here(params, models or base))
            checked = validated.kinds[Preference.KIND]
    except DataError:
        return None
    data_gate = ""
    if not decision.passed:
        failure = validate.failure_of(decision, metrics)
        data_gate = f"{failure}; `rlhf data validate` says which rows are refused"
    kept = len(lengths) / checked.raw_rows if len(lengths) else 1.0
    return forecast(lengths, params, data_gate, are_all=not checked.cut, kept=kept)


def forecast_of_workspace(
    workspace: Path, params: Params, base: Path | None = None, models: Path | None = None
) -> Forecast | None:
    """Forecast for the clean data of a workspace, or for its files where these have changed.

    Args:
        base: The folder that relative paths of files start at; by default the workspace.
        models: The folder that a relative path of the starting model starts at; likewise.

    Returns:
        None where no pairs are named, or they cannot be read here.
    """
    base, models = base or workspace, models or workspace
    if params.collect.source == "files" and params.collect.files.preferences:
        with suppress(DataError):
            if _is_collected(workspace, params.collect, base):
                counting = PairTokens.here(params, models, workspace)
                return forecast(clean_pairs(workspace / CLEAN, params, counting), params)
    return forecast_of_files(base, params, models)


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
    counting = PairTokens(tokenizer, model_positions(init), params, workspace / TOKENS)
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
