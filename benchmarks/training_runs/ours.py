"""``python -m benchmarks.training_runs.ours FOLDER``: training runs by the public API, one per line of input."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_core
from benchmarks.ppo_iteration.workload import EndOfInput, Stopwatch
from rlhf_core.api.inputs import run_context
from rlhf_core.config.policy import DpoConfig
from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.encoding import pad_id
from rlhf_core.training.dpo import train_dpo
from rlhf_core.training.reward.run import split_of

LONGEST, HELD_OUT = 256, 2  # tokens, and rows that the evaluations before and after training read


def main() -> int:
    """Load the model, and train until the input ends."""
    folder = Path(sys.argv[1])
    workload = json.loads((folder / "workload.json").read_text())
    torch.set_num_threads(workload["threads"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    train = {"sft": _sft, "reward": _reward, "dpo": _dpo}[workload["method"]]
    with suppress(EndOfInput):
        Stopwatch().repeat(lambda: train(model, tokenizer, workload))
    return 0


def _sft(model: Any, tokenizer: Any, workload: dict[str, Any]) -> None:
    rows = workload["data"]
    config = rlhf_core.SftConfig(
        steps=workload["steps"], batch_size=workload["rows"], max_tokens=LONGEST, eval_every=workload["steps"]
    )
    rlhf_core.train_sft(model, tokenizer, rows, validation=rows[:HELD_OUT], config=config)


def _reward(model: Any, tokenizer: Any, workload: dict[str, Any]) -> None:
    rows, pairs = workload["data"], workload["rows"]
    config = rlhf_core.RewardConfig(
        steps=workload["steps"],
        max_tokens=LONGEST,
        imitation=0.0,  # TRL's trainer has no loss on the chosen replies
        eval_every=workload["steps"],
        batch=PairBatchConfig(token_budget=2 * pairs * LONGEST, min_pairs=pairs, max_pairs=pairs),
    )
    rlhf_core.train_reward_model(model, tokenizer, rows, validation=rows[:HELD_OUT], config=config)


def _dpo(model: Any, tokenizer: Any, workload: dict[str, Any]) -> None:
    rows = rlhf_core.api.inputs.rows_of(rlhf_core.data.schema.Preference, workload["data"], "pairs")
    train, validation = (split_of(part, tokenizer, LONGEST, "pairs") for part in (rows, rows[:HELD_OUT]))
    config = DpoConfig(
        steps=workload["steps"], batch_size=workload["rows"], max_tokens=LONGEST, eval_every=workload["steps"]
    )
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    with run_context(None, "dpo", config, model) as context:
        train_dpo(copy, pad_id(tokenizer), train, validation, config, 0, context)


if __name__ == "__main__":
    sys.exit(main())
