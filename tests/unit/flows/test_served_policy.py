"""A served policy samples from the distribution that its replies were judged under."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flows.registry.model_pyfunc import ServedPolicy
from rlhf_core.config.model import SamplingConfig
from rlhf_core.models.base import save_policy, train_tokenizer
from rlhf_core.sampling.distribution import EvaluationSampling, evaluation_distribution

CONVERSATION = [{"role": "user", "content": "what colour is the sky?"}]
SPARE = 5  # entries of the model beyond the tokenizer's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "policy"
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer) + SPARE, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            initializer_range=0.4,
        )  # fmt: skip
        save_policy(path, LlamaForCausalLM(config).eval(), tokenizer)
    return path


@pytest.mark.parametrize("sampling", [SamplingConfig(max_new_tokens=24), SamplingConfig(
    max_new_tokens=24, temperature=1.3, top_p=0.6, repetition_penalty=2.0
)])  # fmt: skip
def test_it_samples_as_the_evaluation_does(folder: Path, sampling: SamplingConfig) -> None:
    served = ServedPolicy(folder, sampling.model_dump())
    text = served.tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    ids = served.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(4)
        generated = served.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True,
            output_logits=True, **served.generate_arguments(ids.shape[1], served.defaults),
        )  # fmt: skip
    judged = EvaluationSampling.for_tokenizer(served.tokenizer, sampling)
    reply = generated.sequences[:, ids.shape[1] :]
    assert len(generated.scores) > 4
    for step, (scores, logits) in enumerate(zip(generated.scores, generated.logits, strict=True)):
        expected = evaluation_distribution(logits, reply[:, :step], judged).exp()
        assert torch.allclose(scores.softmax(-1), expected, atol=1e-6), step
    assert int(reply.max()) < len(served.tokenizer)
