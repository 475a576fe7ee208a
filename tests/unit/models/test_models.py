"""Tokenizer, tiny models, scalar heads and their folders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.forward import last_token_indices, position_ids_from_mask, selected_logits
from rlhf_core.models.heads import PRIOR_TOKENS, ScalarModel, mean_over_reply, mean_so_far
from rlhf_core.sampling.token_scoring import Tokens, response_values
from rlhf_extras.memory.dry_run import TensorMemory

SHAPE = BaseConfig(
    vocab_size=280, hidden_size=16, intermediate_size=24, layers=2, heads=2, max_positions=64
)
TEXTS = ["the sky is blue", "the tree is green", "what is the sky like"]


FILE = "model.safetensors"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return new_model(SHAPE, tokenizer, seed=1)


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerFast, policy: LlamaForCausalLM, tmp_path: Path) -> Path:
    save_policy(tmp_path / "policy", policy, tokenizer)
    return tmp_path / "policy"


def test_whoever_may_read_the_config_may_read_the_weights(folder: Path) -> None:
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_tokenizer_is_a_function_of_its_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer(TEXTS, SHAPE.vocab_size).get_vocab() == tokenizer.get_vocab()
    assert (
        tokenizer.pad_token_id
        != tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|end|>")
    )
    with pytest.raises(ConfigError, match="at least 261"):
        train_tokenizer(TEXTS, 260)


def test_new_model_is_a_function_of_the_seed_and_leaves_the_process_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = torch.get_rng_state()
    first, same, other = (new_model(SHAPE, tokenizer, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_policy_round_trip(folder: Path, policy: LlamaForCausalLM) -> None:
    loaded, tokenizer = load_policy(folder)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, policy.eval()(ids).logits)
    assert tokenizer.chat_template and tokenizer.padding_side == "left"
    assert not list(folder.parent.glob(".*"))


def test_weights_in_host_memory_are_the_mapped_file_so_that_ranks_share_them(folder: Path) -> None:
    loaded, _ = load_policy(folder, device=torch.device("cpu"))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [
        range(*(int(end, 16) for end in fields[0].split("-")))
        for fields in maps
        if fields[-1].endswith(FILE)
    ]
    copied = [
        n
        for n, weight in loaded.named_parameters()
        if not any(weight.data_ptr() in span for span in spans)
    ]
    assert copied == []


def test_weights_that_the_config_has_no_layer_for_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    load_policy(folder)
    [warning] = [
        record.getMessage() for record in caplog.records if record.name == "rlhf_core.models.io"
    ]
    assert "9 weights, such as model.layers.1." in warning and "left out" in warning


@pytest.mark.parametrize("fault", ["a bit", "a tensor", "precision", "module", "configuration"])
def test_a_model_that_was_not_saved_as_it_is_is_never_published(
    fault: str, folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "model.safetensors").read_bytes()
    policy, _ = load_policy(folder)
    save = policy.save_pretrained

    def damaged(target: Path) -> None:
        """Save, and lose something."""
        save(target)
        tensors = load_file(target / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        norm[-1] += 2**-23
        changed = {
            "a bit": {"model.norm.weight": norm},
            "precision": {"model.norm.weight": norm.bfloat16()},
        }
        if fault in ("a bit", "a tensor", "precision"):
            save_file(
                tensors | changed.get(fault, {}), target / "model.safetensors", {"format": "pt"}
            )
        if fault == "configuration":
            config = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))

    if fault == "module":
        policy.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    monkeypatch.setattr(policy, "save_pretrained", damaged)
    with pytest.raises(
        ModelError,
        match=r"(model\.norm\.weight is another|not compute the same).*nothing was published",
    ):
        save_policy(folder, policy, tokenizer)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


class Allocations(TensorMemory):
    """Bytes of tensors that have a storage: those on the meta device take none."""

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        if not tensor.is_meta:
            super()._count(tensor, kind)


def test_a_saved_model_is_verified_without_a_second_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By allocations where the model computes: a copy of its weights would double them."""
    shape = SHAPE.model_copy(update={"hidden_size": 128, "intermediate_size": 256, "layers": 4})
    policy = new_model(shape, tokenizer, seed=1)
    reward = ScalarModel.from_causal_lm(policy, seed=1)
    for model, save in (
        (policy, lambda: save_policy(tmp_path / "policy", policy, tokenizer)),
        (reward, lambda: reward.save(tmp_path / "reward", tokenizer)),
    ):
        with Allocations(model) as memory:
            held = memory.live
            save()
        assert memory.peak < 1.2 * held


