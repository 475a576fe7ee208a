"""PPO's sampler in a real vLLM server: the contract of samplers, stale weights, and two iterations of PPO."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampler_contract import EOS, PAD, PROMPTS, SAMPLING, SamplerContract, batch_of, contract_policy, drawn
from transformers import LlamaForSequenceClassification, PreTrainedModel
from unit.ppo.tiny import Tiny, make_config, make_trainer
from vllm_service import VLLM_MARKS, VLLM_PYTHON

from rlhf_core.config.ppo import VllmSamplerConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.heads import ScalarModel
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling
from rlhf_core.sampling.sampler import Sampler
from rlhf_core.sampling.vllm import VllmSampler

pytestmark = VLLM_MARKS


@pytest.fixture(scope="module")
def server_settings() -> Iterator[None]:
    """Small caches, and no compiler: on a small machine it takes longer than vLLM waits for a step."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_CPU_KVCACHE_SPACE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS"):
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def vllm(server_settings: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """One server for all tests, which sync the weights that they need."""
    config = VllmSamplerConfig(
        kind="vllm", python=VLLM_PYTHON, arguments=("--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "32")
    )
    sampler = VllmSampler(config, tmp_path_factory.mktemp("vllm"))
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture
def policy() -> PreTrainedModel:
    return contract_policy()


class TestVllmSampler(SamplerContract):
    @pytest.fixture
    def sampler(self, vllm: VllmSampler) -> Sampler:
        return vllm


def test_weights_that_another_loads_into_the_server_are_noticed(vllm: VllmSampler, policy: PreTrainedModel) -> None:
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
    monkeypatch.setattr(vllm._client, "post", lambda path, body=None: None if path == deaf else post(path, body))
    with pytest.raises(RlhfError, match=r"differs by .* nats per token from the policy whose weights it loaded"):
        vllm.sync(changed, 2)


def test_filters_of_evaluation_are_refused(vllm: VllmSampler, policy: PreTrainedModel) -> None:
    vllm.sync(policy, 1)
    with vllm.awake(1, 1, 9), pytest.raises(RlhfError, match="training distribution only"):
        vllm.sample(batch_of([0]), EvaluationSampling(SAMPLING, top_p=0.9))


def test_two_iterations_of_ppo(vllm: VllmSampler, policy: PreTrainedModel, tmp_path: Path) -> None:
    shape = copy.deepcopy(policy.config)
    shape.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        critic, reward = (ScalarModel(LlamaForSequenceClassification(shape).eval()) for _ in range(2))
    tiny = Tiny(policy, copy.deepcopy(policy), critic, reward, PROMPTS, Sampling(EOS, PAD, 7))
    config = make_config(
        iterations=2, importance_sampling_correction={"mode": "always"}, sampler={"kind": "vllm", "python": VLLM_PYTHON}
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
        assert row["importance_sampling_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    print(f"two iterations in {time.monotonic() - started:.1f} s, gaps {[row['sampler_gap'] for row in rows]}")


def test_a_server_that_dies_ends_the_run_with_one_line(server_settings: None, vllm: VllmSampler) -> None:
    """The last test of the module: it ends the server that the others share."""
    policy = contract_policy()
    vllm.sync(policy, 1)
    assert vllm._server is not None
    vllm._server.stop()
    with pytest.raises(RlhfError, match=r"vLLM's server ended with status .*; from its log ") as raised:
        drawn(vllm, batch_of([0]))
    assert "\n" not in str(raised.value)
