"""SFT: supervised fine-tuning on demonstrations, measured by perplexity on held-out ones."""

from __future__ import annotations

import logging
import shutil
from typing import Any

from rlhf_core.api.sft import train_sft
from rlhf_core.config.base import SftConfig
from rlhf_core.data.schema import Demonstration, read_rows
from rlhf_core.data.tables import parquet_footer
from rlhf_core.data.tokens import read_tokens
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_dir, atomic_write_json, atomic_write_lines
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import sample_replies

logger = logging.getLogger(__name__)


def run(config: SftConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Write ``models/sft``, its metrics, history and sample replies.

    An interrupted run resumes from its checkpoint.
    """
    folder = inputs.clean / "demonstrations"
    _, rows_to_learn = parquet_footer(folder / "train.parquet")
    if not rows_to_learn:
        return keep_base(inputs, outputs)
    tokenizer = load_tokenizer(inputs.base)
    train, validation = (
        read_tokens(context.tokens, folder / f"{split}.parquet", Demonstration.KIND, tokenizer)
        for split in ("train", "validation")
    )
    trained = train_sft(
        inputs.base,
        tokenizer,
        train,
        validation=validation,
        config=config,
        context=context,
        allow_high_learning_rates=True,  # params.yaml was checked as a whole
    )
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    seed = derive_seed(config.seed, "sft", "samples")
    rows = read_rows(folder / "validation.parquet", Demonstration)[: config.samples]
    samples = sample_replies(trained.model, tokenizer, rows, config.sampling, seed)
    atomic_write_lines(outputs.samples, samples)
    atomic_write_json(outputs.metrics, trained.metrics)
    return trained.metrics


def keep_base(inputs: Paths, outputs: Paths) -> dict[str, Any]:
    """Take the base model as the SFT model: without demonstrations there is nothing to train on.

    The data gate lets no run get here that has pairs, from which demonstrations are derived.
    """
    reason = (
        "no model is trained: there are no demonstrations, so that the starting model stands for "
        "the SFT model"
    )
    logger.warning(reason)
    with atomic_dir(outputs.model) as folder:
        shutil.copytree(inputs.base, folder, dirs_exist_ok=True)
    for lines in (outputs.history, outputs.samples):
        atomic_write_lines(lines, [])
    return {"train_rows": 0, "reason": reason}


STAGE = Stage(
    name="sft",
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
