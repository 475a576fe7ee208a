"""Weights sent to a real vLLM server by its own weight transfer, on CPUs: gloo in the place of NCCL
on both sides.

All but NCCL is the real thing: what is asked, what the server's backend ``nccl`` makes of it, how
it loads weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from sampler_contract import SamplerContract, contract_policy
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from vllm_service import VLLM_MARKS, VLLM_PYTHON, started

from rlhf_core.errors import RlhfError
from rlhf_core.sampling.sampler import Sampler
from rlhf_extras.sampling import weight_transfer
from rlhf_extras.sampling.settings import VllmSamplerConfig
from rlhf_extras.sampling.vllm import VllmSampler, save_merged

pytestmark = VLLM_MARKS
MEETING = 600.0
# A plugin of vLLM, which every process of the server loads.
PLUGIN = """
import datetime, torch, torch.distributed as dist

class Gloo:
    def __init__(self, info, parallel):
        host, port = info.nccl_unique_id_bytes.rstrip(b"\\0").decode().split(":")
        rank, wait = info.rank_offset + parallel.rank, datetime.timedelta(seconds=600)
        store = dist.TCPStore(host, int(port), info.world_size, False, wait)
        self.group = dist.ProcessGroupGloo(store, rank, info.world_size, wait)
        self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, weight, src, stream=None):
        self.group.broadcast(weight, src).wait()

    def destroy(self):
        self.group = None

def register():
    from vllm.distributed.weight_transfer import nccl_engine
    nccl_engine.worker_init_process_group = Gloo
    torch.cuda.current_stream = lambda device=None: None  # PyTorch for CPUs has none
"""


class GlooGroup:
    """The trainer's side of the plugin."""

    def __init__(self) -> None:
        self.port = free_port()
        self.id = f"127.0.0.1:{self.port}".encode().ljust(128, b"\0")

    def join(self, size: int) -> None:
        wait = timedelta(seconds=MEETING)
        store = dist.TCPStore("127.0.0.1", self.port, size, True, wait, wait_for_workers=False)
        self.group = dist.ProcessGroupGloo(store, 0, size, wait)
        self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, weight: Tensor) -> None:
        self.group.broadcast(weight, 0).wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with random weights of the contract's model."""
    folder, port = tmp_path_factory.mktemp("transfer"), free_port()
    save_merged(contract_policy(), folder / "model")
    (folder / "plugin" / "gloo-1.dist-info").mkdir(parents=True)
    (folder / "plugin" / "gloo_transfer.py").write_text(PLUGIN)
    (folder / "plugin" / "gloo-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gloo\nVersion: 1\n"
    )
    entry = "[vllm.general_plugins]\ngloo = gloo_transfer:register\n"
    (folder / "plugin" / "gloo-1.dist-info" / "entry_points.txt").write_text(entry)
    assert VLLM_PYTHON is not None
    command = [
        str(Path(VLLM_PYTHON).parent / "vllm"), "serve", str(folder / "model"), "--host", "127.0.0.1", "--port",
        str(port), "--load-format", "dummy", "--served-model-name", "policy", "--skip-tokenizer-init", "--dtype",
        "float32", "--enforce-eager", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--max-model-len", "64", "--max-num-seqs", "32", "--weight-transfer-config", '{"backend": "nccl"}',
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": str(folder / "plugin"),
    }
    with started(command, address, folder / "vllm.log", **variables):
        yield address


def sampler_at(url: str, work: Path) -> VllmSampler:
    return VllmSampler(
        VllmSamplerConfig(kind="vllm", url=url, weights="nccl", timeout_seconds=120), work
    )


@pytest.fixture(scope="module")
def transferred(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """One sampler for all tests, which sync the weights that they need."""
    sampler = sampler_at(url, tmp_path_factory.mktemp("work"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_transfer, "NcclGroup", GlooGroup)
        yield sampler
        sampler.close()


@pytest.fixture
def policy() -> PreTrainedModel:
    return contract_policy()


class TestTransferredSampler(SamplerContract):
    @pytest.fixture
    def sampler(self, transferred: VllmSampler) -> Sampler:
        return transferred


def test_the_run_after_a_killed_one_meets_the_server_again(
    transferred: VllmSampler, url: str, tmp_path: Path
) -> None:
    transferred.sync(contract_policy(), 1)
    following = sampler_at(url, tmp_path)
    following.sync(contract_policy(), 1)
    following.close()
    assert not any(tmp_path.iterdir())
    transferred._transfer = None
    transferred.sync(contract_policy(), 2)


def test_weights_of_another_model_are_refused_by_the_server(transferred: VllmSampler) -> None:
    """The last test of the module: the server has lost some of its weights."""
    shape = copy.deepcopy(contract_policy().config)
    shape.intermediate_size = 32
    transferred.sync(contract_policy(), 1)
    with pytest.raises(RlhfError, match=r"/update_weights .*answered 500") as raised:
        transferred.sync(LlamaForCausalLM(shape).eval(), 2)
    assert "\n" not in str(raised.value)
    print(raised.value)
