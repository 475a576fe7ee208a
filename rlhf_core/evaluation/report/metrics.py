"""What metrics mean, as ``metrics.yaml`` says it: for report, verdict and docs/metrics.md."""

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
    """Metrics that are explained together; the head of ``metrics.yaml`` explains the fields."""

    names: tuple[str, ...]
    meaning: str = ""
    healthy: str = ""
    label: str = ""
    alarm: str = ""

    def departure(self) -> str:
        """Return what is healthy and what alarms, with the bounds filled in."""
        bounds = {}
        for rule in DEFAULT_RULES:
            for check in rule.checks:
                if check.metric in self.names:
                    bounds[rule.name] = f"{check.bound:g}"
        sentences = [self.healthy.format(**bounds)]
        if self.alarm:
            of_kind = alarm_bounds(self.alarm)
            sentences.append(of_kind["text"].format(**of_kind))
        return ". ".join(filter(None, sentences))


@cache
def glossary() -> Mapping[str, Any]:
    """Return the content of ``metrics.yaml``."""
    content: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
    return content


def metrics_of(section: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that a section of :func:`glossary` explains."""
    metrics = []
    for names, about in section.get("metrics", {}).items():
        fields = about
        if isinstance(about, str):
            fields = {"meaning": about}
        metric = Metric(tuple(names.split(", ")), **fields)
        metrics.append(metric)
    return metrics


def healthy_of(file: str, name: str) -> str:
    """Return which values of a metric are healthy; empty if unknown.

    Args:
        file: Where it is, such as ``history/ppo.jsonl``.
        name: Its name there.
    """
    for section in glossary()["sections"]:
        if file not in section.get("files", ()):
            continue
        for metric in metrics_of(section):
            if name in metric.names:
                return metric.departure()
    return ""


@cache
def labelled() -> Mapping[str, Metric]:
    """Return the metrics that the report names for people, by name and in the order of the page."""
    metrics = {}
    for section in glossary()["sections"]:
        for metric in metrics_of(section):
            if metric.label:
                metrics[metric.names[0]] = metric
    return metrics


def alarm_bounds(kind: str) -> Mapping[str, Any]:
    """Return the bounds of a kind of alarm, and a ``text`` that has places for them."""
    bounds: dict[str, Any] = glossary()["alarms"][kind]
    return bounds


def page() -> str:
    """Return docs/metrics.md: each section's files, text and table."""
    lines = [HEAD, glossary()["text"]]
    for section in glossary()["sections"]:
        lines.append(f"{'#' * section.get('level', 2)} {section['title']}\n")
        files = [f"`{file}`" for file in section.get("files", ())]
        if len(files) > 1:
            files = [", ".join(files[:-1]), files[-1]]
        if files:
            lines.append(f"In {' and '.join(files)}.\n")
        if "text" in section:
            lines.append(section["text"])
        if "metrics" in section:
            name, meaning = section.get("columns", ("metric", "meaning"))
            lines += [f"| {name} | {meaning} |", "|---|---|"]
            for metric in metrics_of(section):
                sentences = [metric.meaning]
                if departure := metric.departure():
                    sentences.append(f"*{departure}*")
                cell = ". ".join(filter(None, sentences))
                lines.append(f"| `{'`, `'.join(metric.names)}` | {cell} |")
            lines.append("")
        if "after" in section:
            lines.append(section["after"])
    return "\n".join(lines).rstrip("\n") + "\n"
