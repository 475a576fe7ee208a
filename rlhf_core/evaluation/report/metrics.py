"""What metrics mean, by ``metrics.yaml``: labels and alarms for the report and the verdict, and
docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.config.health import DEFAULT_RULES

HEAD = """<!-- Written by `rlhf config --metrics`; change rlhf_core/evaluation/report/metrics.yaml. -->
# Metrics
"""


@dataclass(frozen=True)
class Metric:
    """Metrics that are explained together; the head of ``metrics.yaml`` says what the fields
    are.
    """

    names: tuple[str, ...]
    meaning: str = ""
    healthy: str = ""
    label: str = ""
    alarm: str = ""

    def departure(self) -> str:
        """Return what is healthy and what alarms, with the bounds filled in."""
        checks = ((rule.name, check) for rule in DEFAULT_RULES for check in rule.checks)
        bounds = {rule: f"{check.bound:g}" for rule, check in checks if check.metric in self.names}
        of_kind = alarm_bounds(self.alarm) if self.alarm else {"text": ""}
        return ". ".join(
            filter(None, (self.healthy.format(**bounds), of_kind["text"].format(**of_kind)))
        )


@cache
def glossary() -> Mapping[str, Any]:
    """Return the content of ``metrics.yaml``."""
    content: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
    return content


def metrics_of(section: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that a section of :func:`glossary` explains."""
    rows: dict[str, Any] = section.get("metrics", {})
    return [
        Metric(
            tuple(names.split(", ")), **({"meaning": about} if isinstance(about, str) else about)
        )
        for names, about in rows.items()
    ]


def healthy_of(file: str, name: str) -> str:
    """Return which values of a metric of ``file``, such as ``history/ppo.jsonl``, are healthy;
    empty if unknown.
    """
    sections = (section for section in glossary()["sections"] if file in section.get("files", ()))
    metrics = (metric for section in sections for metric in metrics_of(section))
    return next((metric.departure() for metric in metrics if name in metric.names), "")


@cache
def labelled() -> Mapping[str, Metric]:
    """Return the metrics that the report names for people, by name and in the order of the page."""
    metrics = (metric for section in glossary()["sections"] for metric in metrics_of(section))
    return {metric.names[0]: metric for metric in metrics if metric.label}


def alarm_bounds(kind: str) -> Mapping[str, Any]:
    """Return the numbers beyond which a metric of this ``alarm`` alarms, and a ``text`` that has
    places for them.
    """
    bounds: dict[str, Any] = glossary()["alarms"][kind]
    return bounds


def page() -> str:
    """Return docs/metrics.md: each section's files, text and table."""
    lines = [HEAD, glossary()["text"]]
    for section in glossary()["sections"]:
        lines.append(f"{'#' * section.get('level', 2)} {section['title']}\n")
        files = [f"`{file}`" for file in section.get("files", ())]
        lines += (
            [f"In {' and '.join(filter(None, (', '.join(files[:-1]), files[-1])))}.\n"]
            if files
            else []
        )
        lines += [section["text"]] if "text" in section else []
        if "metrics" in section:
            lines += [
                "| {} | {} |".format(*section.get("columns", ("metric", "meaning"))),
                "|---|---|",
            ]
            for metric in metrics_of(section):
                departure = metric.departure()
                cell = ". ".join(filter(None, (metric.meaning, departure and f"*{departure}*")))
                lines.append(f"| `{'`, `'.join(metric.names)}` | {cell} |")
            lines.append("")
        lines += [section["after"]] if "after" in section else []
    return "\n".join(lines).rstrip("\n") + "\n"
