"""The served policy: loaded, and replying piece by piece."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.chat_template import reply_format
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_prompt
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.io import reading
from rlhf_core.runtime import distributed
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import EvaluationSampling, philox_uniforms
from rlhf_core.sampling.reply import Check, OnText, ReplyPieces, SampledReply, sample_reply
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision

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
        seed: With the model and the prompt it alone decides the reply, whatever else is sampled
            meanwhile.
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
        # Encoding switches a setting of the tokenizer (whether special tokens in a text are control
        # tokens), which no other thread may use meanwhile. Decoding switches nothing, and goes on
        # with the other copy.
        self._decoder, self._encoder = tokenizer, copy.deepcopy(tokenizer)
        # What is too long is refused; the library would warn of it.
        self._encoder.model_max_length = sys.maxsize
        self._encoding = threading.Lock()
        # Threads share the layers, so they stay for as long as the policy is in memory.
        self._layers = ExitStack()
        self._layers.enter_context(decoding_layers(model, 1, judged.max_new_tokens))

    @classmethod
    def load(cls, revision: PolicyRevision, files: PolicyFiles) -> LoadedPolicy:
        """Load a policy and let it write one token, so that a broken one fails here.

        Its weights are in memory of this process: what happens to the files afterwards changes no
        reply.

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
        """Return the token ids of a conversation. Special tokens that a turn writes out are ordinary text."""
        with self._encoding:
            return encode_prompt(self._encoder, messages)

    def reply(
        self,
        prompt_ids: Sequence[int],
        settings: ReplySettings,
        on_text: OnText | None = None,
        check: Check | None = None,
    ) -> SampledReply:
        """Sample the reply; ``on_text`` and ``check`` are those of :func:`sample_reply`."""
        temperature, top_p = settings.temperature, settings.top_p
        if temperature < GREEDY_BELOW:
            temperature, top_p = 1.0, GREEDY_TOP_P
        base = replace(self._base, max_new_tokens=settings.max_new_tokens, temperature=temperature)
        sampling = EvaluationSampling(base, top_p, settings.repetition_penalty)
        uniforms = philox_uniforms(settings.seed, [0], settings.max_new_tokens)
        return sample_reply(
            self.model, self._decoder, prompt_ids, sampling, uniforms, on_text, settings.stop, check
        )

    def pieces(self, stop: Sequence[str]) -> ReplyPieces:
        """Return what splits a reply of this policy into pieces for a stream."""
        return ReplyPieces(self._format.lead, (*stop, self._format.tail))


def _take_into_memory(model: nn.Module) -> None:
    """Copy weights on the CPU, which are pages of their files until then; shared ones stay so."""
    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
            if key not in copies:
                copies[key] = tensor.data.clone()
            tensor.data = copies[key]
