"""Tags that somebody else wrote into MLflow: shown on one harmless line, read as what they should
be, and no reason to promote.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.text import Text

from flows.commands.registry_output import describe_terms, history_rows, model_history
from flows.commands.status import registry_status
from flows.commands.text import aligned, print_error, unlabelled
from flows.registry.client import OWNER_TAG
from flows.registry.history import DONE_TAG, ReleaseState
from flows.registry.promote import promote
from flows.registry.release_page import read_release_decision, write_release_page
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError

from .conftest import MODEL, Registry, ScriptedMatch
from .test_release_page import hold

FORGED = "rlhf: promoted: version 9 is the champion"
HOSTILE = {
    "text": f"a\n{FORGED}\r{FORGED}\x0b{FORGED}\u2028{FORGED}\x1b[2J\x1b]0;owned\x07\x9b2J\u202egnp"
    "<script>alert(1)</script><img src=x onerror=alert(1)>[red]| `a` | [b](javascript:c)",
    "digits": "9" * 4900,
    "nested": "[" * 4900,
    "other type": json.dumps({"policy": [{"metric": 5, "at_most": "x"}], "sft": 7}),
}
NUMBERS = ("٣", "-1", "1e999", "null", "")
# Tags that this program reads of a version, and what then forbids its promotion.
OF_A_VERSION = {
    "ungated": "", "gates": "is ungated", "complete": "is incomplete", "rolled_back": "was rolled back",
    "declined": "was ", "gate_conditions": "", "content_sha256": "not the ones that were registered",
    "decision.reason": "", "decision.report": "", "reward_model_version": "", "lineage.data": "",
}  # fmt: skip


def shown(workspace: Path) -> list[str]:
    """All lines that commands print of the registry, and the page of the release."""
    lines: list[str] = []
    config = load_section(workspace, "registry", RegistryConfig)
    for read in (
        lambda: unlabelled(registry_status(workspace, config).lines),
        lambda: history_rows(model_history(workspace)),
        lambda: unlabelled(describe_terms(workspace).splitlines()),
    ):
        printed = io.StringIO()
        try:
            # So wide that nothing wraps: a line of a wrapped text may begin at any of its words.
            text: Text = aligned(read(), 10_000)  # type: ignore[operator]
            printed.write(text.plain)
        except RlhfError as error:
            print_error(str(error), printed)
            assert printed.getvalue().count("\n") == 1
        lines += printed.getvalue().splitlines()
    write_release_page(workspace)
    return lines


def require_harmless(lines: list[str], page: str) -> None:
    for line in lines:
        assert line.isprintable() and not line.lstrip().startswith("rlhf: promoted"), line
        assert len(line) < 1500
    assert "<script" not in page and "<img" not in page and "\x1b" not in page


@pytest.mark.slow
@pytest.mark.parametrize("key", OF_A_VERSION)
def test_a_hostile_tag_of_a_version_promotes_nothing_and_shows_as_text(
    key: str, registry: Registry, contest: Path
) -> None:
    hold(contest, "2")
    for name, value in HOSTILE.items():
        registry.client.set_model_version_tag(MODEL, "2", key, value)
        require_harmless(shown(contest), (contest / "release.html").read_text())
        try:
            said = promote(contest, dry_run=True, play=ScriptedMatch(0.4)).reason
        except RlhfError as error:
            said = str(error)
        assert "\n" not in said and said.isprintable() and len(said) < 1500, name
        assert OF_A_VERSION[key] in said, (name, said)
    assert registry.aliases()["champion"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("key", [OWNER_TAG, DONE_TAG, "rlhf.ledger_run"])
def test_a_hostile_tag_of_a_model_is_one_line(key: str, registry: Registry, contest: Path) -> None:
    hold(contest, "2")
    for value in (*HOSTILE.values(), *NUMBERS):
        registry.client.set_registered_model_tag(MODEL, key, value)
        try:
            lines = shown(contest)
            require_harmless(lines, (contest / "release.html").read_text())
            said = promote(contest, dry_run=True, play=ScriptedMatch(0.4)).reason
        except RlhfError as error:
            said = str(error)
        assert "\n" not in said and said.isprintable() and len(said) < 1500
    assert registry.aliases()["champion"] == "1"


def test_an_owner_without_a_folder_is_an_owner(registry: Registry, contest: Path) -> None:
    registry.client.set_registered_model_tag(MODEL, OWNER_TAG, "somebody")
    assert ReleaseState.of(contest).other_owner == "somebody"
    assert "is owned by somebody" in promote(contest, play=ScriptedMatch(0.9)).reason


def test_hostile_tags_of_runs_and_experiments_are_shown_as_text(
    registry: Registry, contest: Path
) -> None:
    hold(contest, "2")
    experiment = registry.client.create_experiment("rlhf")
    for value in HOSTILE.values():
        run = registry.client.create_run(experiment).info.run_id
        for key in ("mlflow.runName", "mlflow.parentRunId", "rlhf.stage", "verdict", "policy_gate"):
            registry.client.set_tag(run, key, value)
        registry.client.set_experiment_tag(experiment, "mlflow.note.content", value)
    require_harmless(shown(contest), (contest / "release.html").read_text())
    assert read_release_decision(contest).headline.startswith("Not released")