def test_positions_and_last_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert position_ids_from_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    assert last_token_indices(mask).tolist() == [3, 2, 3]


def test_selected_logits_are_those_of_the_full_forward(policy: LlamaForCausalLM) -> None:
    ids, mask = (
        torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    )
    select = torch.tensor([[False, True, True, False], [True, False, False, False]])
    full = policy(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(selected_logits(policy, ids, mask, select).whole(), full[select])


def test_scalar_model_begins_small_and_round_trips(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model, same, other = (ScalarModel.from_causal_lm(folder, seed) for seed in (1, 1, 2))
    ids, mask = (
        torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    )
    scores = model.reply_scores(ids, mask)
    assert torch.equal(scores, same.reply_scores(ids, mask))
    assert not torch.equal(scores, other.reply_scores(ids, mask))
    assert scores.abs().max() < 5 / math.sqrt(2)

    path = folder.with_name("reward")
    model.save(path, tokenizer, {"reward_moments.json": {"mean": 0.5}})
    assert torch.equal(ScalarModel.load(path).reply_scores(ids, mask), scores)
    assert json.loads((path / "reward_moments.json").read_text()) == {"mean": 0.5}
    # To anyone else it is a plain Hugging Face classification folder.
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    torch.testing.assert_close(plain(input_ids=ids, attention_mask=mask).logits[:, 0], scores)


def test_a_language_model_folder_is_not_a_scalar_model(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*score"):
        ScalarModel.load(folder)


def test_imitation_starts_as_the_language_model(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for tied in (True, False):
        source = new_model(SHAPE, tokenizer, seed=4)
        if not tied:
            source.config.tie_word_embeddings = False
            source.lm_head.weight = torch.nn.Parameter(torch.randn_like(source.lm_head.weight))
        save_policy(tmp_path / str(tied), source, tokenizer)
        model = ScalarModel.from_causal_lm(tmp_path / str(tied), 1)
        assert (model.unembedding is None) is tied
        logits = model.lm_logits(model.hidden(ids, torch.ones_like(ids))).whole()
        torch.testing.assert_close(logits, source.eval()(ids).logits)
        model.save(tmp_path / f"{tied}-reward", tokenizer)
        assert ScalarModel.load(tmp_path / f"{tied}-reward").unembedding is None


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
def test_the_mean_so_far_ignores_padding_and_what_follows(
    left: int, prompt: int, reply: int, right: int
) -> None:
    generator = torch.Generator().manual_seed(reply)
    states = torch.randn(1, prompt + reply, 2, generator=generator)
    mask = torch.tensor([[0] * prompt + [1] * reply])
    padded = torch.nn.functional.pad(states, (0, 0, left, right), value=7.0)
    wide = torch.nn.functional.pad(mask, (left, right))
    alone = mean_so_far(states, mask)[:, prompt - 1 :]
    torch.testing.assert_close(
        mean_so_far(padded, wide)[:, left + prompt - 1 : left + prompt + reply], alone
    )
    changed = states.clone()
    changed[:, -1] += 1.0
    assert torch.equal(
        mean_so_far(changed, mask)[:, : prompt + reply - 1], mean_so_far(states, mask)[:, :-1]
    )


def critic(pooling: str) -> ScalarModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
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


def test_with_the_sum_each_token_of_a_reply_has_a_score_of_its_own() -> None:
    model = critic("sum")
    tokens = torch.arange(1, 28).unsqueeze(0)
    attention, response = torch.ones_like(tokens), torch.ones(1, 24, dtype=torch.bool)
    with torch.no_grad():
        states = model.scores(model.hidden(tokens, attention))[0]
        score = model.reply_scores(tokens, attention, torch.tensor([[0] * 3 + [1] * 24]))
    torch.testing.assert_close(score[0], states[3:27].sum())
    # Before a token the critic has read those in front of it: none before the first.
    expected = torch.cat([torch.zeros(1), states[3:26].cumsum(0)])
    torch.testing.assert_close(values_of(model, tokens, attention, response)[0], expected)
