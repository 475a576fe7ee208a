"""Requests to a vLLM server: replies as token ids, weights, and the version of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rlhf_core.errors import RlhfError
from rlhf_core.runtime.http_retry import RetriesExhausted, describe_answer, post_json
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.vllm.server import MODEL

RETRIES = 2
# The lowest bias that the OpenAI API has. Weighed with e^-100 a token is never drawn.
FORBIDDING_BIAS = -100.0


@dataclass(frozen=True)
class SampledTokens:
    """Token ids of a reply, its end marker included, and the log-probabilities that they were drawn with."""

    token_ids: list[int]
    logprobs: list[float]


class VllmClient:
    """Talks to one vLLM server of version 0.32, which has ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        http: Has the server's address and the token.
        token: Masked in messages.
        end_report: Says how the server ended, if it did.
    """

    def __init__(self, http: httpx.Client, token: str = "", end_report: Callable[[], str] = lambda: "") -> None:
        self.http, self.token, self.end_report = http, token, end_report

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the server to answer; ``RlhfError`` if it ends before, or takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if ended := self.end_report():
                raise RlhfError(ended)
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.RequestError:
                pass
            time.sleep(0.5)
        raise RlhfError(
            f"vLLM's server at {self.http.base_url} has not answered for {seconds:g} seconds; look at its log, or "
            "raise ppo.sampler.start_seconds"
        )

    def complete(self, prompt: Sequence[int], seed: int, sampling: Sampling, vocabulary: int) -> SampledTokens:
        """Sample one reply from the training distribution.

        Args:
            prompt: Token ids.
            seed: Decides the draws.
            sampling: The distribution.
            vocabulary: Logits of the model.
        """
        forbidden = {*sampling.forbidden_ids, *range(sampling.vocabulary_size or vocabulary, vocabulary)}
        choice = self._complete(
            prompt,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            seed=seed,
            logprobs=0,
            ignore_eos=True,  # what ends a reply is said by the trainer, not by files of the model
            stop_token_ids=list(sampling.stop_ids),
            logit_bias={str(token): FORBIDDING_BIAS for token in sorted(forbidden)},
        )
        return SampledTokens(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """The log-probability of every token of ``prompt`` but the first, at temperature 1 and without masks."""
        entries = self._complete(prompt, max_tokens=1, temperature=1.0, prompt_logprobs=0)["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], entries[1:], strict=True)]

    def load_weights(self, folder: Path) -> None:
        """Load the weights in ``folder`` in place of the present ones, and forget what was computed with those."""
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._post("/reset_prefix_cache")

    def label_weights(self, version: str) -> None:
        """Name the weights that the server has."""
        self._post("/update_weight_version", {"new_version": version})

    def weights_label(self) -> str:
        """The name of the weights that the server has; another one after a restart."""
        try:
            answer = self.http.get("/weight_info")
            return str(answer.json()["weight_version"])
        except (httpx.RequestError, ValueError, KeyError) as error:
            raise self._failed("/weight_info", f"failed ({type(error).__name__})") from error

    def sleep(self) -> None:
        """Have the server give its memory back."""
        self._post("/sleep?level=1")

    def wake_up(self) -> None:
        """Have the server take its memory again."""
        self._post("/wake_up")

    def _complete(self, prompt: Sequence[int], **settings: Any) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **settings,
        }
        answer = self._post("/v1/completions", body)
        try:
            choice: dict[str, Any] = answer.json()["choices"][0]
        except (ValueError, KeyError, IndexError) as error:
            raise self._failed("/v1/completions", describe_answer(answer, self.token)) from error
        return choice

    def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = post_json(self.http, path, body or {}, retries=RETRIES, wait=time.sleep, secret=self.token)
        except RetriesExhausted as error:
            raise self._failed(path, str(error)) from error
        if answer.status_code != 200:
            raise self._failed(path, describe_answer(answer, self.token))
        return answer

    def _failed(self, path: str, problem: str) -> RlhfError:
        return RlhfError(self.end_report() or f"vLLM's server at {self.http.base_url}: {path} {problem}")


def request_seed(seed: int, stream: int) -> int:
    """The seed, in [0, 2^63), of the reply of random stream ``stream``."""
    return int(np.random.Philox(key=[seed, stream]).random_raw()) >> 1
