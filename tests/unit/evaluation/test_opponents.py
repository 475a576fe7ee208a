"""Third parties as opponents: matched replies, bad files in a line, and both models against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig, OpponentConfig
from rlhf_core.config.paths import rebase_sources
from rlhf_core.data.schema import Prompt
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare, compare_outcomes, outcomes
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.comparisons.rivals import Rival
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.judges.model import PairwiseJudgements
from rlhf_core.evaluation.replies import Reply
from rlhf_core.plugins import EVALUATIONS, load_plugin
from rlhf_extras.evaluations.opponents import read_opponent

from .conftest import LengthJudge, made_prompt

PROMPTS = [
    made_prompt(f"what is {i} and {i}?", "fact" if i % 2 else "harmful", "a file") for i in range(4)
]
CONFIG = OpponentConfig(name="other", path="replies.jsonl")


def written(folder: Path, *rows: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "replies.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def replies_to(*prompts: Prompt) -> list[dict[str, str]]:
    return [
        {"prompt": row.prompt[-1].content, "reply": f"reply to {row.prompt[-1].content}"}
        for row in prompts
    ]


def test_replies_are_matched_by_content_and_missing_ones_counted(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "what is  2 and 2?\r\n"}]
    rows = [
        {"prompt": turns, "reply": ""},
        *replies_to(PROMPTS[0]),
        {"prompt": "something else", "reply": "x"},
    ]
    replies, unused = read_opponent(CONFIG, PROMPTS, written(tmp_path, *rows, rows[0]))
    assert [reply and reply.text for reply in replies] == [
        "reply to what is 0 and 0?",
        None,
        "",
        None,
    ]
    assert unused == 1 and all(reply.finished and not reply.token_ids for reply in replies if reply)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: the line is not valid JSON"),
        ({"prompt": "x"}, r"line 2, reply: missing"),
        ({"prompt": "x", "reply": 3}, r"line 2, reply: not a text"),
        ({"prompt": [], "reply": "x"}, r"line 2, prompt: neither a text nor a list of messages"),
        ({"prompt": [{"role": "bot", "content": "x"}], "reply": "x"}, r"line 2, prompt: neither"),
        (
            {"prompt": PROMPTS[0].prompt[0].content, "reply": "another"},
            "line 2: another reply to the prompt of line 1",
        ),
        ({"prompt": "x", "reply": "\ud800"}, r"line \d+: reply holds half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_opponent(CONFIG, PROMPTS, written(tmp_path, *replies_to(PROMPTS[0]), row))
    assert "\n" not in str(caught.value) and "replies.jsonl" in str(caught.value)


def test_a_file_of_other_prompts_or_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has replies to none of the 4 prompts of the evaluation"):
        read_opponent(CONFIG, PROMPTS, written(tmp_path, {"prompt": "else", "reply": "x"}))
    with pytest.raises(
        DataError, match=r"no file matches 'gone\.jsonl'.*correct evaluate\.opponents"
    ):
        read_opponent(OpponentConfig(name="other", path="gone.jsonl"), PROMPTS, tmp_path)
    with pytest.raises(ValidationError, match="two opponents are called 'other'"):
        EvaluateConfig(opponents=(CONFIG, CONFIG))
    with pytest.raises(ValidationError, match="String should match pattern"):
        OpponentConfig(name="a.b", path="x")


class Undecided:
    """Decides on all pairs but the first: for the candidate."""

    name = "llm"

    def judge(self, prompts: Any, candidate: Any, baseline: Any) -> PairwiseJudgements:
        return PairwiseJudgements(
            np.array([np.nan, *[1.0] * (len(prompts) - 1)]), [""] * len(prompts), {}
        )


def model(*texts: str) -> EvaluatedModel:
    return EvaluatedModel([Reply(text, True) for text in texts])


def test_both_models_meet_it_on_the_prompts_that_it_has(tmp_path: Path) -> None:
    # Two replies to each prompt; the first ones meet the opponent.
    sft, policy = model("a", "-", "aa", "-", "aaa", "-"), model("aaaa", "-", "aa", "-", "a", "-")
    config = EvaluateConfig(bootstrap=50, seed=1)
    evaluation = Evaluation(FixedSets(PROMPTS[:3], [], []), sft, policy, config)
    evaluation.score(LengthJudge("gold", 0.5))
    theirs = [row | {"reply": "bb"} for row in replies_to(PROMPTS[0], PROMPTS[2])]
    others = [{"prompt": f"something else {i}", "reply": "x"} for i in range(5)]
    folder = written(tmp_path, *theirs, *others)
    evaluated = load_plugin(EVALUATIONS, "opponents")((CONFIG,), PROMPTS[:3], folder)
    ((name, replies),) = evaluated.replies().items()
    opponent = Rival(name, replies, evaluation)
    opponent.score(LengthJudge("gold", 0.5))
    opponent.judge(Undecided())  # type: ignore[arg-type]
    groups = ["harmless", "helpful", "harmless"]
    metrics = evaluated.metrics({name: opponent}, groups)["opponents"]["other"]
    assert (metrics["prompts"], metrics["missing"], metrics["unused"], metrics["gold"]) == (
        2,
        1,
        5,
        2.0,
    )
    assert metrics["policy"]["comparison"]["gold"]["win_rate"] == 0.5, (
        "4 against 2, and 1 against 2"
    )
    assert metrics["sft"]["comparison"]["gold"] == compare(
        [1.0, 3.0], [2.0, 2.0], 0.5, 50, 1, [-1, 1]
    )
    assert metrics["policy"]["comparison"]["llm"]["prompts"] == 1
    assert set(metrics["policy"]["group"]) == {"harmless"}
    by_hand = compare_outcomes(outcomes(np.array([2.0, -1.0]), 0.5), 50, 1)
    assert metrics["policy"]["group"]["harmless"]["gold"] == by_hand
    assert [row["opponent_other_reply"] for row in opponent.columns()] == ["bb", None, "bb"]
    assert [row["opponent_other_gold"] for row in opponent.columns()] == [2.0, None, 2.0]


def test_paths_follow_the_parameters() -> None:
    text = (
        "evaluate:\n  multiple_choice: {files: ['val/*.csv', /abs.csv], few_shot: 1, few_shot_files: [dev.csv]}\n"
        "  opponents: [{name: other, path: replies.jsonl}]\n"
    )
    moved = yaml_text.plain(
        yaml_text.parse(rebase_sources(text, Path("/w/a"), Path("/w/b/c")), "")
    )["evaluate"]
    assert moved["multiple_choice"]["files"] == ["../../a/val/*.csv", "/abs.csv"]
    assert moved["multiple_choice"]["few_shot_files"] == ["../../a/dev.csv"]
    assert moved["opponents"] == [{"name": "other", "path": "../../a/replies.jsonl"}]
    config = EvaluateConfig.model_validate(moved)
    patterns = [pattern for kind in config.untracked_files.values() for pattern in kind]
    assert set(patterns) == {
        "../../a/val/*.csv",
        "/abs.csv",
        "../../a/dev.csv",
        "../../a/replies.jsonl",
    }
