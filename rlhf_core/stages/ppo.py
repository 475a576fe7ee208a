"""Stage ppo: from SFT, reward model and critic to the policy that the referee selects."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.api.ppo import PTX_KINDS, train_ppo
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.schema import Demonstration, PretrainText, Prompt, columns_of_prompts, read_rows
from rlhf_core.data.tokens import TokenTable, read_tokens
from rlhf_core.errors import DataError, TrainingPaused
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.ppo.checkpoints import abandoned_rows
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.selection import CheckpointChoice
from rlhf_core.runtime import distributed
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines
from rlhf_core.training.history import read_history
from rlhf_core.training.run_context import RunContext

# Of every stage that trains the policy, by whatever method.
POLICY_OUTPUTS = {
    "model": "models/policy",
    "metrics": "metrics/ppo.json",
    "history": "history/ppo.jsonl",
    "abandoned": "history/ppo_abandoned.jsonl",
    "samples": "samples/ppo.jsonl",
}


def run(config: PpoConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Train the policy, and save the selected checkpoint with metrics, history and samples."""
    tokenizer = load_tokenizer(inputs.sft)
    texts = read_ptx_texts(config, inputs.clean, tokenizer, context.tokens)
    referee = inputs.get("referee")
    held_out = [] if referee is None else validation_prompts(inputs.clean)
    try:
        trained = train_ppo(
            inputs.sft,
            tokenizer,
            read_training_prompts(inputs.clean, tokenizer, context.tokens),
            inputs.get("reward"),
            inputs.get("critic"),
            base=inputs.base,
            referee=referee,
            validation_prompts=held_out,
            demonstrations=texts.get(Demonstration.KIND, ()),
            pretrain=texts.get(PretrainText.KIND, ()),
            config=config,
            context=context,
            allow_high_learning_rates=True,  # params.yaml was checked as a whole
        )
        if trained.choice is not None:
            require_admissible(trained.choice, config)
    except TrainingPaused:
        publish_lines(context.work, outputs)  # the report of a paused run shows its curves
        raise
    trained.save(outputs.model)
    publish_lines(context.work, outputs)
    context.tracker.log_artifact(outputs.samples, "samples")
    selection = "the last one: there is no referee"
    if trained.choice is not None:
        selection = trained.choice.reason
    context.tracker.set_tags({"rlhf.selection": selection})
    atomic_write_json(outputs.metrics, trained.metrics)
    return trained.metrics


STAGE = Stage(
    name="ppo",
    config=PpoConfig,
    run=run,
    inputs={
        "clean": "data/clean",
        "base": "models/base",
        "sft": "models/sft",
        "reward": "models/reward",
        "referee": "models/referee",
        "critic": "models/critic",
        "pass_": "gates/reward.pass",
        "reward_sources": REWARD_SOURCES_FILE,
    },
    outputs=POLICY_OUTPUTS,
    optional_inputs=frozenset({"reward_sources"}),
)


def read_training_prompts(
    clean: Path, tokenizer: PreTrainedTokenizerBase, tokens: Path | None = None
) -> TrainingPrompts:
    """Read the prompts of the train split, tokenised by way of the cache in ``tokens``.

    Of several ranks all must call it.

    Raises:
        DataError: There are none.
    """
    path = clean / "prompts" / "train.parquet"
    rows = read_rows(path, Prompt)
    if not rows:
        raise DataError(f"{path} holds no prompts; the validate stage writes them")
    table = read_tokens(tokens, path, Prompt.KIND, tokenizer)
    return TrainingPrompts(
        [row.prompt for row in rows], table.column("prompt"), columns_of_prompts(rows)
    )


def validation_prompts(clean: Path) -> list[Prompt]:
    """Return the validation prompts by id, a content hash, so that the first are a fixed sample."""
    path = clean / "prompts" / "validation.parquet"
    rows = sorted(read_rows(path, Prompt), key=lambda row: row.id)
    if not rows:
        raise DataError(f"{path} has no rows; raise validate.split.validation")
    return rows


def read_ptx_texts(
    config: PpoConfig, clean: Path, tokenizer: PreTrainedTokenizerBase, tokens: Path | None = None
) -> dict[str, TokenTable]:
    """Read the texts that the ptx loss asks for, by kind; of several ranks all must call it."""
    if not config.ptx.weight:
        return {}
    both = config.ptx.data == "both"  # either of the two may then be missing
    tables = {}
    for kind in PTX_KINDS[config.ptx.data]:
        file = clean / kind / "train.parquet"
        if both and not file.is_file():
            continue
        table = read_tokens(tokens, file, kind, tokenizer)
        if len(table) or not both:
            tables[kind] = table
    return tables


def publish_lines(work: Path, outputs: Paths) -> None:
    """Copy history and samples from the partial state in ``work`` to the outputs.

    What rollbacks abandoned comes along, marked with the number of its ``rollback``: rows in a file
    of their own, so that curves stay right, and samples after the others. Only the first rank's
    files are whole.
    """
    history = work / "history.jsonl"
    if not distributed.is_rank_zero() or not history.is_file():
        return
    shutil.copyfile(history, outputs.history)
    atomic_write_lines(outputs.abandoned, abandoned_rows(work, "rows"))
    samples = [*read_history(work / "samples.jsonl"), *abandoned_rows(work, "samples")]
    atomic_write_lines(outputs.samples, samples)


def require_admissible(choice: CheckpointChoice, config: PpoConfig) -> None:
    """Check that the selected checkpoint keeps the limits.

    With health mode ``report``, or selection method ``last``, it is taken all the same.

    Raises:
        TrainingPaused: No checkpoint keeps all limits.
    """
    enforced = config.selection.method == "referee" and config.health.mode == "enforce"
    if enforced and not choice.admissible:
        raise TrainingPaused(
            f"ppo produced no admissible policy: {choice.reason}. Raise ppo.kl.coefficient or lower "
            "ppo.policy_optimizer.lr; or, to take it all the same, loosen ppo.selection or set its method to last"
        )
