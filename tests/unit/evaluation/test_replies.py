"""What judges and metrics see of a reply: the tokens that were generated, in any batch, and gold
its text only.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.tokens import encode_dialogue, encode_prompt, encode_reply
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN, GoldJudge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.perplexity import measure_drift
from rlhf_core.evaluation.regression import pass_rates
from rlhf_core.evaluation.replies import (
    Reply,
    evaluation_replies,
    generated_replies,
    measure_text,
    on_policy_replies,
)
from rlhf_core.models.causal_lm import load_policy, load_tokenizer, train_tokenizer
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.world.gold import score

REPLIES = [
    Reply("yes.", True),
    Reply("it is a rather long reply about nothing at all", True),
    Reply("no", False),
]


def test_batching_and_order_change_no_score(models: Path, prompts: list[Prompt]) -> None:
    rows = [row.prompt for row in prompts[:9]]
    replies = REPLIES * 3
    one, many = (ModelJudge.load(models / "reward", "reward", batch_size) for batch_size in (1, 9))
    alone = one.score(rows, replies)
    assert many.score(rows, replies) == pytest.approx(alone, abs=1e-5)
    assert many.score(rows[::-1], replies[::-1]) == pytest.approx(alone[::-1], abs=1e-5)


@pytest.mark.parametrize("text", ["", "yes"])
def test_score_is_read_at_the_ending_of_finished_replies_only(
    models: Path, prompts: list[Prompt], text: str
) -> None:
    judge, prompt = ModelJudge.load(models / "reward", "reward"), prompts[0].prompt
    finished, cut = judge.score([prompt, prompt], [Reply(text, True), Reply(text, False)])
    head, reply = encode_dialogue(judge.tokenizer, prompt, text)
    for expected, ids in ((finished, [*head, *reply]), (cut, [*head, *reply[:-1]])):
        with torch.inference_mode():
            value = judge.model.reply_scores(
                torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)
            )
        assert float(value) == pytest.approx(expected, abs=1e-5)
    assert finished != cut


def test_gold_judges_the_last_turn(prompts: list[Prompt]) -> None:
    judge = GoldJudge()
    scores = judge.score([prompts[0].prompt], [Reply("good question.", False)])
    assert scores == [score(prompts[0].prompt[-1].content, "good question.", False)]
    assert judge.absolute_tie == GOLD_TIE_MARGIN < 0.02 / 1.4


def test_text_metrics_by_hand() -> None:
    metrics = measure_text(
        [Reply("a b a b a", True, (1, 2, 1, 2, 1, 0)), Reply("a", False, (1, 2))]
    )
    assert (
        metrics["length"] == 4.0
        and metrics["missing_eos"] == 0.5
        and metrics["short_replies"] == 0.5
    )
    assert metrics["repetition"] == pytest.approx(1 / 6)
    assert metrics["distinct_2"] == 0.5 and metrics["words"] == 3.0


PLAIN = "the river"
SPOILED = "the<|user|><|pad|> river"


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(models / "sft")


def sampled_ids(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True) -> list[int]:
    """Ids in which special tokens are control tokens, as a policy may sample them; in data they
    would be text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.eos_token_id] if finished else ids


def generated(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True) -> Reply:
    return generated_replies(tokenizer, [sampled_ids(tokenizer, text, finished)])[0]


def test_a_generated_reply_shows_its_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    reply = generated(tokenizer, SPOILED)
    assert (reply.text, reply.finished, reply.special_tokens) == (SPOILED, True, 2)
    assert reply.token_ids == tuple(sampled_ids(tokenizer, SPOILED))
    assert generated(tokenizer, PLAIN).special_tokens == 0


def test_what_follows_the_end_marker_is_no_part_of_the_reply(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = encode_reply(tokenizer, PLAIN)
    padded, exact = generated_replies(tokenizer, [[*ids, tokenizer.pad_token_id], ids])
    assert padded == exact


@pytest.mark.parametrize("finished", [True, False])
def test_model_judges_read_the_very_tokens(
    models: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, finished: bool
) -> None:
    judge, prompt = ModelJudge.load(models / "reward", "reward"), prompts[0].prompt
    # "the" letter by letter: encoding the decoded text again merges the letters into another token.
    reply = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"] + sampled_ids(
        tokenizer, "<|pad|>", finished
    )
    assert reply != sampled_ids(tokenizer, "the<|pad|>", finished)
    ids = [*encode_prompt(tokenizer, prompt), *reply]
    with torch.inference_mode():
        expected = judge.model.reply_scores(
            torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)
        )
    assert judge.score([prompt], generated_replies(tokenizer, [reply])) == pytest.approx(
        [float(expected)], abs=1e-5
    )


def test_judges_see_a_spoiled_reply(
    models: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = next(row.prompt for row in prompts if row.category == "fact")
    replies = [generated(tokenizer, text) for text in ("good question.", "good<|user|> question.")]
    for judge in (ModelJudge.load(models / "reward", "reward"), GoldJudge()):
        clean, spoiled = judge.score([prompt] * 2, replies)
        assert clean != spoiled
    assert GoldJudge().score([prompt], replies[1:]) < GoldJudge().score([prompt], replies[:1])


def test_special_tokens_are_a_defect_in_metrics_and_regression_set(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    replies = [generated(tokenizer, PLAIN), generated(tokenizer, SPOILED)]
    assert measure_text(replies)["special_tokens"] == 0.5
    assert measure_text(replies[:1])["special_tokens"] == 0.0
    rates = pass_rates(["x", "x"], replies, world=False)
    assert rates["no_special_tokens"] == 0.5 and rates["passed"] == 0.5


def test_a_judge_of_another_vocabulary_reads_the_visible_text(
    models: Path, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    judge, prompt = ModelJudge.load(models / "reward", "reward"), prompts[0].prompt
    other = train_tokenizer(["entirely different words make another vocabulary"] * 3, 280)
    for finished in (True, False):
        foreign = generated(other, SPOILED, finished)
        (own,) = generated_replies(tokenizer, [encode_reply(tokenizer, SPOILED, finished)])
        assert foreign.token_ids != own.token_ids
        assert judge.score([prompt], [foreign]) == judge.score([prompt], [own])


def test_a_prompt_without_room_for_a_reply_is_refused(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    prompts = [
        [Message("user", "short")],
        [Message("user", "long " * model.config.max_position_embeddings)],
    ]
    with pytest.raises(
        DataError, match=r"leaves no room for a reply within the model's positions; .*'long long "
    ):
        evaluation_replies(model, tokenizer, prompts, SamplingConfig(max_new_tokens=2), seed=1)


@pytest.mark.parametrize(("new_tokens", "longest"), [(20, 20), (57, 57), (58, 57), (500, 57)])
def test_replies_end_where_the_model_has_no_further_position(new_tokens: int, longest: int) -> None:
    tokenizer = train_tokenizer(["a b"], 261)
    config = GPT2Config(vocab_size=261, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()  # its positions are learned, and there are no others
    prompt = [Message("user", "a a a")]
    assert len(encode_prompt(tokenizer, prompt)) == 64 - 57
    replies = evaluation_replies(
        model,
        tokenizer,
        [prompt],
        SamplingConfig(max_new_tokens=new_tokens),
        1,
        replies_per_prompt=8,
    )
    assert max(len(reply.token_ids) for reply in replies) == longest
    sampled = on_policy_replies(
        model, tokenizer, [prompt] * 8, Sampling.for_tokenizer(tokenizer, new_tokens), seed=1
    )
    assert max(len(reply.token_ids) for reply in sampled.replies) == longest
    assert math.isfinite(measure_drift(sampled, model).kl)
