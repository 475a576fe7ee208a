"""Results of finished runs, read from their workspaces, side by side for ``rlhf compare``, and whether they compare."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group
from rich.table import Table

from flows.commands.text import format_seconds
from flows.dvc_repo.lock_file import RecordedStage, recorded_stages
from flows.registry.workspace import RegisteredHere, read_registered
from flows.stage.outcome import condition_rows
from flows.workspace.folder import display_path, is_workspace
from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import JUDGE
from rlhf_core.storage.files import atomic_write_json, flatten, read_json, sha256_file
from rlhf_core.training.history import read_history

EVALUATION = Path("metrics") / "evaluation.json"
GATE = Path("gates") / "policy.json"
GATED, FAILED, REPORTED, OUTDATED, UNGATED = "passed", "failed", "failed, mode report", "outdated", "not judged"
WITHOUT_CRITIC = {"rloo": "RLOO", "grpo": "GRPO"}
HISTORIES = ("ppo", "ppo_abandoned", "critic", "reward", "referee")


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95 % interval, None where there is none."""

    value: float
    low95: float | None = None
    high95: float | None = None


@dataclass(frozen=True)
class GateStanding:
    """What ``gates/policy.json`` says: one of the words above, and the metrics whose bounds do not hold."""

    decision: str
    failed: tuple[str, ...] = ()


Histories = Mapping[str, Sequence[Mapping[str, Any]]]
# The stages beside its own that a method needs a model of. DPO reads the pairs themselves.
UPSTREAM: Mapping[Method, tuple[str, ...]] = {
    "ppo": ("critic", "reward", "referee"),
    "rejection_sampling": ("reward",),
    "dpo": (),
}
POLICY_STAGE = "policy"
PHASES = "seconds_"  # what the times of the phases of an iteration begin with


@dataclass(frozen=True)
class TrainingCost:
    """What the histories do not say is None, or left out.

    Attributes:
        seconds: Time of the training loops by stage, that of the policy first: without start-up, loading and saving.
        sampled_tokens: Reply tokens that were generated to train the policy.
        trained_tokens: Tokens that supervised steps of the policy were made on, padding not counted.
        total_seconds: The sum of ``seconds``; None where the time of what the method is named after is not known.
    """

    seconds: Mapping[str, float]
    sampled_tokens: int | None
    trained_tokens: int | None
    total_seconds: float | None


def training_cost(histories: Histories, method: Method, batch_size: int | None, selects: bool = True) -> TrainingCost:
    """Sum up the histories of the stages that ``method`` needs.

    Args:
        histories: Rows by the name of the history file.
        method: How the policy was trained.
        batch_size: Replies per iteration of PPO, whose history has their mean length; None if unknown.
        selects: Whether the referee chose the checkpoint, without which PPO needs none.
    """
    rows = [*histories.get("ppo", ()), *histories.get("ppo_abandoned", ())]
    of_stage = {POLICY_STAGE: _seconds(rows)}
    for stage in UPSTREAM[method]:
        if selects or stage != "referee":
            of_stage[stage] = _seconds(histories.get(stage, ()))
    seconds = {stage: value for stage, value in of_stage.items() if value is not None}
    sampled = [row["sampled_tokens"] for row in rows if "sampled_tokens" in row]
    lengths = [row["length"] for row in rows if "length" in row]
    if method == "ppo" and batch_size is not None and lengths:
        sampled = [round(batch_size * sum(lengths))]
    return TrainingCost(
        seconds,
        sampled_tokens=max(sampled, default=None),
        trained_tokens=max((row["tokens"] for row in rows if "tokens" in row), default=None),
        total_seconds=sum(seconds.values()) if POLICY_STAGE in seconds else None,
    )


def best_of_n_cost(histories: Histories) -> TrainingCost:
    """Best of n trains no policy, but needs the reward model that chooses."""
    seconds = _seconds(histories.get("reward", ()))
    return TrainingCost({} if seconds is None else {"reward": seconds}, None, None, seconds)


