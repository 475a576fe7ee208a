"""The report, one HTML file that needs nothing else: the tables and charts that its template shows,
and the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.config import yaml_text
from rlhf_core.config.base import SCRATCH
from rlhf_core.config.gates import CHECKER
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.data.text import language_tag
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.figures import format_number
from rlhf_core.evaluation.judges.names import final_judges
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
from rlhf_core.evaluation.verdict import WIN_RATE_KEYS, alarms, decided_at_equal_lengths
from rlhf_core.gates import GateDecision
from rlhf_core.storage.files import flatten as dotted

COMMIT = 12  # characters of it that are shown


def build_context(sources: ReportSources, title: str, replies: int) -> dict[str, Any]:
    """Return the template's context; ``replies`` is how many pairs of replies are shown."""
    evaluation = sources.metrics.get("evaluation", {})
    history = sources.histories.get("ppo", [])
    fired = findings(history)
    method: Method = sources.metrics.get("ppo", {}).get(
        "method", "ppo"
    )  # PPO's own metrics name none
    comparisons = dict(_best_judge_first(evaluation.get("comparison", {})))
    comparison_chart = None
    if intervals := measured_intervals(comparisons):
        title_of_chart = "win rate of the policy against SFT, with 95 % intervals"
        comparison_chart = interval_chart(intervals, 0.5, title_of_chart)
    categories: dict[str, JsonObject] = {}
    for name, row in evaluation.get("category", {}).items():
        categories[name] = {key: value for key, value in row.items() if key != "comparison"}
    passed_by_sft = evaluation.get("regression_sft", {})
    regression = []
    for name, share in evaluation.get("regression", {}).items():
        if name != "prompts":
            regression.append((name.replace("_", " "), passed_by_sft.get(name), share))
    answered = []
    for name, label in (("sft", "SFT"), ("policy", "policy")):
        if "multiple_choice" in evaluation.get(name, {}):
            answered.append((label, evaluation[name]["multiple_choice"]))
    mistakes = []
    for row in sources.mistakes:
        marked = _marked("chosen", row.get("chosen", ""), "rejected", row.get("rejected", ""))
        mistakes.append(row | marked)
    tables = {}
    for name, metrics in sources.metrics.items():
        if name not in ("evaluation", "data"):
            tables[name] = flatten(metrics)
    return {
        "title": title,
        "about": about(sources),
        "conclusion": conclude(sources.gates, evaluation),
        "tiles": tiles(sources.metrics),
        "gates": [
            *reversed(sources.gates.values())
        ],  # the policy's first: it is what the reader looks for
        "learns_plain_text": "ptx_loss" in (history[-1] if history else {}),
        "sides": sft_beside_policy(evaluation, sources.gates.get("policy")),
        "comparisons": comparisons,
        "comparison_chart": comparison_chart,
        "categories": categories,
        "category_metrics": list(dict.fromkeys(key for row in categories.values() for key in row)),
        "category_charts": category_charts(evaluation.get("category", {})),
        "group_chart": group_chart(evaluation.get("group", {})),
        "opponents": opponent_charts(evaluation.get("opponents", {})),
        "over_optimization": over_optimization_chart(history, evaluation, sources.comparisons),
        "best_of_n": evaluation.get("best_of_n", {}),
        "method": METHOD_NAMES[method],
        "regression": _lowest_first(regression),
        "verifiable": _verifiable(evaluation.get("verifiable")),
        "multiple_choice": evaluation.get("multiple_choice", {}),
        "answered": answered,
        "findings": fired,
        "curves": draw_charts(
            sources.histories, sorted({float(entry["iteration"]) for entry in fired})
        ),
        "reward_histograms": reward_histograms(history),
        "probes": probe_table(sources.metrics),
        "probes_caption": CAPTION,
        "mistakes": mistakes,
        "replies": [
            reply_pair(row) for row in spread_over_categories(sources.comparisons, replies)
        ],
        "versions": package_versions(),
        "bad_cases": [reply_pair(row) for row in sources.bad_cases],
        "bad_cases_by": next((row["judge"] for row in sources.bad_cases), ""),
        "tables": tables,
        "data": data_table(sources.metrics.get("data", {})),
        "images": sources.images,
        "data_card": sources.data_card,
        "params": sources.params,
        "hashes": sources.hashes,
        "lineage": sources.lineage,
        "missing": sources.missing,
    }


