"""``rlhf compare``: results of finished runs side by side, and whether they compare."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from flows.commands.text import format_seconds, plain_table
from flows.dvc_repo.graph import RecordedStage, recorded_stages
from flows.registry.register import RegisteredHere, read_registered
from flows.workspace import display_path, is_workspace
from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import PARAMS_FILE
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import JUDGE, last_word
from rlhf_core.evaluation.verdict import EVEN_WIN_RATE, percent
from rlhf_core.gates import read_gate
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


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, where that was measured."""

    value: float
    low95: float | None = None
    high95: float | None = None


@dataclass(frozen=True)
class TrainingCost:
    """What training cost by the histories of its stages; None is what they do not say.

    Attributes:
        seconds: Those of the training loops by stage: without start-up, loading and saving.
        trained_tokens: Those that supervised steps of the policy were made on, padding not counted.
    """

    seconds: Mapping[str, float]
    sampled_tokens: int | None = None
    trained_tokens: int | None = None
    total_seconds: float | None = None


@dataclass(frozen=True)
class GateStanding:
    """What ``gates/policy.json`` says of the evaluation that lies beside it.

    Attributes:
        failed: The metrics of the conditions that do not hold.
        found: These conditions in words.
    """

    decision: str
    failed: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunResults:
    """One way to better replies than SFT's, as its workspace evaluated it.

    None is what was not measured.

    Attributes:
        prompts: How many the judge of ``win_rate`` and ``lc_win_rate`` compared replies to.
        clusters: The different questions among them.
        judge_score: The mean score by that judge.
        kl_is_bound: ``kl`` is an upper bound, not an estimate.
        perplexity_tax: Perplexity of held-out text over SFT's, minus one, by kind of text.
    """

    workspace: str
    method: str
    prompts: int
    clusters: int
    win_rate: Estimate | None
    lc_win_rate: Estimate | None
    gold: float | None
    sft_gold: float | None
    gold_win_rate: Estimate | None
    llm_win_rate: Estimate | None
    llm_order_disagreement: float | None
    judge_score: float | None
    reward: float | None
    length: float | None
    sft_length: float | None
    kl: Estimate | None
    cost: TrainingCost
    kl_is_bound: bool = False
    perplexity_tax: Mapping[str, float] = field(default_factory=dict)
    sampled_tokens_per_reply: float | None = None
    gate: GateStanding | None = None
    registered: RegisteredHere | None = None


@dataclass(frozen=True)
class EvaluatedWorkspace:
    """An evaluated workspace: its results, and what dvc.lock records of its stages."""

    name: str
    results: tuple[RunResults, ...]
    stages: Mapping[str, RecordedStage]
    folder: Path


@dataclass(frozen=True)
class RunComparison:
    """Everything that is known of some runs, which table and JSON both show.

    Attributes:
        settings: The parameters that differ: by name, the value in each workspace.
        warnings: Why the runs may not compare.
    """

    settings: Mapping[str, Mapping[str, str]]
    runs: Sequence[RunResults]
    warnings: Sequence[str] = ()

    @classmethod
    def of(cls, workspaces: Sequence[EvaluatedWorkspace]) -> RunComparison:
        """Compare the results of workspaces that were read."""
        runs: list[RunResults] = []
        for workspace in workspaces:
            runs += workspace.results
        settings = differing_settings(workspaces)
        return cls(settings, runs, comparability_warnings(workspaces))

    def as_dict(self) -> dict[str, Any]:
        """Return the same for a program."""
        document = asdict(self)
        for run in document["runs"]:
            if run["registered"] is not None:
                del run["registered"]["reused"]  # it is of a registration, not of a version
        return document


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
    results = [_policy_results(folder, evaluation, stages, histories)]
    best = evaluation.get("best_of_n")
    if best is not None and JUDGE in best.get("comparison", {}):
        # No policy is trained, but the reward model that chooses.
        seconds = _seconds(histories["reward"])
        of_stage = {} if seconds is None else {"reward": seconds}
        cost = TrainingCost(of_stage, total_seconds=seconds)
        sft, kl = evaluation.get("sft", {}), Estimate(best["kl_bound"])
        measured = _results(name, f"best of {best['n']}", best, best["comparison"], sft, kl, cost)
        tokens = best["sampled_tokens_per_reply"]
        results.append(replace(measured, kl_is_bound=True, sampled_tokens_per_reply=tokens))
    return EvaluatedWorkspace(name, tuple(results), stages, folder)


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
    perplexity_tax = {}
    for kind in ("preferred", "pretrain"):
        name = f"perplexity_{kind}"
        if policy.get(name) is not None and sft.get(name):
            perplexity_tax[kind] = policy[name] / sft[name] - 1.0
    measured = _results(
        display_path(folder),
        method_name,
        policy,
        evaluation["comparison"],
        sft,
        _estimate(evaluation, "kl"),
        _training_cost(histories, method, ppo),
    )
    return replace(
        measured,
        perplexity_tax=perplexity_tax,
        gate=gate_standing(folder),
        registered=read_registered(folder, POLICY),
    )


