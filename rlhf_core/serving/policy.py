"""The served policy: loaded, replying piece by piece, and changed for a newer one."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.chat_template import reply_format
from rlhf_core.data.encoding import encode_prompt
from rlhf_core.data.schema import Message
from rlhf_core.errors import ModelError, named_line
from rlhf_core.models.causal_lm import load_policy, positions_of
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.io import reading
from rlhf_core.runtime import distributed
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import EvaluationSampling, philox_uniforms
from rlhf_core.sampling.reply import Check, OnText, ReplyPieces, SampledReply, sample_reply
from rlhf_core.serving.metrics import ServingMetrics
from rlhf_core.serving.policy_source import FileStamps, PolicyFiles, PolicyRevision, PolicySource, file_stamps

# Below this temperature only the most likely token is left; smaller ones would overflow.
GREEDY_BELOW = 0.01
# The nucleus of so small a probability is the most likely token alone.
GREEDY_TOP_P = 1e-9
TRIAL = [Message("user", "Hello")]


@dataclass(frozen=True)
class ReplySettings:
    """How one reply is sampled.

    Attributes:
        temperature: Below ``GREEDY_BELOW`` the most likely token is taken.
        seed: With the model and the prompt it alone decides the reply, whatever else is sampled meanwhile.
        stop: Strings that end the reply.
    """

    temperature: float
    top_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()


class LoadedPolicy:
    """A policy and its tokenizer, ready to sample.

    Attributes:
        judged: The sampling that its replies were judged with, the default of requests.
        context: Tokens that prompt and reply may have together, None where the model has no limit.
    """

    def __init__(
        self,
        revision: PolicyRevision,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        judged: SamplingConfig,
    ) -> None:
        self.revision, self.model, self.judged = revision, model, judged
        self.context: int | None = positions_of(model.config)
        self._format = reply_format(tokenizer)
        self._base = EvaluationSampling.for_tokenizer(tokenizer, judged).base
        # Encoding switches a setting of the tokenizer (whether special tokens in a text are control tokens), which no
        # other thread may use meanwhile. Decoding switches nothing, and goes on with the other copy.
        self._decoder, self._encoder = tokenizer, copy.deepcopy(tokenizer)
        self._encoder.model_max_length = sys.maxsize  # what is too long is refused; the library would warn of it
        self._encoding = threading.Lock()
        # Threads share the layers, so they stay for as long as the policy is in memory.
        self._layers = ExitStack()
        self._layers.enter_context(decoding_layers(model, 1, judged.max_new_tokens))

    @classmethod
    def load(cls, revision: PolicyRevision, files: PolicyFiles) -> LoadedPolicy:
        """Load a policy and let it write one token, so that what is broken fails here and not in a request.

        Its weights are in memory of this process: what happens to the files afterwards changes no reply.

        Raises:
            ModelError: The folder is missing, incomplete or damaged, or opening it ends at a limit.
        """
        require_openable(files.folder)
        model, tokenizer = load_policy(files.folder)
        module: nn.Module = model
        module.to(distributed.device())
        _take_into_memory(module)
        with reading(files.folder):
            policy = cls(revision, model, tokenizer, files.sampling)
            policy.reply(policy.encode(TRIAL), ReplySettings(0.0, 1.0, 1.0, 1, 0))
        return policy

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation. Special tokens that a turn writes out are ordinary text."""
        with self._encoding:
            return encode_prompt(self._encoder, messages)

    def reply(
        self,
        prompt_ids: Sequence[int],
        settings: ReplySettings,
        on_text: OnText | None = None,
        check: Check | None = None,
    ) -> SampledReply:
        """Sample the reply; :func:`rlhf_core.sampling.reply.sample_reply` describes the functions that follow it."""
        greedy = settings.temperature < GREEDY_BELOW
        sampling = EvaluationSampling(
            replace(
                self._base,
                max_new_tokens=settings.max_new_tokens,
                temperature=1.0 if greedy else settings.temperature,
            ),
            GREEDY_TOP_P if greedy else settings.top_p,
            settings.repetition_penalty,
        )
        uniforms = philox_uniforms(settings.seed, [0], settings.max_new_tokens)
        return sample_reply(self.model, self._decoder, prompt_ids, sampling, uniforms, on_text, settings.stop, check)

    def pieces(self, stop: Sequence[str]) -> ReplyPieces:
        """What splits a reply of this policy into pieces for a stream."""
        return ReplyPieces(self._format.lead, (*stop, self._format.tail))


