"""The report as one HTML file that needs nothing else: what its template shows, and the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.config import yaml_text
from rlhf_core.config.base import SCRATCH
from rlhf_core.config.gates import CHECKER
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.data.text import language_tag
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.figures import format_interval, format_number
from rlhf_core.evaluation.judges.names import GOLD, final_judges
from rlhf_core.evaluation.probe_table import CAPTION, probe_table
from rlhf_core.evaluation.remedies import remedy_for
from rlhf_core.evaluation.report.charts import (
    draw_charts,
    interval_chart,
    outcome_chart,
    over_optimization_chart,
    reward_histograms,
)
from rlhf_core.evaluation.report.headline import (
    BEGIN,
    END,
    ReleaseDecision,
    conclude,
    sentence_case,
)
from rlhf_core.evaluation.report.metrics import labelled
from rlhf_core.evaluation.report.sources import JsonObject, ReportSources, package_versions
from rlhf_core.evaluation.verdict import alarms, judge_result
from rlhf_core.gates import GateDecision
from rlhf_core.storage.files import flatten as dotted

COMMIT = 12  # characters of it that are shown


def build_context(sources: ReportSources, title: str, replies: int) -> dict[str, Any]:
    """Return the template's context; ``replies`` is how many pairs of replies are shown."""
    evaluation = sources.metrics.get("evaluation", {})
    history = sources.histories.get("ppo", [])
    fired = findings(history)
    fired_at = sorted({float(entry["iteration"]) for entry in fired})
    # PPO's own metrics name no method.
    method: Method = sources.metrics.get("ppo", {}).get("method", "ppo")
    last_iteration = history[-1] if history else {}
    comparisons = dict(_best_judge_first(evaluation.get("comparison", {})))
    comparison_chart = None
    if intervals := measured_intervals(comparisons):
        title_of_chart = "win rate of the policy against SFT, with 95 % intervals"
        comparison_chart = interval_chart(intervals, 0.5, title_of_chart)
    categories: dict[str, JsonObject] = {}
    category_metrics: dict[str, None] = {}
    for name, row in evaluation.get("category", {}).items():
        categories[name] = {key: value for key, value in row.items() if key != "comparison"}
        category_metrics |= dict.fromkeys(categories[name])
    answered = []
    for name, label in (("sft", "SFT"), ("policy", "policy")):
        if "multiple_choice" in evaluation.get(name, {}):
            answered.append((label, evaluation[name]["multiple_choice"]))
    mistakes = []
    for row in sources.mistakes:
        chosen = row.get("chosen", "")
        rejected = row.get("rejected", "")
        mistakes.append(row | _marked("chosen", chosen, "rejected", rejected))
    shown = spread_over_categories(sources.comparisons, replies)
    bad_cases_by = ""
    if sources.bad_cases:
        bad_cases_by = sources.bad_cases[0]["judge"]
    tables = {}
    for name, metrics in sources.metrics.items():
        if name not in ("evaluation", "data"):
            tables[name] = flatten(metrics)
    return {
        "title": title,
        "about": about(sources),
        "conclusion": conclude(sources.gates, evaluation),
        "tiles": tiles(sources.metrics),
        # The policy's gate comes first: it is what the reader looks for.
        "gates": [*reversed(sources.gates.values())],
        "learns_plain_text": "ptx_loss" in last_iteration,
        "sides": sft_beside_policy(evaluation, sources.gates.get("policy")),
        "comparisons": comparisons,
        "comparison_chart": comparison_chart,
        "categories": categories,
        "category_metrics": list(category_metrics),
        "category_charts": category_charts(evaluation.get("category", {})),
        "group_chart": group_chart(evaluation.get("group", {})),
        "opponents": opponent_charts(evaluation.get("opponents", {})),
        "over_optimization": over_optimization_chart(history, evaluation, sources.comparisons),
        "best_of_n": evaluation.get("best_of_n", {}),
        "method": METHOD_NAMES[method],
        "regression": _regression(evaluation),
        "verifiable": _verifiable(evaluation.get("verifiable")),
        "multiple_choice": evaluation.get("multiple_choice", {}),
        "answered": answered,
        "findings": fired,
        "curves": draw_charts(sources.histories, fired_at),
        "reward_histograms": reward_histograms(history),
        "probes": probe_table(sources.metrics),
        "probes_caption": CAPTION,
        "mistakes": mistakes,
        "replies": list(map(reply_pair, shown)),
        "versions": package_versions(),
        "bad_cases": list(map(reply_pair, sources.bad_cases)),
        "bad_cases_by": bad_cases_by,
        "tables": tables,
        "data": data_table(sources.metrics.get("data", {})),
        "images": sources.images,
        "data_card": sources.data_card,
        "params": sources.params,
        "hashes": sources.hashes,
        "lineage": sources.lineage,
        "missing": sources.missing,
    }