def _results(
    workspace: str,
    method: str,
    model: Values,
    comparison: Mapping[str, Values],
    sft: Values,
    kl: Estimate | None,
    cost: TrainingCost,
) -> RunResults:
    """What judges and scorers say of the replies of one model, beside SFT's."""
    judge = last_word(comparison)
    judged, by_llm = comparison[judge], comparison.get("llm", {})
    return RunResults(
        workspace=workspace,
        method=method,
        prompts=judged["prompts"],
        clusters=judged["clusters"],
        win_rate=_estimate(judged, "win_rate"),
        lc_win_rate=_estimate(judged, "lc_win_rate"),
        gold=model.get("gold"),
        sft_gold=sft.get("gold"),
        gold_win_rate=_estimate(comparison.get("gold", {}), "win_rate"),
        llm_win_rate=_estimate(by_llm, "win_rate"),
        llm_order_disagreement=by_llm.get("order_disagreement"),
        judge_score=model.get(judge),
        reward=model.get("reward"),
        length=model.get("length"),
        sft_length=sft.get("length"),
        kl=kl,
        cost=cost,
    )


def _estimate(values: Values, name: str) -> Estimate | None:
    if values.get(name) is None:
        return None
    return Estimate(values[name], values.get(f"{name}_low95"), values.get(f"{name}_high95"))


def _training_cost(
    histories: Mapping[str, Sequence[Values]], method: Method, ppo: Values
) -> TrainingCost:
    """Return what training cost, by the histories of the stages that ``method`` needs."""
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
    return TrainingCost(
        seconds,
        sampled_tokens(rows, method, ppo),
        max(trained, default=None),
        sum(seconds.values()) if "policy" in seconds else None,
    )


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


def gate_standing(folder: Path) -> GateStanding:
    """Read what the policy gate of a workspace says of its evaluation."""
    gate = read_gate(folder, "policy")
    if gate is None:
        return GateStanding("not judged")
    if str(EVALUATION) not in gate.evidence or str(EVALUATION) in gate.changed_evidence(folder):
        return GateStanding("outdated")
    metrics = tuple(condition.metric for condition in gate.failed)
    return GateStanding(gate.verdict, metrics, tuple(map(str, gate.failed)))


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
GOLD_NOTE = "gold: the true preference of the synthetic world, which no training sees"
PERPLEXITY_NOTE = (
    "perplexity: its change from SFT; of plain text it falls where PPO also trains on such text "
    "(ppo.ptx)"
)


