"""What only a GPU's own kernels can show: that they agree with the CPU's, with masks and without,
fused and apart.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from unit.api.conftest import PPO, QUESTIONS, by_length
from unit.training.tiny import SHAPE, text

import rlhf_core as rlhf
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message
from rlhf_core.models.causal_lm import new_model, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling import generation
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout, cuda_graph
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.sampling.token_scoring import (
    MicroBatchLimits,
    Tokens,
    response_logits,
    response_values,
)
from rlhf_core.serving.policy import LoadedPolicy, ReplySettings
from rlhf_extras.sampling.weight_transfer import NcclGroup

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(eos_id=3, pad_id=0, max_new_tokens=12, forbidden_ids=(0, 1, 2))
PROMPTS = PromptBatch([[5, 6, 7], [8, 9], [5] * 6, [7] * 4], range(4), 1)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def model() -> PreTrainedModel:
    """A model on the CPU."""
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    return new_model(SHAPE.model_copy(update={"layers": 2}), tokenizer, seed=1)


def replies(model: PreTrainedModel, sampling: Sampling = SAMPLING) -> Rollout:
    return sample_replies(LocalSampler.of(model), 0, PROMPTS, sampling)


@pytest.mark.parametrize("tokens", [6, 80], ids=["one by one", "as a graph"])
def test_a_gpu_samples_what_the_cpu_samples(
    model: PreTrainedModel, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = list[bool]()
    monkeypatch.setitem(
        generation.GRAPHS, "cuda", lambda work: (captured.append(True), cuda_graph(work))[1]
    )
    sampling = replace(SAMPLING, max_new_tokens=tokens, min_new_tokens=tokens // 2)
    placed, other = copy.deepcopy(model).to("cuda"), replies(model, sampling)
    for _ in range(2):
        own = replies(placed, sampling)
        assert own.tokens.is_cuda and torch.equal(own.tokens.cpu(), other.tokens)
        assert torch.allclose(own.logprobs.cpu(), other.logprobs, atol=1e-4)
    assert bool(captured) == (tokens == 80)


@pytest.mark.skipif(
    "RLHF_PRETENDED_GPU" in os.environ, reason="its memory has no end, and it captures nothing"
)
def test_memory_that_runs_out_at_a_capture_leaves_no_trace(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, full, graphs = (
        replace(SAMPLING, max_new_tokens=40, min_new_tokens=40),
        True,
        list[bool](),
    )
    own_graph = generation.GRAPHS["cuda"]

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        def greedy() -> None:
            work()
            torch.empty(1 << 48 if full else 1, device="cuda", dtype=torch.int8)

        made = own_graph(greedy)
        graphs.append(True)
        return made

    monkeypatch.setitem(generation.GRAPHS, "cuda", captured)
    placed, expected = copy.deepcopy(model).to("cuda"), replies(model, sampling)
    for full in (True, False):
        own = replies(placed, sampling)
        assert torch.equal(own.tokens.cpu(), expected.tokens) and bool(graphs) is not full


def test_threads_that_sample_at_the_same_time_get_their_own_replies(model: PreTrainedModel) -> None:
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    policy = LoadedPolicy(Any, model.to("cuda"), tokenizer, SamplingConfig(max_new_tokens=44))
    asked = [policy.encode([Message("user", text(row, 3 + row))]) for row in range(4)]

    def reply(row: int) -> str:
        return policy.reply(asked[row % 4], ReplySettings(1.0, 1.0, 1.0, 44, seed=row)).text

    alone = [reply(row) for row in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reply, range(8))) == alone


@pytest.mark.parametrize("tokens", [None, 64], ids=["padded on both sides", "without a mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_cpu(
    model: PreTrainedModel, tokens: int | None, dtype: torch.dtype
) -> None:
    found = []
    rollout = replies(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    critic = ScalarModel.from_causal_lm(model, seed=2)
    for device in ("cpu", "cuda"):
        batch = Tokens(
            *(
                each.to(device)
                for each in (rollout.tokens, rollout.attention_mask, rollout.response_mask)
            )
        )
        with torch.no_grad():
            for part in MicroBatchLimits(None, tokens).split(batch):
                mask = part.tokens.response_mask
                logits = response_logits(model.to(device), part.tokens).whole()[:, :-1].float()
                values = response_values(critic.to(device), part.tokens)
                found.append((device, logits[mask].cpu(), values[mask].cpu()))
    own, other = ([each[1:] for each in found if each[0] == device] for device in ("cuda", "cpu"))
    near = 1e-4 if dtype == torch.float32 else 0.1
    for one, two in zip(own, other, strict=True):
        assert all(torch.allclose(a, b, atol=near) for a, b in zip(one, two, strict=True))


def test_a_run_goes_on_with_the_same_bits(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    config, calls = rlhf.PpoConfig(**PPO), list[int]()
    settings = rlhf.CriticConfig(max_rollouts=1, batch_size=4, optimizer=PPO["critic_optimizer"])
    critic = rlhf.train_critic(
        model, tokenizer, QUESTIONS, by_length, rollout=config.rollout, config=settings
    )
    critic = replace(critic, model=critic.model.to("cpu"))

    # Where it stops is no part of the function: a run goes on with the same function alone.
    def reward(prompts: list[list[dict[str, str]]], texts: list[str]) -> list[float]:
        calls.append(1)
        if str(len(calls)) == os.environ.get("STOP_AT"):
            raise KeyboardInterrupt
        return by_length(prompts, texts)

    def ppo(folder: str, stop: int | None) -> rlhf.TrainedPolicy:
        monkeypatch.setenv("STOP_AT", str(stop))
        calls.clear()
        context = rlhf.RunContext(tmp_path / folder)
        return rlhf.train_ppo(
            model, tokenizer, QUESTIONS, reward, critic, config=config, context=context
        )

    whole = ppo("whole", None)
    with pytest.raises(KeyboardInterrupt):
        ppo("cut", 3)
    resumed = ppo("cut", None)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(one.is_cuda and torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


@pytest.mark.skipif("RLHF_PRETENDED_GPU" in os.environ, reason="PyTorch for CPUs has no NCCL")
def test_a_group_of_nccl_broadcasts_beside_the_other_streams() -> None:
    """A group of one, as a card allows no more; a server's workers would be its other members."""
    group = NcclGroup()
    assert len(group.id) == 128
    group.join(1)
    weight = torch.arange(6.0, device="cuda").bfloat16()
    group.broadcast(weight)
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
