"""Stage validate: check every row, quarantine failures, split by prompt group, and decide the data
gate.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from typing import Any

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
    evaluation = list(
        read_sources(
            config.evaluation_files, "prompts", workspace, parameter="validate.evaluation_files"
        )
    )
    outputs.docs.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".columns-", outputs.docs.parent) as columns:
        validated = validate(raw, suites, columns)
        config = config.model_copy(update={"split": _split_for(validated, config)})
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
        bias = statistics["preferences"].length_bias()
        findings.counts["preferences"] = (
            findings.counts.get("preferences", {}) | validated.agreement | bias
        )
        if config.split.fewest_balanced:
            findings.counts["preferences"]["test_share"] = config.split.test
        metrics = data_metrics(validated, statistics, findings.counts)
        atomic_write_json(outputs.metrics, metrics)
        conditions = gate_conditions(config, collected_kinds(about) if kinds is None else kinds)
        conditions += rule_conditions(validated)
        decision = decide(
            "data",
            conditions,
            metrics,
            evidence={"metrics/data.json": sha256_file(outputs.metrics)},
        )
        decision.save(outputs.gate)
        failed = [condition.metric for condition in decision.conditions if not condition.passed]
        with atomic_dir(outputs.docs) as docs:
            validated.checkpoints.write_docs(docs, failed)
        checked = CheckedData(about, validated, findings, metrics, statistics, failed, tokens)
        write_reports(outputs.card, checked, config)
        if not decision.passed:
            # Clean data of an earlier run must not be mistaken for this one's.
            shutil.rmtree(outputs.clean, ignore_errors=True)
            raise GateFailed(_failure(decision, metrics))
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


def _split_for(validated: Validated, config: ValidateConfig) -> SplitConfig:
    """Return the shares of the splits, with a larger test share where there are few pairs and the
    settings ask so.
    """
    clean = validated.clean["preferences"]
    if not config.split.fewest_balanced or not clean.num_rows:
        return config.split
    from rlhf_core.data.pair_counts import pair_lengths  # with torch

    return pair_lengths(clean.parts(["group", "chosen", "rejected"]), config.seed).adapted(
        config.split
    )


def collected_kinds(manifest: Mapping[str, Any]) -> list[str]:
    """Return the kinds that the data gate asks for: every kind, but without pairs
    (``collect.pairs``) only those that stage collect has rows of, by file or by derivation."""
    if manifest.get("pairs", True):
        return list(ROW_TYPES)
    kinds: Mapping[str, Any] = manifest["kinds"]
    return [kind for kind in ROW_TYPES if kinds[kind]["files"] or kinds[kind]["derived_from"]]


def gate_conditions(
    config: ValidateConfig, kinds: Collection[str] = tuple(ROW_TYPES)
) -> list[Condition]:
    """Return the data gate's conditions: no group in two splits, and of each of the ``kinds``
    enough rows, few in quarantine, no empty split."""
    conditions = [
        Condition(
            metric="group_overlap",
            at_most=0,
            why="with a prompt in two splits no held-out metric means anything",
        )
    ]
    for kind in (kind for kind in ROW_TYPES if kind in kinds):
        least = 1 if kind == "pretrain" else config.min_rows
        conditions += [
            Condition(
                metric=f"{kind}.clean", at_least=least, why="too few rows to learn or to judge from"
            ),
            Condition(
                metric=f"{kind}.quarantined_share",
                at_most=config.max_quarantined,
                why="so many bad rows mean that the source, or how it is read, is wrong",
            ),
        ]
    return conditions + [
        Condition(
            metric=rows_metric(name),
            at_least=1,
            why="a stage reads this split: with too few rows, or shares (validate.split) too small, it has none",
        )
        for name in file_names()
        if rows_metric(name).partition(".")[0] in kinds
    ]


def rule_conditions(validated: Validated) -> list[Condition]:
    """Return a condition for each kind and rule that fails the set: no row breaks it, nor does the
    whole table.
    """
    return [
        Condition(
            metric=f"{kind}.failed_{rule}",
            at_most=0,
            why="the rule fails the set, by validate.rules or as one of all rows",
        )
        for kind, checked in validated.kinds.items()
        for rule in dict.fromkeys(checked.must_hold)
    ]


def _failure(decision: GateDecision, metrics: dict[str, Numbers | float]) -> str:
    """Say in one line which conditions failed, the commonest reason where rows were quarantined,
    and where to look.
    """
    failed = [condition for condition in decision.conditions if not condition.passed]
    parts = []
    for condition in failed[:4]:
        parts.append(str(condition))
        kind, _, name = condition.metric.partition(".")
        numbers = metrics.get(kind)
        if name == "quarantined_share" and isinstance(numbers, dict):
            counts = {
                key.removeprefix("failed_"): n
                for key, n in numbers.items()
                if key.startswith("failed_") and n
            }
            worst = max(counts, key=lambda key: counts[key], default="")
            parts[-1] += (
                f" (most often check {worst}: {counts[worst]:.0f} rows)"
                if worst
                else " (refused by the reader)"
            )
    more = f" and {len(failed) - 4} more" if len(failed) > 4 else ""
    return (
        f"the data gate failed: {'; '.join(parts)}{more}. Reasons by row are in data/quarantine.parquet and data/docs, "
        "all conditions in gates/data.json; correct or add data, or change the limits in section validate"
    )
