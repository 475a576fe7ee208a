"""``rlhf compare``: results of finished runs side by side, and whether they compare."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from flows.commands.text import format_seconds, plain_table
from flows.dvc_repo.graph import RecordedStage, recorded_stages
from flows.registry.register import read_registered
from flows.workspace import display_path, is_workspace
from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import JUDGE, last_word
from rlhf_core.evaluation.verdict import EVEN_WIN_RATE, percent
from rlhf_core.gates import REPORT_MODE, read_gate
from rlhf_core.storage.files import atomic_write_json, flatten, read_json
from rlhf_core.training.history import read_history

POLICY = "models/policy"
EVALUATION = Path("metrics") / "evaluation.json"
WITHOUT_CRITIC = {"rloo": "RLOO", "grpo": "GRPO"}
HISTORIES = ("ppo", "ppo_abandoned", "critic", "reward", "referee")
# The stages beside its own that a method needs a model of. DPO reads the pairs themselves.
UPSTREAM: Mapping[Method, tuple[str, ...]] = {
    "ppo": ("critic", "reward", "referee"),
    "rejection_sampling": ("reward",),
    "dpo": (),
}
Values = Mapping[str, Any]
# One way to better replies than SFT's, as its workspace evaluated it: what ``--json`` prints of it,
# None for what was not measured. An estimate has ``value``, ``low95`` and ``high95``.
RunResults = dict[str, Any]
Show = str | Callable[[Any, RunResults], str]  # a format, or a function of a value and its results


@dataclass(frozen=True)
class EvaluatedWorkspace:
    """An evaluated workspace: its results, and what dvc.lock records of its stages."""

    name: str
    results: tuple[RunResults, ...]
    stages: Mapping[str, RecordedStage]
    folder: Path


def read_workspace(folder: Path) -> EvaluatedWorkspace:
    """Read the results of a workspace: of its policy, and of best of n if that was evaluated.

    Raises:
        RlhfError: ``folder`` is no workspace, or its policy has not been evaluated.
    """
    name = display_path(folder)
    if not is_workspace(folder):
        raise RlhfError(f"{name} is not a workspace: it has no params.yaml and dvc.yaml")
    remedy = f"`rlhf run --workspace {shlex.quote(name)}`"
    if not (folder / EVALUATION).is_file():
        raise RlhfError(f"{name} has not been evaluated: it has no {EVALUATION}; {remedy}")
    evaluation = read_json(folder / EVALUATION)
    comparison = evaluation.get("comparison", {})
    if last_word(comparison) not in comparison:
        raise RlhfError(f"{name}: {EVALUATION} has no comparison by a judge; {remedy}")
    stages = recorded_stages(folder)
    histories = {name: read_history(folder / "history" / f"{name}.jsonl") for name in HISTORIES}
    results = [{"workspace": name, **_policy_results(folder, evaluation, stages, histories)}]
    best = evaluation.get("best_of_n")
    if best is not None and JUDGE in best.get("comparison", {}):
        sft = evaluation.get("sft", {})
        # No policy is trained, but the reward model that chooses.
        results.append({"workspace": name, **_best_of_n(best, sft, histories["reward"])})
    return EvaluatedWorkspace(name, tuple(results), stages, folder)


def _best_of_n(best: Values, sft: Values, history: Iterable[Values]) -> RunResults:
    """The results of the best of n replies of SFT, chosen by the reward model of ``history``."""
    seconds = _seconds(history)
    cost = {
        "seconds": {} if seconds is None else {"reward": seconds},
        "sampled_tokens": None,
        "trained_tokens": None,
        "total_seconds": seconds,
    }
    return {
        "method": f"best of {best['n']}",
        **_measured(best, best["comparison"], sft),
        "kl": {"value": best["kl_bound"], "low95": None, "high95": None},
        "kl_is_bound": True,
        "perplexity_tax": {},
        "cost": cost,
        "sampled_tokens_per_reply": best["sampled_tokens_per_reply"],
        "gate": None,
        "registered": None,
    }


def _policy_results(
    folder: Path,
    evaluation: Values,
    stages: Mapping[str, RecordedStage],
    histories: Mapping[str, Sequence[Values]],
) -> RunResults:
    """The results of the policy that the workspace trained, by what dvc.lock records of it."""
    recorded = stages.get("ppo", RecordedStage()).params
    params = recorded or yaml_text.plain(yaml_text.read(folder / PARAMS_FILE))
    method: Method = (params.get("policy") or {}).get("method", "ppo")
    ppo = params.get("ppo") or {}
    estimator = (ppo.get("advantage") or {}).get("estimator", "gae")
    policy, sft = evaluation.get("policy", {}), evaluation.get("sft", {})
    method_name = METHOD_NAMES[method]
    if method == "ppo":
        method_name = WITHOUT_CRITIC.get(estimator, method_name)
    perplexity_tax = {}  # perplexity of held-out text over SFT's, minus one
    for kind in ("preferred", "pretrain"):
        name = f"perplexity_{kind}"
        if policy.get(name) is not None and sft.get(name):
            perplexity_tax[kind] = policy[name] / sft[name] - 1.0
    registered = read_registered(folder, POLICY)
    about = None
    if registered is not None:
        about = {
            "model": registered.model,
            "version": registered.version,
            "ungated": registered.ungated,
        }
    return {
        "method": method_name,
        **_measured(policy, evaluation["comparison"], sft),
        "kl": _estimate(evaluation, "kl"),
        "kl_is_bound": False,
        "perplexity_tax": perplexity_tax,
        "cost": _training_cost(histories, method, ppo),
        "sampled_tokens_per_reply": None,
        "gate": gate_standing(folder),
        "registered": about,
    }


def _measured(model: Values, comparison: Mapping[str, Values], sft: Values) -> RunResults:
    """What judges and scorers say of the replies of one model."""
    judge = last_word(comparison)
    judged = comparison[judge]
    return {
        "prompts": judged["prompts"],
        "clusters": judged["clusters"],
        "win_rate": _estimate(judged, "win_rate"),
        "lc_win_rate": _estimate(judged, "lc_win_rate"),
        "gold": model.get("gold"),
        "sft_gold": sft.get("gold"),
        "gold_win_rate": _estimate(comparison.get("gold", {}), "win_rate"),
        "llm_win_rate": _estimate(comparison.get("llm", {}), "win_rate"),
        "llm_order_disagreement": comparison.get("llm", {}).get("order_disagreement"),
        "judge_score": model.get(judge),
        "reward": model.get("reward"),
        "length": model.get("length"),
        "sft_length": sft.get("length"),
    }


def _estimate(values: Values, name: str) -> dict[str, float | None] | None:
    if values.get(name) is None:
        return None
    return {
        "value": values[name],
        "low95": values.get(f"{name}_low95"),
        "high95": values.get(f"{name}_high95"),
    }


def _training_cost(
    histories: Mapping[str, Sequence[Values]], method: Method, ppo: Values
) -> RunResults:
    """Return what training cost, by the histories of the stages that ``method`` needs.

    ``seconds`` are those of the training loops by stage: without start-up, loading and saving.
    ``trained_tokens`` are those that supervised steps of the policy were made on, padding not
    counted. None is what the histories do not say.
    """
    rows = [*histories["ppo"], *histories["ppo_abandoned"]]
    stages = [*UPSTREAM[method]]
    selection = (ppo.get("selection") or {}).get("method", "referee")
    if "referee" in stages and selection != "referee":
        stages.remove("referee")
    of_stage = {"policy": _seconds(rows)}
    for stage in stages:
        of_stage[stage] = _seconds(histories[stage])
    seconds = {stage: value for stage, value in of_stage.items() if value is not None}
    trained = [row["tokens"] for row in rows if "tokens" in row]
    return {
        "seconds": seconds,
        "sampled_tokens": sampled_tokens(rows, method, ppo),
        "trained_tokens": max(trained, default=None),
        "total_seconds": sum(seconds.values()) if "policy" in seconds else None,
    }


def sampled_tokens(history: Iterable[Values], method: Method, ppo: Values) -> int | None:
    """Count the reply tokens that were generated to train a policy; None if that is unknown."""
    rows = list(history)
    # PPO's history has the mean of each batch.
    lengths = [float(row["length"]) for row in rows if "length" in row]
    if method == "ppo" and lengths:
        return round(int(ppo.get("batch_size", PpoConfig().batch_size)) * sum(lengths))
    counts = [int(row["sampled_tokens"]) for row in rows if "sampled_tokens" in row]
    return max(counts, default=None)


def _seconds(rows: Iterable[Values]) -> float | None:
    """The time of a history: supervised rows carry the total so far, iterations their parts."""
    totals: list[float] = []
    parts: list[float] = []
    for row in rows:
        for name, value in row.items():
            if name == "seconds":
                totals.append(value)
            elif name.startswith("seconds_"):
                parts.append(value)
    return sum(parts) + max(totals, default=0.0) if totals or parts else None


def gate_standing(folder: Path) -> RunResults:
    """What ``gates/policy.json`` says of the evaluation, and which of its conditions failed."""
    gate = read_gate(folder, "policy")
    if gate is None:
        return {"decision": "not judged", "failed": (), "found": ()}
    if str(EVALUATION) not in gate.evidence or str(EVALUATION) in gate.changed_evidence(folder):
        return {"decision": "outdated", "failed": (), "found": ()}
    decision = "passed"
    if not gate.passed:
        decision = "failed, mode report" if gate.mode == REPORT_MODE else "failed"
    metrics = tuple(condition.metric for condition in gate.failed)
    return {"decision": decision, "failed": metrics, "found": tuple(map(str, gate.failed))}


# What two evaluations must have in common; the other settings of the section add measurements.
SETTINGS = ("prompts", "replies_per_prompt", "sampling", "tie_margin")


def comparability_warnings(workspaces: Sequence[EvaluatedWorkspace]) -> list[str]:
    """Say what the evaluations of these workspaces do not share, and which is outdated."""
    inputs = {
        "data/clean": "data/clean, with the test prompts,",
        "models/sft": "the SFT models that policies are compared with",
        "models/judge": "the judges that compare them",
    }
    warnings = []
    evaluations = {}
    for workspace in workspaces:
        evaluation = workspace.stages.get("evaluate", RecordedStage())
        evaluations[workspace.name] = evaluation
        trained = workspace.stages.get("ppo", RecordedStage()).outputs.get(POLICY)
        evaluated = evaluation.inputs.get(POLICY)
        if None not in (trained, evaluated) and trained != evaluated:
            warnings.append(
                f"{workspace.name}: its policy was trained anew since it was evaluated; `rlhf run` evaluates it"
            )
    for path, what in inputs.items():
        hashes = {name: stage.inputs.get(path) for name, stage in evaluations.items()}
        warnings += _differing(what, hashes)
    settings = {name: _verdict_settings(stage.params) for name, stage in evaluations.items()}
    what = f"the settings {', '.join(SETTINGS)} of section evaluate"
    return warnings + _differing(what, settings)


def _verdict_settings(recorded: Mapping[str, Any]) -> str | None:
    """The settings that change replies or verdicts, as JSON with their defaults."""
    if not recorded:
        return None
    values = recorded.get("evaluate") or {}
    with suppress(ValidationError):  # of another version
        values = EvaluateConfig.model_validate(values).model_dump(mode="json")
    return json.dumps({name: values.get(name) for name in SETTINGS}, sort_keys=True)


def differing_settings(workspaces: Sequence[EvaluatedWorkspace]) -> dict[str, dict[str, str]]:
    """Return the parameters in which these runs differ: by name, the value in each workspace.

    They are those that dvc.lock records of the stages. Of a stage that did not end well, such as a
    gate that closed, it records none, so there they are those of params.yaml.
    """
    recorded: dict[str, dict[str, Any]] = {}
    written: dict[str, dict[str, Any]] = {}
    for workspace in workspaces:
        of_stages: dict[str, Any] = {}
        for stage in workspace.stages.values():
            of_stages |= stage.params
        recorded[workspace.name] = _by_condition(flatten(of_stages))
        file = yaml_text.plain(yaml_text.read(workspace.folder / PARAMS_FILE))
        written[workspace.name] = _by_condition(flatten(file))
    known = recorded if any(recorded.values()) else written
    names: set[str] = set()
    for values in known.values():
        names.update(values)
    rows: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        row = {}
        for run, values in recorded.items():
            value = values.get(name, written[run].get(name, MISSING))
            row[run] = value if isinstance(value, str) else json.dumps(value)
        if len({*row.values()}) > 1:
            rows[name] = row
    return rows


def _by_condition(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with one for each condition of a gate: ``gates.policy: kl``, ``at_most 6.0``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not _are_conditions(value):
            found[name] = value
            continue
        for condition in value:
            bounds = []
            for key, bound in condition.items():
                if key not in ("metric", "why") and bound is not None:
                    bounds.append(f"{key} {bound}")
            found[f"{name}: {condition['metric']}"] = ", ".join(bounds)
    return found


def _are_conditions(value: Any) -> bool:
    """Whether a setting is the list of conditions of a gate."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, Mapping) and "metric" in entry for entry in value)