def _regression(evaluation: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, SFT's share, the policy's share) of the fixed prompts, the lowest first."""
    passed_by_sft = evaluation.get("regression_sft", {})
    rows = []
    for name, share in evaluation.get("regression", {}).items():
        if name != "prompts":
            rows.append((name.replace("_", " "), passed_by_sft.get(name), share))
    return sorted(rows, key=itemgetter(2))


def about(sources: ReportSources) -> list[str]:
    """Say which data, base model, profile and code the run was made of."""
    try:
        params = yaml_text.plain(yaml_text.parse(sources.params, "params.yaml"))
    except RlhfError:
        params = None
    settings = dotted(params or {})
    kind = "preferences"
    counted = "training pairs"
    if settings.get("collect.pairs") is False:
        kind = "prompts"
        counted = "training prompts"
    collected = settings.get("collect.source")
    if collected == "world":
        data = "the synthetic world"
    else:
        files = settings.get(f"collect.files.{kind}") or ["files"]
        data = ", ".join(map(str, files))
    of_kind = sources.metrics.get("data", {}).get(kind, {})
    rows = of_kind.get("train")
    if rows is not None:
        data += f", {format_number(whole(rows))} {counted}"
    base = settings.get("base.source")
    if base == SCRATCH:
        base = "made from nothing"
    profile = settings.get("profile")
    if profile == "smoke":
        profile = "smoke, a toy that tries every step"
    commit, mark, rest = sources.lineage.get("git_revision", "").partition("-")
    known = {
        "data": collected and data,
        "base model": base,
        "profile": profile,
        "commit": commit[:COMMIT] + mark + rest,
    }
    return [f"{name}: {value}" for name, value in known.items() if value]


def measured_intervals(
    comparisons: Mapping[str, JsonObject],
) -> list[tuple[str, float, float, float]]:
    """Return (judge, lower bound, win rate, upper bound) of comparisons with finite numbers."""
    intervals = []
    for judge, compared in comparisons.items():
        if result := judge_result(judge, compared):
            intervals.append((judge, result.low95, result.win_rate, result.high95))
    return intervals


def whole(value: Any) -> Any:
    """Return a whole number as an integer, so that it is printed as a count; else the value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def tiles(metrics: Mapping[str, JsonObject]) -> list[dict[str, str]]:
    """Return the few metrics that matter most, as far as they exist, for the top of the page.

    Returns:
        ``label``, ``value`` and ``note`` of each.
    """
    evaluation = metrics.get("evaluation", {})
    ppo = metrics.get("ppo", {})
    reward = metrics.get("reward", {})
    shown: list[dict[str, str]] = []

    def show(label: str, value: Any, note: str = "") -> None:
        number = format_number(value, 2)
        shown.append({"label": label, "value": number, "note": note})

    comparisons = evaluation.get("comparison", {})
    for judge in final_judges(comparisons):
        result = judge_result(judge, comparisons[judge])
        if result is None:
            show(f"win rate by {judge}", None, "not measured")
            continue
        note = f"95 %: {format_interval(result.low95, result.high95)}"
        if result.lc_win_rate is not None:
            note += f"; {format_number(result.lc_win_rate, 2)} at equal length"
        show(f"win rate by {judge}", result.win_rate, note)
    labels = labelled()
    sft = evaluation.get("sft", {})
    policy = evaluation.get("policy", {})
    for judge in (GOLD, CHECKER):
        if judge in policy:
            of_sft = format_number(sft.get(judge), 2)
            show(labels[judge].label, policy[judge], f"SFT {of_sft}")
    if "kl" in evaluation:
        show(labels["kl"].label, evaluation["kl"], "unfiltered samples")
    if "test_accuracy" in reward:
        note = f"{whole(reward.get('test_pairs'))} test pairs"
        balanced = reward.get("test_accuracy_length_balanced")
        if balanced is not None:
            count = whole(reward.get("test_length_balanced_pairs"))
            note += f"; {format_number(balanced, 2)} on {count} length-balanced ones"
        show(labels["accuracy"].label, reward["test_accuracy"], note)
    if "selected_iteration" in ppo:
        show(labels["selected_iteration"].label, ppo["selected_iteration"])
    return shown


