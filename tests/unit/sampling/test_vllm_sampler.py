"""What the sampler in vLLM asks for and reads, and what it says of servers that fail (a real one is
in tests/e2e)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import sampler_contract as contract
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_core.config.model import LoraConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.adapters import add_adapters
from rlhf_core.sampling.sampler import PromptBatch, opened_sampler
from rlhf_extras.sampling.settings import VllmSamplerConfig
from rlhf_extras.sampling.vllm import (
    VllmClient,
    VllmSampler,
    request_seed,
    rollout_of,
    save_merged,
)
from rlhf_extras.sampling.vllm_server import VllmServer

CORRECTED = {"importance_sampling_correction": {"mode": "always"}}


def test_requests_say_all_of_the_training_distribution() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        choice = {"token_ids": [9, contract.EOS], "logprobs": {"token_logprobs": [-1.5, -0.25]}}
        return httpx.Response(200, json={"choices": [choice]})

    client = VllmClient(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://vllm"))
    assert client.complete([4, 6], 77, contract.SAMPLING, contract.VOCABULARY) == (
        [9, contract.EOS],
        [-1.5, -0.25],
    )
    (body,) = bodies
    assert (body["prompt"], body["seed"], body["temperature"]) == (
        [4, 6],
        77,
        contract.SAMPLING.temperature,
    )
    assert (body["max_tokens"], body["min_tokens"], body["logprobs"]) == (9, 2, 0)
    assert body["ignore_eos"] and body["stop_token_ids"] == [contract.EOS, contract.OTHER_STOP]
    assert body["logit_bias"] == {
        str(token): -100.0
        for token in (*contract.FORBIDDEN, contract.VOCABULARY - 2, contract.VOCABULARY - 1)
    }
    # A server's own defaults would make it another distribution.
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (
        1.0,
        0,
        0.0,
        1.0,
    )


def test_a_stream_has_one_seed_whatever_rank_asks() -> None:
    seeds = {request_seed(seed, stream) for seed in range(20) for stream in range(50)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(3, 4) == request_seed(3, 4) != request_seed(4, 3)


def test_replies_become_a_rollout_as_wide_as_the_longest() -> None:
    replies = [([9, 8, contract.EOS], [-1.0, -2.0, -3.0]), ([contract.OTHER_STOP], [-0.5])]
    rollout = rollout_of(PromptBatch([[4], [5, 6]], [0, 1], 1), replies, contract.SAMPLING)
    assert rollout.tokens.tolist() == [
        [contract.PAD, 4, 9, 8, contract.EOS],
        [5, 6, contract.OTHER_STOP, contract.PAD, contract.PAD],
    ]
    assert rollout.attention_mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert rollout.logprobs.tolist() == [[-1.0, -2.0, -3.0], [-0.5, 0.0, 0.0]]
    assert rollout.finished.tolist() == [True, True] and [
        len(reply) for reply in rollout.replies()
    ] == [3, 1]
    cut = rollout_of(PromptBatch([[4]], [0], 1), [([9] * 9, [-1.0] * 9)], contract.SAMPLING)
    assert cut.finished.tolist() == [False]


def test_adapters_are_merged_into_the_weights_that_the_server_gets(tmp_path: Path) -> None:
    policy = contract.contract_policy()
    add_adapters(policy, LoraConfig(rank=4, alpha=8), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    ids = torch.tensor([[4, 6, 8, 9]])
    with torch.no_grad():
        expected = policy(input_ids=ids).logits
        save_merged(policy, tmp_path / "weights")
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")(input_ids=ids).logits
        assert not torch.allclose(
            expected, contract.contract_policy()(input_ids=ids).logits, atol=0.1
        )
        torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(policy(input_ids=ids).logits, expected, atol=0, rtol=0)


def test_a_tied_unembedding_is_written_as_a_matrix_of_its_own(tmp_path: Path) -> None:
    policy = contract.contract_policy(tied=True)
    save_merged(policy, tmp_path / "weights")
    written = load_file(tmp_path / "weights" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert served.lm_head.weight is not served.model.embed_tokens.weight
    ids = torch.tensor([[4, 6, 8, 9]])
    with torch.no_grad():
        torch.testing.assert_close(
            served(input_ids=ids).logits, policy(input_ids=ids).logits, atol=0, rtol=0
        )
    assert (
        policy.config.tie_word_embeddings
        and policy.lm_head.weight is policy.model.embed_tokens.weight
    )


def test_a_python_without_vllm_is_named_in_one_line(tmp_path: Path) -> None:
    config = VllmSamplerConfig(kind="vllm", python=str(tmp_path / "python"))
    sampler = VllmSampler(config, tmp_path / "work")
    with pytest.raises(RlhfError, match=r"sampler.python .* cannot be started .*has vLLM$"):
        sampler.sync(contract.contract_policy(), 1)
    sampler.close()


def test_paths_of_a_sampler_start_at_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.chdir(tmp_path)
    for given, seen in {
        "vllm/bin/python": f"{tmp_path}/ws/vllm/bin/python",
        "../python": f"{tmp_path}/python",
        "~/vllm/bin/python": "/home/ann/vllm/bin/python",
        "/opt/python": "/opt/python",
        "python3": "python3",
    }.items():
        config = VllmSamplerConfig(kind="vllm", python=given)
        assert config.seen_from(Path("ws")).python == seen
        with opened_sampler(config, tmp_path / "work", Path("ws")) as sampler:
            assert isinstance(sampler, VllmSampler) and sampler.config.python == seen
    server = VllmSamplerConfig(kind="vllm", url="http://vllm", weights_folder="weights")
    assert server.seen_from(Path("ws")).weights_folder == f"{tmp_path}/ws/weights"


def test_a_server_that_ends_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """This Python has no vLLM; neither has any other whose server ends before it answers."""
    sampler = VllmSampler(VllmSamplerConfig(kind="vllm", python=sys.executable), tmp_path / "work")
    with pytest.raises(RlhfError) as raised:
        sampler.sync(contract.contract_policy(), 1)
    message = str(raised.value)
    assert "\n" not in message and "vLLM's server ended with status 1" in message
    assert str(tmp_path / "work" / "vllm.log") in message and "No module named" in message
    assert sampler.version is None
    sampler.close()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["vllm.log"]


def test_errors_of_a_server_are_one_line_without_its_token() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": f"no {request.headers['Authorization']}"})

    http = httpx.Client(
        transport=httpx.MockTransport(refuse),
        base_url="http://vllm",
        headers={"Authorization": "Bearer s3cret"},
    )
    with pytest.raises(RlhfError, match=r"http://vllm/?: /v1/completions answered 401") as raised:
        VllmClient(http, "s3cret").complete([4], 1, contract.SAMPLING, contract.VOCABULARY)
    assert "s3cret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sampler", "others", "reason"),
    [
        (
            {"kind": "vllm", "python": "vllm/bin/python"},
            {},
            "importance_sampling_correction.mode to always",
        ),
        ({"kind": "vllm"}, CORRECTED, "either python"),
        ({"kind": "vllm", "python": "p", "url": "http://h:1"}, CORRECTED, "either python"),
        ({"kind": "vllm", "url": "http://h:1"}, CORRECTED, "weights_folder"),
        (
            {"kind": "vllm", "url": "http://h:1", "weights": "nccl", "weights_folder": "/w"},
            CORRECTED,
            "writes no files",
        ),
        (
            {"kind": "vllm", "url": "http://h:1", "weights": "nccl", "sleep": True},
            CORRECTED,
            "by nccl the server has",
        ),
        ({"kind": "vllm", "python": "p", "weights": "nccl"}, CORRECTED, "GPUs of a server at url"),
        (
            {"kind": "vllm", "url": "http://u:p@h:1", "weights_folder": "/w"},
            CORRECTED,
            "carries credentials",
        ),
        (
            {"kind": "vllm", "url": "http://h:1?se=1&sig=x", "weights_folder": "/w"},
            CORRECTED,
            "carries credentials",
        ),
        ({"kind": "vllm", "python": "p", "token_env": "TOKEN"}, CORRECTED, "random token"),
        (
            {"kind": "vllm", "url": "http://h:1", "weights_folder": "/w", "arguments": ["--x"]},
            CORRECTED,
            "arguments",
        ),
        ({"kind": "vllm", "python": "p", "engine": 1}, CORRECTED, "engine"),
        ({"kind": "local", "python": "p"}, {}, "python"),
        ({"kind": "sglang"}, {}, "sglang"),
        (
            {"kind": "vllm", "python": "p"},
            CORRECTED | {"policy_lora": {"quantize": "nf4"}},
            "policy_lora.quantize to",
        ),
    ],
)
def test_settings_that_contradict_are_refused(
    sampler: dict[str, Any], others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PpoConfig.model_validate({"sampler": sampler} | others)


@pytest.mark.parametrize("mode", ["always", "ratio"])
def test_the_default_is_local_and_vllm_is_accepted_with_its_correction(mode: str) -> None:
    assert PpoConfig().sampler.kind == "local"
    sampler = {"kind": "vllm", "python": "p", "arguments": ["--x", "1"]}
    config = PpoConfig.model_validate(
        {"sampler": sampler, "importance_sampling_correction": {"mode": mode}}
    )
    assert config.sampler.kind == "vllm" and config.sampler.arguments == ("--x", "1")


def test_a_vllm_server_inherits_nothing_of_the_launcher_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these variables the server's own process group waits for the store of the trainer's
    ranks.
    """
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    server = VllmServer(str(python), [], tmp_path, "bfloat16", tmp_path / "log")
    server.process.wait(60)
    inherited = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert "KEPT" in inherited
    assert not {
        name
        for name in inherited
        if name.startswith("TORCHELASTIC") or name in ("RANK", "WORLD_SIZE")
    }
