"""Stage base: the starting model, made from nothing, or from a folder, GGUF file or the hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.base import BaseConfig, BaseStageConfig
from rlhf_core.data.chat_template import refused_dialogues
from rlhf_core.data.schema import (
    Demonstration,
    PairUser,
    Preference,
    PretrainText,
    Prompt,
    read_rows,
)
from rlhf_core.data.tokens import pad_id, read_tokens
from rlhf_core.errors import DataError
from rlhf_core.fingerprint.tracked_files import STARTING_MODEL_FILE
from rlhf_core.models.adapters import adapted_weights
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import (
    load_policy,
    new_model,
    save_policy,
    train_tokenizer,
    with_stop_tokens,
)
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.foreign import (
    find_hub_model,
    prepare_tokenizer,
    require_openable,
    require_trainable,
)
from rlhf_core.models.io import is_local
from rlhf_core.models.precision import weights_precision
from rlhf_core.models.readers import is_model_file, model_reader
from rlhf_core.sampling.agreement import require_replies_as_scored
from rlhf_core.stages.prompt_room import prompt_files, refused_prompts
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training import loop
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.examples import Example
from rlhf_core.training.loop import on_device_if_it_fits
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask

logger = logging.getLogger(__name__)


def run(
    config: BaseStageConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Write ``models/base``.

    Raises:
        ModelError: ``base.source`` cannot be loaded, samples replies otherwise than it scores them,
            or has no layers for PPO's adapters.
        DataError: A prompt leaves no room for a reply of PPO.
    """
    metrics: dict[str, float] = {}
    if config.source == "scratch":
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(
            training_texts(inputs.clean), config.vocab_size, config.max_positions
        )
        seed = derive_seed(config.seed, "base", "weights")
        model: PreTrainedModel = new_model(config, tokenizer, seed)
        if config.pretraining is not None:
            model, metrics = pretrain(model, tokenizer, config, inputs.clean / "pretrain", context)
    else:
        path = context.folder / os.path.expanduser(config.source)
        source = str(path) if path.exists() else config.source
        dtype = getattr(torch, weights_precision(config.dtype))
        if not is_local(source) and not is_model_file(source):
            find_hub_model(source, config.revision)
        require_openable(source, config.revision)
        if is_model_file(source):
            model, tokenizer = model_reader(Path(source)).read_model(Path(source), dtype)
        else:
            require_trainable(source, config.revision)
            loaded, tokenizer = load_policy(source, dtype, config.revision, torch.device("cpu"))
            model = on_device_if_it_fits(loaded)
        require_replies_as_scored(model, config.source)
        if type(model.config) not in AutoScalarModel._model_mapping:
            logger.warning(
                "%s is a %s, of which transformers makes no classifier, and so no reward model and no critic: give "
                "another model, or use reward.sources and advantage.estimator rloo or grpo",
                config.source,
                type(model).__name__,
            )
        if not tokenizer.chat_template:
            logger.warning(
                "%s has no chat template; it gets a plain one (User: … Assistant: …)", config.source
            )
        prepare_tokenizer(tokenizer, config.source)
        tokenizer = with_stop_tokens(tokenizer, model)
        for dialogue, reason in refused_dialogues(tokenizer).items():
            logger.warning(
                "the chat template of %s does not take %s: %s", config.source, dialogue, reason
            )
    # What follows would else be found by a later stage, after hours.
    for lora in filter(None, (config.ppo.policy_lora, config.ppo.critic_lora)):
        adapted_weights(model, lora)
    of_files = []
    for file in prompt_files(inputs.clean):
        prompts = read_tokens(context.tokens, file, Prompt.KIND, tokenizer)
        of_files.append(prompts.column("prompt").lengths)
    lengths = np.concatenate(of_files)
    refusal = refused_prompts(
        inputs.clean, lengths, positions_of(model.config), config, config.ppo.max_new_tokens
    )
    if refusal:
        raise DataError(refusal)
    save_policy(outputs.model, model, tokenizer)
    parameters = float(sum(p.numel() for p in model.parameters()))
    return {"parameters": parameters, "vocabulary": float(len(tokenizer)), **metrics}


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: BaseConfig,
    folder: Path,
    context: RunContext,
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Train a new model on plain texts by cross-entropy on every token but the first.

    Args:
        folder: Holds ``train.parquet`` and ``validation.parquet`` of plain texts.

    Returns:
        The model, and held-out ``perplexity`` and ``tokens_per_second``.

    Raises:
        DataError: There is no text of at most ``base.pretraining.max_tokens`` tokens.
    """
    settings = config.pretraining
    assert settings is not None
    longest = min(settings.max_tokens, config.max_positions)
    texts = []
    for split in ("train", "validation"):
        table = read_tokens(
            context.tokens, folder / f"{split}.parquet", PretrainText.KIND, tokenizer
        )
        column = table.column("text")
        kept = [ids for ids in column if 1 < len(ids) <= longest]
        if not kept:
            raise DataError(
                f"base.pretraining needs plain texts of at most {longest} tokens, and pretrain/{split} has none; "
                "set base.pretraining to null, or give texts (collect.files.pretrain)"
            )
        if len(kept) < len(column):
            logger.warning(
                "base: %d of %d texts are longer than %d tokens",
                len(column) - len(kept),
                len(column),
                longest,
            )
        # Nothing comes before the first token to predict it from.
        texts.append([Example(ids[:1], ids[1:]) for ids in kept])
    train, held_out = texts

    def task(engine: Engine) -> SftTask:
        return SftTask(engine, model, train, held_out, settings, config.seed, pad_id(tokenizer))

    trained, result = loop.train(model, task, settings, "base", config.seed, context)
    perplexity = result.evaluations()[-1]["validation_perplexity"]
    return trained, {"perplexity": perplexity, "tokens_per_second": result.tokens_per_second}


STAGE = Stage(
    name="base",
    config=BaseStageConfig,
    beside=("ppo",),
    run=run,
    inputs={"clean": "data/clean", "source": STARTING_MODEL_FILE},
    outputs={"model": "models/base"},
    optional_inputs=frozenset({"source"}),
)


def training_texts(clean: Path) -> Iterator[str]:
    """Yield the texts of the train splits, which alone may shape the tokenizer.

    A tokenizer trained on test texts would lower perplexity there. Pairs that only the judge may
    see are left out. Dialogues are split into turns, as the tokenizer
    sees them between special tokens.
    """
    for row in read_rows(clean / "demonstrations" / "train.parquet", Demonstration):
        yield from (message.content for message in row.prompt)
        yield row.reply
    for folder in (PairUser.REWARD, PairUser.REFEREE):
        for pair in read_rows(clean / folder / "train.parquet", Preference):
            yield from (message.content for message in pair.prompt)
            yield pair.chosen
            yield pair.rejected
    for text in read_rows(clean / "pretrain" / "train.parquet", PretrainText):
        yield text.text
