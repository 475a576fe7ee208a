"""The verdict of a run as Markdown: for its page on the Prefect server, and for descriptions in MLflow."""

from __future__ import annotations

import re

from flows.pipeline.verdict import RunVerdict

SPECIAL = re.compile(r"([\\`*|\[\]])")
REPLACED = {">=": "≥", "<=": "≤", "<": "&lt;", ">": "&gt;"}


def markdown_text(text: str) -> str:
    """Return ``text`` on one line so that Markdown shows it as it is, with ≥ and ≤ for >= and <=."""
    escaped = SPECIAL.sub(r"\\\1", " ".join(text.split()))
    for characters, replacement in REPLACED.items():
        escaped = escaped.replace(characters, replacement)
    return escaped


def verdict_markdown(verdict: RunVerdict, report_link: str | None = None) -> str:
    """Describe the verdict with its key numbers.

    Args:
        report_link: An address at which a browser shows the report; without one its path is named.
    """
    lines = [f"**{markdown_text(verdict.headline[:1].upper() + verdict.headline[1:])}**", ""]
    if verdict.judges:
        lines += ["| judge | win rate | 95 % interval | prompts | at equal length |", "|---|---|---|---|---|"]
        for j in verdict.judges:
            controlled = "" if j.lc_win_rate is None else f"{j.lc_win_rate:.3f}"
            lines.append(
                f"| {markdown_text(j.judge)} | {j.win_rate:.3f} | {j.low95:.3f} to {j.high95:.3f} | {j.prompts} "
                f"| {controlled} |"
            )
        lines.append("")
    if verdict.kl is not None:
        kl = verdict.kl
        lines += [f"KL from SFT: {kl.mean:.2f} nats per reply (95 %: {kl.low95:.2f} to {kl.high95:.2f})", ""]
    if verdict.alarms:
        lines.append(f"- **Read before release:** {markdown_text('; '.join(verdict.alarms))}")
    lines.append(f"- Registered: {markdown_text(verdict.registered)}")
    lines.append(f"- Promotion: {markdown_text(verdict.promotion)}")
    if verdict.report:
        report = f"[{verdict.report}]({report_link})" if report_link else f"`{verdict.report}` in the workspace"
        lines.append(f"- Report: {report}")
    lines.append(f"- Next: `{verdict.next_command}` ({markdown_text(verdict.next_hint)})")
    return "\n".join(lines)