# Conditions on a paired difference whose name differs from that of the metric of each model.
PAIRED_CONDITIONS = {"missing_ends": "missing_eos", "regression.passed": "regression"}


def sft_beside_policy(evaluation: Mapping[str, Any], gate: GateDecision | None) -> list[JsonObject]:
    """Return the rows that compare SFT and policy, the most urgent first.

    Those that fail the policy gate come first, then alarms, then the others. ``gate`` of a row is
    ``ok`` or ``fails`` where the policy gate looks at it, else empty.
    """
    alarming = {alarm.metric for alarm in alarms(evaluation)}
    sft = dict(flatten(evaluation.get("sft", {})))
    policy = dict(flatten(evaluation.get("policy", {})))
    decided: dict[str, str] = {}
    conditions = gate.conditions if gate is not None else ()
    for condition in conditions:
        name = condition.metric.removeprefix("policy.")
        key = PAIRED_CONDITIONS.get(name, name)
        if decided.get(key) != "fails":
            decided[key] = "ok" if condition.passed else "fails"
    rows: list[JsonObject] = []
    for key, metric in labelled().items():
        before = sft.get(key)
        after = policy.get(key)
        if before is None or after is None:
            continue
        row = {
            "label": sentence_case(metric.label),
            "sft": before,
            "policy": after,
            "change": after - before,
            "gate": decided.get(key, ""),
            "alarming": key in alarming,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["gate"] != "fails", not row["alarming"]))


def category_charts(categories: Mapping[str, JsonObject]) -> list[tuple[str, Markup]]:
    """Return (judge, chart) by category, the worst first, for each judge that decides."""
    by_judge: dict[str, list[tuple[str, JsonObject]]] = {}
    for name, values in categories.items():
        for judge, row in values.get("comparison", {}).items():
            if judge_result(judge, row) is not None:
                by_judge.setdefault(judge, []).append((name, row))
    charts = []
    for judge in final_judges(by_judge):
        rows = sorted(by_judge[judge], key=lambda row: row[1]["win_rate"])
        chart = outcome_chart(rows, f"wins, ties and losses by category, by {judge}")
        charts.append((judge, chart))
    return charts


def _verifiable(measured: Mapping[str, Any] | None) -> JsonObject | None:
    """Add rows with both shares: of all prompts, then of each category and property."""
    if not measured:
        return None
    sft = dict(flatten(measured["sft"]))
    policy = dict(flatten(measured["policy"]))
    every = ("all that is required", sft.pop("passed"), policy.pop("passed"))
    rows = []
    for name, share in policy.items():
        rows.append((name.replace(".", " "), sft.get(name), share))
    rows.sort(key=itemgetter(2))
    return {**measured, "rows": [every, *rows]}


