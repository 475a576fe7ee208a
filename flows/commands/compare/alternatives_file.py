"""The results of runs as a file that the report of a workspace shows beside its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flows.commands.compare.results import Estimate, EvaluatedWorkspace, RunResults
from flows.dvc_repo.lock_file import LOCK_FILE
from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.alternative_runs import AlternativeRun, evaluation_basis, save_alternatives
from rlhf_core.git import git_revision
from rlhf_core.storage.files import sha256_file


def write_alternatives(path: Path, workspaces: Sequence[EvaluatedWorkspace]) -> None:
    """Write every result with what it was judged on and where it comes from.

    Raises:
        RlhfError: The file cannot be written.
    """
    runs = [_run(workspace, result) for workspace in workspaces for result in workspace.results]
    try:
        save_alternatives(path, runs)
    except OSError as error:
        raise RlhfError(f"{path} cannot be written: {error.strerror}; name another file with --output") from error


def _run(workspace: EvaluatedWorkspace, result: RunResults) -> AlternativeRun:
    lock = workspace.folder / LOCK_FILE
    basis = evaluation_basis(lock)
    seed = yaml_text.plain(yaml_text.read(workspace.folder / PARAMS_FILE)).get("seed")
    return AlternativeRun(
        workspace=result.workspace,
        method=result.method,
        seed=seed if isinstance(seed, int) else None,
        git_revision=git_revision(workspace.folder),
        dvc_lock=sha256_file(lock) if lock.is_file() else "",
        basis=replace(basis, policy="") if result.gate is None else basis,
        gold=result.gold,
        judge=result.judge_score,
        by_judge=_win_rate(result.win_rate),
        by_gold=_win_rate(result.gold_win_rate),
        kl=None if result.kl is None else result.kl.value,
        kl_is_bound=result.kl_is_bound,
        length=result.length,
        sampled_per_reply=result.sampled_tokens_per_reply,
        seconds=result.cost.total_seconds,
        sampled_tokens=result.cost.sampled_tokens,
        trained_tokens=result.cost.trained_tokens,
        gate="" if result.gate is None else result.gate.decision,
    )


def _win_rate(estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return {}
    return {"win_rate": estimate.value, "win_rate_low95": estimate.low95, "win_rate_high95": estimate.high95}
