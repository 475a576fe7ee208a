"""The policy by DPO instead of PPO, on the pairs that the reward model is trained on."""

from __future__ import annotations

from typing import Any

from rlhf_core.api.dpo import train_dpo
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.policy import PolicyStageConfig
from rlhf_core.data.schema import Demonstration, PairUser, read_rows
from rlhf_core.models.causal_lm import fitting_length, load_tokenizer
from rlhf_core.stages.ppo import POLICY_OUTPUTS
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines
from rlhf_core.training.reward.run import read_split
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import sample_replies


def run(
    config: PolicyStageConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, Any]:
    """Train the SFT model by DPO, and write the outputs that PPO writes."""
    dpo, tokenizer = config.policy.dpo, load_tokenizer(inputs.sft)
    longest = fitting_length(dpo.max_tokens, inputs.sft)
    pairs = inputs.clean / PairUser.REWARD
    train, validation = (
        read_split(pairs / f"{split}.parquet", tokenizer, longest, context.tokens)
        for split in ("train", "validation")
    )
    trained = train_dpo(
        inputs.sft,
        tokenizer,
        train,
        validation=validation,
        config=dpo,
        lora=config.policy_lora,
        seed=config.seed,
        context=context,
        allow_high_learning_rates=True,  # params.yaml was checked as a whole
    )
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    atomic_write_lines(outputs.abandoned, [])  # PPO's: DPO rolls nothing back
    held_out = read_rows(inputs.clean / "demonstrations" / "validation.parquet", Demonstration)
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    seed = derive_seed(config.seed, "dpo", "samples")
    prompts = held_out[: dpo.samples]
    samples = sample_replies(trained.model, tokenizer, prompts, sampling, seed)
    atomic_write_lines(outputs.samples, samples)
    context.tracker.log_artifact(outputs.samples, "samples")
    metrics = {"method": config.policy.method, **trained.metrics}
    atomic_write_json(outputs.metrics, metrics)
    return metrics


STAGE = Stage(
    name="ppo",
    config=PolicyStageConfig,
    beside=("policy",),
    run=run,
    inputs={"clean": "data/clean", "sft": "models/sft", "pass_": "gates/reward.pass"},
    outputs=POLICY_OUTPUTS,
    method="dpo",
)
