"""What a run shows on the Prefect server: bounds with their sign, failures first, addresses that a browser opens."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.flows.verdicts import VERDICT

from flows.pipeline import artifacts
from flows.pipeline.artifacts import publish_gate_tables, publish_report, publish_stage_table
from flows.pipeline.verdict import markdown_text, verdict_markdown
from flows.registry.client import mlflow_address, run_page
from flows.stage.outcome import StageOutcome
from flows.workspace.cleanup import record_services
from rlhf_core.evaluation.verdict import JudgeResult


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The content of each artifact by its key, in place of a Prefect server."""
    contents: dict[str, Any] = {}

    def record(content: Any, key: str, description: str, link_text: str = "") -> None:
        contents[re.sub("-(demo|test.*)$", "", key)] = content

    for kind in ("table", "markdown", "link"):
        monkeypatch.setattr(artifacts, f"create_{kind}_artifact", record)
    return contents


def test_bounds_keep_their_sign_values_are_rounded_and_passed_is_second(
    tmp_path: Path, published: dict[str, Any]
) -> None:
    conditions = [
        {"metric": "kl", "value": 2.3456789, "bound": "<= 6", "limit": 6.0, "passed": True, "why": "nats"},
        {"metric": "accuracy", "value": 0.41, "bound": ">= 0.5", "limit": 0.5, "passed": False, "why": "a|b"},
    ]
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "reward.json").write_text(json.dumps({"passed": False, "conditions": conditions}))
    publish_gate_tables(tmp_path)
    failed, passed = published["gate-reward"]
    assert failed == {"metric": "accuracy", "passed": "NO", "value": "0.41", "bound": "≥ 0.5", "why": "a|b"}
    assert list(passed) == ["metric", "passed", "value", "bound", "why"]
    assert (passed["passed"], passed["value"], passed["bound"]) == ("yes", "2.346", "≤ 6")


def test_a_message_is_no_markup(published: dict[str, Any]) -> None:
    publish_stage_table(Path("demo"), [StageOutcome.failed("sft", "> quote *a* <b>\n>= 0.5 [x](y)")])
    (row,) = published["stages"]
    assert row["message"] == "› quote ∗a∗ ‹b› ≥ 0.5 [x] (y)"
    assert markdown_text("> *a* <b>\n>= 0.5 [x](y)|win_rate_low95") == (
        r"&gt; \*a\* &lt;b&gt; ≥ 0.5 \[x\](y)\|win_rate_low95"
    )


def test_the_verdict_names_judges_intervals_kl_and_the_next_command() -> None:
    verdict = replace(VERDICT, judges=(JudgeResult("judge", 0.61234, 0.5512, 0.6689, 320, 103, 0.5876),))
    text = verdict_markdown(verdict, "http://127.0.0.1:5000/#/experiments/1/runs/ab/artifacts/report.html")
    assert text.startswith("**Better than champion version 3**\n")
    assert "| judge | 0.612 | 0.551 to 0.669 | 0.588 | 320 | 103 |" in text
    assert "KL from SFT: 1.90 nats per reply (95 %: 1.70 to 2.10)" in text
    assert "- Report: [report.html](http://127.0.0.1:5000/#/experiments/1/runs/ab/artifacts/report.html)" in text
    assert "- Next: `rlhf chat` (talk to the champion)" in text
    assert "file:" not in text and "`report.html` in the workspace" in verdict_markdown(VERDICT)


def test_the_report_is_a_link_only_where_a_server_shows_it(tmp_path: Path, published: dict[str, Any]) -> None:
    publish_report(Path("demo"), tmp_path / "report.html", None)
    assert not published
    (tmp_path / "report.html").touch()
    publish_report(Path("demo"), tmp_path / "report.html", None)
    assert published["report"] == f"The report is the file `{tmp_path / 'report.html'}`."
    publish_report(Path("demo"), tmp_path / "report.html", "http://h/x")
    assert published["report"] == "http://h/x"


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("http://user:secret@host:5000/", "http://host:5000"),
        ("https://mlflow.example", "https://mlflow.example"),
        ("sqlite:///x.db", None),
        ("", None),
    ],
)
def test_the_mlflow_pages_are_those_of_the_server_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, address: str | None
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert mlflow_address(tmp_path) == address


def test_the_mlflow_pages_are_those_of_a_running_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record_services(tmp_path, "http://127.0.0.1:4200/api", {"mlflow": "http://127.0.0.1:5000"})
    assert mlflow_address(tmp_path) == "http://127.0.0.1:5000"
    of_plot = "#/experiments/1/runs/ab/artifacts/plots/kl%201.png?workflowType=machine_learning"
    assert run_page("1", "ab", "plots/kl 1.png") == of_plot
    record = json.loads((tmp_path / ".rlhf" / "services.json").read_text())
    assert record["pid"] == os.getpid()
    (tmp_path / ".rlhf" / "services.json").write_text(json.dumps({**record, "start_token": "another process"}))
    assert mlflow_address(tmp_path) is None
