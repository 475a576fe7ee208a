"""PPO's sampler in a real vLLM server: the contract of samplers, stale weights, and two iterations
of PPO.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampler_contract import (
    EOS,
    PAD,
    PROMPTS,
    SAMPLING,
    SamplerContract,
    batch_of,
    contract_policy,
    drawn,
)
from transformers import LlamaForSequenceClassification, PreTrainedModel
from unit.evaluation.conftest import QUESTIONS, made_prompt
from unit.evaluation.test_evaluate_stage import run_stage
from unit.ppo.tiny import Tiny, make_config, make_trainer
from vllm_service import VLLM_MARKS, VLLM_PYTHON

import rlhf_core as rlhf
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.evaluation import EvaluateStageConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.causal_lm import load_tokenizer, new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling
from rlhf_core.sampling.sampler import LocalSampler, Sampler
from rlhf_core.training.run_context import RunContext
from rlhf_extras.sampling.settings import VllmSamplerConfig
from rlhf_extras.sampling.vllm import VllmSampler

pytestmark = VLLM_MARKS


@pytest.fixture(scope="module")
def server_settings() -> Iterator[None]:
    """Small caches, and no compiler: on a small machine it takes longer than vLLM waits for a
    step.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_CPU_KVCACHE_SPACE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS"):
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def vllm(server_settings: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """One server for all tests, which sync the weights that they need."""
    config = VllmSamplerConfig(
        kind="vllm",
        python=VLLM_PYTHON,
        arguments=("--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "32"),
    )
    sampler = VllmSampler(config, tmp_path_factory.mktemp("vllm"))
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def policy(request: pytest.FixtureRequest) -> PreTrainedModel:
    return contract_policy(request.param)


class TestVllmSampler(SamplerContract):
    @pytest.fixture
    def sampler(self, vllm: VllmSampler) -> Sampler:
        return vllm


def test_weights_that_another_loads_into_the_server_are_noticed(
    vllm: VllmSampler, policy: PreTrainedModel
) -> None:
    vllm.sync(policy, 1)
    assert vllm._client is not None
    vllm._client.post("/update_weight_version", {"new_version": "others-1"})
    with pytest.raises(RlhfError, match="has the weights others-1, not"), vllm.awake(1, 1, 1):
        raise AssertionError("it woke up")
    vllm.sync(policy, 1)
    assert len(drawn(vllm, batch_of([0])).replies()) == 1


def test_a_server_that_did_not_take_the_weights_is_noticed(
    vllm: VllmSampler, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.sync(policy, 1)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        changed.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(3.0)
    assert vllm._client is not None
    post = vllm._client.post
    deaf = "/collective_rpc"  # by which weights are loaded
    monkeypatch.setattr(
        vllm._client, "post", lambda path, body=None: None if path == deaf else post(path, body)
    )
    with pytest.raises(
        RlhfError, match=r"differs by .* nats per token from the policy whose weights it loaded"
    ):
        vllm.sync(changed, 2)


def test_a_repetition_penalty_is_refused_and_a_small_nucleus_leaves_one_token(
    vllm: VllmSampler, policy: PreTrainedModel
) -> None:
    vllm.sync(policy, 1)
    greedy, local = EvaluationSampling(SAMPLING, top_p=1e-6), LocalSampler.of(policy)
    with vllm.awake(1, 16, 9), local.awake(0, 16, 9):
        with pytest.raises(RlhfError, match="repetition penalty"):
            vllm.sample(batch_of([0]), EvaluationSampling(SAMPLING, repetition_penalty=1.1))
        served = vllm.sample(batch_of(range(16)), greedy).replies()
        assert served == local.sample(batch_of(range(16)), greedy).replies()


@pytest.mark.parametrize("mode", ["always", "ratio"])
def test_two_iterations_of_ppo(
    vllm: VllmSampler, policy: PreTrainedModel, mode: str, tmp_path: Path
) -> None:
    shape = copy.deepcopy(policy.config)
    shape.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        critic, reward = (
            ScalarModel(LlamaForSequenceClassification(shape).eval()) for _ in range(2)
        )
    tiny = Tiny(policy, copy.deepcopy(policy), critic, reward, PROMPTS, Sampling(EOS, PAD, 7))
    config = make_config(
        iterations=2,
        importance_sampling_correction={"mode": mode},
        sampler={"kind": "vllm", "python": VLLM_PYTHON},
    )
    before = copy.deepcopy(policy.state_dict())
    trainer = make_trainer(tiny, config, tmp_path, sampler=vllm)
    started = time.monotonic()
    trainer.run()
    rows = trainer.history.rows()
    assert [row["iteration"] for row in rows] == [1, 2] and vllm.version == 1
    assert any(not torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    for row in rows:
        assert row["sampling_logp_difference_mean"] < 1e-4
        compared = {"always": "importance_sampling_ratio_mean", "ratio": "first_ratio"}[mode]
        assert row[compared] == pytest.approx(1.0, abs=1e-3)
    print(
        f"two iterations in {time.monotonic() - started:.1f} s, gaps {[row['sampler_gap'] for row in rows]}"
    )


SERVER = {
    "kind": "vllm",
    "python": VLLM_PYTHON,
    "arguments": ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "32"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``sft``, ``policy`` and the three reward models, with heads that vLLM has kernels for, far
    from ties.
    """
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([question.text for question in QUESTIONS], 300)
    shape = BaseConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, layers=1, heads=2, max_positions=256
    )
    for seed, name in enumerate(("sft", "policy"), start=1):
        model = new_model(shape, tokenizer, seed)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(8.0)
        save_policy(root / name, model, tokenizer)
    for seed, name in enumerate(("reward", "referee", "judge"), start=1):
        ScalarModel.from_causal_lm(root / "sft", seed).save(root / name, tokenizer)
    return root


def test_a_critic_learns_from_replies_of_the_server(
    server_settings: None, models: Path, tmp_path: Path
) -> None:
    prompts = [question.text for question in QUESTIONS[:8]]
    trained = rlhf.train_critic(
        models / "sft", load_tokenizer(models / "sft"), prompts, lambda prompts, replies: [len(r) for r in replies],
        rollout=rlhf.RolloutConfig.model_validate({"max_new_tokens": 8, "sampler": SERVER}),
        config=rlhf.CriticConfig(max_rollouts=2, batch_size=8, minibatches=2),
        context=RunContext(tmp_path),
    )  # fmt: skip
    assert len(trained.history) == 2 and trained.history[0]["length"] > 1
    assert not (tmp_path / "sampler" / "vllm-weights").exists()


def test_an_evaluation_in_the_server_judges_the_replies_of_a_local_one(
    server_settings: None, models: Path, tmp_path: Path
) -> None:
    """Of so small a nucleus only the likeliest token is left, so that both samplers write the
    same.
    """
    settings = {
        "prompts": 4, "kl_samples": 4, "max_new_tokens": 6, "bootstrap": 50, "best_of_n": 2,
        "sampling": {"max_new_tokens": 6, "top_p": 1e-6, "repetition_penalty": 1.0},
        "safety": {"max_new_tokens": 6},
    }  # fmt: skip
    rows = [made_prompt(question.text, question.category) for question in QUESTIONS[:4]]
    measured = {
        name: run_stage(
            tmp_path / name, models, rows, EvaluateStageConfig.model_validate(settings | of)
        )[0]
        for name, of in (("local", {}), ("vllm", {"sampler": SERVER}))
    }
    assert measured["vllm"]["comparison"]["judge"] == measured["local"]["comparison"]["judge"]
    assert measured["vllm"]["policy"]["judge"] == pytest.approx(
        measured["local"]["policy"]["judge"]
    )
    for name in ("losses", "regression"):
        assert measured["vllm"][name] == measured["local"][name]
    # Sampled without filters, each with random numbers of its own.
    assert measured["vllm"]["kl"] > 0 and measured["local"]["kl"] > 0


def test_a_server_that_dies_ends_the_run_with_one_line(
    server_settings: None, vllm: VllmSampler
) -> None:
    """The last test of the module: it ends the server that the others share."""
    policy = contract_policy()
    vllm.sync(policy, 1)
    assert vllm._server is not None
    vllm._server.stop()
    with pytest.raises(
        RlhfError, match=r"vLLM's server ended with status .*; from its log "
    ) as raised:
        drawn(vllm, batch_of([0]))
    assert "\n" not in str(raised.value)
