"""``python trl_trainers.py FOLDER``: runs of TRL's trainers, one per line of input. Needs TRL
alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workload import (
    ENDLESS,
    EOS,
    GROUP,
    LONGEST,
    PAD,
    TRAININGS,
    EndOfInput,
    Stopwatch,
    Workload,
    ranks,
)

TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}


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
        if workload.method in TRAININGS:
            _repeat_training(workload, folder, work)
        else:
            (_ppo if workload.method == "ppo" else _groups)(workload, folder, work).train()
    return 0


def _repeat_training(workload: Workload, folder: Path, work: str) -> None:
    trainer, config = TRAINERS[workload.method]
    rows, tokenizer = (
        json.loads((folder / "rows.json").read_text()),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    loaded: Any = AutoModelForCausalLM
    sizes: dict[str, Any] = {}
    if workload.method == "reward":
        loaded, sizes = AutoModelForSequenceClassification, {"num_labels": 1}
    model = loaded.from_pretrained(folder / "model", dtype=torch.float32, **sizes)

    def train() -> None:
        arguments = config(
            **_arguments(workload, work, workload.rows),
            max_steps=workload.steps,
            max_length=LONGEST,
        )
        data = Dataset.from_list(rows)
        trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()

    Stopwatch().repeat(train)


def _ppo(workload: Workload, folder: Path, work: str) -> PPOTrainer:
    policy, reference = (_policy(folder) for _ in range(2))
    value, reward = (
        LlamaForSequenceClassification.from_pretrained(folder / name)
        for name in ("value", "reward")
    )
    return PPOTrainer(
        args=PPOConfig(
            **_iteration_arguments(workload, work),
            gradient_accumulation_steps=workload.minibatches,
            num_mini_batches=workload.minibatches,
            num_ppo_epochs=workload.epochs,
            total_episodes=workload.replies * ENDLESS,
            local_rollout_forward_batch_size=workload.replies // workload.processes,
            response_length=workload.reply,
            num_sample_generations=0,
            eval_strategy="no",
        ),
        processing_class=_tokenizer(workload),
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": workload.prompt_ids()}),
        callbacks=[Laps(1)],
    )


def _groups(workload: Workload, folder: Path, work: str) -> trl.GRPOTrainer | trl.RLOOTrainer:
    trainer, config = TRAINERS[workload.method]
    tokenizer = _tokenizer(workload)
    reward = LlamaForSequenceClassification.from_pretrained(folder / "reward")
    prompts = [" ".join(map("t{}".format, ids)) for ids in workload.prompt_ids()]
    # Every reply has the full length, whatever samples it.
    sampled: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": workload.reply}}
    if workload.vllm:
        tokenizer.save_pretrained(folder / "policy")  # from where vLLM loads it
        sampled = {
            "generation_kwargs": {"ignore_eos": True},
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": workload.prompt + workload.reply,
        }
    return trainer(
        args=config(
            **_iteration_arguments(workload, work),
            max_steps=workload.minibatches * ENDLESS,
            steps_per_generation=workload.minibatches,
            num_iterations=workload.epochs,
            num_generations=GROUP,
            max_completion_length=workload.reply,
            beta=0.05,
            **sampled,
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


def _iteration_arguments(workload: Workload, work: str) -> dict[str, Any]:
    rows = workload.replies // workload.minibatches // workload.processes
    on_cpu = not torch.cuda.is_available()
    backend = "gloo" if workload.processes > 1 and on_cpu else None
    return {**_arguments(workload, work, rows), "ddp_backend": backend, "temperature": 1.0}


def _arguments(workload: Workload, work: str, rows: int) -> dict[str, Any]:
    return {
        "output_dir": work,
        "bf16": workload.dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def _tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """Only its special tokens are read."""
    pieces = {"<pad>": PAD, "<eos>": EOS} | {
        f"t{number}": number for number in range(2, workload.vocabulary)
    }
    inner = Tokenizer(models.WordLevel(pieces, unk_token="t2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


if __name__ == "__main__":
    sys.exit(main())
