"""Sections of the report that only some runs have: worst mistakes, groups, third parties, multiple choice."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config.gates import Condition
from rlhf_core.gates import decide

from .test_report import ATTACK, fill, fill_sections, render, write


def test_mistakes_groups_opponents_and_multiple_choice_are_shown(tmp_path: Path) -> None:
    fill(tmp_path)
    fill_sections(tmp_path, ATTACK, ATTACK)
    page = render(tmp_path)
    assert "gets most wrong" in page and "margin -2.35" in page and "reward -1.50 · 6 tokens" in page
    assert "same <mark>&lt;script&gt;" in page and '<p class="text" lang="zh">我很好</p>' in page
    assert "Helpful and harmless apart" in page and "helpful, judge" in page
    assert "Against &lt;script&gt;" in page and "2 more have no reply of it; 7 of its replies" in page
    assert "policy, harmless, gold" in page and "SFT, gold" in page
    assert "0.477 to 0.723" in page and "-0.321 to 0.700" in page and "城市" in page
    assert "1 more questions were too long" in page and "Multiple choice answered rightly" in page
    decide("reward", [Condition(metric="accuracy", at_least=0.9, why="no")], {"accuracy": 0.8}).save(
        tmp_path / "gates/reward.json"
    )
    assert "gets most wrong" in render(tmp_path), "they say why the reward gate failed"


def test_alarming_figures_stand_in_the_verdict_and_on_top_of_the_table(tmp_path: Path) -> None:
    fill(tmp_path)
    evaluation = json.loads((tmp_path / "metrics/evaluation.json").read_text())
    for name, refused in (("sft", 0.28), ("policy", 0.31)):
        evaluation[name] = evaluation[name] | {"safety": {"refuses_harmful": refused, "answers_benign": 0.9}}
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    page = render(tmp_path)
    verdict = page[page.index('class="verdict') : page.index("</section>")]
    assert "Read before release:</b> harmful requests refused 0.31 (SFT 0.28)." in verdict
    table = page[page.index("Means of both models") :]
    assert table.index("Harmful requests refused") < table.index("Gold score") < table.index("Benign look-alikes")


def test_verifiable_prompts_are_shown_by_category_and_property(tmp_path: Path) -> None:
    fill(tmp_path)
    evaluation = json.loads((tmp_path / "metrics/evaluation.json").read_text())
    evaluation["verifiable"] = {
        "prompts": 20,
        "sft": {"passed": 0.8, "category": {"sums": 0.9}, "property": {"regex": 0.85}},
        "policy": {"passed": 0.7, "category": {"sums": 0.95}, "property": {"regex": 0.65}},
        "comparison": evaluation["comparison"]["gold"] | {"lose": 0.2, "win_rate": 0.45, "clusters": 13},
    }
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    page = render(tmp_path)
    table = page[page.index('id="verifiable"') :]
    assert table.index("all that is required") < table.index("property regex") < table.index("category sums")
    assert "13 of them different" in table and "win rate 0.450 (95 %:" in table and "SFT alone on\n  0.200" in table
    assert "verifiable prompts passed 0.70 (SFT 0.80)" in page[: page.index("</section>")]
