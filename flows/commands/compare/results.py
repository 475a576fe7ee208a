"""The results of finished runs, read from what their workspaces have on disk."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.dvc_repo.lock_file import RecordedStage, recorded_stages
from flows.registry.workspace import RegisteredHere, read_registered
from flows.stage.outcome import condition_rows
from flows.workspace.folder import display_path, is_workspace
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.config.stages.policy import METHOD_NAMES
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.final import JUDGE, SELECTED_BY
from rlhf_core.evaluation.metrics.training_cost import TrainingCost, best_of_n_cost, training_cost
from rlhf_core.storage.files import read_json, sha256_file
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


@dataclass(frozen=True)
class RunResults:
    """One way to better replies than SFT's, as its workspace evaluated it. None is what was not measured.

    Attributes:
        workspace: Its folder as a person types it.
        method: ``PPO``, ``DPO``, …, or ``best of N`` of the workspace's SFT model.
        judge: The judge of ``win_rate``; the referee where an earlier version trained no judge.
        win_rate: Of the replies against SFT's.
        lc_win_rate: The same at equal reply lengths.
        gold: Mean gold score; of the synthetic world alone.
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
    judge: str
    win_rate: Estimate
    lc_win_rate: Estimate | None
    gold: float | None
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
    judge = JUDGE if JUDGE in evaluation.get("comparison", {}) else SELECTED_BY
    if judge not in evaluation.get("comparison", {}):
        raise RlhfError(
            f"{name}: {EVALUATION} has no comparison by a judge; `rlhf run --workspace {shlex.quote(name)}`"
        )
    stages = recorded_stages(folder)
    policy = policy_results(folder, name, evaluation, judge, stages)
    best = best_of_n_results(folder, name, evaluation, judge)
    return EvaluatedWorkspace(name, (policy, best) if best is not None else (policy,), stages, folder)


def policy_results(
    folder: Path, name: str, evaluation: Mapping[str, Any], judge: str, stages: Mapping[str, RecordedStage]
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
        judge=judge,
        win_rate=_estimate(comparison[judge], "win_rate"),
        lc_win_rate=_interval(comparison[judge], "lc_win_rate"),
        gold=policy.get("gold"),
        gold_win_rate=_interval(comparison.get("gold", {}), "win_rate"),
        judge_score=policy.get(judge),
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


def best_of_n_results(folder: Path, name: str, evaluation: Mapping[str, Any], judge: str) -> RunResults | None:
    """The results of choosing among n replies of SFT; None where the evaluation has none."""
    best = evaluation.get("best_of_n")
    if best is None or judge not in best.get("comparison", {}):
        return None
    return RunResults(
        workspace=name,
        method=f"best of {best['n']}",
        judge=judge,
        win_rate=_estimate(best["comparison"][judge], "win_rate"),
        lc_win_rate=_interval(best["comparison"][judge], "lc_win_rate"),
        gold=best.get("gold"),
        gold_win_rate=_interval(best["comparison"].get("gold", {}), "win_rate"),
        judge_score=best.get(judge),
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
