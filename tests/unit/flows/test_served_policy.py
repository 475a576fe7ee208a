"""A served policy samples from the distribution that its replies were judged under."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import REAL_TEMPLATES, RealTemplate
from transformers import LlamaConfig, LlamaForCausalLM

from flows.registry.model_pyfunc import ChatEncoder, RequestRefused, ServedPolicy
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.encoding import encode_dialogue, stop_token_ids
from rlhf_core.data.schema import Message
from rlhf_core.models.starting.base import save_policy, train_tokenizer, with_stop_tokens
from rlhf_core.sampling.distribution import EvaluationSampling, evaluation_distribution
from rlhf_core.serving.protocol.chat import CompletionId, Usage

CONVERSATION = [{"role": "user", "content": "what colour is the sky?"}]
PIECES = ["the sky", "蓝色", " ", "\n", "?", "<|im_start|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<s>", "[INST]"]
TINY = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
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


def turns(first: str, answer: str, second: str, reply: str) -> list[dict[str, str]]:
    contents = [("user", first), ("assistant", answer), ("user", second), ("assistant", reply)]
    return [{"role": role, "content": content} for role, content in contents]


@pytest.mark.parametrize("real", REAL_TEMPLATES, ids=lambda real: real.name)
@settings(max_examples=25, deadline=None)
@given(
    contents=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), min_size=4, max_size=4)
)
def test_conversations_are_encoded_as_in_training(real: RealTemplate, contents: list[str]) -> None:
    tokenizer, conversation = real.tokenizer, turns(*contents)
    chat = ChatEncoder(with_stop_tokens(tokenizer, LlamaForCausalLM(TINY)))
    prompt, reply = encode_dialogue(tokenizer, [Message(**turn) for turn in conversation[:3]], contents[-1])
    assert chat.prompt_ids(conversation[:3]) == prompt
    assert chat.answered_ids(conversation) == [*prompt, *reply]
    assert tuple(chat.stop_ids) == stop_token_ids(tokenizer)


def test_a_conversation_that_the_template_refuses_is_a_bad_request() -> None:
    gemma = next(real.tokenizer for real in REAL_TEMPLATES if real.name == "gemma-2")
    system = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    with pytest.raises(RequestRefused, match="System role not supported"):
        ChatEncoder(gemma).prompt_ids(system)


def test_a_served_policy_stops_at_the_token_that_closes_a_turn(tmp_path: Path) -> None:
    tokenizer = next(real.tokenizer for real in REAL_TEMPLATES if real.name == "qwen-2.5-base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**TINY.to_dict(), "vocab_size": len(tokenizer)})).eval()
    closing = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[closing] = 1.0
    save_policy(tmp_path / "policy", model, with_stop_tokens(tokenizer, model))
    served = ServedPolicy(tmp_path / "policy", SamplingConfig(max_new_tokens=5, temperature=0.01).model_dump())
    (answer,) = served.answer([CONVERSATION], {})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 1


def test_an_answer_has_the_shape_of_those_of_rlhf_serve(folder: Path) -> None:
    served = ServedPolicy(folder, SamplingConfig(max_new_tokens=4).model_dump())
    (answer,) = served.answer([CONVERSATION], {"seed": 1})
    expected = CompletionId("policy:1", 0).completion("text", "stop", Usage(2, 3))
    assert set(expected) - set(answer) == {"id", "created", "model"}  # which only a server knows
    assert set(answer["choices"][0]) == set(expected["choices"][0])
    usage = answer["usage"]
    assert set(usage) == set(expected["usage"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