def about(sources: ReportSources) -> list[str]:
    """Say on which data, from which base model, with which profile and by which code the run was
    made.
    """
    try:
        settings = dotted(yaml_text.plain(yaml_text.parse(sources.params, "params.yaml")) or {})
    except RlhfError:
        settings = {}
    kind = "prompts" if settings.get("collect.pairs") is False else "preferences"
    collected = settings.get("collect.source")
    files = settings.get(f"collect.files.{kind}") or ["files"]
    data = "the synthetic world" if collected == "world" else ", ".join(map(str, files))
    rows = sources.metrics.get("data", {}).get(kind, {}).get("train")
    if rows is not None:
        counted = "training pairs" if kind == "preferences" else "training prompts"
        data += f", {format_number(whole(rows))} {counted}"
    base, profile = settings.get("base.source"), settings.get("profile")
    commit, mark, rest = sources.lineage.get("git_revision", "").partition("-")
    known = {
        "data": collected and data,
        "base model": "made from nothing" if base == SCRATCH else base,
        "profile": f"{profile}, a toy that tries every step" if profile == "smoke" else profile,
        "commit": commit[:COMMIT] + mark + rest,
    }
    return [f"{name}: {value}" for name, value in known.items() if value]


def measured_intervals(
    comparisons: Mapping[str, JsonObject],
) -> list[tuple[str, float, float, float]]:
    """Return (judge, lower bound, win rate, upper bound) of the comparisons whose numbers are
    finite.
    """
    intervals = []
    for judge, compared in comparisons.items():
        if None not in map(compared.get, WIN_RATE_KEYS):
            rate, low, high = (float(compared[key]) for key in WIN_RATE_KEYS)
            intervals.append((judge, low, rate, high))
    return intervals


