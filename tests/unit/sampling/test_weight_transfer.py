"""Weights sent one by one to a server: what it gets, and servers that refuse, fail or end meanwhile
(a real one is in tests/e2e/vllm)."""

from __future__ import annotations

import base64
import queue
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import sampler_contract as contract
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.models.adapters import WithoutAdapters, add_adapters
from rlhf_core.runtime import distributed
from rlhf_extras.sampling import vllm, weight_transfer
from rlhf_extras.sampling.settings import VllmSamplerConfig
from rlhf_extras.sampling.vllm import VllmClient, VllmSampler, save_merged
from rlhf_extras.sampling.weight_transfer import CheckpointWeights, WeightTransfer

NEVER = threading.Event()


class Wire:
    """A group of the trainer and one worker, in one process. What is sent while ``broken`` never
    arrives.
    """

    id = b"meet here".ljust(128, b"\0")

    def __init__(self, broken: bool = False) -> None:
        self.sent: queue.Queue[Tensor] = queue.Queue()
        self.broken = broken
        self.size = 0

    def join(self, size: int) -> None:
        if self.broken:
            NEVER.wait()
        self.size = size

    def broadcast(self, weight: Tensor) -> None:
        if self.broken:
            NEVER.wait()
        assert weight.is_contiguous()
        self.sent.put(weight.clone())