def _seconds(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The time of a history: rows of the supervised loop carry the total so far, those of iterations their parts."""
    rows = list(rows)
    totals = [row["seconds"] for row in rows if "seconds" in row]
    parts = [value for row in rows for name, value in row.items() if name.startswith(PHASES)]
    return sum(parts) + max(totals, default=0.0) if totals or parts else None


@dataclass(frozen=True)
class RunResults:
    """One way to better replies than SFT's, as its workspace evaluated it. None is what was not measured.

    Attributes:
        workspace: Its folder as a person types it.
        method: ``PPO``, ``DPO``, …, or ``best of N`` of the workspace's SFT model.
        prompts: How many prompts were judged.
        clusters: How many different questions these ask, which intervals are over.
        win_rate: Of the replies against SFT's, by the judge.
        lc_win_rate: The same at equal reply lengths.
        gold: Mean gold score; of the synthetic world alone.
        sft_gold: That of SFT's replies.
        gold_win_rate: Win rate against SFT by the gold judge.
        judge_score: Mean score by the judge.
        reward: Mean reward by the reward model.
        kl: From SFT in nats per reply.
        kl_is_bound: Whether ``kl`` is an upper bound, as that of best of n is.
        perplexity_tax: Perplexity of held-out text over SFT's, by kind of text, minus one.
        length: Tokens per reply.
        sft_length: Those of SFT's replies.
        cost: What training it cost.
        sampled_tokens_per_reply: Tokens that are generated for each reply that is used, where that is more than one.
        gate: None for best of n, which no gate judges.
        registered: The version of the registered model that holds the policy.
    """

    workspace: str
    method: str
    prompts: int
    clusters: int
    win_rate: Estimate
    lc_win_rate: Estimate | None
    gold: float | None
    sft_gold: float | None
    gold_win_rate: Estimate | None
    judge_score: float | None
    reward: float | None
    kl: Estimate | None
    kl_is_bound: bool
    perplexity_tax: Mapping[str, float]
    length: float | None
    sft_length: float | None
    cost: TrainingCost
    sampled_tokens_per_reply: float | None
    gate: GateStanding | None
    registered: RegisteredHere | None


@dataclass(frozen=True)
class EvaluatedWorkspace:
    """A workspace whose evaluation is on disk: its results, and what dvc.lock records of its stages."""

    name: str
    results: tuple[RunResults, ...]
    stages: Mapping[str, RecordedStage]
    folder: Path


def read_workspace(folder: Path) -> EvaluatedWorkspace:
    """Read the results of one workspace: those of its policy, and of best of n where that was evaluated.

    Raises:
        RlhfError: ``folder`` is no workspace, or its policy has not been evaluated.
    """
    name = display_path(folder)
    if not is_workspace(folder):
        raise RlhfError(f"{name} is not a workspace: it has no params.yaml and dvc.yaml")
    if not (folder / EVALUATION).is_file():
        raise RlhfError(
            f"{name} has not been evaluated: it has no {EVALUATION}; `rlhf run --workspace {shlex.quote(name)}`"
        )
    evaluation = read_json(folder / EVALUATION)
    if JUDGE not in evaluation.get("comparison", {}):
        raise RlhfError(
            f"{name}: {EVALUATION} has no comparison by a judge; `rlhf run --workspace {shlex.quote(name)}`"
        )
    stages = recorded_stages(folder)
    policy = policy_results(folder, name, evaluation, stages)
    best = best_of_n_results(folder, name, evaluation)
    return EvaluatedWorkspace(name, (policy, best) if best is not None else (policy,), stages, folder)


def policy_results(
    folder: Path, name: str, evaluation: Mapping[str, Any], stages: Mapping[str, RecordedStage]
) -> RunResults:
    """The results of the policy that the workspace trained."""
    params = _training_params(folder, stages)
    method = (params.get("policy") or {}).get("method", "ppo")
    ppo = params.get("ppo") or {}
    estimator = (ppo.get("advantage") or {}).get("estimator", "gae")
    selects = (ppo.get("selection") or {}).get("method", "referee") == "referee"
    batch_size = int(ppo.get("batch_size", PpoConfig().batch_size))
    comparison, policy, sft = evaluation["comparison"], evaluation.get("policy", {}), evaluation.get("sft", {})
    return RunResults(
        workspace=name,
        method=WITHOUT_CRITIC.get(estimator, METHOD_NAMES[method]) if method == "ppo" else METHOD_NAMES[method],
        prompts=comparison[JUDGE]["prompts"],
        clusters=comparison[JUDGE]["clusters"],
        win_rate=_estimate(comparison[JUDGE], "win_rate"),
        lc_win_rate=_interval(comparison[JUDGE], "lc_win_rate"),
        gold=policy.get("gold"),
        sft_gold=sft.get("gold"),
        gold_win_rate=_interval(comparison.get("gold", {}), "win_rate"),
        judge_score=policy.get(JUDGE),
        reward=policy.get("reward"),
        kl=_interval(evaluation, "kl"),
        kl_is_bound=False,
        perplexity_tax=_perplexity_tax(policy, sft),
        length=policy.get("length"),
        sft_length=sft.get("length"),
        cost=training_cost(_histories(folder), method, batch_size, selects),
        sampled_tokens_per_reply=None,
        gate=_gate_decision(folder),
        registered=read_registered(folder, "models/policy"),
    )


def best_of_n_results(folder: Path, name: str, evaluation: Mapping[str, Any]) -> RunResults | None:
    """The results of choosing among n replies of SFT; None where the evaluation has none."""
    best = evaluation.get("best_of_n")
    if best is None or JUDGE not in best.get("comparison", {}):
        return None
    return RunResults(
        workspace=name,
        method=f"best of {best['n']}",
        prompts=best["comparison"][JUDGE]["prompts"],
        clusters=best["comparison"][JUDGE]["clusters"],
        win_rate=_estimate(best["comparison"][JUDGE], "win_rate"),
        lc_win_rate=_interval(best["comparison"][JUDGE], "lc_win_rate"),
        gold=best.get("gold"),
        sft_gold=evaluation.get("sft", {}).get("gold"),
        gold_win_rate=_interval(best["comparison"].get("gold", {}), "win_rate"),
        judge_score=best.get(JUDGE),
        reward=best.get("reward"),
        kl=Estimate(best["kl_bound"]),
        kl_is_bound=True,
        perplexity_tax={},
        length=best.get("length"),
        sft_length=evaluation.get("sft", {}).get("length"),
        cost=best_of_n_cost(_histories(folder)),
        sampled_tokens_per_reply=best["sampled_tokens_per_reply"],
        gate=None,
        registered=None,
    )


def _training_params(folder: Path, stages: Mapping[str, RecordedStage]) -> Mapping[str, Any]:
    """The parameters that the policy was trained with, those of params.yaml where dvc.lock records none."""
    recorded = stages.get("ppo", RecordedStage()).params
    return recorded or yaml_text.plain(yaml_text.read(folder / PARAMS_FILE))


def _histories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: read_history(folder / "history" / f"{name}.jsonl") for name in HISTORIES}


def _interval(values: Mapping[str, Any], name: str) -> Estimate | None:
    return None if values.get(name) is None else _estimate(values, name)


def _estimate(values: Mapping[str, Any], name: str) -> Estimate:
    return Estimate(values[name], values.get(f"{name}_low95"), values.get(f"{name}_high95"))


def _perplexity_tax(policy: Mapping[str, Any], sft: Mapping[str, Any]) -> dict[str, float]:
    kinds = ("preferred", "pretrain")
    names = {kind: f"perplexity_{kind}" for kind in kinds}
    return {
        kind: policy[name] / sft[name] - 1.0
        for kind, name in names.items()
        if policy.get(name) is not None and sft.get(name)
    }


def _gate_decision(folder: Path) -> GateStanding:
    if not (folder / GATE).is_file():
        return GateStanding(UNGATED)
    report = read_json(folder / GATE)
    judged = (report.get("evidence") or {}).get(str(EVALUATION))
    if judged != sha256_file(folder / EVALUATION):
        return GateStanding(OUTDATED)
    failed = tuple(row.metric for row in condition_rows(report) if not row.passed)
    if report.get("passed") is True and not failed:
        return GateStanding(GATED)
    return GateStanding(REPORTED if report.get("mode") == "report" else FAILED, failed)


POLICY = "models/policy"
# What two evaluations must have in common; the other settings of the section add measurements.
SETTINGS = ("prompts", "replies_per_prompt", "sampling", "tie_margin")


def comparability_warnings(workspaces: Sequence[EvaluatedWorkspace]) -> list[str]:
    """Say, one line each, what the evaluations of these workspaces do not have in common, and which is outdated."""
    if not workspaces:
        return []
    inputs = {
        "data/clean": "data/clean, with the test prompts,",
        "models/sft": "the SFT models that policies are compared with",
        "models/judge": "the judges that compare them",
    }
    warnings = [
        f"{workspace.name}: its policy was trained anew since it was evaluated; `rlhf run` evaluates it"
        for workspace in workspaces
        if _outdated(workspace)
    ]
    evaluations = {workspace.name: workspace.stages.get("evaluate", RecordedStage()) for workspace in workspaces}
    for path, what in inputs.items():
        warnings += _differing(what, {name: stage.inputs.get(path) for name, stage in evaluations.items()})
    settings = {name: _verdict_settings(stage.params) for name, stage in evaluations.items()}
    return warnings + _differing(f"the settings {', '.join(SETTINGS)} of section evaluate", settings)


def _verdict_settings(recorded: Mapping[str, Any]) -> str | None:
    """The settings of an evaluation that change replies or verdicts, as JSON with their defaults."""
    if not recorded:
        return None
    try:
        values = EvaluateConfig.model_validate(recorded.get("evaluate") or {}).model_dump(mode="json")
    except ValidationError:  # of another version
        values = recorded.get("evaluate") or {}
    return json.dumps({name: values.get(name) for name in SETTINGS}, sort_keys=True)


def differing_settings(workspaces: Sequence[EvaluatedWorkspace]) -> dict[str, dict[str, str]]:
    """Return the parameters that not all of these runs were made with, by name: the value in each workspace.

    They are those that dvc.lock records of the stages, else those of params.yaml.
    """
    settings = {workspace.name: _settings(workspace) for workspace in workspaces}
    names = sorted({name for values in settings.values() for name in values})
    rows = {name: {run: values.get(name, MISSING) for run, values in settings.items()} for name in names}
    return {name: row for name, row in rows.items() if len({*row.values()}) > 1}


def _settings(workspace: EvaluatedWorkspace) -> dict[str, str]:
    recorded = {name: value for stage in workspace.stages.values() for name, value in stage.params.items()}
    values = flatten(recorded or yaml_text.plain(yaml_text.read(workspace.folder / PARAMS_FILE)))
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _differing(what: str, values: Mapping[str, str | None]) -> list[str]:
    """Say which workspaces have another value than the others, and which have none, by workspace."""
    groups: dict[str, list[str]] = {}
    unknown = [name for name, value in values.items() if not value]
    for name, value in values.items():
        if value:
            groups.setdefault(value, []).append(name)
    lines = []
    if unknown:
        lines.append(f"not known to be comparable: dvc.lock of {', '.join(unknown)} does not record {what}")
    if len(groups) > 1:
        parts = " | ".join(", ".join(names) for names in groups.values())
        lines.append(f"not comparable: {what} differ: {parts}")
    return lines


def _outdated(workspace: EvaluatedWorkspace) -> bool:
    """Whether dvc.lock has another policy as the output of its training than as an input of the evaluation."""
    trained = workspace.stages.get("ppo", RecordedStage()).outputs.get(POLICY)
    evaluated = workspace.stages.get("evaluate", RecordedStage()).inputs.get(POLICY)
    return None not in (trained, evaluated) and trained != evaluated


LABEL_WIDTH, RUN_WIDTH, GAP = 24, 12, 2
SETTING = 36  # of a longer value, such as a gate's conditions, the beginning is shown
MISSING = "–"


def results_table(
    results: Sequence[RunResults], width: int, settings: Mapping[str, Mapping[str, str]] | None = None
) -> Group:
    """Return one table, or several below each other where ``width`` columns do not hold all runs.

    Args:
        settings: The parameters that differ, with which the table starts.
    """
    at_once = max(1, (width - LABEL_WIDTH) // (RUN_WIDTH + GAP))
    return Group(*(_block(results[at : at + at_once], settings or {}) for at in range(0, len(results), at_once)))


def _block(results: Sequence[RunResults], settings: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("", max_width=LABEL_WIDTH - GAP, style="dim", overflow="fold")
    for result in results:
        table.add_column(result.workspace, max_width=RUN_WIDTH, overflow="fold")
    for name, of_runs in settings.items():
        texts = (of_runs[result.workspace] for result in results)
        table.add_row(name, *(text if len(text) <= SETTING else f"{text[:SETTING]} …" for text in texts), style="cyan")
    cells = [dict(_rows(result)) for result in results]
    for label in dict.fromkeys(label for column in cells for label in column):
        values = [column.get(label, MISSING) for column in cells]
        if any(value != MISSING for value in values):
            table.add_row(label, *values)
    return table


def _rows(result: RunResults) -> Iterator[tuple[str, str]]:
    yield "method", result.method
    yield "prompts / questions", f"{result.prompts} / {result.clusters}"
    yield "win rate", _percent(result.win_rate)
    yield "at equal length", _percent(result.lc_win_rate)
    yield "win rate, gold", _percent(result.gold_win_rate)
    yield "gold score", _number(result.gold, 3)
    yield "gold score of SFT", _number(result.sft_gold, 3)
    yield "judge's score", _number(result.judge_score, 3)
    yield "reward", _number(result.reward, 3)
    bound = "≤ " if result.kl_is_bound else ""
    yield "KL, nats per reply", bound + _number(result.kl.value, 2) if result.kl is not None else MISSING
    for kind in ("preferred", "pretrain"):
        tax = result.perplexity_tax.get(kind)
        yield f"perplexity, {kind}", MISSING if tax is None else f"{tax:+.1%}"
    yield "length, tokens", _number(result.length, 1)
    yield "length of SFT", _number(result.sft_length, 1)
    yield from _cost_rows(result)
    yield "policy gate", _gate(result.gate)
    yield "registered", _version(result)


def _cost_rows(result: RunResults) -> Iterator[tuple[str, str]]:
    cost = result.cost
    yield "training time", MISSING if cost.total_seconds is None else format_seconds(cost.total_seconds)
    for stage in ("policy", "critic", "reward", "referee"):
        yield f"  of {stage}", format_seconds(cost.seconds[stage]) if stage in cost.seconds else MISSING
    yield "tokens sampled", _count(cost.sampled_tokens)
    yield "tokens trained on", _count(cost.trained_tokens)
    yield "tokens per reply", _number(result.sampled_tokens_per_reply, 0)


def _percent(interval: Estimate | None) -> str:
    if interval is None:
        return MISSING
    if interval.low95 is None or interval.high95 is None:
        return f"{interval.value:.1%}"
    return f"{interval.value:.1%}\n{interval.low95:.1%}–{interval.high95:.1%}"


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _gate(gate: GateStanding | None) -> str:
    if gate is None:
        return MISSING
    return f"{gate.decision}: {', '.join(gate.failed)}" if gate.failed else gate.decision


def _version(result: RunResults) -> str:
    entry = result.registered
    if entry is None:
        return MISSING
    return f"{entry.model} {entry.version}{' (ungated)' if entry.ungated else ''}"


def results_document(workspaces: Sequence[EvaluatedWorkspace]) -> dict[str, Any]:
    """Return everything that is known of the runs and why they may not compare, as JSON values."""
    results = [result for workspace in workspaces for result in workspace.results]
    return {
        "settings": differing_settings(workspaces),
        "runs": [asdict(result) for result in results],
        "warnings": comparability_warnings(workspaces),
    }


def write_results(path: Path, workspaces: Sequence[EvaluatedWorkspace]) -> None:
    """Write :func:`results_document` to a file.

    Raises:
        RlhfError: The file cannot be written.
    """
    try:
        atomic_write_json(path, results_document(workspaces))
    except OSError as error:
        raise RlhfError(f"{path} cannot be written: {error.strerror}; name another file with --output") from error