def whole(value: Any) -> Any:
    """Return a whole number as an integer, which is printed as the count that it is, and any other
    value as it is.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tiles(metrics: Mapping[str, JsonObject]) -> list[dict[str, str]]:
    """Return the few metrics that matter most, those that exist, with ``label``, ``value`` and
    ``note``.
    """
    evaluation, ppo, reward = (metrics.get(name, {}) for name in ("evaluation", "ppo", "reward"))
    labels = {name: metric.label for name, metric in labelled().items()}
    known: list[tuple[str, Any, str]] = []
    comparisons = evaluation.get("comparison", {})
    for judge in final_judges(comparisons):
        comparison = comparisons[judge]
        low, high = (
            format_number(comparison.get(f"win_rate_{bound}95"), 2) for bound in ("low", "high")
        )
        controlled = decided_at_equal_lengths(comparison)
        beside = (
            f"; {format_number(controlled, 2)} at equal length" if controlled is not None else ""
        )
        known.append(
            (f"win rate by {judge}", comparison.get("win_rate"), f"95 %: {low} to {high}{beside}")
        )
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    if "gold" in policy:
        known.append((labels["gold"], policy["gold"], f"SFT {format_number(sft.get('gold'), 2)}"))
    if CHECKER in policy:
        known.append(
            (labels[CHECKER], policy[CHECKER], f"SFT {format_number(sft.get(CHECKER), 2)}")
        )
    if "kl" in evaluation:
        known.append((labels["kl"], evaluation["kl"], "unfiltered samples"))
    if "test_accuracy" in reward:
        balanced, count = (
            reward.get("test_accuracy_length_balanced"),
            reward.get("test_length_balanced_pairs"),
        )
        beside = (
            ""
            if balanced is None
            else f"; {format_number(balanced, 2)} on {whole(count)} length-balanced ones"
        )
        note = f"{whole(reward.get('test_pairs'))} test pairs{beside}"
        known.append((labels["accuracy"], reward["test_accuracy"], note))
    if "selected_iteration" in ppo:
        known.append((labels["selected_iteration"], ppo["selected_iteration"], ""))
    return [
        {"label": label, "value": format_number(value, 2), "note": note}
        for label, value, note in known
    ]


# Conditions on a difference between the two that are called otherwise than what is shown of each.
PAIRED_CONDITIONS = {"missing_ends": "missing_eos", "regression.passed": "regression"}


def sft_beside_policy(evaluation: Mapping[str, Any], gate: GateDecision | None) -> list[JsonObject]:
    """Return the rows that compare SFT and policy: first those that fail the policy gate, then
    alarms, then others.

    ``gate`` of a row is ``ok`` or ``fails`` where the policy gate looks at it, else empty.
    """
    alarming = {alarm.metric for alarm in alarms(evaluation)}
    sft, policy = (dict(flatten(evaluation.get(name, {}))) for name in ("sft", "policy"))
    decided: dict[str, str] = {}
    for condition in gate.conditions if gate is not None else ():
        name = condition.metric.removeprefix("policy.")
        key = PAIRED_CONDITIONS.get(name, name)
        if decided.get(key) != "fails":
            decided[key] = "ok" if condition.passed else "fails"
    rows = [
        {
            "label": metric.label[0].upper() + metric.label[1:],
            "sft": sft[key],
            "policy": policy[key],
            "change": policy[key] - sft[key],
            "gate": decided.get(key, ""),
            "alarming": key in alarming,
        }
        for key, metric in labelled().items()
        if sft.get(key) is not None and policy.get(key) is not None
    ]
    return sorted(rows, key=lambda row: (row["gate"] != "fails", not row["alarming"]))


def category_charts(categories: Mapping[str, JsonObject]) -> list[tuple[str, Markup]]:
    """Return (judge, chart) of the policy against SFT by category, its worst first, for each judge
    that decides.
    """
    compared = {name: values.get("comparison", {}) for name, values in categories.items()}
    judges = {judge for by_judge in compared.values() for judge in by_judge}
    charts = []
    for judge in final_judges(judges):
        of_judge = {
            name: by_judge[judge] for name, by_judge in compared.items() if judge in by_judge
        }
        rows = [
            (name, row) for name, row in of_judge.items() if None not in map(row.get, WIN_RATE_KEYS)
        ]
        rows.sort(key=lambda row: row[1]["win_rate"])
        if rows:
            charts.append(
                (judge, outcome_chart(rows, f"wins, ties and losses by category, by {judge}"))
            )
    return charts


def _lowest_first(rows: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """(name, SFT's share, the policy's), the policy's lowest first."""
    return sorted(rows, key=lambda row: row[2])


def _verifiable(measured: Mapping[str, Any] | None) -> JsonObject | None:
    """All prompts first, then each category and each property with both shares."""
    if not measured:
        return None
    sft, policy = (dict(flatten(measured[name])) for name in ("sft", "policy"))
    rows = _lowest_first(
        (name.replace(".", " "), sft.get(name), share) for name, share in policy.items()
    )
    every = [("all that is required", sft["passed"], policy["passed"])]
    return {**measured, "rows": every + [row for row in rows if row[0] != "passed"]}


