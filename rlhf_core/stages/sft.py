"""SFT: supervised fine-tuning on demonstrations, measured by perplexity on held-out ones."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_core.config.sft import SftConfig
from rlhf_core.data.chat import pad_id
from rlhf_core.data.schema import Demonstration, read_rows
from rlhf_core.errors import DataError
from rlhf_core.files import atomic_write_json, atomic_write_text
from rlhf_core.models.base import load_policy, save_policy
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.examples import Example, tokenised_examples
from rlhf_core.training.loop import Loop, LoopSettings
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask, sample_replies


def run(config: SftConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, float]:
    """Write ``models/sft``, its metrics, history and sample replies. An interrupted run resumes from its checkpoint."""
    model, tokenizer = load_policy(inputs.base)
    folder = inputs.clean / "demonstrations"
    train, dropped = read_examples(folder / "train.parquet", tokenizer, config.max_tokens)
    validation, _ = read_examples(folder / "validation.parquet", tokenizer, config.max_tokens)
    engine = build_engine(model, config.optimizer, config.steps, "sft", context)
    task = SftTask(engine, model, train, validation, config, pad_id(tokenizer))
    settings = LoopSettings("sft", config.seed, config.steps, config.eval_every, config.checkpoint)
    result = Loop(engine, task, settings, context).run()
    model = finish(engine, model)

    save_policy(outputs.model, model, tokenizer)
    atomic_write_text(outputs.history, "".join(json.dumps(record) + "\n" for record in result.history))
    rows = read_rows(folder / "validation.parquet", Demonstration)[: config.samples]
    samples = sample_replies(model, tokenizer, rows, config.sampling, derive_seed(config.seed, "sft", "samples"))
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
    atomic_write_text(outputs.samples, "".join(lines))
    evaluations = result.evaluations()
    metrics = {
        "perplexity": evaluations[-1]["validation_perplexity"],
        "perplexity_before": evaluations[0]["validation_perplexity"],
        "train_loss": next(r["loss"] for r in reversed(result.history) if "loss" in r),
        "validation_loss": evaluations[-1]["validation_loss"],
        "train_rows": float(len(train)),
        "validation_rows": float(len(validation)),
        "dropped_over_long": float(dropped),
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": float(engine.skipped_steps),
    }
    atomic_write_json(outputs.metrics, metrics)
    return metrics


STAGE = Stage(
    name="sft",
    section="sft",
    config=SftConfig,
    run=run,
    inputs={"clean": "data/clean", "base": "models/base"},
    outputs={
        "model": "models/sft",
        "metrics": "metrics/sft.json",
        "history": "history/sft.jsonl",
        "samples": "samples/sft.jsonl",
    },
)


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[Example], int]:
    """Read and tokenise demonstrations, and count those over ``max_tokens``; ``DataError`` when none is left."""
    rows = read_rows(path, Demonstration)
    examples, dropped = tokenised_examples(tokenizer, rows, max_tokens)
    if not examples:
        raise DataError(f"{path}: all {len(rows)} demonstrations are longer than {max_tokens} tokens; raise max_tokens")
    return examples, dropped