def _differing(what: str, values: Mapping[str, str | None]) -> list[str]:
    """Say which workspaces differ in a value, and which do not have it."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value or "", []).append(name)
    unknown, lines = groups.pop("", []), []
    if unknown:
        lines.append(
            f"not known to be comparable: dvc.lock of {', '.join(unknown)} does not record {what}"
        )
    if len(groups) > 1:
        parts = " | ".join(", ".join(names) for names in groups.values())
        lines.append(f"not comparable: {what} differ: {parts}")
    return lines


LABEL_WIDTH, RUN_WIDTH, GAP = 24, 12, 2
SETTING = 36  # of a longer value, such as a gate's conditions, the beginning is shown
MISSING = "–"
NOTES = {
    "gold": "gold: the true preference of the synthetic world, which no training sees",
    "perplexity_tax": "perplexity: its change from SFT; of plain text it falls where PPO also trains on such text "
    "(ppo.ptx)",
}


def results_table(
    results: Sequence[RunResults],
    width: int,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> Group:
    """Return a table, or several where ``width`` columns do not hold all runs.

    Args:
        settings: The parameters that differ, with which the table starts.
    """
    at_once = max(1, (width - LABEL_WIDTH) // (RUN_WIDTH + GAP))
    parts: list[RenderableType] = []
    for at in range(0, len(results), at_once):
        parts.append(_block(results[at : at + at_once], settings or {}, width))
    for name, note in NOTES.items():
        if any(result.get(name) is not None for result in results):
            parts.append(Text(note, style="dim"))
    return Group(*parts)


def _block(
    results: Sequence[RunResults], settings: Mapping[str, Mapping[str, str]], width: int
) -> Table:
    room = max(RUN_WIDTH, (width - LABEL_WIDTH) // len(results) - GAP)
    columns = [Column("", max_width=LABEL_WIDTH - GAP, style="dim", overflow="fold")]
    for result in results:
        columns.append(Column(result["workspace"], max_width=room, overflow="fold"))
    table = plain_table(columns)
    for name, of_runs in settings.items():
        values = []
        for result in results:
            text = of_runs[result["workspace"]]
            values.append(text if len(text) <= SETTING else f"{text[:SETTING]} …")
        table.add_row(_broken(name), *values, style="cyan")
    for label, (path, show) in ROWS.items():
        values = [_shown(result, path, show) for result in results]
        if any(value != MISSING for value in values):
            table.add_row(label, *values)
    return table


def _shown(result: RunResults, path: str, show: Show) -> str:
    """One cell: the value at a dotted path of the results, or that there is none."""
    value: Any = result
    for key in path.split("."):
        value = None if value is None else value.get(key)
    if value is None:
        return MISSING
    return format(value, show) if isinstance(show, str) else show(value, result)


def _broken(name: str) -> str:
    """A setting's name with line breaks behind dots and underscores, as its column needs them."""
    lines = [""]
    for part in re.findall(r"[^._]*[._]?", name):
        if len(lines[-1] + part) > LABEL_WIDTH - GAP:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _percent(estimate: Values, _: RunResults) -> str:
    low, high = estimate["low95"], estimate["high95"]
    rate = f"{percent(estimate['value'], EVEN_WIN_RATE)}%"
    if low is None or high is None:
        return rate
    return f"{rate}\n{percent(low, EVEN_WIN_RATE)}%–{percent(high, EVEN_WIN_RATE)}%"


