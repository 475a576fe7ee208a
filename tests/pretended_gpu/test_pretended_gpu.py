"""On the pretended GPU nothing mixes devices, and launches, waits of the host and copies stay
within bounds.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, run
from pretended_gpu.device import Counts, pretended_gpu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from unit.api.conftest import PPO, QUESTIONS, by_length
from unit.training.tiny import SHAPE, demonstrations, preferences, text

import rlhf_core as rlhf
from benchmarks.against_trl.workload import ANSWER, Workload
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.data.schema import Message
from rlhf_core.models.causal_lm import load_policy, new_model, save_policy, train_tokenizer
from rlhf_core.models.forward import right_padded
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.kernels import use_kernels
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.ppo.actor_critic import build_actor_critic
from rlhf_core.ppo.advantages import estimate_advantages, gae
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.rewards import RunningMeanStd, with_rewards
from rlhf_core.ppo.rollout import score_rollout
from rlhf_core.ppo.update import Learner, update
from rlhf_core.sampling import generation
from rlhf_core.sampling.decoding import attention_by_products
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling, TokenDistribution
from rlhf_core.sampling.generation import NoWaiting
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.serving.policy import LoadedPolicy, ReplySettings
from rlhf_core.training.examples import Example
from rlhf_core.training.sft import example_batch, reply_loss

TRAINED = ("sft", "reward", "referee", "judge", "critic", "ppo", "evaluate")
DECODED = {
    "rollout": Sampling(
        eos_id=3, pad_id=0, max_new_tokens=1, temperature=0.9, forbidden_ids=(0, 1, 2, 3)
    ),
    "least length": Sampling(3, 0, 1, temperature=0.9, forbidden_ids=(0, 1), min_new_tokens=1),
    "evaluation": EvaluationSampling(Sampling(3, 0, 1, forbidden_ids=(0, 1, 2, 3)), 0.9, 1.1),
}


@pytest.fixture
def counts() -> Iterator[Counts]:
    with pretended_gpu() as counts:
        yield counts


def small_model(
    dtype: torch.dtype, layers: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on the CPU."""
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    model = new_model(SHAPE.model_copy(update={"layers": layers}), tokenizer, seed=1)
    # A conversion of the whole model would round its rotary frequencies, too.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model, tokenizer


def test_what_cuda_refuses_is_refused(counts: Counts) -> None:
    device, host, index = torch.ones(3, device="cuda"), torch.ones(3), torch.tensor([0])
    refused: dict[str, Callable[[], Any]] = {
        "a sum of both": lambda: device + host,
        "numbers of both in a stack": lambda: torch.stack([device.sum(), torch.zeros(())]),
        "a weight of the host": lambda: torch.nn.functional.linear(
            torch.ones(2, 3, device="cuda"), torch.ones(4, 3)
        ),
        "a row of the host's table": lambda: torch.nn.functional.embedding(
            index.cuda(), torch.ones(4, 3)
        ),
        "NumPy": device.numpy,
        "the host's generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
        "a host's rows by a device's index": lambda: host[index.cuda()],
        "a device's rows by gather of the host": lambda: device.gather(0, index),
        "pinned memory": device.pin_memory,
        "a pickle": lambda: copy.copy(device),
    }
    for name, call in refused.items():
        with pytest.raises((RuntimeError, TypeError)):
            call()
            pytest.fail(f"{name} was not refused")
    assert (device + torch.tensor(2.0)).is_cuda and device.cpu().numpy().sum() == 3


def test_what_is_counted(counts: Counts) -> None:
    device = torch.ones(4).to("cuda")
    float(device.sum()), device[[0, 1]], device[device > 2]
    assert counts.launches == {"": {"sum": 1, "index": 2, "gt": 1}}
    assert counts.bytes == {"": {"to device": 4 * 4 + 2 * 8}}
    assert counts.total("waits") == 2 + 1 + 1, "copies, a number, and how many are above 2"
    torch.manual_seed(3)
    drawn = torch.rand(2, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2, device="cuda").cpu(), drawn.cpu())


def test_without_the_block_there_is_no_gpu() -> None:
    with pretended_gpu():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available() and not torch.accelerator.is_available()


