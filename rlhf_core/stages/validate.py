"""Stage validate: check rows, quarantine failures, split by group, and decide the data gate."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from rlhf_core.config.data import SplitConfig, ValidateConfig
from rlhf_core.config.gates import Condition
from rlhf_core.data.collection.raw_folder import read_raw
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.dataset import (
    Numbers,
    count_tokens,
    data_metrics,
    file_names,
    rows_metric,
    write_clean,
    write_readme,
)
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.data_reports import CheckedData, write_reports
from rlhf_core.data.validation.set_rules import apply_set_rules, check_set
from rlhf_core.data.validation.suites import FOLDER, read_suites
from rlhf_core.data.validation.tables import Validated, validate, write_quarantine
from rlhf_core.errors import GateFailed
from rlhf_core.gates import GateDecision, decide
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.stages.token_lengths import load_counting_tokenizer
from rlhf_core.storage.files import (
    atomic_dir,
    atomic_write_json,
    read_json,
    scratch_folder,
    sha256_file,
)
from rlhf_core.training.run_context import RunContext


def run(
    config: ValidateConfig,
    inputs: Paths,
    outputs: Paths,
    context: RunContext,
    kinds: Collection[str] | None = None,
) -> dict[str, Numbers | float]:
    """Write clean splits, quarantine, data docs, data card, metrics and the gate's evidence.

    Args:
        kinds: What the data gate asks for; by default every kind, or where there are no pairs those
            that were collected.

    Raises:
        DataError: The data of stage collect, or an evaluation file, cannot be read.
        GateFailed: The data gate failed (exit code 3). All but the clean data is written then too,
            as evidence.
    """
    raw, workspace = read_raw(inputs.raw), inputs.raw.parents[1]
    manifest = inputs.raw / "manifest.json"
    about = read_json(manifest) if manifest.is_file() else {}
    suites = read_suites(inputs.expectations, config, raw.derived)
    # A tokenizer that cannot be loaded is reported before the rows are checked, which takes longer.
    tokenizer = load_counting_tokenizer(config.tokenizer, workspace) if config.tokenizer else None
    files, parameter = config.evaluation_files, "validate.evaluation_files"
    evaluation = list(read_sources(files, "prompts", workspace, parameter=parameter))
    outputs.docs.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".columns-", outputs.docs.parent) as columns:
        validated = validate(raw, suites, columns)
        config = config.model_copy(update={"split": split_for(validated, config)})
        findings = check_set(validated.clean, config, suites, raw.derived, evaluation)
        apply_set_rules(validated, findings)
    tokens = None
    if tokenizer is not None:
        tokens = count_tokens(validated.clean, tokenizer)
        for kind, counted in tokens.items():
            findings.counts[kind] = findings.counts.get(kind, {}) | counted.metrics()
    write_quarantine(outputs.quarantine, validated.quarantine())
    with atomic_dir(outputs.clean) as folder:
        statistics = write_clean(folder, validated.clean, config.seed, config.split)
        write_readme(folder)
        of_pairs = findings.counts.get("preferences", {})
        of_pairs = of_pairs | validated.agreement | statistics["preferences"].length_bias()
        if config.split.fewest_balanced:
            of_pairs["test_share"] = config.split.test
        findings.counts["preferences"] = of_pairs
        metrics = data_metrics(validated, statistics, findings.counts)
        atomic_write_json(outputs.metrics, metrics)
        conditions = gate_conditions(config, collected_kinds(about) if kinds is None else kinds)
        conditions += rule_conditions(validated)
        evidence = {"metrics/data.json": sha256_file(outputs.metrics)}
        decision = decide("data", conditions, metrics, evidence=evidence)
        decision.save(outputs.gate)
        failed = [condition.metric for condition in decision.conditions if not condition.passed]
        with atomic_dir(outputs.docs) as docs:
            validated.checkpoints.write_docs(docs, failed)
        checked = CheckedData(about, validated, findings, metrics, statistics, failed, tokens)
        write_reports(outputs.card, checked, config)
        if not decision.passed:
            # Clean data of an earlier run must not be mistaken for this one's.
            shutil.rmtree(outputs.clean, ignore_errors=True)
            raise GateFailed(
                f"{failure_of(decision, metrics)}. Reasons by row are in data/quarantine.parquet and data/docs, all "
                "conditions in gates/data.json; correct or add data, or change the limits in section validate"
            )
    return metrics


STAGE = Stage(
    name="validate",
    config=ValidateConfig,
    run=run,
    inputs={"raw": "data/raw", "expectations": FOLDER},
    outputs={
        "clean": "data/clean",
        "quarantine": "data/quarantine.parquet",
        "docs": "data/docs",
        "card": "data/card",
        "metrics": "metrics/data.json",
        "gate": "gates/data.json",
    },
)


def split_for(validated: Validated, config: ValidateConfig) -> SplitConfig:
    """Return the shares of the splits, the test share grown for few pairs if settings ask so."""
    clean = validated.clean["preferences"]
    if not config.split.fewest_balanced or not clean.num_rows:
        return config.split
    from rlhf_core.data.pair_counts import PairLengths, estimated_differences  # with torch

    table = pa.concat_tables(clean.parts(["group", "chosen", "rejected"]))
    groups = table.column("group").to_pylist()
    lengths = PairLengths.of(groups, config.seed, estimated_differences(table))
    return lengths.adapted(config.split)


def collected_kinds(manifest: Mapping[str, Any]) -> list[str]:
    """Return the kinds that the data gate asks for.

    These are all; without pairs (``collect.pairs``) those that stage collect has rows of, by file
    or by derivation.
    """
    if manifest.get("pairs", True):
        return list(ROW_TYPES)
    kinds: Mapping[str, Any] = manifest["kinds"]
    return [kind for kind in ROW_TYPES if kinds[kind]["files"] or kinds[kind]["derived_from"]]


def gate_conditions(
    config: ValidateConfig, kinds: Collection[str] = tuple(ROW_TYPES)
) -> list[Condition]:
    """Return the conditions of the data gate on rows of these kinds.

    No group may be in two splits, and of each kind there must be enough rows, few in quarantine,
    and no empty split.
    """
    conditions = [
        Condition(
            metric="group_overlap",
            at_most=0,
            why="with a prompt in two splits no held-out metric means anything",
        )
    ]
    for kind in ROW_TYPES:
        if kind not in kinds:
            continue
        enough = Condition(
            metric=f"{kind}.clean",
            at_least=1 if kind == "pretrain" else config.min_rows,
            why="too few rows to learn or to judge from",
        )
        mostly_sound = Condition(
            metric=f"{kind}.quarantined_share",
            at_most=config.max_quarantined,
            why="so many bad rows mean that the source, or how it is read, is wrong",
        )
        conditions += [enough, mostly_sound]
    for name in file_names():
        metric = rows_metric(name)
        if metric.partition(".")[0] in kinds:
            not_empty = Condition(
                metric=metric,
                at_least=1,
                why="a stage reads this split: with too few rows, or shares (validate.split) too small, it has none",
            )
            conditions.append(not_empty)
    return conditions


def rule_conditions(validated: Validated) -> list[Condition]:
    """Return a condition for each kind and rule that fails the set where rows or tables break it."""
    conditions = []
    for kind, checked in validated.kinds.items():
        for rule in dict.fromkeys(checked.must_hold):
            unbroken = Condition(
                metric=f"{kind}.failed_{rule}",
                at_most=0,
                why="the rule fails the set, by validate.rules or as one of all rows",
            )
            conditions.append(unbroken)
    return conditions


def failure_of(decision: GateDecision, metrics: dict[str, Numbers | float]) -> str:
    """Say in one line which conditions of the data gate failed, and mostly why."""
    failed = [condition for condition in decision.conditions if not condition.passed]
    parts = []
    for condition in failed[:4]:
        parts.append(str(condition))
        kind, _, name = condition.metric.partition(".")
        numbers = metrics.get(kind)
        if name == "quarantined_share" and isinstance(numbers, dict):
            broken = {key: n for key, n in numbers.items() if key.startswith("failed_") and n}
            reason = "refused by the reader"
            if broken:
                worst = max(broken, key=lambda key: broken[key])
                rule = worst.removeprefix("failed_")
                reason = f"most often check {rule}: {broken[worst]:.0f} rows"
            parts[-1] += f" ({reason})"
    more = f" and {len(failed) - 4} more" if len(failed) > 4 else ""
    return f"the data gate failed: {'; '.join(parts)}{more}"
