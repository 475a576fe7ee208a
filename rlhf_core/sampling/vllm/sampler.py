"""Sampling in a vLLM server, which gets the policy's weights as a folder. Not bit-exact: vLLM rounds otherwise."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import torch
from transformers import PreTrainedModel

from rlhf_core.config.ppo import VllmSamplerConfig
from rlhf_core.data.encoding import left_pad
from rlhf_core.errors import RlhfError
from rlhf_core.models.forward import probe_ids
from rlhf_core.models.precision import matmul_precision
from rlhf_core.runtime import distributed
from rlhf_core.runtime.http_retry import bearer_token
from rlhf_core.sampling.distribution import Sampling, TokenDistribution
from rlhf_core.sampling.generation import Rollout, trimmed_rollout
from rlhf_core.sampling.rounding_limits import LIMITS
from rlhf_core.sampling.sampler import PromptBatch, require_version
from rlhf_core.sampling.vllm.client import SampledTokens, VllmClient, request_seed
from rlhf_core.sampling.vllm.merged_weights import save_merged
from rlhf_core.sampling.vllm.server import VllmServer


class VllmSampler:
    """Samples in a vLLM server that is started at the first :meth:`sync`, or that runs already.

    Rank 0 starts the server and loads weights; every rank sends the requests for its own prompts. A reply's draws are
    a function of seed and stream, and its tokens are too but for rounding, which may depend on what is sampled with it.

    Args:
        config: Names the server.
        work: A folder for the log, and for the weights unless ``config.weights_folder`` names one.
    """

    def __init__(self, config: VllmSamplerConfig, work: Path) -> None:
        self.config = config
        self.version: int | None = None
        self._log = work / "vllm.log"
        self._weights = Path(config.weights_folder or work) / "vllm-weights"
        self._name = secrets.token_hex(8)  # tells apart the weights of this run and of others on the same server
        self._server: VllmServer | None = None
        self._client: VllmClient | None = None
        self._vocabulary, self._awake = 0, False

    def sync(self, policy: PreTrainedModel, version: int) -> None:
        """Have the server load the weights of ``policy``, adapters merged; see :meth:`Sampler.sync`.

        Raises:
            RlhfError: The sampler is awake, the server cannot be started or reached, or it does not compute what the
                policy computes.
        """
        if self._awake:
            raise RlhfError("the weights of a sampler that is awake must not change: call sync before awake")
        problem = ""
        if distributed.is_rank_zero():
            try:
                self._load(policy, version)
            except RlhfError as error:
                problem = str(error)
        address = self._server.address if self._server is not None else None
        problem, self._name, address = distributed.broadcast_from_rank0([problem, self._name, address])
        if problem:
            raise RlhfError(problem)
        if self._client is None:
            self._client = self._connect(address)
        self._vocabulary, self.version = int(policy.config.get_text_config().vocab_size), version

    @contextmanager
    def awake(self, version: int, rows: int, steps: int) -> Iterator[None]:
        """Check that the server has the weights of ``version``, awake if it sleeps; see :meth:`Sampler.awake`."""
        require_version(self.version, version)
        assert self._client is not None
        if self.config.sleep and distributed.is_rank_zero():
            self._client.wake_up()
        distributed.any_rank(False)  # all ranks wait for it
        if (label := self._client.weights_label()) != self._label(version):
            raise RlhfError(
                f"vLLM's server has the weights {label}, not {self._label(version)} as after the last sync: it was "
                "started again, or another run loads weights into it; give each run a server of its own"
            )
        self._awake = True
        try:
            yield
        finally:
            self._awake = False
        if self.config.sleep:
            distributed.any_rank(False)  # the others may sample still
            if distributed.is_rank_zero():
                self._client.sleep()

    def sample(self, prompts: PromptBatch, sampling: TokenDistribution) -> Rollout:
        """Send a request per prompt, all at once; see :meth:`Sampler.sample`.

        Raises:
            RlhfError: The sampler is not awake, the server fails, or ``sampling`` has the filters of evaluation.
        """
        if not self._awake:
            raise RlhfError("a sampler samples only while it is awake: call sample inside of awake")
        if not isinstance(sampling, Sampling):
            # vLLM's repetition penalty counts the prompt's tokens too, which ours does not.
            raise RlhfError("vLLM samples from the training distribution only: sample for evaluation locally")
        assert self._client is not None
        seeds = [request_seed(prompts.seed, stream) for stream in prompts.streams]
        request = partial(self._client.complete, sampling=sampling, vocabulary=self._vocabulary)
        with ThreadPoolExecutor(self.config.concurrent_requests) as pool:
            replies = list(pool.map(request, prompts.ids, seeds))
        return rollout_of(prompts, replies, sampling)

    def close(self) -> None:
        """Stop the server if this sampler started it, and remove the folder of weights."""
        if self._client is not None:
            self._client.http.close()
        if self._server is not None:
            self._server.stop()
        if distributed.is_rank_zero():
            shutil.rmtree(self._weights, ignore_errors=True)

    def _label(self, version: int) -> str:
        return f"{self._name}-{version}"

    def _load(self, policy: PreTrainedModel, version: int) -> None:
        """Hand the weights over and compare what the server computes with them, on rank 0."""
        save_merged(policy, self._weights)
        if self._client is None:
            if self.config.python is not None:
                precision = str(policy.dtype).removeprefix("torch.")
                self._log.parent.mkdir(parents=True, exist_ok=True)
                self._server = VllmServer(
                    self.config.python, self.config.arguments, self._weights, precision, self._log, self.config.sleep
                )
            self._client = self._connect(self._server.address if self._server is not None else None)
            self._client.wait_until_ready(self.config.start_seconds)
        elif self.config.sleep:
            self._client.wake_up()
        self._client.label_weights(f"{self._name}-unverified")
        self._client.load_weights(self._weights)
        self._require_same(policy)
        self._client.label_weights(self._label(version))

    @torch.no_grad()
    def _require_same(self, policy: PreTrainedModel) -> None:
        """Compare log-probabilities of fixed tokens. Only a coarse difference decides: rollouts are compared finely."""
        assert self._client is not None
        ids = probe_ids(int(policy.config.get_text_config().vocab_size))
        logits = policy(input_ids=ids.to(policy.device), use_cache=False).logits[:, :-1].float()
        expected = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None].to(logits.device)).squeeze(2).cpu()
        server = torch.tensor([self._client.prompt_logprobs(row) for row in ids.tolist()])
        difference, limit = float((server - expected).abs().mean()), LIMITS[matmul_precision(policy)].token
        if not difference <= limit:
            raise RlhfError(
                f"vLLM's server differs by {difference:.3g} nats per token from the policy whose weights it loaded (at "
                f"most {limit:g}): it did not take them, or computes in another precision than {policy.dtype}"
            )

    def _connect(self, address: list[str] | None) -> VllmClient:
        """Connect to the server that rank 0 started, at ``address`` (socket and token), or to the one at ``url``."""
        limits = httpx.Limits(max_connections=self.config.concurrent_requests)
        if address is not None:
            socket, token = address
            transport, url = httpx.HTTPTransport(uds=socket, limits=limits), "http://localhost"
        else:
            token = bearer_token(self.config.token_env, "ppo.sampler")
            transport, url = httpx.HTTPTransport(limits=limits), str(self.config.url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = httpx.Client(transport=transport, base_url=url, headers=headers, timeout=self.config.timeout_seconds)
        return VllmClient(http, token, self._server.end_report if self._server is not None else lambda: "")


def rollout_of(prompts: PromptBatch, replies: list[SampledTokens], sampling: Sampling) -> Rollout:
    """The replies to ``prompts`` as tensors on this rank's device."""
    device = distributed.device()
    ids, mask = left_pad(prompts.ids, sampling.pad_id, prompts.width)
    response = ids.new_full((len(replies), sampling.max_new_tokens), sampling.pad_id)
    logprobs = torch.zeros(response.shape)
    for row, reply in enumerate(replies):
        response[row, : len(reply.token_ids)] = torch.tensor(reply.token_ids)
        logprobs[row, : len(reply.logprobs)] = torch.tensor(reply.logprobs)
    lengths = torch.tensor([len(reply.token_ids) for reply in replies], dtype=torch.long)
    finished = torch.tensor([reply.token_ids[-1] in sampling.stop_ids for reply in replies], dtype=torch.bool)
    columns = (ids, mask, response, logprobs, lengths, finished)
    return trimmed_rollout(*(column.to(device) for column in columns))
