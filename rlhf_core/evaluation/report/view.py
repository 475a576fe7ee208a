"""Turns what was read into what the template shows: verdict, tiles, tables, charts, replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from rlhf_core.config.health.default_rules import DEFAULT_RULES
from rlhf_core.evaluation.report.charts import interval_chart
from rlhf_core.evaluation.report.curves import draw
from rlhf_core.evaluation.report.sources import Sources, shut_gate

SIDE_FIGURES = (
    ("gold", "Gold score"), ("reward", "Reward model's score"), ("referee", "Referee's score"),
    ("length", "Reply length, tokens"), ("repetition", "Repeated trigrams"), ("missing_eos", "Missing end"),
    ("special_tokens", "Special tokens inside"),
    ("short_replies", "Very short replies"), ("distinct_2", "Distinct bigrams"),
    ("perplexity_reference", "Perplexity under SFT"), ("regression", "Regression set passed"),
)  # fmt: skip
JUDGES = ("gold", "referee", "reward")


def build(found: Sources, title: str, replies: int) -> dict[str, Any]:
    """The template's context."""
    evaluation = found.metrics.get("evaluation", {})
    comparisons = _comparisons(evaluation)
    return {
        "title": title,
        "verdict": verdict(found),
        "tiles": tiles(found),
        "gates": list(reversed(found.gates.values())),  # the policy first: it is what the reader came for
        "sides": sides(evaluation),
        "comparisons": comparisons,
        "comparison_chart": _comparison_chart(comparisons),
        "categories": evaluation.get("category", {}),
        "regression": _regression(evaluation),
        "findings": findings(found),
        "curves": draw(found.histories),
        "images": found.images,
        "replies": [reply(row) for row in pick(found.comparisons, replies)],
        "bad_cases": [reply(row) for row in found.bad_cases],
        "tables": {name: flatten(found.metrics[name]) for name in found.metrics if name not in ("evaluation", "data")},
        "data": data_table(found.metrics.get("data", {})),
        "params": found.params,
        "hashes": found.hashes,
        "missing": found.missing,
    }


def verdict(found: Sources) -> dict[str, str]:
    """One line on how the run ended: ``state`` is good, bad or open."""
    shut = shut_gate(found)
    if shut:
        failed = [c["metric"] for c in found.gates[shut].get("conditions", []) if not c.get("passed")]
        return {"state": "bad", "text": f"Stopped at the {shut} gate: {', '.join(failed)}"}
    last = found.gates.get("policy")
    if last is None:
        return {"state": "open", "text": "Not finished: the policy gate has not been reached"}
    if last.get("passed"):
        return {"state": "good", "text": "The policy passed its gate"}
    return {"state": "open", "text": "The policy did not meet its gate; decisions are recorded, not enforced"}


def tiles(found: Sources) -> list[dict[str, str]]:
    """The few figures that matter most, those that exist."""
    evaluation, ppo, reward = (found.metrics.get(name, {}) for name in ("evaluation", "ppo", "reward"))
    shown = []
    for judge, values in evaluation.get("comparison", {}).items():
        if judge != "reward":
            low, high = number(values.get("win_rate_low95"), 2), number(values.get("win_rate_high95"), 2)
            shown.append(_tile(f"win rate by {judge}", values.get("win_rate"), f"95 %: {low} to {high}"))
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    if "gold" in policy:
        shown.append(_tile("gold score", policy["gold"], f"SFT {number(sft.get('gold'), 2)}"))
    if "kl" in evaluation:
        shown.append(_tile("KL, nats per sequence", evaluation["kl"], "unfiltered samples"))
    if "accuracy" in reward:
        shown.append(_tile("reward model accuracy", reward["accuracy"], "held-out pairs"))
    selected = next((ppo[k] for k in ("selected_iteration", "selected") if isinstance(ppo.get(k), int | float)), None)
    if selected is not None:
        shown.append(_tile("selected iteration", int(selected), str(ppo.get("selection_reason", ""))))
    return shown


def _tile(label: str, value: Any, note: str) -> dict[str, str]:
    return {"label": label, "value": number(value, 2), "note": note}