def decode(
    counts: Counts, sampling: TokenDistribution, layers: int, tokens: int
) -> tuple[int, int]:
    """Launches and waits of a batch's replies."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    settings = LlamaConfig(
        **shape, num_hidden_layers=layers, pad_token_id=0, eos_token_id=3, bos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(settings, dtype=torch.bfloat16).eval().to("cuda")
    use_float32_unembedding(model)
    use_kernels(model)
    base = replace(
        sampling.base,
        max_new_tokens=tokens,
        min_new_tokens=tokens if sampling.base.min_new_tokens else 0,
    )
    own = base if sampling is sampling.base else replace(sampling, base=base)
    prompts = PromptBatch(
        [[5 + i % 7 for i in range(6 + row % 3)] for row in range(4)], range(4), 1
    )
    sampler = LocalSampler.of(model)
    with sampler.awake(0, 4, tokens):
        counts.clear()
        replies = sampler.sample(prompts, own)
    assert [len(reply) for reply in replies.replies()] == [tokens] * 4
    return counts.total("launches"), counts.total("waits")


@pytest.mark.parametrize("name", DECODED)
def test_decoding_waits_for_no_token(counts: Counts, name: str) -> None:
    _, few = decode(counts, DECODED[name], layers=1, tokens=4)
    _, many = decode(counts, DECODED[name], layers=1, tokens=14)
    assert many - few <= 1, "for ten tokens more"


def test_a_layer_launches_few_kernels_for_a_token(counts: Counts) -> None:
    of_layers = [
        [decode(counts, DECODED["rollout"], layers, tokens)[0] for tokens in (2, 4)]
        for layers in (1, 2)
    ]
    first, second = [(many - few) / 2 for few, many in of_layers]
    assert second - first <= 27, "40 with the norms of transformers"
    assert first - (second - first) <= 50, "what a step launches beside its layers"


@pytest.mark.parametrize("name", DECODED)
def test_a_long_reply_is_one_launch_for_a_token(counts: Counts, name: str) -> None:
    (few, _), (many, waits) = (
        decode(counts, DECODED[name], layers=1, tokens=tokens) for tokens in (34, 44)
    )
    assert counts.launches[""]["graph"] == 44 - 1, "all but the first token"
    assert many - few <= 10 + 8, "a launch for a token, and looks at what has ended"
    assert waits <= 16


def test_a_thread_that_waits_while_another_replays_a_graph_waits_in_none(counts: Counts) -> None:
    device, inside, waited = torch.ones(2, device="cuda"), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert waited.wait(60)

    def wait() -> None:
        assert inside.wait(60)
        float(device.sum())
        waited.set()

    other = threading.Thread(target=wait)
    other.start()
    generation.GRAPHS["cuda"](work)()
    other.join()
    assert counts.total("waits", "") == 1 and counts.launches[""]["graph"] == 1


def test_on_a_gpu_that_is_not_the_current_one_steps_are_not_captured(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    decode(counts, DECODED["rollout"], layers=1, tokens=44)
    assert "graph" not in counts.launches[""]


@pytest.mark.parametrize("place", ["capture", "left capture", "graph", "comparison"])
def test_memory_that_runs_out_at_a_capture_costs_the_graph_of_these_replies_alone(
    counts: Counts, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model, own_graph, failing = (
        small_model(torch.float32)[0].to("cuda"),
        generation.GRAPHS["cuda"],
        True,
    )
    prompts = PromptBatch([[5, 6, 7], [8, 9]], range(2), 1)
    sampling = replace(DECODED["rollout"].base, max_new_tokens=40, min_new_tokens=40)
    read_fixed = generation._Decoding._read_fixed

    def full() -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError("CUDA out of memory.")

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        try:
            if failing and place != "comparison":
                raise full() if place != "graph" else RuntimeError("CUDA error: out of memory")
        except RuntimeError:
            if place != "left capture":
                raise
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        return own_graph(work)

    def read(*given: Any) -> torch.Tensor:
        if failing and place == "comparison":
            raise full()
        return read_fixed(*given)

    monkeypatch.setitem(generation.GRAPHS, "cuda", captured)
    monkeypatch.setattr(generation._Decoding, "_read_fixed", read)
    found = []
    for failing in (True, False):
        counts.clear()
        found.append(sample_replies(LocalSampler.of(model), 0, prompts, sampling).tokens.cpu())
        assert ("graph" in counts.launches[""]) is not failing
    assert torch.equal(*found)


def test_no_graph_holds_a_copy_between_host_and_device(counts: Counts) -> None:
    device, host = torch.ones(2, device="cuda"), torch.ones(2)
    copies: dict[str, Callable[[], Any]] = {
        "to the device": lambda: host.to("cuda"),
        "a number": lambda: torch.tensor(2.0).to("cuda"),
        "into a tensor": lambda: device.copy_(host),
        "to the host": device.cpu,
        "a value": lambda: float(device.sum()),
        "a condition": lambda: bool(device.any()),
    }
    with torch.inference_mode():
        for name, copied in copies.items():
            with pytest.raises(RuntimeError, match="waits"), NoWaiting():
                copied()
                pytest.fail(f"{name} was not refused")
        with NoWaiting():
            (
                device * torch.tensor(2.0),
                device[torch.zeros(3, dtype=torch.long, device="cuda")],
                device.sum() + 1,
            )
            torch.arange(3, device="cuda"), device.new_zeros(2)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_by_products_is_that_of_transformers(counts: Counts, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 6, 1, 4, generator=generator).bfloat16()
    key, value = torch.randn(2, 3, kv_heads, 7, 4, generator=generator).bfloat16()
    mask = torch.zeros(3, 1, 1, 7, dtype=torch.bfloat16)
    mask[1, ..., :3] = mask[..., 6:] = torch.finfo(mask.dtype).min
    layer = torch.nn.Module()
    layer.num_key_value_groups = 6 // kv_heads  # type: ignore[assignment]
    for settings in ({"scaling": 0.3}, {}):
        exact = (query.float(), key.float(), value.float(), mask.float())
        expected, _ = sdpa_attention_forward(layer, *exact, **settings)
        found, _ = attention_by_products(
            layer, *(each.cuda() for each in (query, key, value, mask)), **settings
        )
        torch.testing.assert_close(found.cpu().float(), expected, atol=0.02, rtol=0.02)
    assert counts.launches[""]["bmm"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_is_one_launch_and_computes_the_same(
    counts: Counts, dtype: torch.dtype
) -> None:
    own, _ = small_model(dtype)
    fused = copy.deepcopy(own)
    use_kernels(fused)
    batch, found = (
        example_batch(TEXTS, 0, torch.device("cuda", 0)),
        list[tuple[torch.Tensor, torch.Tensor]](),
    )
    for model in (own, fused):
        reply_loss(model.to("cuda"), batch, 6)  # the first pass asks whether the head is plain
        counts.clear()
        loss = reply_loss(model, batch, 6)
        loss.backward()
        found.append((loss.detach().cpu(), model.model.norm.weight.grad.cpu().float()))
        assert counts.launches[""].get("rms_norm", 0) == (3 if model is fused else 0), (
            "two of the layer, and the last"
        )
    assert torch.allclose(found[0][0], found[1][0], rtol=0.01)
    assert torch.allclose(
        found[0][1], found[1][1], rtol=0.05, atol=0.02 * float(found[0][1].abs().max())
    )


def test_a_model_with_fused_norms_is_saved_and_verified(counts: Counts, tmp_path: Path) -> None:
    model, tokenizer = small_model(torch.bfloat16)
    save_policy(tmp_path / "own", model, tokenizer)
    loaded = load_policy(tmp_path / "own")[0]
    assert loaded.device.type == "cuda"
    save_policy(tmp_path / "again", loaded, tokenizer)


def learner_and_experience(layers: int, work: Path) -> tuple[Learner, Experience]:
    """A policy and a critic in bfloat16 on the device, and a rollout of theirs with rewards and
    advantages.
    """
    model, _ = small_model(torch.bfloat16, layers)
    critic = ScalarModel.from_causal_lm(model.to("cuda"), seed=2)
    config = rlhf.PpoConfig(**PPO | {"micro_batch_tokens": 64, "minibatches": 1, "epochs": 1})
    sampling, rows = (
        DECODED["rollout"].base,
        PromptBatch([[5, 6, 7], [8, 9], [5] * 6, [7] * 4], range(4), 1),
    )
    pair = build_actor_critic(
        config, model, critic, replace(sampling, max_new_tokens=8), rlhf.RunContext(work)
    )
    replies = sample_replies(LocalSampler.of(model), 0, rows, pair.sampling)
    reference = copy.deepcopy(model)
    scored = score_rollout(pair, reference, replies)
    rewarded = with_rewards(
        scored, torch.ones(4, device="cuda"), RunningMeanStd(), 0.05, config.rollout
    )
    return Learner(config, pair, reference), estimate_advantages(rewarded, config.advantage, 1)


@pytest.mark.slow
def test_an_update_launches_and_waits_little(counts: Counts, tmp_path: Path) -> None:
    launches = []
    for layers in (1, 2):
        learner, experience = learner_and_experience(layers, tmp_path)
        counts.clear()
        update(learner, experience, 0.05, 0)
        launches.append(counts.total("launches"))
    passes = counts.launches[""]["attention"] // 2
    assert passes == 4, "two of the policy and two of the critic"
    assert "attention with a mask" not in counts.launches[""], (
        "rows that begin in the first column need none"
    )
    assert counts.total("waits") <= 16, sorted(counts.waits[""].items())
    assert counts.total("bytes") <= 4096
    assert (launches[1] - launches[0]) / passes <= 134, (
        "of a layer, forward and backward; of a norm's backward pass its parts"
    )


TEXTS = [Example([5, 6], [7, 3]), Example([5], [7, 8, 9, 3])]


def test_logits_are_made_in_chunks(counts: Counts) -> None:
    model, _ = small_model(torch.float32)
    batch, found = example_batch(TEXTS, 0, torch.device("cuda", 0)), list[torch.Tensor]()
    for limit in (1 << 20, 2 * 4 * SHAPE.vocab_size):
        reply_loss(model.to("cuda"), batch, 6, limit).backward()
        found.append(next(parameter.grad.cpu() for parameter in model.parameters()))
        model.zero_grad()
    assert torch.allclose(*found, atol=1e-6)


def test_texts_padded_on_the_right_have_no_mask(counts: Counts) -> None:
    model, _ = small_model(torch.bfloat16)
    batch = example_batch(TEXTS, 0, torch.device("cuda", 0))
    reply_loss(model.to("cuda"), batch, 6).backward()
    ScalarModel.from_causal_lm(model, seed=2).hidden(
        batch.input_ids, *right_padded(batch.attention_mask)
    )
    assert (
        counts.launches[""]["attention"] >= 2 and "attention with a mask" not in counts.launches[""]
    )


def test_advantages_launch_no_kernel_for_each_token(counts: Counts) -> None:
    launches = []
    for tokens in (2, 40):
        values, mask = (
            torch.ones(2, tokens, device="cuda"),
            torch.ones(2, tokens, dtype=torch.bool, device="cuda"),
        )
        counts.clear()
        assert all(each.is_cuda for each in gae(values, values, mask, 1.0, 0.95))
        launches.append(counts.total("launches"))
    assert launches[0] == launches[1]


def train_critic(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reward: Any = by_length,
    **config: Any,
) -> rlhf.TrainedCritic:
    settings = rlhf.CriticConfig(
        max_rollouts=1, batch_size=4, optimizer=PPO["policy_optimizer"], **config
    )
    rollout = rlhf.PpoConfig(**PPO).rollout
    return rlhf.train_critic(model, tokenizer, QUESTIONS, reward, rollout=rollout, config=settings)


@pytest.mark.slow
def test_critic_and_policy_are_trained_from_models_of_the_host(counts: Counts) -> None:
    model, tokenizer = small_model(torch.float32)
    reward = ScalarModel.from_causal_lm(copy.deepcopy(model), seed=2)
    critic = train_critic(model, tokenizer, reward)
    moved = replace(critic, model=copy.deepcopy(critic.model).to("cpu"))
    config = rlhf.PpoConfig(**PPO | {"iterations": 1})
    given = {
        "referee": copy.deepcopy(reward),
        "validation_prompts": QUESTIONS[:2],
        "config": config,
    }
    trained = rlhf.train_ppo(model, tokenizer, QUESTIONS, reward, moved, **given)
    assert next(trained.model.parameters()).is_cuda
    copied = counts.total("bytes", "generation", "forward", "rewards", "update")
    assert copied < 10_000, f"{counts.bytes}: tokens and scores alone, no weights"
    assert not next(model.parameters()).is_cuda and not next(reward.parameters()).is_cuda, (
        "given models stay"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, rlhf.LoraConfig(rank=2, alpha=4)], ids=["whole", "adapters"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_public_functions(
    counts: Counts, tmp_path: Path, dtype: torch.dtype, lora: rlhf.LoraConfig | None
) -> None:
    model, tokenizer = small_model(dtype)
    adapters = {"lora": lora} if lora else {}
    sft = rlhf.train_sft(
        model, tokenizer, demonstrations(12), config=rlhf.SftConfig(steps=2, batch_size=4)
    )
    rate = PPO["policy_optimizer"]
    scorers = [
        rlhf.train_reward_model(
            sft.model, tokenizer, preferences(12), name=name,
            config=rlhf.RewardConfig(steps=2, imitation=0.1, optimizer=rate, **adapters),
        )
        for name in ("reward", "referee")
    ]  # fmt: skip
    critic = train_critic(sft.model, tokenizer, scorers[0], **adapters)
    own = {"policy_lora": lora, "critic_lora": lora} if lora else {}
    config = rlhf.PpoConfig(**PPO | {"ptx": rlhf.PtxConfig(weight=0.1, batch_size=2)}, **own)
    policy = rlhf.train_ppo(
        sft.model, tokenizer, QUESTIONS, scorers[0], critic, referee=scorers[1], validation_prompts=QUESTIONS[:2],
        demonstrations=demonstrations(4), config=config, context=rlhf.RunContext(tmp_path / "run"),
    )  # fmt: skip
    policy.save(tmp_path / "policy")
    assert (tmp_path / "policy/model.safetensors").stat().st_size > 1000


def test_a_served_policy_replies_to_threads(counts: Counts) -> None:
    model, tokenizer = small_model(torch.bfloat16)
    policy = LoadedPolicy(Any, model.to("cuda"), tokenizer, SamplingConfig(max_new_tokens=6))
    asked, texts = policy.encode([Message("user", text(1, 3))]), list[str]()

    def ask(seed: int) -> None:
        texts.append(policy.reply(asked, ReplySettings(0.9, 0.95, 1.1, 6, seed)).text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3


@pytest.mark.slow
def test_frozen_models_wait_in_host_memory(tmp_path: Path) -> None:
    model, tokenizer = small_model(torch.float32)
    sft, scorers = (
        tmp_path / "models/sft",
        [tmp_path / "models" / name for name in ("reward", "referee")],
    )
    save_policy(sft, model, tokenizer)
    for seed, folder in enumerate(scorers):
        ScalarModel.from_causal_lm(sft, seed).save(folder, tokenizer)
    context = rlhf.RunContext(tmp_path / "run", launch=LaunchConfig(frozen="offload"))
    config = rlhf.PpoConfig(**PPO | {"iterations": 2})
    with pretended_gpu() as counts:
        critic = train_critic(model, tokenizer)
        counts.clear()
        rlhf.train_ppo(
            sft, tokenizer, QUESTIONS, scorers[0], critic, referee=scorers[1], validation_prompts=QUESTIONS[:2],
            config=config, context=context, allow_high_learning_rates=True,
        )  # fmt: skip
        assert counts.total("bytes", "generation", "forward", "rewards", "update") < 10_000, (
            "models move between phases"
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_tested_on_a_gpu_passes(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-n0", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu")
    ended = run("python", *words, cwd=ROOT, RLHF_PRETENDED_GPU="1")
    assert ended.returncode == 0, ended.stdout[-4000:]


SETTINGS = {
    "float32": (),
    "bfloat16": ("base.dtype=bfloat16",),
    "adapters": (
        "ppo.policy_lora.rank=4",
        "ppo.critic_lora.rank=4",
        "critic.lora.rank=4",
        "reward.lora.rank=4",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a dozen processes in turn
@pytest.mark.parametrize("name", SETTINGS)
def test_every_trained_stage(tmp_path: Path, name: str) -> None:
    less = (
        "sft.steps=4",
        "reward.steps=4",
        "referee.steps=4",
        "judge.steps=4",
        "critic.max_rollouts=1",
    )
    few = (
        "ppo.iterations=2",
        "ppo.batch_size=8",
        "critic.batch_size=8",
        "ppo.max_new_tokens=8",
        "evaluate.prompts=8",
    )
    world = ("collect.world.demonstrations=1200", "collect.world.preferences=1500", "base.layers=1")
    settings = [word for each in (*less, *few, *world, *SETTINGS[name]) for word in ("--set", each)]
    made = run("rlhf", "init", tmp_path / "w", "--profile", "smoke", *settings, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    for gate in ("sft", "reward"):  # a few steps make no model that passes one
        passed = tmp_path / f"w/gates/{gate}.pass"
        passed.parent.mkdir(exist_ok=True)
        passed.touch()
    for stage in ("collect", "validate", "base", *TRAINED):
        pretended = (
            ("tests/pretended_gpu", "rlhf_core") if stage in TRAINED else ("-m", "rlhf_core")
        )
        ended = run(
            "python",
            *pretended,
            "stage",
            stage,
            "--workspace",
            tmp_path / "w",
            cwd=ROOT,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_the_comparison_with_trl_makes_its_iterations_on_a_gpu(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "workload"
    Workload(
        hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, reply=8, processes=1, threads=1, method=method,
        dtype="bfloat16", replies=8, vocabulary=200,
    ).write(folder)  # fmt: skip
    command = [sys.executable, str(ROOT / "tests/pretended_gpu"), "benchmarks.against_trl.ours"]
    ended = subprocess.run(
        [*command, str(folder)], cwd=ROOT, input="\n", text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    ready, seconds = [line for line in ended.stdout.splitlines() if line.startswith(ANSWER)]
    assert ready == f"{ANSWER}ready" and float(seconds.removeprefix(ANSWER)) > 0
