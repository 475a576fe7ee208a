"""Models in memory that are given to be trained: as other libraries leave them, refused by name or
trained rightly.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length

from rlhf_core import (
    PpoConfig,
    RewardConfig,
    SftConfig,
    train_ppo,
    train_reward_model,
    train_sft,
)
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import ConfigError, ModelError, RlhfError
from rlhf_core.models.given import require_plain

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(4)]
PAIRS = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(4)]
LORA = peft.LoraConfig(r=2, target_modules=["q_proj"])
CONFIG = SftConfig(steps=2, batch_size=2, max_tokens=32, optimizer=OptimizerConfig(lr=1e-3))


@pytest.fixture
def model(llama: LanguageModel) -> LlamaForCausalLM:
    given = llama[0]
    assert isinstance(given, LlamaForCausalLM)
    return given


@pytest.fixture
def tokenizer(llama: LanguageModel) -> PreTrainedTokenizerBase:
    return llama[1]


def with_adapters(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.add_adapter(LORA)
    return model


def offloaded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)
    return model


def with_integers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(
        torch.ones_like(layer.weight, dtype=torch.int8), requires_grad=False
    )
    return model


def with_a_layer_in(
    dtype: torch.dtype, path: str
) -> Callable[[LlamaForCausalLM], LlamaForCausalLM]:
    def make(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.get_submodule(path).to(dtype)
        return model

    return make


def with_layers(layers: int) -> Callable[[LlamaForCausalLM], LlamaForCausalLM]:
    def make(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.config.num_hidden_layers = layers
        return model

    return make


def with_a_biased_head(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    model.config.tie_word_embeddings = False
    return model


def with_a_bias(model: LlamaForCausalLM) -> LlamaForCausalLM:
    layer = model.model.layers[0].self_attn.q_proj
    layer.bias = nn.Parameter(torch.ones(layer.out_features))
    return model


def with_another_activation(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    return model


def with_another_epsilon(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.norm.variance_epsilon = 0.5
    return model


def with_another_scale(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers[0].self_attn.scaling = 0.01
    return model


def of_another_vocabulary(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.config.vocab_size += 8
    return model


def broken(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers[0].self_attn.forward = lambda *_, **__: None
    return model


def damaged(model: LlamaForCausalLM) -> LlamaForCausalLM:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
    return model


def untied_in_its_config(model: LlamaForCausalLM) -> LlamaForCausalLM:
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.config.tie_word_embeddings = False
    return model


REFUSED: dict[str, tuple[Callable[[LlamaForCausalLM], Any], type[RlhfError], str]] = {
    "PeftModel": (
        lambda model: peft.get_peft_model(model, LORA),
        ModelError,
        "model is a PeftModel.*merge_and_unload",
    ),
    "adapters inside": (
        with_adapters,
        ModelError,
        r"has adapters inside \(in model.layers.0.*merge_and_unload",
    ),
    "DataParallel": (
        nn.DataParallel,
        ConfigError,
        r"model is a DataParallel; give the model .* its \.module",
    ),
    "compiled": (torch.compile, ConfigError, r"OptimizedModule; give the model .* its \._orig_mod"),
    "no model": (
        lambda model: nn.Linear(2, 2),
        ConfigError,
        "model is a Linear; give a model of transformers",
    ),
    "name": (lambda model: "models/sft", ConfigError, "model is a str"),
    "offloaded": (offloaded, ModelError, "not in memory.*device_map"),
    "integers": (with_integers, ModelError, "quantised weights"),
    "layer in half precision": (
        with_a_layer_in(torch.float16, "model.layers.0.mlp.up_proj"),
        ModelError,
        "model.layers.0.mlp.up_proj is in float16, its model.embed_tokens in float32",
    ),
    "layer in double precision": (
        with_a_layer_in(torch.float64, "model.layers.0.self_attn.q_proj"),
        ModelError,
        "mixes precisions",
    ),
    "layers in bfloat16, embedding in float32": (
        with_a_layer_in(torch.bfloat16, "model.layers"),
        ModelError,
        "mixes precisions",
    ),
    "layer taken out": (with_layers(2), ModelError, r"it lacks model.layers.1.*change the config"),
    "head with a bias": (with_a_biased_head, ModelError, "its lm_head.bias is one too many"),
    "bias": (with_a_bias, ModelError, "q_proj.bias is one too many"),
    "activation": (with_another_activation, ModelError, "does not compute the same"),
    "epsilon": (with_another_epsilon, ModelError, "does not compute the same"),
    "scale of attention": (with_another_scale, ModelError, "does not compute the same"),
    "vocabulary": (of_another_vocabulary, ModelError, r"embed_tokens.weight has the shape"),
    "broken": (broken, ModelError, "cannot read a few tokens"),
    "damaged": (damaged, ModelError, "not finite"),
    "untied in its config": (
        untied_in_its_config,
        ModelError,
        r"lm_head.weight is model.embed_tokens.weight, but its config has tie_word_embeddings: false",
    ),
    "without a head": (
        lambda model: AutoModel.from_config(model.config),
        ModelError,
        "without a head",
    ),
    "classifier": (
        lambda model: AutoModelForSequenceClassification.from_config(model.config),
        ModelError,
        "gives scores and no replies",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name: str, model: LlamaForCausalLM) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        require_plain(make(copy.deepcopy(model)), "model")


def test_each_function_refuses_them_before_it_trains(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    adapted: Any = with_adapters(copy.deepcopy(model))
    for call in (
        lambda: train_sft(adapted, tokenizer, ROWS),
        lambda: train_reward_model(adapted, tokenizer, PAIRS),
        lambda: train_ppo(
            adapted, tokenizer, ["What?"], lambda prompts, replies: [0.0] * len(replies)
        ),
    ):
        with pytest.raises(ModelError, match="merge_and_unload"):
            call()


def test_each_module_of_a_given_model_keeps_its_mode(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = copy.deepcopy(model).train()
    own.model.layers[0].self_attn.eval()
    own.config.return_dict = False
    modes = {name: module.training for name, module in own.named_modules()}
    assert len(set(modes.values())) == 2
    ppo = PpoConfig(**PPO | CRITIC_FREE | {"iterations": 1, "warmup_iterations": 0})
    for call in (
        lambda: require_plain(own, "model"),
        lambda: train_sft(own, tokenizer, ROWS, config=CONFIG),
        lambda: train_reward_model(own, tokenizer, PAIRS, config=RewardConfig(steps=1)),
        lambda: train_ppo(own, tokenizer, QUESTIONS, by_length, config=ppo),
    ):
        call()
        assert {name: module.training for name, module in own.named_modules()} == modes
        assert not own.config.return_dict
    own.model.norm.variance_epsilon = 0.5
    with pytest.raises(ModelError, match="does not compute the same"):
        require_plain(own, "model")
    assert {name: module.training for name, module in own.named_modules()} == modes


def test_a_merged_model_is_trained(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain: Any = peft.get_peft_model(copy.deepcopy(model), LORA).merge_and_unload()
    assert not any(weight.requires_grad for weight in plain.parameters())
    trained = train_sft(plain, tokenizer, ROWS, config=CONFIG)
    expected = train_sft(copy.deepcopy(model), tokenizer, ROWS, config=CONFIG)
    for own, other in zip(trained.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_what_is_frozen_stays_and_is_said(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    given = copy.deepcopy(model)
    given.get_input_embeddings().weight.requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        trained = train_sft(given, tokenizer, ROWS, config=CONFIG)
    assert any(
        "frozen (such as model.embed_tokens.weight)" in record.message for record in caplog.records
    )
    assert torch.equal(
        trained.model.get_input_embeddings().weight, given.get_input_embeddings().weight
    )
    before, after = (each.model.layers[0].mlp.up_proj.weight for each in (given, trained.model))
    assert not torch.equal(before, after)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        assert torch.get_default_dtype() is dtype
        torch.set_default_dtype(before)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        assert torch.get_default_device().type == name
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "a device": lambda: torch.device("meta"),
    "a default device": lambda: default_device("meta"),
}


def sampled(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    config = PpoConfig(**PPO | CRITIC_FREE | {"iterations": 1, "warmup_iterations": 0})
    return train_ppo(model, tokenizer, QUESTIONS, by_length, config=config).history


def tuned(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return train_sft(model, tokenizer, ROWS, config=CONFIG).history


@pytest.mark.parametrize(
    ("train", "modes"), [(tuned, set(AROUND)), (sampled, {"bfloat16", "a default device"})]
)
def test_modes_of_torch_around_change_nothing(
    train: Callable[..., list[dict[str, Any]]],
    modes: set[str],
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Autocast would keep the first step's cast weights, so that later steps and the measurement
    read stale ones; where new tensors are of another precision, the sampler rounds otherwise.
    """
    plain = untimed(train(model, tokenizer))
    for mode in modes:
        with AROUND[mode]():
            assert untimed(train(model, tokenizer)) == plain, mode


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of a training without its speed and memory."""
    rows = []
    for record in history:
        kept = {
            key: value for key, value in record.items() if not re.search("second|gib|time", key)
        }
        rows.append(kept)
    return rows


def test_flags_of_config_json_change_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    flagged = copy.deepcopy(model)
    flagged.config.return_dict = False
    flagged.config.output_hidden_states = True
    runs = [train_sft(each, tokenizer, ROWS, config=CONFIG) for each in (model, flagged)]
    assert runs[0].metrics["perplexity"] == runs[1].metrics["perplexity"]
