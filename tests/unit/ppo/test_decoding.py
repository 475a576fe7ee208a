"""Decoding token by token: the cache, merged and packed layers, grouped attention, and what must
not change with them.

Packed layers are one product for layers of the same input, whatever order and thread they are
called in.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from threading import Barrier
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from architectures import tiny_causal_lm
from recorded_graph import recorded_graph
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from unit.models.adapted import needs_bitsandbytes, needs_peft
from unit.ppo.tiny import EOS, Tiny

from rlhf_core.config.model import LoraConfig
from rlhf_core.models.adapters import NF4Linear, adapted_layers, add_adapters
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.sampling import block_cache, generation
from rlhf_core.sampling import decoding as layers
from rlhf_core.sampling.block_cache import BLOCK, BlockCache, BlockLayer
from rlhf_core.sampling.distribution import (
    EvaluationSampling,
    Sampling,
    _forbidden_mask,
    inverse_cdf,
    log_distribution_at,
    philox_uniforms,
)
from rlhf_core.sampling.generation import Rollout, generate
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch

V, STEPS = 29, 40
SAMPLING = Sampling(EOS, 0, STEPS, min_new_tokens=4, forbidden_ids=(0,), other_stop_ids=(5, 9))
PROMPTS = [[4 + (7 * row + column) % 23 for column in range(2 + 9 * (row % 4))] for row in range(8)]
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": EOS,
}  # fmt: skip
CONFIGS = [
    transformers.LlamaConfig(**SIZES),
    transformers.Qwen2Config(**SIZES),
    transformers.MistralConfig(**SIZES, sliding_window=6),
    transformers.Gemma2Config(
        **(SIZES | {"initializer_range": 0.1}), sliding_window=6, query_pre_attn_scalar=8
    ),
    transformers.GPT2Config(
        vocab_size=V,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        eos_token_id=EOS,
    ),
]


def build(
    config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, **settings
        ).eval()
    use_float32_unembedding(model)
    return model


def sample(model: transformers.PreTrainedModel) -> Rollout:
    return generate(model, PROMPTS, philox_uniforms(5, range(len(PROMPTS)), STEPS), SAMPLING)


@torch.inference_mode()
def sample_without_cache(
    model: Any, prompt: list[int], uniforms: Tensor
) -> tuple[list[int], list[float]]:
    """One reply, each token from a forward pass over all tokens before it, without padding."""
    reply: list[int] = []
    logprobs: list[float] = []
    for step in range(STEPS):
        logits = model(input_ids=torch.tensor([prompt + reply]), use_cache=False).logits[:, -1:]
        distribution = log_distribution_at(logits, torch.tensor([step]), SAMPLING)[:, 0]
        reply.append(int(inverse_cdf(distribution, uniforms[step : step + 1])))
        logprobs.append(float(distribution[0, reply[-1]]))
        if reply[-1] in SAMPLING.stop_ids:
            break
    return reply, logprobs


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_replies_are_those_of_a_forward_pass_over_all_tokens(
    config: transformers.PretrainedConfig, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    if packed:
        monkeypatch.setattr(layers, "PACKED_PARAMETERS", 0)
    with layers.decoding_layers(model, len(PROMPTS), STEPS):
        assert any(isinstance(layer, layers.PackedLinear) for layer in model.modules()) == packed
        rollout = sample(model)
    assert (
        len({len(reply) for reply in rollout.replies()}) > 2
        and max(map(len, rollout.replies())) > 8
    )
    # The first four have every length of a prompt.
    for row, (prompt, uniforms) in enumerate(
        zip(PROMPTS[:4], philox_uniforms(5, range(4), STEPS), strict=True)
    ):
        reply, logprobs = sample_without_cache(model, prompt, uniforms)
        assert rollout.replies()[row] == reply
        torch.testing.assert_close(
            rollout.logprobs[row, : len(reply)], torch.tensor(logprobs), atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_block_cache_changes_no_bit(
    config: transformers.PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    rollout = sample(model)
    monkeypatch.setattr(
        generation, "BlockCache", lambda config: transformers.DynamicCache(config=config)
    )
    concatenated = sample(model)
    for field in fields(Rollout):
        assert torch.equal(getattr(rollout, field.name), getattr(concatenated, field.name)), (
            field.name
        )


def test_blocks_hold_what_concatenation_holds() -> None:
    """Over the border of a block, and after rows were dropped in the middle of one."""
    ours, theirs = BlockLayer(), DynamicLayer()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    for new, kept in (
        (BLOCK - 3, None),
        (1, None),
        (1, [0, 2]),
        (1, None),
        (1, None),
        (2 * BLOCK, [1]),
        (1, None),
    ):
        rows = 3 if theirs.keys is None else len(theirs.keys)
        keys, values = torch.randn(2, rows, 2, new, 4, generator=generator)
        for got, expected in zip(
            ours.update(keys, values), theirs.update(keys, values), strict=True
        ):
            assert torch.equal(got, expected)
            assert got.untyped_storage().nbytes() % (rows * 2 * BLOCK * 4 * 4) == 0
        if kept is not None:
            ours.batch_select_indices(torch.tensor(kept))
            theirs.batch_select_indices(torch.tensor(kept))
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.keys is not None and torch.equal(ours.keys, theirs.keys)


def test_layers_with_a_window_keep_their_own_cache() -> None:
    kinds = [
        type(layer).__name__
        for layer in BlockCache(transformers.Gemma2Config(**SIZES, sliding_window=6)).layers
    ]
    assert kinds == ["DynamicSlidingWindowLayer", "BlockLayer"]


@pytest.mark.parametrize("every", [3, 8, 100])
def test_looking_for_ended_replies_less_often_is_safe(
    tiny: Tiny, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniforms = philox_uniforms(11, range(12), 7)
    expected = generate(tiny.policy, tiny.prompts[:12], uniforms, tiny.sampling)
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", every)
    rollout = generate(tiny.policy, tiny.prompts[:12], uniforms, tiny.sampling)
    for name in ("tokens", "attention_mask", "response_mask", "finished"):
        assert torch.equal(getattr(rollout, name), getattr(expected, name)), name
    torch.testing.assert_close(rollout.logprobs, expected.logprobs)
    written: list[int] = []
    filtered = EvaluationSampling(tiny.sampling)
    streamed = generate(
        tiny.policy,
        tiny.prompts[:1],
        uniforms[:1],
        filtered,
        lambda ids: written.extend(ids.tolist()),
    )
    assert written == streamed.replies()[0]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Steps are captured on a CPU too; returned are the buffers' shapes."""
    shapes: list[torch.Size] = []
    fix = BlockLayer.fix

    def fixed(layer: BlockLayer, slot: Tensor, length: int) -> None:
        fix(layer, slot, length)
        assert layer._buffers is not None
        shapes.append(layer._buffers[0].shape)

    monkeypatch.setattr(BlockLayer, "fix", fixed)
    monkeypatch.setitem(generation.GRAPHS, "cpu", recorded_graph)
    monkeypatch.setattr(generation, "GRAPH_STEPS", 3)
    return shapes


