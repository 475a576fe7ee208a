"""SFT: supervised fine-tuning on demonstrations, measured by perplexity on held-out ones."""

from __future__ import annotations

from rlhf_core.api.sft import train_sft
from rlhf_core.config.base import SftConfig
from rlhf_core.data.schema import Demonstration, read_rows
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import sample_replies


def run(config: SftConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, float]:
    """Write ``models/sft``, its metrics, history and sample replies. An interrupted run resumes from its checkpoint."""
    tokenizer = load_tokenizer(inputs.base)
    folder = inputs.clean / "demonstrations"
    train, validation = (
        read_tokens(context.tokens, folder / f"{split}.parquet", Demonstration.KIND, tokenizer)
        for split in ("train", "validation")
    )
    trained = train_sft(
        inputs.base, tokenizer, train, validation=validation, config=config, context=context,
        allow_high_learning_rates=True,  # params.yaml was checked as a whole
    )  # fmt: skip
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    seed = derive_seed(config.seed, "sft", "samples")
    rows = read_rows(folder / "validation.parquet", Demonstration)[: config.samples]
    atomic_write_lines(outputs.samples, sample_replies(trained.model, tokenizer, rows, config.sampling, seed))
    atomic_write_json(outputs.metrics, trained.metrics)
    return trained.metrics


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
