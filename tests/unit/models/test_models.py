"""Tokenizer, tiny models, scalar heads and their folders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.config.base import BaseConfig
from rlhf_core.data.encoding import encode_prompt
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.memory.dry_run import TensorMemory
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.forward import last_token_indices, position_ids_from_mask, selected_logits
from rlhf_core.models.heads import ScalarModel

SHAPE = BaseConfig(vocab_size=280, hidden_size=16, intermediate_size=24, layers=2, heads=2, max_positions=64)
TEXTS = ["the sky is blue", "the tree is green", "what is the sky like"]


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


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30).filter(lambda text: "<|" not in text))
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [Message("user", "hi"), Message("assistant", "yes"), Message("user", "why")]
    pieces = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, messages))
    special = [piece for piece in pieces if piece.startswith("<|")]
    assert special == ["<|user|>", "<|assistant|>", "<|end|>", "<|user|>", "<|assistant|>"]
    assert pieces[-1] == "<|assistant|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")


def test_tokenizer_is_a_function_of_its_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer(TEXTS, SHAPE.vocab_size).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="at least 261"):
        train_tokenizer(TEXTS, 260)


def test_new_model_is_a_function_of_the_seed_and_leaves_the_process_alone(tokenizer: PreTrainedTokenizerFast) -> None:
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


def test_weights_that_the_config_has_no_layer_for_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    load_policy(folder)
    [warning] = [record.getMessage() for record in caplog.records if record.name == "rlhf_core.models.io"]
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
        changed = {"a bit": {"model.norm.weight": norm}, "precision": {"model.norm.weight": norm.bfloat16()}}
        if fault in ("a bit", "a tensor", "precision"):
            save_file(tensors | changed.get(fault, {}), target / "model.safetensors", {"format": "pt"})
        if fault == "configuration":
            config = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))

    if fault == "module":
        policy.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    monkeypatch.setattr(policy, "save_pretrained", damaged)
    with pytest.raises(
        ModelError, match=r"(model\.norm\.weight is another|not compute the same).*nothing was published"
    ):
        save_policy(folder, policy, tokenizer)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


class Allocations(TensorMemory):
    """Bytes of tensors that have a storage: those on the meta device take none."""

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        if not tensor.is_meta:
            super()._count(tensor, kind)


def test_a_saved_model_is_verified_without_a_second_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
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
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    select = torch.tensor([[False, True, True, False], [True, False, False, False]])
    full = policy(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(selected_logits(policy, ids, mask, select).whole(), full[select])


def test_scalar_model_begins_small_and_round_trips(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model, same, other = (ScalarModel.from_causal_lm(folder, seed) for seed in (1, 1, 2))
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
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


def test_imitation_logits_start_as_those_of_the_language_model(
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