class Server:
    """vLLM's side: it waits for what it was told to expect, or answers ``early``, and fails at the
    path ``fails``.
    """

    def __init__(self, wire: Wire, fails: str = "", early: bool = False) -> None:
        self.wire, self.fails, self.early = wire, fails, early
        self.alive = True
        self.asked: list[tuple[str, Any]] = []
        self.weights: dict[str, Tensor] = {}

    def workers(self) -> int:
        return 3

    def require_alive(self) -> None:
        if not self.alive:
            raise RlhfError("/health answered 503")

    def post_once(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.asked.append((path, body))
        if path == self.fails:
            raise RlhfError(f"{path} answered 500")
        if path == "/update_weights" and not self.early:
            assert body is not None
            told = body["update_info"]
            for name, dtype, shape in zip(
                told["names"], told["dtype_names"], told["shapes"], strict=True
            ):
                weight = self.wire.sent.get(timeout=60)
                assert weight.dtype == getattr(torch, dtype) and list(weight.shape) == shape
                self.weights[name] = weight


def send(policy: PreTrainedModel, server: Server) -> None:
    weights = CheckpointWeights(policy)
    transfer = WeightTransfer(server, 60, server.wire)
    transfer.begin(weights)
    for weight in weights:
        transfer.send(weight)
    transfer.finish()
    transfer.close()


def adapted() -> PreTrainedModel:
    policy = contract.contract_policy()
    add_adapters(policy, LoraConfig(rank=4, alpha=8), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    return policy


def experts() -> PreTrainedModel:
    """In memory all experts of a layer are one tensor, in files each is three."""
    config = MixtralConfig(
        vocab_size=23, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    "policy",
    [
        contract.contract_policy(), contract.contract_policy(tied=True), contract.contract_policy().bfloat16(),
        adapted(), WithoutAdapters(adapted()), experts(),
    ],
    ids=["plain", "tied", "bfloat16", "adapted", "adapters off", "experts"],
)  # fmt: skip
def test_the_server_gets_what_files_would_hold(policy: Any, tmp_path: Path) -> None:
    server = Server(Wire())
    send(policy, server)
    run = policy.run if isinstance(policy, WithoutAdapters) else lambda save: save()
    run(lambda: save_merged(policy, tmp_path / "w"))
    expected = load_file(tmp_path / "w" / "model.safetensors")
    if policy.config.tie_word_embeddings:  # files for servers have both
        del expected["lm_head.weight"]
    assert server.weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(server.weights[name], weight, atol=0, rtol=0)
    assert [path for path, _ in server.asked] == [
        "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
        "/finish_weight_update", "/shutdown_weight_transfer_engine",
    ]  # fmt: skip
    (info,) = server.asked[1][1].values()
    assert (info["rank_offset"], info["world_size"], server.wire.size) == (1, 4, 4)
    assert base64.b64decode(info["nccl_unique_id_b64"]) == Wire.id


def test_adapted_weights_keep_their_places() -> None:
    """vLLM fuses a layer as soon as it has all parts of it, and keeps the others on its GPU
    meanwhile.
    """
    policy = contract.contract_policy()
    names = [name for name, _ in CheckpointWeights(policy).described]
    add_adapters(policy, LoraConfig(rank=2, alpha=2, targets=("q_proj", "gate_proj")), seed=0)
    assert [name for name, _ in CheckpointWeights(policy).described] == names


def test_one_weight_is_gathered_at_a_time() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Sharded:
        def __init__(self) -> None:
            self.model = experts()

        def gathered(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights.items():
                assert not alive, "an earlier one is still there"
                whole = weight.detach().clone()
                alive.add(whole)
                yield name, whole
                del whole

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

    count = 0
    for weight in CheckpointWeights(cast("Any", Sharded())):
        count += weight.numel() > 0
        del weight
    assert count == len(CheckpointWeights(experts()).described)


def test_a_model_whose_files_fuse_weights_is_refused() -> None:
    hrm = pytest.importorskip("transformers.models.hrm_text")
    config = hrm.HrmTextConfig(
        vocab_size=23, hidden_size=16, intermediate_size=16, num_attention_heads=2
    )
    with pytest.raises(ModelError, match=r"set sampler\.weights to files"):
        CheckpointWeights(AutoModelForCausalLM.from_config(config))


def test_a_server_that_refuses_to_meet_ends_the_wait_for_it() -> None:
    with pytest.raises(RlhfError, match="/init_weight_transfer_engine answered 500"):
        WeightTransfer(Server(Wire(), "/init_weight_transfer_engine"), 60, Wire(broken=True))


@pytest.mark.parametrize(
    ("alive", "message"), [(False, "/health answered 503"), (True, "has taken no weight for")]
)
def test_a_server_that_ends_after_its_answer_is_noticed(
    alive: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs it answers as soon as it has queued what it will do."""
    monkeypatch.setattr(weight_transfer, "ALIVE_EVERY", 0.05)
    wire = Wire()
    weights, server = CheckpointWeights(contract.contract_policy()), Server(wire, early=True)
    transfer = WeightTransfer(server, 60, wire)
    transfer.begin(weights)
    transfer.send(next(iter(weights)))
    wire.broken, server.alive, transfer.seconds = True, alive, 0.2
    with pytest.raises(RlhfError, match=message):
        transfer.send(next(iter(weights)))


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_server_that_fails_meanwhile_ends_the_wait_for_it(path: str) -> None:
    wire = Wire()
    weights, server = CheckpointWeights(contract.contract_policy()), Server(wire, path)
    transfer = WeightTransfer(server, 60, wire)
    wire.broken = path == "/update_weights"
    with pytest.raises(RlhfError, match=f"{path} answered 500"):
        transfer.begin(weights)
        for weight in weights:
            transfer.send(weight)
        transfer.finish()


def test_an_error_of_nccl_is_one_line() -> None:
    class Torn(Wire):
        def broadcast(self, weight: Tensor) -> None:
            raise RuntimeError("NCCL Error 2: unhandled system error\n at somewhere")

    wire = Torn()
    weights = CheckpointWeights(contract.contract_policy())
    transfer = WeightTransfer(Server(wire), 60, wire)
    transfer.begin(weights)
    with pytest.raises(
        RlhfError, match=r"^weights cannot be sent by NCCL: NCCL Error 2: unhandled system error$"
    ):
        transfer.send(next(iter(weights)))


NCCL = VllmSamplerConfig(kind="vllm", url="http://127.0.0.1:1", weights="nccl")


def test_a_trainer_without_a_gpu_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmSampler, "_opened", lambda self: Server(Wire()))
    with pytest.raises(
        RlhfError, match=r"sampler\.weights nccl sends from a GPU, and this trainer has none"
    ):
        VllmSampler(NCCL, tmp_path).sync(contract.contract_policy(), 1)


def sync_with_a_server_that_ends(folder: Path) -> None:
    """The server is gone after two weights."""

    class Ending(Wire):
        def broadcast(self, weight: Tensor) -> None:
            if self.sent.qsize() == 2:
                NEVER.wait()
            self.sent.put(weight)

    class Gone(Server):
        def post_once(self, path: str, body: dict[str, Any] | None = None) -> None:
            if path == "/update_weights":
                while self.wire.sent.qsize() < 2:
                    threading.Event().wait(0.01)
                raise RlhfError("the server is gone")

    wire = Ending()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmSampler, "_opened", lambda self: Gone(wire))
        patch.setattr(
            vllm, "WeightTransfer", lambda server, seconds: WeightTransfer(server, seconds, wire)
        )
        sampler = VllmSampler(NCCL, folder)
        with pytest.raises(RlhfError, match="the server is gone"):
            sampler.sync(contract.contract_policy(), 1)
        assert sampler.version is None
        sampler.close()
    (folder / f"{distributed.rank()}.done").touch()


def test_all_ranks_hear_that_the_server_is_gone(tmp_path: Path) -> None:
    run_ranks(sync_with_a_server_that_ends, 2, tmp_path)
    assert len(list(tmp_path.glob("*.done"))) == 2


def test_what_the_client_asks_once_is_not_asked_again() -> None:
    asked = []

    def busy(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return (
            httpx.Response(200, json={"world_size": 8})
            if request.method == "GET"
            else httpx.Response(503)
        )

    client = VllmClient(httpx.Client(transport=httpx.MockTransport(busy), base_url="http://vllm"))
    assert client.workers() == 8
    with pytest.raises(RlhfError, match="/update_weights failed 1 times"):
        client.post_once("/update_weights")
    assert asked == ["/get_world_size", "/update_weights"]
