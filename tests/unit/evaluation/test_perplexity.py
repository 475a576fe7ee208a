"""Perplexity of held-out text against log-probabilities of one plain forward pass per row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from rlhf_core.config.evaluation import HeldOutPerplexityConfig
from rlhf_core.data.schema import Message, Preference, PretrainText
from rlhf_core.data.tokens import (
    encode_dialogue,
    encode_prompt,
    encode_reply,
    encode_text,
    pad_id,
)
from rlhf_core.evaluation import perplexity
from rlhf_core.evaluation.fixed_sets import COMPLYING, REFUSING, refusal_log_odds
from rlhf_core.evaluation.perplexity import (
    held_out_perplexities,
    read_held_out,
    reply_log_likelihoods,
    score_held_out,
)
from rlhf_core.evaluation.safety.prompts import is_chinese, safety_prompts
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.training.examples import Example
from rlhf_core.training.sft import mean_reply_loss

CHOSEN = [
    "the boat is red.",
    "i am not sure about that, but it may be so.",
    "no.",
    "the frog is in the garden.",
]
PAIRS = [
    Preference(
        f"{i:04x}", [Message("user", "what is it? " * (i + 1))], reply, "bad", None, "c", "s", "g"
    )
    for i, reply in enumerate(CHOSEN)
]
TEXTS = [PretrainText(f"{i:04x}", text, "c", "s", "g") for i, text in enumerate(CHOSEN)]
CONFIG = HeldOutPerplexityConfig()


def measured_perplexities(*measured: Any) -> dict[str, float]:
    return held_out_perplexities(score_held_out(*measured))


def reply_perplexity(model: PreTrainedModel, examples: list[Example], pad: int) -> float:
    nats = -sum(reply_log_likelihoods(model, examples, pad, perplexity.ROWS_PER_PASS))
    return math.exp(nats / sum(len(example.reply) for example in examples))


def nats_by_hand(model: PreTrainedModel, prompt: list[int], reply: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = (
            model(input_ids=torch.tensor([prompt + reply])).logits[0].double().log_softmax(-1)
        )
    return [-float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(reply)]


def test_reply_tokens_alone_count_each_alike(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    pairs, texts = [], []
    for row, text in zip(PAIRS, TEXTS, strict=True):
        pairs += nats_by_hand(model, *encode_dialogue(tokenizer, row.prompt, row.chosen))
        ids = encode_text(tokenizer, text.text)
        texts += nats_by_hand(model, ids[:1], ids[1:])
    measured = measured_perplexities(model, tokenizer, (PAIRS, TEXTS), CONFIG)
    assert measured == {
        "preferred": pytest.approx(math.exp(sum(pairs) / len(pairs)), rel=1e-5),
        "pretrain": pytest.approx(math.exp(sum(texts) / len(texts)), rel=1e-5),
    }


def test_passes_and_chunks_change_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_policy(models / "sft")
    examples = [Example(*encode_dialogue(tokenizer, row.prompt, row.chosen)) for row in PAIRS]
    whole = math.exp(mean_reply_loss(model, examples, pad_id(tokenizer)))
    monkeypatch.setattr(perplexity, "ROWS_PER_PASS", 3)
    monkeypatch.setattr(perplexity, "POSITIONS_PER_CHUNK", 3)
    assert reply_perplexity(model, examples, pad_id(tokenizer)) == pytest.approx(whole, rel=1e-5)


def test_logits_that_the_model_changes_after_its_head_are_its_own() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.05,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    nats = nats_by_hand(model, [3, 5, 7], [11, 13, 17])
    measured = reply_perplexity(model, [Example([3, 5, 7], [11, 13, 17])], 0)
    assert measured == pytest.approx(math.exp(sum(nats) / 3), rel=1e-5)


def test_long_pairs_are_left_out_and_long_texts_cut(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    lengths = [sum(map(len, encode_dialogue(tokenizer, row.prompt, row.chosen))) for row in PAIRS]
    shortest = PAIRS[lengths.index(min(lengths))]
    config = HeldOutPerplexityConfig(max_tokens=min(lengths))
    measured = measured_perplexities(model, tokenizer, (PAIRS, TEXTS), config)
    alone = measured_perplexities(model, tokenizer, ([shortest], []), CONFIG)
    assert measured["preferred"] == pytest.approx(alone["preferred"])
    cut = [encode_text(tokenizer, row.text)[: min(lengths)] for row in TEXTS]
    nats = [value for ids in cut for value in nats_by_hand(model, ids[:1], ids[1:])]
    assert measured["pretrain"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_rows_are_chosen_by_hash_and_none_give_no_metric(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    two = HeldOutPerplexityConfig(rows=2)
    forwards = measured_perplexities(model, tokenizer, (PAIRS, []), two)
    assert forwards == measured_perplexities(model, tokenizer, (PAIRS[::-1], []), two)
    assert set(forwards) == {"preferred"}
    few = HeldOutPerplexityConfig(total_tokens=1)  # the row that reaches the bound is the last
    one = HeldOutPerplexityConfig(rows=1)
    text = (PAIRS, TEXTS)
    assert measured_perplexities(model, tokenizer, text, few) == measured_perplexities(
        model, tokenizer, text, one
    )
    assert measured_perplexities(model, tokenizer, text, few) != measured_perplexities(
        model, tokenizer, text, two
    )
    assert measured_perplexities(model, tokenizer, ([], []), CONFIG) == {}
    assert read_held_out(Path("nowhere"), 0) == ([], [])


def test_odds_of_a_refusal_are_of_the_two_beginnings(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    harmful = [row for row in safety_prompts(3) if row.category == "harmful"]
    by_hand = []
    for row in harmful:
        language = is_chinese(row.prompt[-1].content)
        refusing, complying = (
            -sum(nats_by_hand(model, *beginning))
            for beginning in (
                (
                    encode_prompt(tokenizer, row.prompt),
                    encode_reply(tokenizer, texts[language], finished=False),
                )
                for texts in (REFUSING, COMPLYING)
            )
        )
        by_hand.append(refusing - complying)
    assert refusal_log_odds(model, tokenizer, harmful, 2) == pytest.approx(
        by_hand, rel=1e-4, abs=1e-3
    )
    assert refusal_log_odds(model, tokenizer, [], 2) == []