FILTERED = EvaluationSampling(SAMPLING, top_p=0.9, repetition_penalty=1.3)


@pytest.mark.parametrize("sampling", [SAMPLING, FILTERED], ids=["training", "filtered"])
@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[1]] * 8], ids=["padded", "equally long"])
@pytest.mark.parametrize(
    "config", [CONFIGS[0], CONFIGS[1], CONFIGS[4]], ids=lambda config: config.model_type
)
def test_captured_steps_draw_the_same_replies(
    config: transformers.PretrainedConfig,
    prompts: list[list[int]],
    sampling: Sampling | EvaluationSampling,
    captured: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over borders of the buffers, with rows dropped between, and with the tokens of each step
    told.
    """
    model = build(config)
    uniforms, told = philox_uniforms(5, range(len(prompts)), STEPS), list[int]()
    monkeypatch.setattr(generation, "GRAPH_LENGTH", BLOCK // 4)
    monkeypatch.setattr(block_cache, "BLOCK", BLOCK // 4)
    rollout = generate(model, prompts, uniforms, sampling, lambda ids: told.append(len(ids)))
    rows, lengths = {shape[0] for shape in captured}, {shape[2] for shape in captured}
    assert len(rows) > 1 and len(lengths) > 1
    monkeypatch.delitem(generation.GRAPHS, "cpu")
    plain = generate(model, prompts, uniforms, sampling)
    for name in ("tokens", "attention_mask", "response_mask", "finished"):
        assert torch.equal(getattr(rollout, name), getattr(plain, name)), name
    torch.testing.assert_close(rollout.logprobs, plain.logprobs, atol=2e-5, rtol=1e-5)
    assert told == plain.response_mask.sum(dim=0).tolist()


CAPTURED = ("gpt_neox", "gptj", "opt", "falcon", "stablelm", "qwen3_moe", "cohere", "glm4")


@pytest.mark.parametrize("name", [*CAPTURED, "bloom", "gemma3_text", "mamba"])
def test_architectures_are_captured_where_nothing_changes(
    name: str, captured: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bloom's attention takes positions from the mask, Gemma's layers see windows, Mamba's have
    states.
    """
    model, uniforms = tiny_causal_lm(name), philox_uniforms(1, range(4), STEPS)
    prompts = [prompt[: 3 + row] for row, prompt in enumerate(PROMPTS[4:])]
    rollout = generate(model, prompts, uniforms, SAMPLING)
    fixed = len(captured) // model.config.num_hidden_layers
    assert fixed >= 2 if name in CAPTURED else fixed == (name == "bloom"), (
        "compared, and then captured"
    )
    monkeypatch.delitem(generation.GRAPHS, "cpu")
    plain = generate(model, prompts, uniforms, SAMPLING)
    assert torch.equal(rollout.tokens, plain.tokens)
    torch.testing.assert_close(rollout.logprobs, plain.logprobs, atol=1e-4, rtol=1e-4)


def test_a_graph_holds_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    for name in ("graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    read = torch.ones(3)
    seen = weakref.ref(read)
    launch = generation.cuda_graph(partial(torch.sum, read))
    del read
    launch()
    assert seen() is not None, "its memory would be another's"
    del launch
    assert seen() is None


def test_masks_stay_where_a_graph_reads_them() -> None:
    forbidden = partial(
        _forbidden_mask,
        torch.zeros(1, dtype=torch.long),
        sampling=replace(SAMPLING, min_new_tokens=0),
    )
    own = forbidden(width=V)
    for width in range(V + 1, V + 100):
        forbidden(width=width)
    assert forbidden(width=V) is own


def test_a_capture_that_fails_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["default"]

    @contextmanager
    def stream(other: str) -> Iterator[None]:
        streams.append(other)
        try:
            yield
        finally:
            streams[:] = streams[: streams.index(other, 1)]

    class Graph(nullcontext[None]):
        """As PyTorch's: where the end of the capture raises, the stream is not left."""

        def __init__(self, graph: object, **_: Any) -> None:
            super().__init__()

        def __enter__(self) -> None:
            streams.append("capture")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    for name, value in {
        "CUDAGraph": Mock,
        "graph": Graph,
        "stream": stream,
        "current_stream": lambda: "own",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(RuntimeError, match="previous error"):
        generation.cuda_graph(lambda: None)
    assert streams == ["default"]


def test_a_fixed_layer_holds_its_tokens_once() -> None:
    layer, slot = BlockLayer(), torch.tensor([4])
    written = torch.arange(2 * 5 * 4.0).view(1, 2, 5, 4)
    layer.update(written, -written)
    for length in (3 * BLOCK, 3 * BLOCK, 5 * BLOCK):
        layer.fix(slot, length)
        assert layer._buffers is not None and layer.keys is not None and layer.values is not None
        assert layer._buffers[0].shape[-2] == length and layer.get_seq_length() == 5
        for own, buffer in zip((layer.keys, layer.values), layer._buffers, strict=True):
            assert own.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert torch.equal(layer.keys, written) and torch.equal(layer.values, -written)
        layer.unfix(5)


def sample_plainly(prompts: list[list[int]]) -> Rollout:
    with patch.dict(generation.GRAPHS, clear=True):
        return sample_of(build(CONFIGS[0]), prompts)


def with_forward(change: Any) -> Any:
    """A model that calls ``change`` with the mask of attention, which a graph gives four
    dimensions.
    """
    model = build(CONFIGS[0])
    own = model.model.forward

    def forward(attention_mask: Any = None, **given: Any) -> Any:
        return own(
            attention_mask=change(attention_mask) if attention_mask is not None else None, **given
        )

    model.model.forward = forward
    return model


def seen_anyway(mask: Tensor) -> Tensor:
    """Of a model that does not understand masks for attention: it sees what is not there."""
    return mask if mask.dim() == 2 else torch.zeros_like(mask)


def refused(kind: type[Exception]) -> Any:
    def change(mask: Tensor) -> Tensor:
        if mask.dim() == 4:
            raise kind("attention_mask")
        return mask

    return change


def looks(look: Any) -> Any:
    def change(mask: Tensor) -> Tensor:
        look(mask)
        return mask

    return change


WAITS = {
    "item": lambda mask: mask.sum().item(),
    "if": lambda mask: 1 if mask.any() else 0,
    "nonzero": lambda mask: mask.nonzero(),
    "index by a mask": lambda mask: mask[mask == 0],
    "unique": lambda mask: mask.unique(),
}
NOT_CAPTURED = {
    **{
        f"sees all, {count} tokens held": (seen_anyway, count)
        for count in (BLOCK - 2, BLOCK - 1, BLOCK, 5)
    },
    **{
        kind.__name__: (refused(kind), 5)
        for kind in (AttributeError, IndexError, KeyError, ValueError, RuntimeError)
    },
    **{f"waits: {name}": (looks(look), 5) for name, look in WAITS.items()},
}


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_what_a_graph_cannot_hold_is_decoded_step_by_step(
    name: str, captured: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, tokens = NOT_CAPTURED[name]
    prompts = [[4 + (row + column) % 23 for column in range(tokens)] for row in range(2)]
    monkeypatch.setitem(generation.GRAPHS, "cpu", Mock(side_effect=AssertionError("captured")))
    model, expected = with_forward(change), sample_plainly(prompts)
    for _ in range(2):
        assert torch.equal(sample_of(model, prompts).tokens, expected.tokens)
        assert len(captured) == 2, "two layers, compared once"


def test_what_cannot_be_captured_goes_step_by_step(
    captured: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    windowed, busy, expected = build(CONFIGS[2]), build(CONFIGS[0]), sample_plainly(PROMPTS[1:3])
    sample_of(windowed, PROMPTS[1:3])
    assert not captured
    monkeypatch.setitem(generation.GRAPHS, "cpu", waits)
    for _ in range(2):
        assert torch.equal(sample_of(busy, PROMPTS[1:3]).tokens, expected.tokens)
        assert len(captured) == 4, "compared once, and captured once in vain"


def test_a_layer_that_keeps_nothing_is_no_obstacle(captured: list[torch.Size]) -> None:
    model = build(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 3}))
    model.model.layers = model.model.layers[:2]  # the cache has three
    replies = sample_of(model, PROMPTS[1:3])
    assert not captured
    with patch.dict(generation.GRAPHS, clear=True):
        assert torch.equal(sample_of(model, PROMPTS[1:3]).tokens, replies.tokens)


def moved(model: Any) -> None:
    """Weights come back from elsewhere to other addresses, as after a turn in host memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def trained(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def doubled(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def off(model: Any) -> None:
    for _, layer in adapted_layers(model):
        layer.enable_adapters(False)


BETWEEN: dict[str, Any] = {
    "weights trained in place": trained,
    "weights at other addresses": moved,
    "weights of another precision": doubled,
    "adapters off": off,
    "the model for a copy": lambda model: None,
}


@needs_peft
@pytest.mark.parametrize("name", BETWEEN)
def test_what_changes_between_two_samplings_is_seen(
    name: str, captured: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, adapters, prompts, lengths, temperature and draws."""
    model = adapted()
    rounds = ((lambda model: None, PROMPTS, 1.0, 5), (BETWEEN[name], PROMPTS[2:6], 0.7, 6))
    for change, prompts, temperature, seed in rounds:
        change(model)
        sampling = replace(SAMPLING, temperature=temperature, max_new_tokens=STEPS - seed)
        batch, found = PromptBatch(prompts, range(len(prompts)), seed), []
        for graphs in ({"cpu": recorded_graph}, {}):
            monkeypatch.setattr(generation, "GRAPHS", graphs)
            sampler = LocalSampler.of(
                copy.deepcopy(model) if name == "the model for a copy" else model
            )
            captured.clear()
            with sampler.awake(0, len(prompts), STEPS):
                found.append(sampler.sample(batch, sampling))
            assert bool(captured) == bool(graphs)
        assert torch.equal(found[0].tokens, found[1].tokens)
        torch.testing.assert_close(found[0].logprobs, found[1].logprobs, atol=2e-5, rtol=1e-5)


def test_threads_capture_their_own_steps(captured: list[torch.Size]) -> None:
    """Two models, each in two threads."""
    models = [build(CONFIGS[0]), build(CONFIGS[1])] * 2
    alone = [sample_of(model, PROMPTS[row : row + 2]).tokens for row, model in enumerate(models)]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda row: sample_of(models[row], PROMPTS[row : row + 2]).tokens, range(4))
        )
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def adapted(dtype: torch.dtype = torch.float32, quantize: Any = None) -> Any:
    """A model whose adapters change its logits by much."""
    model = build(transformers.LlamaConfig(**SIZES), dtype)
    add_adapters(model, LoraConfig(rank=4, alpha=8, quantize=quantize), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(4, 28).view(2, 12)).logits.clone()  # type: ignore[no-any-return]


@needs_peft
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_adapters_are_merged_while_sampling_and_never_after(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    before, modules = logits(model), dict(model.named_modules())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if packed:
        monkeypatch.setattr(layers, "PACKED_PARAMETERS", 0)
    with pytest.raises(ZeroDivisionError), layers.decoding_layers(model, 8, STEPS):
        assert not any("lora_" in name for name, _ in model.named_modules())
        torch.testing.assert_close(logits(model), before, atol=2e-5, rtol=1e-5)
        _ = 1 / 0
    after = dict(model.named_modules())
    assert list(after) == list(modules) and all(
        after[name] is module for name, module in modules.items()
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ] == trainable
    assert torch.equal(logits(model), before)


@needs_peft
def test_adapters_that_are_off_are_not_merged() -> None:
    from rlhf_core.models.adapters import adapters_off

    model = adapted()
    with adapters_off(model), layers.decoding_layers(model, 8, STEPS):
        off = logits(model)
    with adapters_off(model):
        assert torch.equal(off, logits(model))


@needs_peft
@needs_bitsandbytes
def test_layers_in_four_bits_stay_packed_and_adapted() -> None:
    model = adapted(quantize="nf4")
    before = logits(model)
    with layers.decoding_layers(model, 8, STEPS):
        assert sum(isinstance(layer, NF4Linear) for layer in model.modules()) == 14
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_the_head_of_a_bfloat16_model_still_gives_float32_logits(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(transformers.LlamaConfig(**SIZES), torch.bfloat16)
    before = logits(model)
    if packed:
        monkeypatch.setattr(layers, "PACKED_PARAMETERS", 0)
    with layers.decoding_layers(model, 8, STEPS):
        inside = logits(model)
    assert inside.dtype == torch.float32
    assert (inside - before).abs().max() <= (0.05 if packed else 0.0)


def test_packing_is_left_to_large_models_and_batches() -> None:
    with torch.device("meta"):
        large, small = nn.Linear(4000, 2500), nn.Linear(4000, 2499, bias=False)
    on_cpu: Any = type("Model", (), {"device": torch.device("cpu")})
    large_model, small_model = on_cpu(), on_cpu()
    large_model.parameters, small_model.parameters = large.parameters, small.parameters
    assert layers.packing_pays(large_model, rows=4, steps=16)
    assert not layers.packing_pays(small_model, rows=64, steps=64)
    assert not layers.packing_pays(large_model, rows=3, steps=16)
    assert not layers.packing_pays(large_model, rows=4, steps=15)
    large_model.device = torch.device("cuda")
    assert not layers.packing_pays(large_model, rows=4, steps=16)


FEW = 12


def with_six_heads(dtype: torch.dtype, kv_heads: int = 2) -> transformers.PreTrainedModel:
    """A random Llama with six query heads."""
    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": kv_heads,
        "initializer_range": 0.02,
    }
    return build(transformers.LlamaConfig(**SIZES | sizes), dtype, attn_implementation="sdpa")


def sample_of(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> Rollout:
    sampling = Sampling(eos_id=1, pad_id=0, max_new_tokens=FEW, min_new_tokens=FEW)
    return generate(model, prompts, philox_uniforms(5, range(len(prompts)), FEW), sampling)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that pass the kernel grouped."""
    shapes: list[tuple[int, ...]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *rest: Any, **settings: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *rest, **settings)

    monkeypatch.setattr(layers.nn.functional, "scaled_dot_product_attention", counted)
    return shapes


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_by_hand_and_by_transformers(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 6, 1, 4, generator=generator)
    key, value = torch.randn(2, 3, kv_heads, 7, 4, generator=generator)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 6 // kv_heads  # type: ignore[assignment]
    computed, _ = layers.grouped_attention(layer, query, key, value, None, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(computed, expected)
    head = 5
    weights = torch.softmax(0.3 * key[2, head * kv_heads // 6] @ query[2, head, 0], dim=0)
    torch.testing.assert_close(computed[2, 0, head], weights @ value[2, head * kv_heads // 6])


def test_one_token_without_mask_is_grouped_in_low_precision(queries: list[tuple[int, ...]]) -> None:
    model, prompts = with_six_heads(torch.bfloat16), [[5, 6, 7], [8, 9, 10]]
    plain = sample_of(model, prompts)
    queries.clear()
    with layers.decoding_layers(model, 1, FEW):
        grouped = sample_of(model, prompts)
    assert queries.count((2, 2, 3, 8)) == 2 * (FEW - 1), "two layers, all tokens but the first"
    # Log-probabilities in bfloat16 round at the third digit; where no other token was drawn they
    # are the same.
    same = (plain.tokens == grouped.tokens)[:, 3:].long().cumprod(dim=1).bool()
    assert same[:, 0].all()
    torch.testing.assert_close(grouped.logprobs[same], plain.logprobs[same], atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "prompts"),
    [
        (torch.float32, 2, [[5, 6, 7], [8, 9, 10]]),
        (torch.bfloat16, 6, [[5, 6, 7], [8, 9, 10]]),
        (torch.bfloat16, 2, [[5, 6, 7], [8]]),
    ],
    ids=["float32", "a key for each query", "padding"],
)
def test_elsewhere_no_bit_changes(
    dtype: torch.dtype, kv_heads: int, prompts: list[list[int]]
) -> None:
    model = with_six_heads(dtype, kv_heads)
    plain = sample_of(model, prompts)
    with layers.decoding_attention(model):
        inside = sample_of(model, prompts)
    assert torch.equal(plain.tokens, inside.tokens) and torch.equal(plain.logprobs, inside.logprobs)


@pytest.mark.parametrize(("attention", "inside"), [("sdpa", layers.CPU_NAME), ("eager", "eager")])
def test_the_model_attends_as_before_afterwards(attention: str, inside: str) -> None:
    model = with_six_heads(torch.bfloat16)
    model.config._attn_implementation = attention
    with pytest.raises(ZeroDivisionError), layers.decoding_layers(model, 1, FEW):
        assert model.config._attn_implementation == inside
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == attention


packs = hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_packing = pytest.mark.skipif(not packs, reason="this build of PyTorch has no packed products")
ROWS = 6


@pytest.fixture
def plain() -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(16, 24), nn.Linear(16, 8, bias=False), nn.Linear(16, 8)]


@pytest.fixture
def packed(plain: list[nn.Linear]) -> list[layers.PackedLinear]:
    shared = layers.FusedProjection(plain, [layer.weight for layer in plain], ROWS)
    return [layers.PackedLinear(layer, shared, position) for position, layer in enumerate(plain)]


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, 1, 16, generator=torch.Generator().manual_seed(seed))


@needs_packing
def test_the_result_of_another_input_is_not_taken(
    plain: list[nn.Linear], packed: list[layers.PackedLinear]
) -> None:
    with torch.inference_mode():
        first, second = rows(1), rows(2)
        packed[0](first)
        torch.testing.assert_close(packed[1](second), plain[1](second))
        torch.testing.assert_close(packed[2](first), plain[2](first))


@needs_packing
def test_no_result_is_kept_once_the_last_layer_has_it(packed: list[layers.PackedLinear]) -> None:
    with torch.inference_mode():
        input = rows(1)
        for layer, kept in zip(packed, (True, True, False), strict=True):
            layer(input)
            assert (layer.shared._last.held is not None) == kept


@needs_packing
def test_threads_do_not_take_results_of_each_other(
    plain: list[nn.Linear], packed: list[layers.PackedLinear]
) -> None:
    barrier = Barrier(2, timeout=60)

    def compute(seed: int) -> bool:
        right = True
        with torch.inference_mode():
            for turn in range(20):
                input = rows(100 * seed + turn)
                for position in range(3):
                    barrier.wait()
                    right &= torch.allclose(
                        packed[position](input), plain[position](input), atol=1e-6
                    )
        return right

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(compute, (1, 2)))


@needs_packing
@pytest.mark.parametrize("heads", [4, 2])
def test_a_block_of_llama_is_four_products(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(transformers.LlamaConfig(**SIZES | {"num_key_value_heads": heads}))
    monkeypatch.setattr(layers, "PACKED_PARAMETERS", 0)
    calls: list[int] = []
    product = layers.FusedProjection.product

    def counted(self: layers.FusedProjection, input: Tensor, position: int) -> Tensor:
        held = getattr(self._last, "held", None)
        calls.append(held is None or held[0] is not input)
        return product(self, input, position)

    monkeypatch.setattr(layers.FusedProjection, "product", counted)
    ids = torch.arange(4, 28).view(2, 12)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        with layers.decoding_layers(model, 8, 40):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=2e-5, rtol=1e-5)
    assert sum(calls) == 2 * 4 + 1 and len(calls) == 2 * 7 + 1