def findings(history: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the findings of the health monitor in PPO's history; those that stopped the run come
    first.

    There is one per rule, with its first iteration, ``last`` and ``times``; each rollback is one of
    its own, with what was ``returned`` to.
    """
    entries: dict[Any, JsonObject] = {}
    for number, row in enumerate(history, start=1):
        iteration = row.get("iteration", number)
        for rollback in row.get("rollbacks") or []:
            adjusted = sorted(rollback["finding"]["adjust"].items())
            factors = ", ".join(f"{name} × {factor:g}" for name, factor in adjusted)
            returned = f"to iteration {rollback['to']}, with {factors}"
            once = {
                "iteration": rollback["from"],
                "last": rollback["from"],
                "times": 1,
                "returned": returned,
            }
            entries["rollback", len(entries)] = rollback["finding"] | once
        for finding in row.get("findings") or []:
            entry = entries.setdefault(
                finding["rule"], finding | {"iteration": iteration, "times": 0, "returned": ""}
            )
            entry.update(last=iteration, times=entry["times"] + 1)
    return sorted(
        entries.values(), key=lambda entry: (entry["action"] == "warn", entry["iteration"])
    )


def data_table(metrics: Mapping[str, Any]) -> JsonObject:
    """Return metrics by kind of data (``kinds`` as columns, ``rows`` of (name, value per kind)),
    and the ``rest``.
    """
    kinds = [name for name, values in metrics.items() if isinstance(values, Mapping)]
    names = dict.fromkeys(name for kind in kinds for name in metrics[kind])
    rows = [
        (name.replace("_", " "), [whole(metrics[kind].get(name)) for kind in kinds])
        for name in names
    ]
    rest = flatten({name: value for name, value in metrics.items() if name not in kinds})
    return {"kinds": kinds, "rows": rows, "rest": rest}


def flatten(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (dotted name, value) of all plain values; lists are left out."""
    return [
        (name, whole(value))
        for name, value in dotted(values).items()
        if not isinstance(value, list)
    ]


JUDGES = ("gold", "llm", "checker", "judge", "referee", "reward")
LLM_VERDICTS = {1.0: "the policy's reply is better", 0.5: "a tie", 0.0: "SFT's reply is better"}
WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def spread_over_categories(rows: Sequence[JsonObject], count: int) -> list[JsonObject]:
    """Choose ``count`` rows: the first of each category, then the second of each, and so on; never
    the best ones.
    """
    groups: dict[str, list[JsonObject]] = {}
    for row in rows:
        groups.setdefault(str(row.get("category")), []).append(row)
    in_order = [group for _, group in sorted(groups.items())]
    ordered = []
    for rank in range(max(map(len, in_order), default=0)):
        ordered += [group[rank] for group in in_order if rank < len(group)]
    return ordered[:count]


def reply_pair(row: Mapping[str, Any]) -> JsonObject:
    """Return a prompt with both replies, (judge, SFT's score, policy's score) triples, what the LLM
    judge said, and who wins by the best judge with scores.

    ``winner`` is ``policy``, ``sft`` or ``tie``, by the sign of the difference alone; empty without
    scores.
    """
    judges = [name for name in JUDGES if f"sft_{name}" in row and f"policy_{name}" in row]
    winner = ""
    if judges:
        gain = row[f"policy_{judges[0]}"] - row[f"sft_{judges[0]}"]
        winner = "tie"
        if gain > 0:
            winner = "policy"
        elif gain < 0:
            winner = "sft"
    sft, policy = str(row.get("sft_reply", "")), str(row.get("policy_reply", ""))
    return {
        "category": row.get("category", ""),
        "prompt": row.get("prompt", ""),
        "sft": sft,
        "policy": policy,
        **_marked("sft", sft, "policy", policy),
        "sft_finished": row.get("sft_finished", True),
        "policy_finished": row.get("policy_finished", True),
        "winner": winner,
        "scores": [(name, row[f"sft_{name}"], row[f"policy_{name}"]) for name in judges],
        # It was asked about the first reply to each prompt; only then there is a reason, which may
        # be empty.
        "llm": ""
        if row.get("llm_reason") is None
        else LLM_VERDICTS.get(row["llm_outcome"], "no usable answer"),
        "llm_reason": row.get("llm_reason") or "",
    }


def _marked(name: str, text: Any, other_name: str, other_text: Any) -> dict[str, Markup]:
    """Both texts with the words marked in which they differ, under ``NAME_marked``."""
    marked, other_marked = mark_differences(str(text), str(other_text))
    return {f"{name}_marked": marked, f"{other_name}_marked": other_marked}


def mark_differences(first: str, second: str) -> tuple[Markup, Markup]:
    """Escape both texts and put ``<mark>`` around the words that the other one does not have at
    that place.
    """
    pieces = [WORDS.findall(text) for text in (first, second)]
    marked: tuple[list[str], list[str]] = ([], [])
    for kind, *spans in SequenceMatcher(a=pieces[0], b=pieces[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((spans[:2], spans[2:])):
            text = escape("".join(pieces[side][start:end]))
            if text:
                marked[side].append(text if kind == "equal" else f"<mark>{text}</mark>")
    return Markup("".join(marked[0])), Markup("".join(marked[1]))


def group_chart(groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Markup | None:
    """Draw the policy against SFT by group and judge; None without groups."""
    rows = []
    for group, by_judge in groups.items():
        rows += [(f"{group}, {judge}", compared) for judge, compared in _best_judge_first(by_judge)]
    return (
        outcome_chart(rows, "wins, ties and losses on helpful and harmless prompts")
        if rows
        else None
    )


def opponent_charts(opponents: Mapping[str, Mapping[str, Any]]) -> list[JsonObject]:
    """Return each opponent with its chart of SFT and policy against it, by judge, in all and by
    group.
    """
    charts = []
    for name, opponent in opponents.items():
        judges = [judge for judge, _ in _best_judge_first(opponent["policy"]["comparison"])]
        rows = []
        for judge in judges:
            for side, label in (("sft", "SFT"), ("policy", "policy")):
                parts = {"": opponent[side]["comparison"], **opponent[side]["group"]}
                for group, by_judge in parts.items():
                    if judge in by_judge:
                        row_label = ", ".join(filter(None, (label, group, judge)))
                        rows.append((row_label, by_judge[judge]))
        chart = outcome_chart(rows, f"wins, ties and losses against {name}", name, "our side")
        counts = {key: opponent[key] for key in ("prompts", "missing", "unused")}
        charts.append({"name": name, "chart": chart, **counts})
    return charts


def _best_judge_first(by_judge: Mapping[str, Any]) -> list[tuple[str, Any]]:
    ranks = {judge: rank for rank, judge in enumerate(JUDGES)}
    return sorted(by_judge.items(), key=lambda row: ranks.get(row[0], len(JUDGES)))


PACKAGE = "rlhf_core.evaluation.report"


def render(context: Mapping[str, Any]) -> str:
    """Return the page for the context of :func:`~rlhf_core.evaluation.report.view.build_context`;
    text is escaped.
    """
    style = Markup(files(PACKAGE).joinpath("style.css").read_text(encoding="utf-8"))
    markers = {"release_begin": Markup(BEGIN), "release_end": Markup(END)}
    return _environment().get_template("page.html.j2").render(**context, **markers, style=style)


def with_release(report: str, decision: ReleaseDecision) -> str | None:
    """Return a copy of a report that says what was released; None where ``report`` has no place for
    it.

    Everything else stays as it was rendered, so that the copy shows what the decision was made on.
    """
    before, begin, rest = report.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return None
    return before + _environment().get_template("release.html.j2").render(release=decision) + after


def lang_attribute(text: str) -> Markup:
    """Return the attribute ``lang`` of an element that holds ``text``, where its script tells it:
    else nothing.
    """
    tag = language_tag(text)
    return Markup(' lang="{}"').format(tag) if tag else Markup()


def breakable(text: str) -> Markup:
    """Let a browser break a long name after its dots and underscores, and nowhere else; numbers
    stay whole.
    """
    # In text that is already Markup the substitution would escape the tags that it puts in.
    return Markup(re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def commands(text: str) -> Markup:
    """Show what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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
    return environment
