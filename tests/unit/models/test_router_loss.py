"""Mixtures of experts with ``output_router_logits: true``: their auxiliary loss in SFT and DPO, and
their sampling.
"""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import tiny_causal_lm
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.architecture import arguments_of
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling.agreement import require_replies_as_scored
from rlhf_core.training.examples import ReplyBatch, collate
from rlhf_core.training.sft import reply_loss

PROMPTS, REPLIES = [[5, 6, 7], [8, 9]], [[10, 11, 3], [12, 13, 14, 15, 3]]
WITH_LOSS = ("mixtral", "granitemoe")
MORE = (
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "phimoe",
    "minimax_m2",
    "ernie4_5_moe",
    "qwen3_next",
    "llama4_text",
)
KINDS = [*WITH_LOSS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


def model_of(name: str, weight: float) -> PreTrainedModel:
    return tiny_causal_lm(name, output_router_logits=True, router_aux_loss_coef=weight)


def batch() -> ReplyBatch:
    return collate(PROMPTS, REPLIES, 0)


def own_loss(model: PreTrainedModel) -> Tensor:
    """What the model's own forward says of the same rows with the prompts' labels masked."""
    rows = batch()
    labels = torch.full_like(rows.input_ids, -100)
    for row, (prompt, reply) in enumerate(zip(PROMPTS, REPLIES, strict=True)):
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    loss: Tensor = model(
        input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=labels
    ).loss
    return loss


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_the_models_own(name: str) -> None:
    total = sum(map(len, REPLIES))
    losses = []
    for weight in (0.0, 5.0):
        model = model_of(name, weight)
        loss = reply_loss(model, batch(), total)
        torch.testing.assert_close(loss, own_loss(model), atol=1e-4, rtol=1e-4)
        losses.append(loss)
        with torch.no_grad():  # perplexity is that of the tokens alone
            assert reply_loss(model, batch(), total) == pytest.approx(
                float(losses[0].detach()), abs=1e-4
            )
    if name != "llama4_text":  # has no such loss
        assert float(losses[1]) > float(losses[0]) + 1.0


def test_batches_add_up_to_their_tokens_share() -> None:
    """Of the same rows in two batches each adds its share: twice the same row is the loss of
    one.
    """
    model = model_of("mixtral", 5.0)
    one = collate(PROMPTS[:1], REPLIES[:1], 0)
    whole = reply_loss(model, one, len(REPLIES[0]))
    parts = [reply_loss(model, one, 2 * len(REPLIES[0])) for _ in range(2)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("name", KINDS)
def test_such_a_model_is_sampled(name: str) -> None:
    require_replies_as_scored(model_of(name, 0.1), name)


def test_what_config_json_asks_for_changes_no_pass() -> None:
    plain = tiny_causal_lm("llama")
    flagged = tiny_causal_lm("llama", output_hidden_states=True, output_attentions=True)
    rows = batch()
    for model in (plain, flagged):
        output = model(**arguments_of(model, input_ids=rows.input_ids))
        assert output.hidden_states is None and output.attentions is None
    selected = [
        selected_logits(model, rows.input_ids, rows.attention_mask, rows.select)
        for model in (plain, flagged)
    ]
    assert torch.equal(selected[0].whole(), selected[1].whole())


def test_that_a_reward_model_has_no_such_loss_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ScalarModel.from_causal_lm(model_of("mixtral", 0.1), 0)
    assert any("output_router_logits" in record.message for record in caplog.records)
