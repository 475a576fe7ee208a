"""``python trl_trainer.py FOLDER``: iterations of TRL's PPO trainer, one per line of input. Needs TRL alone."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workload import EOS, PAD, VOCABULARY, EndOfInput, Stopwatch, Workload, ranks

ITERATIONS = 10_000  # more than are asked for


class Laps(TrainerCallback):
    """Ends a lap of the stopwatch after each iteration."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the next iteration to be asked for."""
        self.stopwatch.lap()


def main() -> int:
    """Load the models, and train until the input ends."""
    folder = Path(sys.argv[1])
    workload = Workload.read(folder)
    policy, reference = (LlamaForCausalLM.from_pretrained(folder / "policy") for _ in range(2))
    for model in (policy, reference):
        model.generation_config.eos_token_id = None  # every reply has the full length
    value, reward = (LlamaForSequenceClassification.from_pretrained(folder / name) for name in ("value", "reward"))
    ids = workload.prompt_ids()
    with ranks(workload.processes), suppress(EndOfInput), tempfile.TemporaryDirectory() as work:
        trainer = PPOTrainer(
            args=_arguments(workload, work),
            processing_class=_tokenizer(),
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            callbacks=[Laps()],
        )
        trainer.train()
    return 0


def _arguments(workload: Workload, work: str) -> PPOConfig:
    return PPOConfig(
        output_dir=work,
        bf16=workload.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        ddp_backend="gloo" if workload.processes > 1 else None,
        per_device_train_batch_size=workload.prompts // workload.minibatches // workload.processes,
        gradient_accumulation_steps=workload.minibatches,
        num_mini_batches=workload.minibatches,
        num_ppo_epochs=workload.epochs,
        total_episodes=workload.prompts * ITERATIONS,
        local_rollout_forward_batch_size=workload.prompts // workload.processes,
        response_length=workload.reply,
        temperature=1.0,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Only its special tokens are read."""
    pieces = {"<pad>": PAD, "<eos>": EOS} | {f"t{number}": number for number in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(pieces, unk_token="t2"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


if __name__ == "__main__":
    sys.exit(main())
