"""Replies behind one prompt: what each token sees, the same hidden states as apart, and models that
cannot do it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import VOCABULARY, tiny_causal_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from unit.training.tiny import SHAPE, preferences

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.batches import PrefixRow
from rlhf_core.data.encoding import right_pad
from rlhf_core.errors import ModelError
from rlhf_core.models.forward import hidden_states
from rlhf_core.models.prefix_sharing import prefix_batch, require_prefix_sharing

SETTING = "reward.batch.prefix_sharing"
ids = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6)


def test_what_each_token_sees_by_hand() -> None:
    rows = [PrefixRow([11, 12], [[13], [14, 15]], [0, 1]), PrefixRow([21], [[22]], [2])]
    batch = prefix_batch(rows, pad=0)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 0, 0, 0]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 2, 3] and batch.position_ids[
        1, :2
    ].tolist() == [0, 1]
    assert batch.visible[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert batch.visible[1, 0, :2].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.visible.any(dim=-1).all(), "a token that sees nothing has no softmax"
    assert batch.tokens.tolist()[:2] == [[0, 1, 2, 0], [0, 1, 3, 4]] and batch.tokens[
        2, :2
    ].tolist() == [5, 6]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(ids, st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=4))
def test_hidden_states_are_those_of_each_sequence_alone(
    drawn: list[tuple[list[int], list[list[int]]]],
) -> None:
    torch.manual_seed(0)
    backbone = tiny_causal_lm("llama").double().eval().base_model
    rows = [PrefixRow(prompt, replies, list(range(len(replies)))) for prompt, replies in drawn]
    sequences = [[*prompt, *reply] for prompt, replies in drawn for reply in replies]
    with torch.no_grad():
        shared = prefix_batch(rows, pad=0).hidden(backbone)
        for states, sequence in zip(shared, sequences, strict=True):
            expected = hidden_states(backbone, *right_pad([sequence], 0))[0]
            torch.testing.assert_close(states[: len(sequence)], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gpt_neox", "phi3"])
def test_usual_architectures_may_share_a_prompt(kind: str, dtype: torch.dtype) -> None:
    settings = {"sliding_window": None} if kind == "phi3" else {}
    model = tiny_causal_lm(kind, **settings).to(dtype).train()
    require_prefix_sharing(model, 100, SETTING)
    assert all(module.training for module in model.modules())


def test_a_window_that_reaches_back_less_far_is_refused() -> None:
    model = tiny_causal_lm("mistral", sliding_window=16)
    require_prefix_sharing(model, 16, SETTING)
    with pytest.raises(
        ModelError, match=rf"{SETTING}: MistralForCausalLM attends to the last 16 tokens only"
    ):
        require_prefix_sharing(model, 17, SETTING)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mpt", "lets replies behind one prompt see each other"),
        ("qwen3_next", "lets replies behind one prompt see each other"),
        ("bloom", "takes no attention mask of its own"),
        ("mamba", "takes no attention mask of its own"),
    ],
)
def test_other_architectures_are_refused(kind: str, reason: str, dtype: torch.dtype) -> None:
    model = tiny_causal_lm(kind).to(dtype)
    with pytest.raises(ModelError, match=f"{SETTING}: .*{reason}.*set it to false"):
        require_prefix_sharing(model, 100, SETTING)


def test_positions_that_a_model_counts_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("gpt2")
    forward = model.base_model.forward

    def by_column(**given: Any) -> Any:
        return forward(
            **(given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None]})
        )

    monkeypatch.setattr(model.base_model, "forward", by_column)
    with pytest.raises(
        ModelError, match=f"{SETTING}: .*computes a reply behind another otherwise than alone"
    ):
        require_prefix_sharing(model, 100, SETTING)


def test_a_model_that_cannot_is_refused_by_the_name_of_the_setting(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = tiny_causal_lm("mistral", vocab_size=SHAPE.vocab_size, sliding_window=32)
    refusal = r"reward\.batch\.prefix_sharing: MistralFor\w+ attends to the last 32 tokens only; set it to false"
    config = RewardConfig(max_tokens=128, batch=PairBatchConfig(prefix_sharing=True))
    with pytest.raises(ModelError, match=refusal):
        train_reward_model(model, tokenizer, preferences(60), config=config)
