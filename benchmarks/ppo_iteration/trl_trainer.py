"""``python trl_trainer.py FOLDER``: iterations of TRL's trainers, one per line of input. Needs TRL alone."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workload import EOS, GROUP, PAD, VOCABULARY, EndOfInput, Stopwatch, Workload, ranks

ITERATIONS = 10_000  # more than are asked for


class Laps(TrainerCallback):
    """Ends a lap of the stopwatch after each iteration of so many ``steps``."""

    def __init__(self, steps: int) -> None:
        self.stopwatch, self.steps = Stopwatch(), steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the next iteration to be asked for."""
        if state.global_step % self.steps == 0:
            self.stopwatch.lap()


def main() -> int:
    """Load the models, and train until the input ends."""
    folder = Path(sys.argv[1])
    workload = Workload.read(folder)
    with ranks(workload.processes), suppress(EndOfInput), tempfile.TemporaryDirectory() as work:
        (_ppo if workload.method == "ppo" else _groups)(workload, folder, work).train()
    return 0


def _ppo(workload: Workload, folder: Path, work: str) -> PPOTrainer:
    policy, reference = (_policy(folder) for _ in range(2))
    value, reward = (LlamaForSequenceClassification.from_pretrained(folder / name) for name in ("value", "reward"))
    return PPOTrainer(
        args=PPOConfig(
            **_arguments(workload, work),
            gradient_accumulation_steps=workload.minibatches,
            num_mini_batches=workload.minibatches,
            num_ppo_epochs=workload.epochs,
            total_episodes=workload.replies * ITERATIONS,
            local_rollout_forward_batch_size=workload.replies // workload.processes,
            response_length=workload.reply,
            num_sample_generations=0,
            eval_strategy="no",
        ),
        processing_class=_tokenizer(),
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": workload.prompt_ids()}),
        callbacks=[Laps(1)],
    )


def _groups(workload: Workload, folder: Path, work: str) -> GRPOTrainer | RLOOTrainer:
    trainer, config = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[workload.method]
    tokenizer = _tokenizer()
    reward = LlamaForSequenceClassification.from_pretrained(folder / "reward")
    prompts = [" ".join(map("t{}".format, ids)) for ids in workload.prompt_ids()]
    return trainer(
        args=config(
            **_arguments(workload, work),
            max_steps=workload.minibatches * ITERATIONS,
            steps_per_generation=workload.minibatches,
            num_iterations=workload.epochs,
            num_generations=GROUP,
            max_completion_length=workload.reply,
            generation_kwargs={"min_new_tokens": workload.reply},
            beta=0.05,
        ),
        processing_class=tokenizer,
        model=_policy(folder),
        reward_funcs=reward,
        reward_processing_classes=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Laps(workload.minibatches)],
    )


def _policy(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder / "policy")
    model.generation_config.eos_token_id = None  # every reply has the full length
    return model


def _arguments(workload: Workload, work: str) -> dict[str, Any]:
    return {
        "output_dir": work,
        "bf16": workload.dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "ddp_backend": "gloo" if workload.processes > 1 else None,
        "per_device_train_batch_size": workload.replies // workload.minibatches // workload.processes,
        "temperature": 1.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    """Only its special tokens are read."""
    pieces = {"<pad>": PAD, "<eos>": EOS} | {f"t{number}": number for number in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(pieces, unk_token="t2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


if __name__ == "__main__":
    sys.exit(main())
