"""Means of hidden states over a reply, and over the part written so far; expected numbers are computed by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.models.heads import PRIOR_TOKENS, ScalarModel, mean_over_reply, mean_so_far
from rlhf_core.sampling.token_scoring import Tokens, response_values

# One row: a padding position, two of the prompt, three of the reply, one of padding. H = 1.
HIDDEN = torch.tensor([[[100.0], [50.0], [2.0], [4.0], [6.0], [9.0], [100.0]]])
REPLY = torch.tensor([[0, 0, 0, 1, 1, 1, 0]])


def test_the_mean_over_a_reply_sees_nothing_else() -> None:
    torch.testing.assert_close(mean_over_reply(HIDDEN, REPLY), torch.tensor([[19 / 3]]))


def test_the_mean_so_far_begins_with_the_state_before_the_reply() -> None:
    assert PRIOR_TOKENS == 10
    expected = [2 / 10, (2 + 4) / 11, (2 + 4 + 6) / 12, (2 + 4 + 6 + 9) / 13]
    torch.testing.assert_close(mean_so_far(HIDDEN, REPLY)[0, 2:6, 0], torch.tensor(expected))


@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 3))
def test_the_mean_so_far_ignores_padding_and_what_follows(left: int, prompt: int, reply: int, right: int) -> None:
    generator = torch.Generator().manual_seed(reply)
    states = torch.randn(1, prompt + reply, 2, generator=generator)
    mask = torch.tensor([[0] * prompt + [1] * reply])
    padded = torch.nn.functional.pad(states, (0, 0, left, right), value=7.0)
    wide = torch.nn.functional.pad(mask, (left, right))
    alone = mean_so_far(states, mask)[:, prompt - 1 :]
    torch.testing.assert_close(mean_so_far(padded, wide)[:, left + prompt - 1 : left + prompt + reply], alone)
    changed = states.clone()
    changed[:, -1] += 1.0
    assert torch.equal(mean_so_far(changed, mask)[:, : prompt + reply - 1], mean_so_far(states, mask)[:, :-1])


def critic(pooling: str) -> ScalarModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    return ScalarModel.from_causal_lm(LlamaForCausalLM(config), seed=1, pooling=pooling)  # type: ignore[arg-type]


def values_of(model: ScalarModel, tokens: Tensor, attention: Tensor, response: Tensor) -> Tensor:
    with torch.no_grad():
        return response_values(model, Tokens(tokens, attention, response))


def test_a_critic_of_means_comes_near_the_score_of_the_finished_reply() -> None:
    model = critic("mean")
    tokens = torch.cat([torch.arange(1, 4), torch.arange(4, 28)]).unsqueeze(0)
    attention, response = torch.ones_like(tokens), torch.ones(1, 24, dtype=torch.bool)
    values = values_of(model, tokens, attention, response)
    with torch.no_grad():
        states = model.scores(model.hidden(tokens, attention))[0]
        score = model.reply_scores(tokens, attention, torch.tensor([[0] * 3 + [1] * 24]))
    # The last value has read 23 of 24 tokens and the state before them, over 23 + 10.
    torch.testing.assert_close(values[0, -1], states[2:26].sum() / 33)
    torch.testing.assert_close(score[0], states[3:27].mean())
    last = critic("last")
    torch.testing.assert_close(values_of(last, tokens, attention, response)[0], states[2:26])
