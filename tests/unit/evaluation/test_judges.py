"""Judges: batches never matter, unfinished replies are read without an ending, gold reads text only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.data.encoding import encode_dialogue
from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN, GoldJudge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.reply import Reply, measure_text
from rlhf_core.world.gold import score

REPLIES = [Reply("yes.", True), Reply("it is a rather long reply about nothing at all", True), Reply("no", False)]


def test_batching_and_order_change_no_score(models: Path, prompts: list[Prompt]) -> None:
    rows = [row.prompt for row in prompts[:9]]
    replies = REPLIES * 3
    one, many = (
        ModelJudge.load(models / "reward", "reward", batch_size=1),
        ModelJudge.load(models / "reward", "reward", 9),
    )
    alone = one.score(rows, replies)
    assert many.score(rows, replies) == pytest.approx(alone, abs=1e-5)
    assert many.score(rows[::-1], replies[::-1]) == pytest.approx(alone[::-1], abs=1e-5)


@pytest.mark.parametrize("text", ["", "yes"])
def test_score_is_read_at_the_ending_of_finished_replies_only(models: Path, prompts: list[Prompt], text: str) -> None:
    judge, prompt = ModelJudge.load(models / "reward", "reward"), prompts[0].prompt
    finished, cut = judge.score([prompt, prompt], [Reply(text, True), Reply(text, False)])
    head, reply = encode_dialogue(judge.tokenizer, prompt, text)
    for expected, ids in ((finished, [*head, *reply]), (cut, [*head, *reply[:-1]])):
        with torch.inference_mode():
            value = judge.model.reply_scores(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
        assert float(value) == pytest.approx(expected, abs=1e-5)
    assert finished != cut


def test_gold_judges_the_last_turn(prompts: list[Prompt]) -> None:
    judge = GoldJudge()
    scores = judge.score([prompts[0].prompt], [Reply("good question.", False)])
    assert scores == [score(prompts[0].prompt[-1].content, "good question.", False)]
    assert judge.absolute_tie == GOLD_TIE_MARGIN < 0.02 / 1.4


def test_text_metrics_by_hand() -> None:
    metrics = measure_text([Reply("a b a b a", True, (1, 2, 1, 2, 1, 0)), Reply("a", False, (1, 2))])
    assert metrics["length"] == 4.0 and metrics["missing_eos"] == 0.5 and metrics["short_replies"] == 0.5
    assert metrics["repetition"] == pytest.approx(1 / 6)
    assert metrics["distinct_2"] == 0.5 and metrics["words"] == 3.0
