"""What the commands about registered models print: why a decision fell, and the history."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Column

from flows.commands.text import Row, gate_table, marked_table, plain_table
from flows.registry.client import CHAMPION, OWNER_TAG
from flows.registry.decisions import PromotionDecision, report_name
from flows.registry.history import ReleaseState, version_words
from flows.registry.promote import gate_conditions
from flows.registry.release_page import describe_tries
from flows.workspace import printed_line
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.probe_table import CAPTION, PROBED_MODELS, probe_table
from rlhf_core.gates import GATES, GateDecision, describe_bound, read_gate
from rlhf_core.storage.files import read_json


def explain_promotion(decision: PromotionDecision) -> Group:
    """Return what was compared with what, every criterion, and which of them decided."""
    against = "nothing: there was no champion"
    if decision.champion:
        against = f"version {decision.champion}, the champion"
    lines = [f"compared: version {decision.challenger} of {decision.model} with {against}"]
    if not decision.criteria:
        return Group(*lines, f"decided by: {decision.reason}")
    question = decision.question or {}
    data = f"data {str(question.get('prompts'))[:12]}"
    if "prompt_set" in question:
        data = f"set {question['prompt_set']} of {question['prompt_sets']}, {data}"
    lines.append(
        f"judged: attempt {decision.attempt} on these test prompts ({data}), "
        f"settings of section evaluate, level of the intervals 95 %"
    )
    criteria = sorted(decision.criteria, key=lambda criterion: criterion.passed)
    rows = ((of.passed, of.name, of.measured, of.required) for of in criteria)
    table = marked_table(["criterion", "measured", "required"], rows)
    unmet = [criterion.name for criterion in decision.criteria if not criterion.passed]
    decided = ", ".join(unmet) or f"all {len(decision.criteria)} criteria hold"
    if decision.forced:
        decided = f"force ({decision.forced}); without it: {decided}"
    return Group(*lines, table, f"decided by: {decided}")


def judged_gate(workspace: Path, name: str) -> GateDecision:
    """Read ``gates/NAME.json``.

    Raises:
        RlhfError: There is no such gate, or it has not been decided yet.
    """
    if name not in GATES:
        raise RlhfError(f"there is no gate '{name}'; the gates are {', '.join(GATES)}")
    gate = read_gate(workspace, name)
    if gate is None:
        raise RlhfError(
            f"gates/{name}.json does not exist: the {name} gate has not judged this workspace; `rlhf run`"
        )
    return gate


def explain_gate(workspace: Path, gate: GateDecision) -> Group:
    """Return every condition of a gate, which of them decided, and what they were read from."""
    decided = ", ".join(condition.metric for condition in gate.failed) or "all conditions hold"
    lines = [f"decided by: {decided}"]
    changed = gate.changed_evidence(workspace)
    for name, judged in gate.evidence.items():
        state = "unchanged since"
        if name in changed:
            state = "changed since: run `rlhf run` to judge it anew"
        lines.append(f"read from {name} (sha256 {judged[:12]}, {state})")
    if gate.name == "policy" and (tries := describe_tries(workspace)):
        lines.append(f"tries: {tries}")
    probes = probe_lines(workspace) if gate.name == "reward" else []
    return Group(gate_table(gate, every_reason=True), *lines, *probes)


def probe_lines(workspace: Path) -> list[RenderableType]:
    """Return how often the reward models score a reply above a worse copy of it, if known."""
    metrics = {}
    for name in PROBED_MODELS:
        path = workspace / "metrics" / f"{name}.json"
        if path.is_file():
            metrics[name] = read_json(path)
    probes = probe_table(metrics)
    if probes is None:
        return []
    if not probes.rows:
        return [*probes.notes]
    first, *others = probes.header
    table = plain_table([first, *(Column(name, justify="right") for name in others)])
    for row in probes.rows:
        table.add_row(*row)
    return [f"{CAPTION}:", table, *probes.notes]


def history_rows(state: ReleaseState) -> list[Row]:
    """Say who changed what, when, why and by which report, and where something else did."""
    rows: list[Row] = []
    for entry in state.entries:
        moves = []
        for of in entry["moves"]:
            model = "" if of["model"] == state.name else f"{of['model']} "
            moves.append(f"{model}@{of['alias']} → {of['version'] or 'none'}")
        about = ", ".join(moves)
        if not moves:
            about = f"version {entry['decided_on']}" if entry["decided_on"] else "versions"
        when = str(entry["time"])[:19].replace("T", " ")
        who = printed_line(str(entry["who"] or "unknown"))
        rows.append((str(entry["number"]), f"{when} UTC  {who}  {entry['action']}: {about}"))
        rows.append(("", f"why: {printed_line(str(entry['reason']))}"))
        if entry["decision"]:
            report = report_name(entry["decision"], entry["id"])
            attached = f"attached to the run that registered version {entry['decided_on']}"
            rows.append(("", f"evidence: {report}, {attached}"))
    if state.recorded_champion != state.champion:
        moved = (
            f"the champion is {version_words(state.champion)}, but the history ends with "
            f"{version_words(state.recorded_champion)}: @{CHAMPION} was moved by something else than rlhf"
        )
        rows.append((None, moved))
    return rows


def model_history(workspace: Path, model: str | None = None) -> ReleaseState:
    """Read a registered model with its history, by default the policy of ``workspace``.

    Raises:
        RlhfError: The model is unknown, or its history cannot be read.
    """
    state = ReleaseState.of(workspace, model or "")
    if not state.entries:
        raise RlhfError(
            f"{state.name} has no history yet; it begins with the first version that becomes challenger"
        )
    return state


def describe_terms(workspace: Path) -> str:
    """Say who owns the registered policy, and what a promotion by ``workspace`` requires."""
    workspace = workspace.resolve()
    state = ReleaseState.of(workspace)
    config = state.config
    if state.model is None or OWNER_TAG not in state.model.tags:
        owner = "nobody yet: whoever promotes first"
    else:
        owner = state.other_owner or "this workspace"
    lines = [
        f"{config.policy}, owned by {owner}",
        f"every judge's lower 95 % bound of the win rate above {config.promote_win_rate_low95:g}, "
        "as it is and at equal lengths",
        f"error budget {config.error_budget:g} over all attempts on the same prompts",
    ]
    margins = config.non_inferiority.model_dump(
        exclude={"min_refusals", "min_category_prompts"}, exclude_none=True
    )
    held = ", ".join(f"{name} {margin:g}" for name, margin in margins.items())
    lines += [f"worse than the champion by less than: {held}"] if held else []
    lines += ["a person approves each promotion (`rlhf approve`)"] if config.approval else []
    for name, conditions in gate_conditions(workspace).items():
        bounds = [f"{condition.metric} {describe_bound(condition)}" for condition in conditions]
        lines += [f"gates.{name}: {', '.join(bounds)}"] if bounds else []
    return "\n".join(lines)
