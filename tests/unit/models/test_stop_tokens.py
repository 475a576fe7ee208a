"""The tokens that end a reply, in the tokenizer's files and in the generation config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from real_templates import REAL_TEMPLATES, RealTemplate
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from rlhf_core.api.inputs import checked_tokenizer
from rlhf_core.data.tokens import special_token_ids, stop_token_ids
from rlhf_core.models.causal_lm import load_policy, save_policy, with_stop_tokens


def template(name: str) -> RealTemplate:
    return next(real for real in REAL_TEMPLATES if real.name == name)


def tiny_model(
    tokenizer: PreTrainedTokenizerBase, stops: list[int] | None = None
) -> LlamaForCausalLM:
    """A model whose generation config comes from a file if ``stops`` are given, else from the
    architecture's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=2, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)  # fmt: skip
        model = LlamaForCausalLM(config).eval()
    if stops is not None:
        model.generation_config = GenerationConfig(eos_token_id=stops)
    return model


def names(tokenizer: PreTrainedTokenizerBase, ids: list[int] | tuple[int, ...]) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(list(ids)))


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("qwen-2.5-base", ["<|im_end|>", "<|endoftext|>"]),
        ("qwen-2.5-instruct", "<|im_end|>"),
    ],
)
def test_what_transformers_and_serving_engines_stop_at_is_saved(
    name: str, stops: object, tmp_path: Path
) -> None:
    tokenizer = template(name).tokenizer
    save_policy(tmp_path / "model", tiny_model(tokenizer), tokenizer)
    saved = GenerationConfig.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(saved.eos_token_id) == stops


def test_stop_tokens_of_the_generation_config_end_replies(tmp_path: Path) -> None:
    """Like Llama 3.1's ``<|eom_id|>``, which neither the template nor the tokenizer names."""
    tokenizer = template("llama-3").tokenizer
    header = tokenizer.convert_tokens_to_ids("<|start_header_id|>")
    word = tokenizer.encode("sky", add_special_tokens=False)[0]
    model = tiny_model(tokenizer, [tokenizer.eos_token_id, header, word])
    known = with_stop_tokens(tokenizer, model)
    expected = ["<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>"]
    assert names(known, stop_token_ids(known)) == expected, "a word is no stop token"
    assert header in special_token_ids(tokenizer) and header not in special_token_ids(known)
    assert names(tokenizer, stop_token_ids(tokenizer)) == expected[:2], (
        "the given tokenizer is left as it is"
    )
    save_policy(tmp_path / "model", model, known)
    loaded, again = load_policy(tmp_path / "model")
    assert names(again, stop_token_ids(again)) == expected
    assert loaded.generation_config is not None
    assert set(loaded.generation_config.eos_token_id) == {*stop_token_ids(again), word}
    again.save_pretrained(tmp_path / "reward")
    assert (
        names(again, stop_token_ids(AutoTokenizer.from_pretrained(tmp_path / "reward"))) == expected
    )
    assert with_stop_tokens(again, loaded) is again
    assert names(known, stop_token_ids(checked_tokenizer(tokenizer, model))) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("eos_token_id", value)
            for value in ([], [None], "3", -1, 10**9, 2**70, [[3]], {"a": 1}, True, [3, -1, 10**9])
        ),
        ("pad_token_id", -1),
        ("pad_token_id", 10**9),
        ("bos_token_id", -5),
    ],
)
def test_a_model_whose_generation_config_names_no_tokens_is_saved_as_well(
    name: str, value: object, tmp_path: Path
) -> None:
    """What cannot be saved would otherwise be found after the training."""
    tokenizer = template("llama-3").tokenizer
    save_policy(tmp_path / "model", tiny_model(tokenizer), tokenizer)
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    model, loaded = load_policy(tmp_path / "model")
    save_policy(tmp_path / "again", model, loaded)
    saved = GenerationConfig.from_pretrained(tmp_path / "again")
    kept = saved.eos_token_id if isinstance(saved.eos_token_id, list) else [saved.eos_token_id]
    stops = list(stop_token_ids(loaded))
    assert kept[: len(stops)] == stops and all(0 <= index < len(tokenizer) for index in kept)


def test_ids_that_an_architecture_has_by_default_mean_nothing() -> None:
    tokenizer = template("smollm-2").tokenizer
    model = tiny_model(tokenizer)
    model.generation_config = GenerationConfig.from_model_config(LlamaConfig(eos_token_id=1))
    assert with_stop_tokens(tokenizer, model) is tokenizer


@pytest.mark.parametrize("real", REAL_TEMPLATES, ids=lambda real: real.name)
def test_transformers_ends_a_sampled_reply_where_training_does(
    real: RealTemplate, tmp_path: Path
) -> None:
    tokenizer = real.tokenizer
    closing = stop_token_ids(tokenizer)[0]
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[closing] = (
            model.model.norm.weight
        )  # every position favours the closing token
        model.model.embed_tokens.weight.fill_(1.0)
    save_policy(tmp_path / "model", model, tokenizer)
    loaded, _ = load_policy(tmp_path / "model")
    written = loaded.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert written[0, 2:].tolist() == [closing]


def test_sampling_settings_that_cannot_be_saved_are_left_out(tmp_path: Path) -> None:
    """Like those of Llama 2, whose file names a temperature but does not ask for sampling."""
    tokenizer = template("llama-3").tokenizer
    model = tiny_model(tokenizer, [tokenizer.eos_token_id])
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    save_policy(tmp_path / "model", model, tokenizer)
    saved = GenerationConfig.from_pretrained(tmp_path / "model")
    assert saved.temperature is None
    assert names(tokenizer, saved.eos_token_id) == ["<|eot_id|>", "<|end_of_text|>"]