def _prompts(prompts: int, result: RunResults) -> str:
    return f"{prompts} / {result['clusters']}"


def _kl(kl: float, result: RunResults) -> str:
    return f"≤ {kl:.2f}" if result["kl_is_bound"] else f"{kl:.2f}"


def _time(value: float, _: RunResults) -> str:
    return format_seconds(value)


def _gate(gate: Values, _: RunResults) -> str:
    return "\n".join((gate["decision"], *gate["found"]))


def _registered(version: Values, _: RunResults) -> str:
    name = f"{version['model']} {version['version']}"
    return f"{name} (ungated)" if version["ungated"] else name


# What the table shows: label, where it is in the results, how it is written.
ROWS: Mapping[str, tuple[str, Show]] = {
    "method": ("method", ""),
    "prompts / questions": ("prompts", _prompts),
    "win rate": ("win_rate", _percent),
    "at equal length": ("lc_win_rate", _percent),
    "win rate, gold": ("gold_win_rate", _percent),
    "win rate, LLM judge": ("llm_win_rate", _percent),
    "LLM judge, by order": ("llm_order_disagreement", ".0%"),
    "gold score": ("gold", ".3f"),
    "gold score of SFT": ("sft_gold", ".3f"),
    "judge's score": ("judge_score", ".3f"),
    "reward": ("reward", ".3f"),
    "KL, nats per reply": ("kl.value", _kl),
    "perplexity, preferred": ("perplexity_tax.preferred", "+.1%"),
    "perplexity, plain text": ("perplexity_tax.pretrain", "+.1%"),
    "length, tokens": ("length", ".1f"),
    "length of SFT": ("sft_length", ".1f"),
    "training time": ("cost.total_seconds", _time),
    "  of policy": ("cost.seconds.policy", _time),
    "  of critic": ("cost.seconds.critic", _time),
    "  of reward": ("cost.seconds.reward", _time),
    "  of referee": ("cost.seconds.referee", _time),
    "tokens sampled": ("cost.sampled_tokens", ","),
    "tokens trained on": ("cost.trained_tokens", ","),
    "tokens per reply": ("sampled_tokens_per_reply", ".0f"),
    "policy gate": ("gate", _gate),
    "registered": ("registered", _registered),
}


def results_document(workspaces: Sequence[EvaluatedWorkspace]) -> dict[str, Any]:
    """Return everything that is known of the runs and why they may not compare, as JSON values."""
    runs: list[RunResults] = []
    for workspace in workspaces:
        runs += workspace.results
    return {
        "settings": differing_settings(workspaces),
        "runs": runs,
        "warnings": comparability_warnings(workspaces),
    }


def write_results(path: Path, document: Values) -> None:
    """Write :func:`results_document` to a file.

    Raises:
        RlhfError: The file cannot be written.
    """
    try:
        atomic_write_json(path, document)
    except OSError as error:
        raise RlhfError(
            f"{path} cannot be written: {error.strerror}; name another file with --output"
        ) from error
