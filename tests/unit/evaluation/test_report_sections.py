"""Sections of the report that only some runs have: worst mistakes, groups, third parties, multiple choice."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config.gates import Condition
from rlhf_core.gates import decide

from .test_report import ATTACK, fill, render, write


def test_mistakes_groups_opponents_and_multiple_choice_are_shown(tmp_path: Path) -> None:
    fill(tmp_path)
    evaluation = json.loads((tmp_path / "metrics/evaluation.json").read_text())
    versus = evaluation["comparison"]["gold"]
    side = {"comparison": {"gold": versus}, "group": {"harmless": {"gold": versus}}}
    for name, accuracy in (("sft", 0.4), ("policy", 0.6)):
        evaluation[name]["multiple_choice"] = {
            "accuracy": accuracy,
            "accuracy_low95": accuracy - 0.123,
            "accuracy_high95": accuracy + 0.123,
            "subject_mean": 0.5,
        }
    evaluation |= {
        "group": {"helpful": {"judge": versus}},
        "opponents": {ATTACK: {"prompts": 3, "missing": 2, "unused": 7, "sft": side, "policy": side}},
        "multiple_choice": {
            "questions": 5, "too_long": 1, "difference": 0.2, "difference_low95": -0.321, "difference_high95": 0.7,
            "policy_alone_right": 2, "sft_alone_right": 1,
            "subject": {ATTACK: {"questions": 5, "sft": 0.4, "policy": 0.6},
                        "城市": {"questions": 1, "sft": 0.0, "policy": 1.0}},
        },
    }  # fmt: skip
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    pair = {"category": ATTACK, "prompt": "我很好", "chosen": f"same {ATTACK}", "rejected": "same other",
            "margin": -2.345, "reward_chosen": -1.5, "reward_rejected": 0.845,
            "tokens_chosen": 6, "tokens_rejected": 2}  # fmt: skip
    write(tmp_path / "samples/reward_mistakes.jsonl", json.dumps(pair) + "\n")
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
        "comparison": {
            "win": 0.1,
            "lose": 0.2,
            "win_rate": 0.45,
            "win_rate_low95": 0.3,
            "win_rate_high95": 0.6,
            "clusters": 13,
        },
    }
    write(tmp_path / "metrics/evaluation.json", json.dumps(evaluation))
    page = render(tmp_path)
    table = page[page.index('id="verifiable"') :]
    assert table.index("all that is required") < table.index("property regex") < table.index("category sums")
    assert "13 of them different" in table and "win rate 0.450 (95 %:" in table and "SFT alone on\n  0.200" in table
    assert "verifiable prompts passed 0.70 (SFT 0.80)" in page[: page.index("</section>")]