def sides(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the SFT against policy table."""
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    return [
        {"label": label, "sft": sft[key], "policy": policy[key], "change": policy[key] - sft[key]}
        for key, label in SIDE_FIGURES
        if key in sft and key in policy
    ]


def _comparisons(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    given = evaluation.get("comparison", {})
    return {judge: given[judge] for judge in sorted(given, key=lambda j: JUDGES.index(j) if j in JUDGES else 9)}


def _comparison_chart(comparisons: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    rows = [
        (judge, float(c["win_rate_low95"]), float(c["win_rate"]), float(c["win_rate_high95"]))
        for judge, c in comparisons.items()
    ]
    return interval_chart(rows, 0.5, "win rate of the policy against SFT, with 95 % intervals") if rows else None


def _regression(evaluation: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    policy, sft = evaluation.get("regression", {}), evaluation.get("regression_sft", {})
    return [(name.replace("_", " "), sft.get(name), policy[name]) for name in policy if name != "prompts"]


def findings(found: Sources) -> list[dict[str, Any]]:
    """Findings of the health monitor in PPO's history, one per rule with its first iteration, ``last`` and ``times``;
    each rollback is one of its own, with what was ``returned`` to. Those that stopped the run come first. A finding is
    whole, or a rule's name, which the rule book explains."""
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    shown: dict[Any, dict[str, Any]] = {}
    for place, row in enumerate(found.histories.get("ppo", []), start=1):
        iteration = row.get("iteration", place)
        for record in row.get("rollbacks") or []:
            once = {"iteration": record["from"], "last": record["from"], "times": 1, "returned": _returned(record)}
            shown["rollback", len(shown)] = record["finding"] | once
        for finding in row.get("findings") or []:
            if isinstance(finding, str):
                if finding not in rules:
                    continue
                finding = asdict(rules[finding]) | {"rule": finding, "evidence": ()}
            start = {"iteration": iteration, "times": 0, "returned": ""}
            first = shown.setdefault(finding["rule"], finding | start)
            first.update(last=iteration, times=first["times"] + 1)
    return sorted(shown.values(), key=lambda f: (f["action"] == "warn", f["iteration"]))


def _returned(record: Mapping[str, Any]) -> str:
    """``to iteration 10, with kl_coefficient × 2``."""
    factors = ", ".join(f"{name} × {factor:g}" for name, factor in sorted(record["finding"]["adjust"].items()))
    return f"to iteration {record['to']}, with {factors}"


def pick(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Rows spread over the categories: the first of each, then the second of each, and so on. Never the best ones."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("category")), []).append(row)
    ordered = [
        group[place]
        for place in range(max((len(g) for g in groups.values()), default=0))
        for _, group in sorted(groups.items())
        if place < len(group)
    ]
    return ordered[:count]


def reply(row: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt with both replies and (judge, SFT's score, policy's score) triples."""
    judges = [name for name in JUDGES if f"sft_{name}" in row and f"policy_{name}" in row]
    return {
        "category": row.get("category", ""),
        "prompt": row.get("prompt", ""),
        "sft": row.get("sft_reply", ""),
        "policy": row.get("policy_reply", ""),
        "sft_finished": row.get("sft_finished", True),
        "policy_finished": row.get("policy_finished", True),
        "scores": [(name, row[f"sft_{name}"], row[f"policy_{name}"]) for name in judges],
    }


def data_table(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by kind of data (``kinds`` as columns, ``rows`` of (figure, one value per kind)), and the ``rest``."""
    kinds = [name for name, values in metrics.items() if isinstance(values, Mapping)]
    figures = dict.fromkeys(key for kind in kinds for key in metrics[kind])
    rows = [(key.replace("_", " "), [metrics[kind].get(key) for kind in kinds]) for key in figures]
    rest = flatten({key: value for key, value in metrics.items() if key not in kinds})
    return {"kinds": kinds, "rows": rows, "rest": rest}


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of all plain values."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            rows.append((f"{prefix}{key}", value))
    return rows


def number(value: Any, digits: int = 3) -> str:
    """A number for people: ``digits`` decimals, thousands separated, whole numbers without decimals."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 2):
        return f"{int(value):,}"
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