def findings(history: Sequence[JsonObject]) -> list[JsonObject]:
    """Return what the health monitor found in PPO's history; what stopped the run comes first.

    There is one finding per rule, with its first iteration, ``last`` and ``times``; each rollback
    is one of its own, with what was ``returned`` to.
    """
    entries: dict[Any, JsonObject] = {}
    for number, row in enumerate(history, start=1):
        iteration = row.get("iteration", number)
        for rollback in row.get("rollbacks") or []:
            begun = rollback["from"]
            adjusted = sorted(rollback["finding"]["adjust"].items())
            factors = ", ".join(f"{name} × {factor:g}" for name, factor in adjusted)
            entry = dict(rollback["finding"])
            entry |= {"iteration": begun, "last": begun, "times": 1}
            entry["returned"] = f"to iteration {rollback['to']}, with {factors}"
            entries["rollback", len(entries)] = entry
        for finding in row.get("findings") or []:
            first = finding | {"iteration": iteration, "times": 0, "returned": ""}
            entry = entries.setdefault(finding["rule"], first)
            entry["last"] = iteration
            entry["times"] += 1
    return sorted(
        entries.values(), key=lambda entry: (entry["action"] == "warn", entry["iteration"])
    )


def data_table(metrics: Mapping[str, Any]) -> JsonObject:
    """Return the table of metrics by kind of data, and the other metrics.

    Returns:
        ``kinds``, its columns; ``rows`` of (name, value per kind); ``rest``, (name, value) pairs.
    """
    kinds = [name for name, values in metrics.items() if isinstance(values, Mapping)]
    names: dict[str, None] = {}
    for kind in kinds:
        names |= dict.fromkeys(metrics[kind])
    rows = []
    for name in names:
        values = [whole(metrics[kind].get(name)) for kind in kinds]
        rows.append((name.replace("_", " "), values))
    rest = flatten({name: value for name, value in metrics.items() if name not in kinds})
    return {"kinds": kinds, "rows": rows, "rest": rest}


