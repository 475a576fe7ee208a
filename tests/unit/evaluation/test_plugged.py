"""Judges, evaluations and data reports of other packages: what they add, and how they are refused."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from plugin_distributions import Install, example
from pydantic import ValidationError

from rlhf_core.config.data import ValidateConfig
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.data.validation.data_reports import FINDINGS_FILE, CheckedData, write_reports
from rlhf_core.data.validation.set_rules import SetFindings
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.plugged import added_evaluations, added_into, plugged_judges
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.verdict import judge_results
from rlhf_core.fingerprint.tracked_files import write_evaluation_inputs
from rlhf_core.plugins import DATA_REPORTS, EVALUATIONS, JUDGES, PluginError

from .conftest import made_prompt

PROMPTS = [made_prompt(f"what is {i} and {i}?", "sums", "a file") for i in range(6)]


def model(text: str) -> EvaluatedModel:
    return EvaluatedModel([Reply(text, True) for _ in PROMPTS])


def test_the_judge_of_the_docs_scores_both_models_and_decides(
    install: Install, tmp_path: Path
) -> None:
    install(
        "brevity", JUDGES, {"brief": "brevity_of_docs:FewWords"}, brevity_of_docs=example("A judge")
    )
    config = EvaluateConfig(judges={"brief": {"most": 1}}, bootstrap=20)
    (judge,) = plugged_judges(config.named_judges, tmp_path)
    evaluation = Evaluation(FixedSets(PROMPTS), model("a b c"), model("a b"), config)
    evaluation.score(judge)
    assert evaluation.policy.scores["brief"] == [-1] * len(PROMPTS)
    assert evaluation.sft.scores["brief"] == [-2] * len(PROMPTS)
    assert [result.judge for result in judge_results(evaluation.comparison)] == ["brief"]
    assert evaluation.comparison["brief"]["win_rate"] == 1.0
    write_evaluation_inputs(tmp_path, config)
    seen = (tmp_path / ".fingerprints/verifiable.txt").read_text()
    assert "rlhf.judges brief: brevity 1" in seen


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("def make(settings, workspace): return 1 / 0", "cannot begin: .*division"),
        (
            "class make:\n    name, score, absolute_tie = 'other', len, 0.0\n"
            "    def __init__(self, *_): pass",
            "calls itself 'other'",
        ),
    ],
)
def test_a_judge_that_cannot_be_made_is_one_line(
    install: Install, tmp_path: Path, module: str, said: str
) -> None:
    install("broken", JUDGES, {"brief": "broken_judge:make"}, broken_judge=module)
    sys.modules.pop("broken_judge", None)
    with pytest.raises(PluginError, match=said) as caught:
        plugged_judges({"brief": {}}, tmp_path)
    assert "brief" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(PluginError, match="no installed package gives 'nobodys'"):
        plugged_judges({"nobodys": {}}, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"judges": {"gold": {}}},
        {"judges": {"Two Words": {}}},
        {"evaluations": {"opponents": {}}},
        {"evaluations": {"multiple_choice": {"files": ["x"]}}},
    ],
)
def test_names_of_the_pipeline_are_not_taken(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvaluateConfig.model_validate(settings)


COUNTED = """
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.plugged import AddedEvaluation


class Prompts(AddedEvaluation):
    def __init__(self, settings, prompts, workspace):
        super().__init__(settings, prompts, workspace)
        if "unit" not in settings:
            raise ConfigError("prompts_counted needs a unit")

    def metrics(self, rivals, groups):
        return {"sft": {"asked": len(self.prompts)}, "asked": {"unit": self.settings["unit"]}}
"""


def test_an_evaluation_of_a_package_gets_its_settings_and_adds_metrics(
    install: Install, tmp_path: Path
) -> None:
    install(
        "counting", EVALUATIONS, {"prompts_counted": "counting_all:Prompts"}, counting_all=COUNTED
    )
    config = EvaluateConfig(evaluations={"prompts_counted": {"unit": "rows"}})
    (added,) = added_evaluations(config, PROMPTS, tmp_path).values()
    metrics: dict[str, Any] = {"sft": {"length": 3.0}}
    added_into(metrics, added.metrics({}, []))
    assert metrics == {"sft": {"length": 3.0, "asked": 6}, "asked": {"unit": "rows"}}
    assert added.replies() == {} and added.rows() == []
    for taken in ({"sft": {"length": 1.0}}, {"sft": 1.0}, {"sft": {"length": {"x": 1.0}}}):
        with pytest.raises(PluginError, match="a metric already"):
            added_into({"sft": {"length": 3.0}}, taken)
    with pytest.raises(ConfigError, match="needs a unit"):
        added_evaluations(EvaluateConfig(evaluations={"prompts_counted": {}}), PROMPTS, tmp_path)


class Nothing:
    """Data of which nothing is known."""

    kinds: dict[str, Any] = {}


def test_without_the_extras_data_are_checked_and_a_line_says_what_is_missing(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "rlhf_extras", None)  # as if it were not there
    for name in [name for name in sys.modules if name.startswith("rlhf_extras.")]:
        monkeypatch.delitem(sys.modules, name)
    module = "def write(folder, data, config): (folder / 'notes.txt').write_text(data.failed[0])"
    install("notes", DATA_REPORTS, {"notes": "notes_on_data:write"}, notes_on_data=module)
    data = CheckedData({}, Nothing(), SetFindings(), {}, {}, ["rows"])  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        write_reports(tmp_path / "card", data, ValidateConfig())
    assert pq.read_table(tmp_path / "card" / FINDINGS_FILE).num_rows == 0
    assert (tmp_path / "card/notes.txt").read_text() == "rows"
    (warning,) = caplog.messages
    assert "data report card" in warning and "rlhf-pipeline" in warning and "\n" not in warning
