"""Third parties and best of n: matched replies, bad files in a line, groups of prompts, and what is
chosen.
"""

from __future__ import annotations

import json
import math
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
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    compare_groups,
    compare_outcomes,
    outcomes,
)
from rlhf_core.evaluation.comparisons.opponents import (
    Rival,
    best_of_n,
    group_of,
    kl_bound,
    read_opponent,
)
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.judges.llm.judge import PairwiseJudgements
from rlhf_core.evaluation.replies import Reply

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


def test_both_models_meet_it_on_the_prompts_that_it_has() -> None:
    # Two replies to each prompt; the first ones meet the opponent.
    sft, policy = model("a", "-", "aa", "-", "aaa", "-"), model("aaaa", "-", "aa", "-", "a", "-")
    config = EvaluateConfig(bootstrap=50, seed=1)
    evaluation = Evaluation(FixedSets(PROMPTS[:3], [], []), sft, policy, config)
    evaluation.score(LengthJudge("gold", 0.5))
    opponent = Rival("opponent_other", [Reply("bb", True), None, Reply("bb", True)], evaluation)
    opponent.score(LengthJudge("gold", 0.5))
    opponent.judge(Undecided())  # type: ignore[arg-type]
    metrics = opponent.opponent_metrics(["harmless", "helpful", "harmless"], 5)
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


def test_the_bound_on_kl_by_hand() -> None:
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert kl_bound(16) == pytest.approx(1.8350887)


def test_the_highest_score_of_each_prompt_is_chosen_and_the_first_of_equal_ones() -> None:
    prompts = [made_prompt(f"what is {i}?", "sums") for i in range(3)]
    texts = [["a", "bbb", "c"], ["aa", "b", "d"], ["aaa", "bb", "e"]]
    samples = [[Reply(text, True, tuple(range(len(text)))) for text in row] for row in texts]
    sft, policy = (EvaluatedModel(samples[0]) for _ in range(2))
    evaluation = Evaluation(FixedSets(prompts, [], []), sft, policy, EvaluateConfig(bootstrap=20))
    evaluation.score(LengthJudge())
    best = best_of_n(LengthJudge(), evaluation, samples)
    assert [reply.text for reply in best.known.judged] == ["aaa", "bbb", "c"]
    best.score(LengthJudge())
    assert best.known.scores == {"reward": [3.0, 3.0, 1.0]}
    metrics = best.best_of_n_metrics(samples)
    assert (metrics["n"], metrics["kl_bound"]) == (3, kl_bound(3))
    assert metrics["reward"] == pytest.approx(7 / 3) and metrics["sampled_tokens_per_reply"] == 5.0
    assert (
        metrics["comparison"]["reward"]["lose"]
        == metrics["policy_comparison"]["reward"]["win"]
        == 0.0
    )
    assert metrics["comparison"]["reward"]["mean_difference"] == pytest.approx((7 - 5) / 3)
    assert best.columns()[1] == {
        "best_of_n_reply": "bbb",
        "best_of_n_finished": True,
        "best_of_n_reward": 3.0,
    }


def test_one_reply_is_no_choice() -> None:
    with pytest.raises(ValidationError, match="best_of_n 1 is SFT itself"):
        EvaluateConfig(best_of_n=1)


def prompt_of(category: str, source: str = "a file") -> Prompt:
    return made_prompt("?", category, source)


@pytest.mark.parametrize(
    ("category", "source", "group"),
    [
        ("fact", "world", "helpful"),
        ("howto", "world", "helpful"),
        ("harmful", "world", "harmless"),
        ("safe", "pku", "harmless"),
        ("general", "/data/hh/harmless-base/test.jsonl.gz", "harmless"),
        ("general", "hub:Anthropic/hh-rlhf/helpful-online:test", "helpful"),
        ("general", "/helpful/hh_rlhf_harmless.sample.jsonl.gz", "harmless"),
        ("general", "unhelpful.jsonl", ""),
        ("satisfaction", "a file", ""),
        ("sums", "a file", "maths"),
        ("Red-team-attempts", "helpful", "harmless"),
    ],
)
def test_a_prompt_is_in_the_group_of_its_category_else_of_its_source(
    category: str, source: str, group: str
) -> None:
    assert group_of(prompt_of(category, source), {"sums": "maths"}) == group


def test_a_default_can_be_changed_or_taken_away() -> None:
    assert group_of(prompt_of("howto"), {"howto": "recipes"}) == "recipes"
    assert group_of(prompt_of("howto"), {"howto": ""}) == ""


def test_comparisons_within_a_group_by_hand() -> None:
    outcome = {
        "gold": np.array([[1.0], [0.0], [0.5], [1.0]]),
        "llm": np.array([[1.0], [np.nan], [np.nan], [0.0]]),
        "silent": np.array([[np.nan], [1.0], [np.nan], [np.nan]]),
    }
    table = compare_groups(["helpful", "harmless", "helpful", ""], outcome, 100, 1)
    assert set(table) == {"helpful", "harmless"}, "a prompt of no group counts in none"
    gold = table["helpful"]["gold"]
    assert (gold["win"], gold["tie"], gold["lose"], gold["prompts"]) == (0.5, 0.5, 0.0, 2)
    assert gold == compare_outcomes([1.0, 0.5], 100, 1)
    assert table["helpful"]["llm"]["prompts"] == 1 and "silent" not in table["helpful"]
    assert set(table["harmless"]) == {"gold", "silent"} and table["harmless"]["gold"]["lose"] == 1.0


def test_several_replies_to_a_prompt_are_one_prompt() -> None:
    table = compare_groups(
        ["helpful"] * 2, {"gold": np.array([[1.0, 1.0, 0.0], [0.5, 0.5, 0.5]])}, 100, 1
    )
    gold = table["helpful"]["gold"]
    assert gold["prompts"] == 2 and gold["win"] == 0.5 and gold["tie"] == 0.5
    assert gold["win_rate"] == pytest.approx((2 / 3 + 1 / 2) / 2)
