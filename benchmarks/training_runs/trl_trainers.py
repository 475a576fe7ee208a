"""``python trl_trainers.py FOLDER``: training runs by TRL's trainers, one per line of input. Needs TRL alone."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "ppo_iteration"))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from workload import EndOfInput, Stopwatch

LONGEST = 256
TRAINERS = {"sft": (SFTTrainer, SFTConfig), "reward": (RewardTrainer, RewardConfig), "dpo": (DPOTrainer, DPOConfig)}


def main() -> int:
    """Load the model, and train until the input ends."""
    folder = Path(sys.argv[1])
    workload = json.loads((folder / "workload.json").read_text())
    torch.set_num_threads(workload["threads"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    loaded: Any = AutoModelForCausalLM
    sizes: dict[str, Any] = {}
    if workload["method"] == "reward":
        loaded, sizes = AutoModelForSequenceClassification, {"num_labels": 1}
    model = loaded.from_pretrained(folder / "model", dtype=torch.float32, **sizes)
    with suppress(EndOfInput):
        Stopwatch().repeat(lambda: _train(model, tokenizer, workload))
    return 0


def _train(model: Any, tokenizer: Any, workload: dict[str, Any]) -> None:
    trainer, config = TRAINERS[workload["method"]]
    with tempfile.TemporaryDirectory() as work:
        arguments = config(
            output_dir=work,
            max_steps=workload["steps"],
            per_device_train_batch_size=workload["rows"],
            max_length=LONGEST,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        data = Dataset.from_list(workload["data"])
        trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()


if __name__ == "__main__":
    sys.exit(main())