def flatten(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (dotted name, value) of all plain values; lists are left out."""
    plain = []
    for name, value in dotted(values).items():
        if not isinstance(value, list):
            plain.append((name, whole(value)))
    return plain


JUDGES = ("gold", "llm", "checker", "judge", "referee", "reward")
LLM_VERDICTS = {1.0: "the policy's reply is better", 0.5: "a tie", 0.0: "SFT's reply is better"}
WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def spread_over_categories(rows: Sequence[JsonObject], count: int) -> list[JsonObject]:
    """Choose ``count`` rows: the first of each category, then the second of each, and so on.

    Nothing is chosen by its scores.
    """
    groups: dict[str, list[JsonObject]] = {}
    for row in rows:
        groups.setdefault(str(row.get("category")), []).append(row)
    in_order = [groups[category] for category in sorted(groups)]
    ordered: list[JsonObject] = []
    for rows_of_rank in zip_longest(*in_order):
        ordered += [row for row in rows_of_rank if row is not None]
    return ordered[:count]


def reply_pair(row: Mapping[str, Any]) -> JsonObject:
    """Return a prompt with both replies and what the judges say of them.

    Returns:
        Among others ``scores``, (judge, SFT's score, the policy's score) triples, and ``winner``,
        ``policy``, ``sft`` or ``tie`` by the best judge with scores: the sign of the difference
        alone decides. ``winner`` is empty without scores.
    """
    scores: list[tuple[str, float, float]] = []
    for name in JUDGES:
        if f"sft_{name}" in row and f"policy_{name}" in row:
            scores.append((name, row[f"sft_{name}"], row[f"policy_{name}"]))
    winner = ""
    if scores:
        _, before, after = scores[0]
        winner = "tie"
        if after > before:
            winner = "policy"
        elif after < before:
            winner = "sft"
    llm = ""
    # The LLM judge was asked about the first reply to each prompt alone: only there is a reason,
    # which may be empty.
    if row.get("llm_reason") is not None:
        llm = LLM_VERDICTS.get(row["llm_outcome"], "no usable answer")
    sft = str(row.get("sft_reply", ""))
    policy = str(row.get("policy_reply", ""))
    return {
        "category": row.get("category", ""),
        "prompt": row.get("prompt", ""),
        "sft": sft,
        "policy": policy,
        **_marked("sft", sft, "policy", policy),
        "sft_finished": row.get("sft_finished", True),
        "policy_finished": row.get("policy_finished", True),
        "winner": winner,
        "scores": scores,
        "llm": llm,
        "llm_reason": row.get("llm_reason") or "",
    }


def _marked(name: str, text: Any, other_name: str, other_text: Any) -> dict[str, Markup]:
    """Return both texts, with the words marked in which they differ, under ``NAME_marked``."""
    marked, other_marked = mark_differences(str(text), str(other_text))
    return {f"{name}_marked": marked, f"{other_name}_marked": other_marked}


def mark_differences(first: str, second: str) -> tuple[Markup, Markup]:
    """Escape both texts and put ``<mark>`` around the words in which they differ."""
    words = WORDS.findall(first)
    other_words = WORDS.findall(second)
    matcher = SequenceMatcher(a=words, b=other_words, autojunk=False)

    def marked(pieces: Sequence[str], kind: str) -> str:
        text = str(escape("".join(pieces)))
        if text and kind != "equal":
            return f"<mark>{text}</mark>"
        return text

    left = right = ""
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        left += marked(words[start:end], kind)
        right += marked(other_words[other_start:other_end], kind)
    return Markup(left), Markup(right)


def group_chart(groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Markup | None:
    """Draw the policy against SFT by group and judge; None without groups."""
    rows = []
    for group, by_judge in groups.items():
        for judge, compared in _best_judge_first(by_judge):
            rows.append((f"{group}, {judge}", compared))
    if not rows:
        return None
    return outcome_chart(rows, "wins, ties and losses on helpful and harmless prompts")


def opponent_charts(opponents: Mapping[str, Mapping[str, Any]]) -> list[JsonObject]:
    """Return each opponent with a chart of both models against it, by judge and group."""
    charts = []
    for name, opponent in opponents.items():
        judges = [judge for judge, _ in _best_judge_first(opponent["policy"]["comparison"])]
        rows = []
        for judge in judges:
            for side, label in (("sft", "SFT"), ("policy", "policy")):
                parts = {"": opponent[side]["comparison"], **opponent[side]["group"]}
                for group, by_judge in parts.items():
                    if judge in by_judge:
                        words = [word for word in (label, group, judge) if word]
                        rows.append((", ".join(words), by_judge[judge]))
        chart = outcome_chart(rows, f"wins, ties and losses against {name}", name, "our side")
        counts = {key: opponent[key] for key in ("prompts", "missing", "unused")}
        charts.append({"name": name, "chart": chart, **counts})
    return charts


def _best_judge_first(by_judge: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = [judge for judge in JUDGES if judge in by_judge]
    others = [judge for judge in by_judge if judge not in JUDGES]
    return [(judge, by_judge[judge]) for judge in (*known, *others)]


PACKAGE = "rlhf_core.evaluation.report"


def render(context: Mapping[str, Any]) -> str:
    """Return the page for what :func:`build_context` returned; text is escaped."""
    style = files(PACKAGE).joinpath("style.css").read_text(encoding="utf-8")
    markers = {"release_begin": Markup(BEGIN), "release_end": Markup(END)}
    template = _environment().get_template("page.html.j2")
    return template.render(**context, **markers, style=Markup(style))


def with_release(report: str, decision: ReleaseDecision) -> str | None:
    """Return a copy of a report that says what was released; None where it has no place for it.

    Everything else stays as it was rendered, so that the copy shows what the decision was made on.
    """
    before, begin, rest = report.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return None
    release = _environment().get_template("release.html.j2").render(release=decision)
    return before + release + after


def lang_attribute(text: str) -> Markup:
    """Return the attribute ``lang`` for an element with ``text``, if its script shows it."""
    tag = language_tag(text)
    if not tag:
        return Markup()
    return Markup(' lang="{}"').format(tag)


def breakable(text: str) -> Markup:
    """Let a browser break a long name after its dots and underscores; numbers stay whole."""
    # In text that is already Markup the substitution would escape the tags that it puts in.
    escaped = str(escape(text))
    return Markup(re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", escaped))


def commands(text: str) -> Markup:
    """Show what stands between backticks as code."""
    escaped = str(escape(text))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    environment.filters["lang"] = lang_attribute
    environment.filters["breakable"] = breakable
    environment.filters["commands"] = commands
    environment.filters["sentence_case"] = sentence_case
    environment.globals["remedy"] = remedy_for
    environment.globals["ends"] = format_interval
    return environment
