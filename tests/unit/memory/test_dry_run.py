"""Passes on shapes alone: exact at any depth, and at widths that no test could allocate as counted
by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from unit.memory import subjects

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.sampling.distribution import EvaluationSampling, Sampling, log_distribution_at
from rlhf_extras.memory import dry_run, passes
from rlhf_extras.memory.architecture import PUBLISHED_CONFIGS, Architecture
from rlhf_extras.memory.dry_run import ModelVariant, Moments, largest, model_size
from rlhf_extras.memory.sequence_lengths import BatchShape

SAMPLING = Sampling(-1, 0, 16, forbidden_ids=(0,))
BATCH = BatchShape(4, 40, 64)
GROUPED = subjects.llama(900, 64, 176, 7, 4, 2, tied=False)
GPT2 = Architecture.of(
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 7, "n_head": 4, "vocab_size": 500}, "a test"
)


def policy(
    architecture: Architecture, *, checkpointing: bool = False, lora: LoraConfig | None = None
) -> ModelVariant:
    trained = "weights" if lora is None else "adapters"
    return ModelVariant(architecture, "causal_lm", "bfloat16", trained, lora, checkpointing)  # type: ignore[arg-type]


def scalar(
    architecture: Architecture, *, reward: bool = False, checkpointing: bool = False
) -> ModelVariant:
    head = "reward" if reward else "scalar"
    return ModelVariant(architecture, head, "bfloat16", "weights", None, checkpointing)  # type: ignore[arg-type]


PASSES: dict[str, Callable[[Architecture, bool], Moments]] = {
    "SFT": lambda a, c: passes.reply_loss(policy(a, checkpointing=c), BATCH),
    "ptx": lambda a, c: passes.reply_loss(policy(a, checkpointing=c), BATCH, accumulated=True),
    "SFT held out": lambda a, c: passes.reply_loss(policy(a).in_inference, BATCH),
    "reward": lambda a, c: passes.pair_loss(scalar(a, reward=True, checkpointing=c), BATCH),
    "reward held out": lambda a, c: passes.reply_scores(scalar(a), BATCH),
    "policy": lambda a, c: passes.reply_statistics(
        policy(a, checkpointing=c), BATCH, SAMPLING, True, "frozen"
    ),
    "critic": lambda a, c: passes.value_loss(scalar(a, checkpointing=c), BATCH, SAMPLING, True),
    "rollout": lambda a, c: passes.reply_statistics(
        policy(a).in_inference, BATCH, SAMPLING, True, "frozen", critic=scalar(a)
    ),
    "drift": lambda a, c: passes.reply_statistics(policy(a).in_inference, BATCH, SAMPLING),
    "generation": lambda a, c: passes.generation(policy(a), 4, 24, SAMPLING),
    "filtered": lambda a, c: passes.generation(
        policy(a), 4, 24, EvaluationSampling(SAMPLING, 0.9, 1.1)
    ),
}


def built_whole(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    """The same under another name, so that nothing remembered of it counts, with every layer
    built.
    """
    monkeypatch.setattr(dry_run, "DEPTH", architecture.config().num_hidden_layers)
    return Architecture.of({**json.loads(architecture.text), "name_or_path": "whole"}, "a test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name", "checkpointing"),
    [
        *((GROUPED, name, False) for name in PASSES),
        *((GROUPED, name, True) for name in ("SFT", "ptx", "reward", "policy", "critic")),
        *((GPT2, name, True) for name in ("SFT", "generation")),
    ],
)
def test_three_layers_tell_the_bytes_of_seven(
    architecture: Architecture, name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extrapolated = PASSES[name](architecture, checkpointing)
    direct = PASSES[name](built_whole(architecture, monkeypatch), checkpointing)
    assert largest(extrapolated) == largest(direct)


@pytest.mark.slow
def test_lower_layers_without_adapters_are_stood_for_on_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("peft")
    upper = LoraConfig(rank=4, upper_layers=5)

    def update(architecture: Architecture, lora: LoraConfig) -> Moments:
        return passes.reply_statistics(policy(architecture, lora=lora), BATCH, SAMPLING, True)

    twelve = subjects.llama(900, 64, 176, 12, 4, 2, tied=False)
    extrapolated = largest(update(twelve, upper))
    assert extrapolated.activations < largest(update(twelve, LoraConfig(rank=4))).activations
    assert extrapolated == largest(update(built_whole(twelve, monkeypatch), upper))


def test_more_adapted_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lora.upper_layers is 8, but the model has 7 layers"):
        model_size(policy(GROUPED, lora=LoraConfig(rank=4, upper_layers=8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        None,
        LoraConfig(rank=4),
        LoraConfig(rank=4, upper_layers=5),
        LoraConfig(rank=4, upper_layers=7),
    ],
    ids=["weights", "adapters", "adapters of upper layers", "adapters of all layers by number"],
)
def test_sizes_are_extrapolated_exactly(
    lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    extrapolated = model_size(policy(GROUPED, lora=lora))
    assert model_size(policy(built_whole(GROUPED, monkeypatch), lora=lora)) == extrapolated


LLAMA = Architecture.of(PUBLISHED_CONFIGS["huggyllama/llama-7b"], "LLaMA-7B")
ROWS, WIDTH = 4, 1024


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_activations_at_the_widths_of_llama_7b_are_those_counted_by_hand(on_gpu: bool) -> None:
    """After Korthikanti et al. 2022, section 4, for this decoder: per token and layer two norms
    keep 2((4 + 2e)H + 4), or 2(2eH + 4) on a GPU, attention 4eH and 4 per head, SwiGLU 4eF, and the
    mask e per token of the row; and the last norm once, without its output of eH, since the head
    looks at one position of a row."""
    hidden, feed_forward, heads, layers, e = 4096, 11008, 32, 32, 2
    norm = (2 * e if on_gpu else 4 + 2 * e) * hidden + 4
    layer = 2 * norm + e * 4 * hidden + 4 * heads + e * 4 * feed_forward + e * WIDTH
    kept = ROWS * WIDTH * (layers * layer + norm - e * hidden)
    use = largest(
        passes.reply_loss(replace(policy(LLAMA), on_gpu=on_gpu), BatchShape(ROWS, WIDTH, 1))
    )
    # The peak is where the head is differentiated, whose float32 copy is the largest thing beside
    # the activations.
    assert kept < use.activations < 1.001 * kept
    checkpointed = largest(
        passes.value_loss(
            replace(scalar(LLAMA, checkpointing=True), on_gpu=on_gpu),
            BatchShape(ROWS, WIDTH),
            SAMPLING,
            True,
        )
    )
    inputs = ROWS * WIDTH * layers * e * hidden
    assert inputs < checkpointed.activations < inputs + 2 * ROWS * WIDTH * layer
    assert checkpointed.gradients == pytest.approx(2 * 6_607_347_712, rel=0.001)


def test_the_cache_and_logits_of_llama_7b_are_those_counted_by_hand() -> None:
    use = largest(passes.generation(policy(LLAMA), ROWS, WIDTH - 512, Sampling(-1, 0, 512)))
    assert use.kv_cache == pytest.approx(2 * 32 * 4096 * 2 * ROWS * WIDTH, rel=0.03)
    model, batch = policy(LLAMA).in_inference, BatchShape(ROWS, WIDTH)
    scores = largest(passes.reply_statistics(model, batch, Sampling(-1, 0, 512), True, "frozen"))
    # Log-probabilities of policy and reference, and of the exact KL the exponential, the difference
    # and the product.
    assert scores.logits == pytest.approx(5 * 4 * ROWS * 512 * 32000, rel=0.01)


@pytest.mark.slow
def test_more_rows_take_as_much_more() -> None:
    """Beside the weights and their gradients everything is proportional to the rows."""
    few, many = (
        largest(
            passes.reply_statistics(
                policy(GROUPED), BatchShape(rows, 40), SAMPLING, accumulated=True
            )
        )
        for rows in (8, 16)
    )
    assert many.activations + many.logits == pytest.approx(
        2 * (few.activations + few.logits), rel=0.02
    )
    assert many.gradients == few.gradients == 2 * model_size(policy(GROUPED)).parameters


@pytest.mark.slow
def test_what_cannot_run_on_shapes_is_refused_in_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"^a model of type 'llama' cannot be run on shapes alone \([^\n]+\)$"
    ):
        dry_run.run_pass(
            lambda memory, model: bool(next(model.parameters()).sum() > 0), [policy(GROUPED)]
        )
    encoder = Architecture.of(
        {"model_type": "t5", "d_model": 32, "num_layers": 2, "vocab_size": 100}, "a test"
    )
    with pytest.raises(ModelError, match=r"^transformers cannot build a t5 model \([^\n]+\)$"):
        model_size(policy(encoder))


def test_passes_with_values_and_on_shapes_do_not_share_a_mask() -> None:
    logits, at = torch.zeros(1, 3, 77), torch.arange(3)
    for _ in range(2):
        seen = log_distribution_at(logits, at, SAMPLING)
        assert not is_fake(seen) and seen[0, 0, 0] < -1e8 < seen[0, 0, 1]
        with FakeTensorMode():
            assert is_fake(log_distribution_at(torch.zeros(1, 3, 77), torch.arange(3), SAMPLING))