def results_table(comparison: RunComparison, width: int) -> Group:
    """Return a table, or several where ``width`` columns do not hold all runs."""
    runs, parts = comparison.runs, list[RenderableType]()
    at_once = max(1, (width - LABEL_WIDTH) // (RUN_WIDTH + GAP))
    for at in range(0, len(runs), at_once):
        parts.append(_block(runs[at : at + at_once], comparison.settings, width))
    if any(run.gold is not None for run in runs):
        parts.append(Text(GOLD_NOTE, style="dim"))
    if any(run.perplexity_tax for run in runs):
        parts.append(Text(PERPLEXITY_NOTE, style="dim"))
    return Group(*parts)


def _block(
    runs: Sequence[RunResults], settings: Mapping[str, Mapping[str, str]], width: int
) -> Table:
    room = max(RUN_WIDTH, (width - LABEL_WIDTH) // len(runs) - GAP)
    columns = [Column("", max_width=LABEL_WIDTH - GAP, style="dim", overflow="fold")]
    for run in runs:
        columns.append(Column(run.workspace, max_width=room, overflow="fold"))
    table = plain_table(columns)
    for name, of_runs in settings.items():
        values = []
        for run in runs:
            text = of_runs[run.workspace]
            values.append(text if len(text) <= SETTING else f"{text[:SETTING]} …")
        table.add_row(_broken(name), *values, style="cyan")
    columns_of_cells = [_cells(run) for run in runs]
    for label in columns_of_cells[0]:
        texts = [cells[label] for cells in columns_of_cells]
        if any(text is not None for text in texts):
            table.add_row(label, *(MISSING if text is None else text for text in texts))
    return table


def _cells(run: RunResults) -> dict[str, str | None]:
    """The column of one run: by the label of its row the text, None for what was not measured."""
    cost, tax = run.cost, run.perplexity_tax
    kl = gate = registered = None
    if run.kl is not None:
        kl = f"≤ {run.kl.value:z.2f}" if run.kl_is_bound else f"{run.kl.value:z.2f}"
    if run.gate is not None:
        gate = "\n".join((run.gate.decision, *run.gate.found))
    if run.registered is not None:
        registered = f"{run.registered.model} {run.registered.version}"
        registered += " (ungated)" if run.registered.ungated else ""
    return {
        "method": run.method,
        "prompts / questions": f"{run.prompts} / {run.clusters}",
        "win rate": _percent(run.win_rate),
        "at equal length": _percent(run.lc_win_rate),
        "win rate, gold": _percent(run.gold_win_rate),
        "win rate, LLM judge": _percent(run.llm_win_rate),
        "LLM judge, by order": _number(run.llm_order_disagreement, ".0%"),
        "gold score": _number(run.gold, "z.3f"),
        "gold score of SFT": _number(run.sft_gold, "z.3f"),
        "judge's score": _number(run.judge_score, "z.3f"),
        "reward": _number(run.reward, "z.3f"),
        "KL, nats per reply": kl,
        "perplexity, preferred": _number(tax.get("preferred"), "+z.1%"),
        "perplexity, plain text": _number(tax.get("pretrain"), "+z.1%"),
        "length, tokens": _number(run.length, ".1f"),
        "length of SFT": _number(run.sft_length, ".1f"),
        "training time": _time(cost.total_seconds),
        "  of policy": _time(cost.seconds.get("policy")),
        "  of critic": _time(cost.seconds.get("critic")),
        "  of reward": _time(cost.seconds.get("reward")),
        "  of referee": _time(cost.seconds.get("referee")),
        "tokens sampled": _number(cost.sampled_tokens, ","),
        "tokens trained on": _number(cost.trained_tokens, ","),
        "tokens per reply": _number(run.sampled_tokens_per_reply, ".0f"),
        "policy gate": gate,
        "registered": registered,
    }


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_seconds(seconds)


def _percent(share: Estimate | None) -> str | None:
    if share is None:
        return None
    rate = f"{percent(share.value, EVEN_WIN_RATE)}%"
    if share.low95 is None or share.high95 is None:
        return rate
    low, high = percent(share.low95, EVEN_WIN_RATE), percent(share.high95, EVEN_WIN_RATE)
    return f"{rate}\n{low}%–{high}%"


def _broken(name: str) -> str:
    """A setting's name with line breaks behind dots and underscores, as its column needs them."""
    lines = [""]
    for part in re.findall(r"[^._]*[._]?", name):
        if len(lines[-1] + part) > LABEL_WIDTH - GAP:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def write_results(path: Path, document: Values) -> None:
    """Write what ``--json`` prints to a file.

    Raises:
        RlhfError: The file cannot be written.
    """
    try:
        atomic_write_json(path, document)
    except OSError as error:
        raise RlhfError(
            f"{path} cannot be written: {error.strerror}; name another file with --output"
        ) from error
