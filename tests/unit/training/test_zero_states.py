"""State of DeepSpeed engines of every ZeRO stage and precision: saved after a step, it goes on in another engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.training.checkpoints.checkpoint import SavedTensors, write_pieces

IDS = torch.arange(32).view(2, 16)
SLOW = [("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)]
STAGES = [("float32", 0), ("float32", 3), *(pytest.param(*stage, marks=pytest.mark.slow) for stage in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "zero"), STAGES)
def test_a_state_goes_on_in_another_engine(dtype: str, zero: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from rlhf_core.training.engine.deepspeed import DeepSpeedEngine

    def engine() -> DeepSpeedEngine:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            pad_token_id=0, eos_token_id=3, bos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()
        launch = LaunchConfig(engine="deepspeed", zero=zero)
        return DeepSpeedEngine(model, OptimizerConfig(lr=1e-3), 4, "policy", None, launch, tmp_path)

    def step(made: DeepSpeedEngine) -> float:
        made.backward(made.forward(lambda: made.model(input_ids=IDS, labels=IDS).loss))
        return made.step().grad_norm

    first = engine()
    step(first)
    state = first.state()
    file = tmp_path / "state.safetensors"
    write_pieces(file, state.pieces)
    second = engine()
    second.load_state(SavedTensors([file]), state.meta)
    assert step(second) == pytest.approx(step(first), rel=1e-3)