def _take_into_memory(model: nn.Module) -> None:
    """Copy weights on the CPU, which are pages of their files until then; those that are shared stay so."""
    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
            if key not in copies:
                copies[key] = tensor.data.clone()
            tensor.data = copies[key]


Load = Callable[[PolicyRevision, PolicyFiles], LoadedPolicy]
# A revision that could not be loaded is tried again after so many seconds, another one at once.
RETRY_SECONDS = 60.0

logger = logging.getLogger(__name__)


class PolicyWatch:
    """Serves the revision that a source names, and keeps the one before while a new one cannot be loaded.

    A request takes ``policy`` once and answers with it to the end. A new policy is loaded beside the old one, whose
    memory is freed after its last request.

    Attributes:
        policy: What new requests are answered with.
        trouble: That something is wrong, as anybody may know it; empty if nothing is.
        problem: The same with its reason, in one line.
    """

    def __init__(
        self,
        source: PolicySource,
        metrics: ServingMetrics,
        load: Load = LoadedPolicy.load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the first policy. Raises ``RlhfError`` where that fails."""
        self.source, self.metrics, self._load, self._clock = source, metrics, load, clock
        self.problem = self.trouble = ""
        self._failed: PolicyRevision | None = None
        self._retry_at = 0.0
        self._serve(*self._verified(source.latest()))

    def check(self) -> None:
        """Ask the source once, and load what it names if that is not served yet."""
        try:
            latest = self.source.latest()
        except Exception as error:  # whatever a client of a registry raises, the server goes on with what it has
            self._report("cannot find out which revision to serve", error)
            return
        if latest != self.policy.revision:
            if latest != self._failed or self._clock() >= self._retry_at:
                self._replace_by(latest)
        elif self._stamps != file_stamps(self._folder):
            changed = ModelError(f"{self._folder}; replies are those of the files as they were when they were loaded")
            self._report(f"files of {latest.id} have changed since they were loaded", changed)
        else:
            self._resolve()

    def run(self, stop: threading.Event, seconds: float) -> None:
        """Check every ``seconds`` until ``stop`` is set."""
        while not stop.wait(seconds):
            self.check()

    def _verified(self, revision: PolicyRevision) -> tuple[LoadedPolicy, Path, FileStamps]:
        """Load ``revision`` from files that nobody has written to since before they were verified.

        Raises:
            ModelError: Somebody has.
        """
        files = self.source.files(revision)
        stamps = file_stamps(files.folder)
        if stamps:
            files = self.source.files(revision)  # verified after the stamps were taken
        policy = self._load(revision, files)
        if file_stamps(files.folder) != stamps:
            raise ModelError(f"files in {files.folder} were changed while they were loaded; load them again at rest")
        return policy, files.folder, stamps

    def _replace_by(self, revision: PolicyRevision) -> None:
        before = self.policy.revision
        try:
            loaded = self._verified(revision)
        except Exception as error:  # damaged files and full memory end in many kinds of errors
            self._failed, self._retry_at = revision, self._clock() + RETRY_SECONDS
            self.metrics.reloads.labels("failed").inc()
            self._report(f"{revision.id} cannot be loaded", error)
            return
        self._serve(*loaded)
        self.metrics.reloads.labels("loaded").inc()
        self._resolve()
        logger.info("%s is served now; requests that %s had begun are finished by it", revision.id, before.id)

    def _serve(self, policy: LoadedPolicy, folder: Path, stamps: FileStamps) -> None:
        self.policy, self._folder, self._stamps = policy, folder, stamps
        self._failed = None
        self.metrics.serve_revision(policy.revision.id)

    def _report(self, trouble: str, error: Exception) -> None:
        """Say once in the log, and in ``problem`` for as long as it lasts, what is wrong with what is served."""
        problem = f"{trouble} ({named_line(error)})"
        if problem != self.problem:
            logger.error("%s; %s is still served", problem, self.policy.revision.id)
        self.problem, self.trouble = problem, trouble
        self.metrics.reload_failing.set(1)

    def _resolve(self) -> None:
        self.problem, self.trouble, self._failed = "", "", None
        self.metrics.reload_failing.set(0)
