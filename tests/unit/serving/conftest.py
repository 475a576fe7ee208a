"""A tiny policy with random weights, which writes nonsense of any length, and an app around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from fastapi import FastAPI
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.sampling.reply import Check, OnText, SampledReply
from rlhf_core.serving.policy import LoadedPolicy, ReplySettings
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.serving.protocol import ServingLimits
from rlhf_extras.serving.app import create_app
from rlhf_extras.serving.completions import Completions
from rlhf_extras.serving.metrics import ServingMetrics
from rlhf_extras.serving.watch import PolicyWatch

JUDGED = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1, max_new_tokens=12)
CONTEXT = 128
PATIENCE = 60  # seconds until a test that waits for another thread fails
Result = TypeVar("Result")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(tiny_config(tokenizer, max_position_embeddings=CONTEXT)).eval()


class HeldPolicy(LoadedPolicy):
    """A policy that waits after its first token, while ``go`` is not set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.holding = threading.Event(), threading.Semaphore(0)
        self.go.set()

    def hold(self) -> None:
        self.go.clear()

    def reply(
        self,
        ids: Any,
        settings: ReplySettings,
        on_text: OnText | None = None,
        check: Check | None = None,
    ) -> SampledReply:
        def held() -> None:
            if not self.go.is_set():
                self.holding.release()
                assert self.go.wait(PATIENCE)
            if check is not None:
                check()

        return super().reply(ids, settings, on_text, held)


class ChangingSource:
    """A source whose alias a test moves, and which fails when a test says so."""

    def __init__(self) -> None:
        self.version, self.error = 1, ""

    def latest(self) -> PolicyRevision:
        if self.error:
            raise OSError(self.error)
        return PolicyRevision(f"policy:{self.version}", "policy@champion")

    def files(self, revision: PolicyRevision) -> PolicyFiles:
        return PolicyFiles(Path(revision.id), JUDGED)


class Served:
    """An app with all its parts in reach, asked in this process."""

    def __init__(
        self, load: Callable[..., HeldPolicy], limits: ServingLimits, **settings: Any
    ) -> None:
        self.source, self.metrics, self.now = ChangingSource(), ServingMetrics(), 0.0
        self.watch = PolicyWatch(self.source, self.metrics, load, clock=lambda: self.now)
        self.completions = Completions(
            self.watch, limits, self.metrics, clock=lambda: self.now, now=lambda: 1e9
        )
        self.app: FastAPI = create_app(self.completions, **settings)

    @property
    def policy(self) -> HeldPolicy:
        policy = self.watch.policy
        assert isinstance(policy, HeldPolicy)
        return policy

    def run(self, story: Callable[[httpx.AsyncClient], Awaitable[Result]]) -> Result:
        """Run ``story`` with a client of the app."""

        async def with_client() -> Result:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                return await story(client)

        return asyncio.run(with_client())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.run(lambda client: client.get(path, **arguments))

    def post(self, body: Any, **arguments: Any) -> httpx.Response:
        return self.run(lambda client: client.post("/v1/chat/completions", json=body, **arguments))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def serve(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Served]:
    def load(revision: PolicyRevision, files: PolicyFiles) -> HeldPolicy:
        return HeldPolicy(revision, model, tokenizer, files.sampling)

    def make(limits: ServingLimits | None = None, **settings: Any) -> Served:
        return Served(load, limits or ServingLimits(max_new_tokens=40), **settings)

    return make


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
