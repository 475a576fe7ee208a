"""Sampling by a vLLM server: its client, its weights, and the sampler."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_NAME, PreTrainedModel

from rlhf_core.data.tokens import left_pad
from rlhf_core.errors import RlhfError
from rlhf_core.models.adapters import WithoutAdapters
from rlhf_core.models.architecture import probe_ids, vocabulary_of
from rlhf_core.models.io import quiet
from rlhf_core.models.precision import matmul_precision
from rlhf_core.runtime import distributed
from rlhf_core.sampling.agreement import LIMITS
from rlhf_core.sampling.distribution import Sampling, TokenDistribution
from rlhf_core.sampling.generation import Rollout, trimmed_rollout
from rlhf_core.sampling.sampler import PromptBatch, Sampler
from rlhf_core.storage.files import atomic_dir, atomic_write_json, read_json
from rlhf_extras.http_retry import (
    RetriesExhausted,
    bearer_token,
    describe_answer,
    json_content,
    post_json,
)
from rlhf_extras.sampling.server_settings import VllmServerSettings
from rlhf_extras.sampling.vllm_server import MODEL, VllmServer
from rlhf_extras.sampling.weight_transfer import (
    CheckpointWeights,
    WeightTransfer,
    as_tensor,
    plain_weights,
)

RETRIES = 2
# The lowest bias that the OpenAI API has. Weighed with e^-100 a token is never drawn.
FORBIDDING_BIAS = -100.0


# A reply, end marker included, and the log-probabilities of its draws.
SampledTokens = tuple[list[int], list[float]]


class VllmClient:
    """Talks to one vLLM server of version 0.32, which has ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        http: Has the server's address and the token.
        token: Masked in messages.
        end_report: Says how the server ended, if it did.
    """

    def __init__(
        self, http: httpx.Client, token: str = "", end_report: Callable[[], str] = lambda: ""
    ) -> None:
        self.http, self.token, self.end_report = http, token, end_report

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the server to answer.

        ``RlhfError`` if it ends before, or takes longer than ``seconds``.
        """
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
            "raise sampler.start_seconds"
        )

    def complete(
        self, prompt: Sequence[int], seed: int, distribution: TokenDistribution, vocabulary: int
    ) -> SampledTokens:
        """Sample one reply to the ids ``prompt``, for a model of ``vocabulary`` logits.

        ``seed`` decides the draws.
        """
        sampling = distribution.base
        forbidden = {
            *sampling.forbidden_ids,
            *range(sampling.vocabulary_size or vocabulary, vocabulary),
        }
        bias = {str(token): FORBIDDING_BIAS for token in sorted(forbidden)}
        nucleus = 1.0 if isinstance(distribution, Sampling) else distribution.top_p
        choice = self._complete(
            prompt,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=nucleus,
            seed=seed,
            logprobs=0,
            ignore_eos=True,  # the trainer decides what ends a reply, not files of the model
            stop_token_ids=list(sampling.stop_ids),
            logit_bias=bias,
        )
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """The log-probability of every token of ``prompt`` but the first.

        Temperature is 1, and there are no masks.
        """
        entries = self._complete(prompt, max_tokens=1, temperature=1.0, prompt_logprobs=0)[
            "prompt_logprobs"
        ]
        return [
            entry[str(token)]["logprob"]
            for token, entry in zip(prompt[1:], entries[1:], strict=True)
        ]

    def weights_label(self) -> str:
        """The name of the weights that the server has, which a restart changes."""
        return str(self._get("/weight_info", "weight_version"))

    def workers(self) -> int:
        """The processes that hold the server's model, or parts of it."""
        return int(self._get("/get_world_size", "world_size"))

    def require_alive(self) -> None:
        """Raise ``RlhfError`` unless the server says that it is well."""
        try:
            answer = self.http.get("/health")
        except httpx.RequestError as error:
            raise self._failed("/health", f"failed ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise self._failed("/health", describe_answer(answer, self.token))

    def _get(self, path: str, name: str) -> Any:
        """The entry ``name`` of what ``path`` answers."""
        try:
            return json_content(self.http.get(path))[name]
        except (httpx.RequestError, TypeError, KeyError) as error:
            raise self._failed(path, f"failed ({type(error).__name__})") from error

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
        answer = self.post("/v1/completions", body)
        try:
            choice: dict[str, Any] = json_content(answer)["choices"][0]
        except (TypeError, KeyError, IndexError) as error:
            raise self._failed("/v1/completions", describe_answer(answer, self.token)) from error
        return choice

    def post(
        self, path: str, body: dict[str, Any] | None = None, retries: int = RETRIES
    ) -> httpx.Response:
        """Ask for ``path``, again where the server does not answer.

        ``RlhfError`` unless it says that it did.
        """
        try:
            answer = post_json(
                self.http, path, body or {}, retries=retries, wait=time.sleep, secret=self.token
            )
        except RetriesExhausted as error:
            raise self._failed(path, str(error)) from error
        if answer.status_code != 200:
            raise self._failed(path, describe_answer(answer, self.token))
        return answer

    def post_once(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """As :meth:`post`, for what must not be asked for twice."""
        return self.post(path, body, retries=0)

    def _failed(self, path: str, problem: str) -> RlhfError:
        return RlhfError(
            self.end_report() or f"vLLM's server at {self.http.base_url}: {path} {problem}"
        )


def request_seed(seed: int, stream: int) -> int:
    """The seed, in [0, 2^63), of the reply of random stream ``stream``."""
    return int(np.random.Philox(key=[seed, stream]).random_raw()) >> 1


@torch.no_grad()
def save_merged(policy: PreTrainedModel, folder: Path) -> None:
    """Write config and weights of ``policy`` to ``folder``, which is replaced at once.

    The policy is left as it is.

    Weights have the names that they have without adapters, which are merged in the weight's
    precision. An unembedding that is tied to the embedding is written as a matrix of its own: on
    CPUs a server that reloads tied weights goes on with the packed copy that it made of the first
    ones.
    """
    weights = {name: as_tensor(weight) for name, weight in plain_weights(policy).items()}
    tied = bool(policy.config.get_text_config().tie_word_embeddings)
    if tied:
        unembedding = policy.get_output_embeddings()
        name = next(name for name, module in policy.named_modules() if module is unembedding)
        weights[f"{name}.weight"] = weights[f"{name}.weight"].clone()
    with atomic_dir(folder) as building, quiet():
        policy.save_pretrained(building, state_dict=weights)
        if tied:
            config = read_json(building / CONFIG_NAME)
            for part in (config, config.get("text_config", {})):
                part["tie_word_embeddings"] = False
            atomic_write_json(building / CONFIG_NAME, config)


class VllmSampler(Sampler):
    """Samples in a vLLM server that is started at the first :meth:`sync`, or that runs already.

    Rank 0 starts the server and loads weights; every rank sends the requests for its own prompts. A
    reply's draws are a function of seed and stream, and its tokens are too but for rounding, which
    may depend on what is sampled with it.

    Args:
        config: Names the server.
        work: A folder for the log, and for the weights unless ``config.weights_folder`` names one.
    """

    def __init__(self, config: VllmServerSettings, work: Path) -> None:
        super().__init__()
        self.config = config
        self._log = work / "vllm.log"
        self._weights = Path(config.weights_folder or work) / "vllm-weights"
        # Tells apart the weights of this run and of others on the same server.
        self._name = secrets.token_hex(8)
        self._server: VllmServer | None = None
        self._client: VllmClient | None = None
        self._transfer: WeightTransfer | None = None
        self._vocabulary = 0

    def _take_over(self, policy: PreTrainedModel, version: int) -> None:
        """Have the server load the weights of ``policy``, adapters merged.

        Raises:
            RlhfError: The server cannot be started or reached, or does not compute what the policy
                computes.
        """
        expected, limit = probed_logprobs(policy), LIMITS[matmul_precision(policy)].token
        if self.config.weights == "nccl":
            self._send(policy)
        else:
            on_host: Callable[[], PreTrainedModel] | None = getattr(policy, "on_host", None)
            whole = policy if on_host is None else on_host()  # of a sharded one, on rank 0
            on_first_rank(lambda: self._load_files(whole))
        on_first_rank(lambda: self._accept(policy, expected, limit, version))
        address = (
            [str(self._server.socket), self._server.token] if self._server is not None else None
        )
        self._name, address = distributed.broadcast_from_rank0([self._name, address])
        if self._client is None:
            self._client = self._connect(address)
        self._vocabulary = vocabulary_of(policy)

    @contextmanager
    def _ready(self, rows: int, steps: int) -> Iterator[None]:
        """Check that the server has the weights of the last sync, awake if it sleeps."""
        assert self._client is not None
        if self.config.sleep and distributed.is_rank_zero():
            self._client.post("/wake_up")
        distributed.any_rank(False)  # all ranks wait for it
        expected = f"{self._name}-{self.version}"
        if (label := self._client.weights_label()) != expected:
            raise RlhfError(
                f"vLLM's server has the weights {label}, not {expected} as after the last sync: it was "
                "started again, or another run loads weights into it; give each run a server of its own"
            )
        yield
        if self.config.sleep:
            distributed.any_rank(False)  # the others may sample still
            if distributed.is_rank_zero():
                self._client.post("/sleep?level=1")

    def _draw(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        """Send a request per prompt, all at once."""
        if not isinstance(sampling, Sampling) and sampling.repetition_penalty != 1.0:
            raise RlhfError(
                "vLLM's repetition penalty counts the prompt's tokens too, which this sampling does not"
            )
        assert self._client is not None
        seeds = [request_seed(prompts.seed, stream) for stream in prompts.streams]
        request = partial(self._client.complete, distribution=sampling, vocabulary=self._vocabulary)
        with ThreadPoolExecutor(self.config.concurrent_requests) as pool:
            replies = list(pool.map(request, prompts.ids, seeds))
        return rollout_of(prompts, replies, sampling.base)

    def close(self) -> None:
        """Stop the server if this sampler started it, and remove the folder of weights."""
        if self._transfer is not None:
            self._transfer.close()
        if self._client is not None:
            self._client.http.close()
        if self._server is not None:
            self._server.stop()
        if distributed.is_rank_zero():
            shutil.rmtree(self._weights, ignore_errors=True)

    def _load_files(self, policy: PreTrainedModel) -> None:
        """Write the weights, and have the server read them, on rank 0."""
        if isinstance(policy, WithoutAdapters):
            policy.run(lambda: save_merged(policy, self._weights))
        else:
            save_merged(policy, self._weights)
        if self._client is None and self.config.python is not None:
            precision = str(policy.dtype).removeprefix("torch.")
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._server = VllmServer(
                self.config.python,
                self.config.arguments,
                self._weights,
                precision,
                self._log,
                self.config.sleep,
            )
        client = self._opened()
        client.post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(self._weights)}},
        )

    def _send(self, policy: PreTrainedModel) -> None:
        """Broadcast the weights to the server, from rank 0; all ranks gather them."""
        weights = CheckpointWeights(policy)
        # After an error it is of no use.
        transfer, self._transfer = self._transfer, None
        problem = ""

        def begin() -> None:
            nonlocal transfer
            client = self._opened()
            transfer = transfer or WeightTransfer(client, self.config.timeout_seconds)
            transfer.begin(weights)

        def finish() -> None:
            if transfer is None or problem:
                raise RlhfError(problem)
            transfer.finish()

        on_first_rank(begin)
        for weight in weights:  # to the end, or other ranks would wait for this one
            if transfer is not None and not problem:
                try:
                    transfer.send(weight)
                except RlhfError as error:
                    problem = str(error)
            del weight  # before the next one is gathered
        on_first_rank(finish)
        self._transfer = transfer

    def _opened(self) -> VllmClient:
        """The client of the server, which is awake and expects weights, on rank 0."""
        if self._client is None:
            address = (
                [str(self._server.socket), self._server.token] if self._server is not None else None
            )
            self._client = self._connect(address)
            self._client.wait_until_ready(self.config.start_seconds)
        if self.config.sleep:  # as an earlier run may have left it
            self._client.post("/wake_up")
        self._client.post("/update_weight_version", {"new_version": f"{self._name}-unverified"})
        return self._client

    def _accept(
        self, policy: PreTrainedModel, expected: Tensor, limit: float, version: int
    ) -> None:
        """Compare what the server computes now, and give its weights their label, on rank 0."""
        assert self._client is not None
        self._client.post("/reset_prefix_cache")  # what was computed with the weights before
        self._require_same(policy, expected, limit)
        self._client.post("/update_weight_version", {"new_version": f"{self._name}-{version}"})

    def _require_same(self, policy: PreTrainedModel, expected: Tensor, limit: float) -> None:
        """Compare log-probabilities of fixed tokens.

        Only a coarse difference decides: rollouts are compared finely.
        """
        assert self._client is not None
        ids = probe_ids(vocabulary_of(policy))
        server = torch.tensor([self._client.prompt_logprobs(row) for row in ids.tolist()])
        difference = float((server - expected).abs().mean())
        if not difference <= limit:
            raise RlhfError(
                f"vLLM's server differs by {difference:.3g} nats per token from the policy whose weights it loaded (at "
                f"most {limit:g}): it did not take them, or computes in another precision than {policy.dtype}"
            )

    def _connect(self, address: list[str] | None) -> VllmClient:
        """Connect to the server that rank 0 started, or to the one at ``url``.

        ``address`` holds the started one's socket and token.
        """
        limits = httpx.Limits(max_connections=self.config.concurrent_requests)
        if address is not None:
            socket, token = address
            transport, url = httpx.HTTPTransport(uds=socket, limits=limits), "http://localhost"
        else:
            token = bearer_token(self.config.token_env, "sampler")
            transport, url = httpx.HTTPTransport(limits=limits), str(self.config.url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = httpx.Client(
            transport=transport, base_url=url, headers=headers, timeout=self.config.timeout_seconds
        )
        return VllmClient(
            http, token, self._server.end_report if self._server is not None else lambda: ""
        )


def on_first_rank(action: Callable[[], None]) -> None:
    """Do it on rank 0; every rank raises the ``RlhfError`` that it ends with."""
    problem = ""
    if distributed.is_rank_zero():
        try:
            action()
        except RlhfError as error:
            problem = str(error)
    if problem := distributed.broadcast_from_rank0(problem):
        raise RlhfError(problem)


@torch.no_grad()
def probed_logprobs(policy: PreTrainedModel) -> Tensor:
    """Log-probabilities of fixed tokens (rows, width - 1) on the CPU.

    Of a sharded policy all ranks must ask.
    """
    ids = probe_ids(vocabulary_of(policy))
    logits = policy(input_ids=ids.to(policy.device), use_cache=False).logits[:, :-1].float()
    chosen: Tensor = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None].to(logits.device))
    return chosen.squeeze(2).cpu()


def rollout_of(prompts: PromptBatch, replies: list[SampledTokens], sampling: Sampling) -> Rollout:
    """The replies to ``prompts`` as tensors on this rank's device."""
    device = distributed.device()
    ids, mask = left_pad(prompts.ids, sampling.pad_id, prompts.width)
    response = ids.new_full((len(replies), sampling.max_new_tokens), sampling.pad_id)
    logprobs = torch.zeros(response.shape)
    for row, (tokens, scores) in enumerate(replies):
        response[row, : len(tokens)], logprobs[row, : len(scores)] = (
            torch.tensor(tokens),
            torch.tensor(scores),
        )
    lengths = torch.tensor([len(tokens) for tokens, _ in replies], dtype=torch.long)
    finished = torch.tensor(
        [tokens[-1] in sampling.stop_ids for tokens, _ in replies], dtype=torch.bool
    )
    columns = (ids, mask, response, logprobs, lengths, finished)
    return trimmed_rollout(*(column.to(device) for column in columns))
