"""Whether runs may be compared: judged on the same prompts, by the same judge, against the same SFT model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flows.commands.compare.results import EvaluatedWorkspace
from flows.dvc_repo.lock_file import RecordedStage

POLICY = "models/policy"


def comparability_warnings(workspaces: Sequence[EvaluatedWorkspace]) -> list[str]:
    """Say, one line each, what the evaluations of these workspaces do not have in common, and which is outdated."""
    if not workspaces:
        return []
    judged_by = {result.judge for workspace in workspaces for result in workspace.results}
    inputs = {
        "data/clean": "data/clean, with the test prompts,",
        "models/sft": "the SFT models that policies are compared with",
        **{f"models/{judge}": f"the {judge}s that compare them" for judge in sorted(judged_by)},
    }
    warnings = [
        f"{workspace.name}: its policy was trained anew since it was evaluated; `rlhf run` evaluates it"
        for workspace in workspaces
        if _outdated(workspace)
    ]
    if len(judged_by) > 1:
        warnings.append(f"not comparable: some win rates are by the {', others by the '.join(sorted(judged_by))}")
    evaluations = {workspace.name: workspace.stages.get("evaluate", RecordedStage()) for workspace in workspaces}
    for path, what in inputs.items():
        warnings += _differing(what, {name: stage.inputs.get(path) for name, stage in evaluations.items()})
    settings = {
        name: json.dumps(stage.params, sort_keys=True) if stage.params else None for name, stage in evaluations.items()
    }
    return warnings + _differing("the settings of section evaluate", settings)


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
