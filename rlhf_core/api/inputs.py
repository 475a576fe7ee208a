"""Inputs of the training functions: records, tokenizers, rewards, and a run's folder."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.identity import claim_folder
from rlhf_core.config.data import ReadOptions
from rlhf_core.config.model import Strict
from rlhf_core.config.policy import DpoConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.config.rates import trained_parts, with_chosen_rates
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.reward_sources import DEFAULT_SOURCES, OWN_MODEL, FunctionSource, source_names
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.readers.detection import format_of
from rlhf_core.data.readers.turns import Refusal, text_of
from rlhf_core.data.row_counts import Record
from rlhf_core.data.schema import (
    ROLES,
    Demonstration,
    Message,
    Preference,
    PretrainText,
    Prompt,
    columns_of_records,
)
from rlhf_core.data.text import has_visible_text
from rlhf_core.data.tokens import TokenTable
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.fingerprint.tracked_files import model_folders, plugin_line
from rlhf_core.models.architecture import embedding_weight, evaluation_mode, named_outputs
from rlhf_core.models.causal_lm import fitting_length, with_stop_tokens
from rlhf_core.models.foreign import prepare_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.kernels import kernels_inside
from rlhf_core.models.precision import float32_unembedding
from rlhf_core.ppo.reward_sources.build import SourceContext, build_reward_fn
from rlhf_core.ppo.reward_sources.functions import FunctionReward, PythonFunction
from rlhf_core.ppo.reward_sources.source import (
    SIGNATURE,
    PromptReader,
    RankShared,
    RewardFn,
    RewardMixture,
    WeightedSource,
    reward_model_fn,
)
from rlhf_core.ppo.rollout import TrainingPrompts, require_room
from rlhf_core.runtime import distributed
from rlhf_core.runtime.user_function import load_function
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.storage.files import scratch_folder
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.reward.run import Split, split_of
from rlhf_core.training.run_context import RunContext

Row = TypeVar("Row", Demonstration, Preference, Prompt, PretrainText)
Config = TypeVar("Config", bound=Strict)
PairConfig = TypeVar("PairConfig", DpoConfig, RewardConfig)

HELD_OUT_EVERY = 20
TEXTS = {"chosen", "rejected", "reply", "text"}
# (prompts, replies, columns by name) -> one number per reply; a prompt is its turns as {"role":
# ..., "content": ...}.
RewardFunction = Callable[..., Sequence[float | None] | Any] | FunctionReward

logger = logging.getLogger(__name__)


def rows_of(
    kind: type[Row], records: Iterable[Row | Mapping[str, Any] | str], name: str
) -> list[Row]:
    """Read records of a known format (see docs/data-formats.md) as rows.

    A string is a prompt of one user turn, or a plain text where those are asked for.

    Args:
        kind: The class of the rows.
        records: Rows, or records such as those of a ``datasets.Dataset``; or a table, see
            :func:`records_of`.
        name: What messages call them.

    Raises:
        DataError: There are none, they are of no known format, or one of them is not of the format
            of the first, or prefers no reply.
    """
    listed = records_of(records, name)
    if not listed:
        raise DataError(f"{name} is empty; at least one record is needed")
    rows = [record for record in listed if isinstance(record, kind)]
    if len(rows) < len(listed):
        rows = _read(kind, listed, name)
    for number, row in enumerate(rows, start=1):
        _require_usable(row, f"{name}, record {number}")
    return rows


def _read(kind: type[Row], listed: Sequence[Mapping[str, Any] | str | Row], name: str) -> list[Row]:
    """Read records, all of which must be of one format: that of the first which has one."""
    field = "text" if kind is PretrainText else "prompt"
    values: list[Any] = []
    for record in listed:
        values.append({field: record} if isinstance(record, str) else record)
    shape = next(filter(None, map(format_of, values)), None)
    numbered = [Record(number, value) for number, value in enumerate(values, start=1)]
    options = ReadOptions.model_validate({"format": shape.name if shape else None})
    result = read_records(numbered, kind.KIND, name, options=options)
    if result.refused:
        first = result.refused[0]
        raise DataError(f"{name}, record {first.position}: {first.reason}")
    if result.counts.dropped:
        reason, count = result.counts.dropped.most_common(1)[0]
        raise DataError(f"{name}: {count} of the records cannot be used ({reason}); take them out")
    rows = []
    for row in result.rows:
        if "prompt" in row:
            row["prompt"] = [Message(turn["role"], turn["content"]) for turn in row["prompt"]]
        rows.append(kind(**row))
    return rows


def records_of(given: Any, name: str) -> list[Any]:
    """Return the records of an iterable, or of a table of pandas, Polars or PyArrow.

    Missing values of a table are None. Anything else with columns is refused, since it would yield
    their names in place of rows.

    Raises:
        DataError: ``given`` is one record, no iterable, or a table of another kind; or it holds
            something else than strings and records.
    """
    kind = type(given).__name__
    if isinstance(given, str | bytes):
        raise DataError(f"{name} is one {kind}; give a list of records")
    if isinstance(given, Mapping):
        held = ", ".join(map(str, list(given)[:4]))
        raise DataError(
            f"{name} is one {kind} (with {held}); give a list of records, such as the rows of one split"
        )
    fields = getattr(getattr(given, "dtype", None), "names", None)  # of a structured array of NumPy
    names_columns = hasattr(given, "columns") or hasattr(given, "keys") or fields is not None
    if type(given).__module__.partition(".")[0] == "datasets":
        names_columns = False  # it yields rows all the same
    listed: list[Any]
    if hasattr(given, "to_pylist"):  # PyArrow's tables, batches and columns
        listed = given.to_pylist()
    elif hasattr(given, "to_dicts"):  # Polars' tables
        listed = given.to_dicts()
    elif hasattr(given, "to_dict") and hasattr(given, "iterrows"):  # pandas, and what follows it
        listed = [plain_values(row) for row in given.to_dict("records")]
    elif hasattr(given, "tolist") and fields is None:  # a column of pandas, an array of NumPy
        listed = plain_values(given)
    elif not isinstance(given, Iterable) or (names_columns and not isinstance(given, Sequence)):
        raise DataError(
            f"{name} is a {kind}, which is no list of records; give its rows as a list of dicts"
        )
    else:
        listed = list(given)
    known = (str, Mapping, Demonstration, Preference, Prompt, PretrainText)
    for number, record in enumerate(listed, start=1):
        if not isinstance(record, known):
            raise DataError(
                f"{name}, record {number} is a {type(record).__name__}; give each as a dict, or as a string"
            )
    return listed


def plain_values(value: Any) -> Any:
    """Return a value of pandas as JSON has it: lists for arrays, None for missing values."""
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    is_nan = isinstance(value, float) and value != value
    if is_nan or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value


def _require_usable(row: Demonstration | Preference | Prompt | PretrainText, where: str) -> None:
    """Raise ``DataError`` for a row that teaches nothing, or whose texts are not text."""
    try:
        for name in TEXTS & vars(row).keys():
            text_of(getattr(row, name), name)
        turns = [] if isinstance(row, PretrainText) else row.prompt
        for turn in turns:
            if not isinstance(turn, Message) or turn.role not in ROLES:
                raise Refusal(f"a turn of the prompt is no Message of the role {', '.join(ROLES)}")
            text_of(turn.content, f"the {turn.role} turn")
    except Refusal as refusal:
        raise DataError(f"{where}: {refusal}") from refusal
    if isinstance(row, PretrainText):
        return
    if not row.prompt or row.prompt[-1].role != "user":
        raise DataError(f"{where}: the prompt must end with a turn of the user")
    if not any(has_visible_text(turn.content) for turn in row.prompt):
        raise DataError(f"{where}: the prompt is empty")
    if isinstance(row, Demonstration) and not has_visible_text(row.reply):
        raise DataError(f"{where}: the reply is empty")


def held_out(
    kind: type[Row],
    records: Iterable[Row | Mapping[str, Any] | str],
    validation: Iterable[Row | Mapping[str, Any] | str] | None,
    name: str,
) -> tuple[list[Row], list[Row]]:
    """Read records as training and validation rows.

    Without ``validation`` every twentieth record and the last are held out.

    Raises:
        DataError: As of :func:`rows_of`, or there are too few rows to hold one out.
    """
    rows: list[Row] = rows_of(kind, records, name)
    if validation is not None:
        return rows, rows_of(kind, validation, "validation")
    if len(rows) < 2:
        raise DataError(
            f"{name} has {len(rows)} record, of which none can be held out; give validation records"
        )
    numbers = {*range(HELD_OUT_EVERY - 1, len(rows), HELD_OUT_EVERY), len(rows) - 1}
    training = [row for number, row in enumerate(rows) if number not in numbers]
    return training, [rows[number] for number in sorted(numbers)]


def pairs_of(
    preferences: Iterable[Preference | Mapping[str, Any]] | Split,
    validation: Iterable[Preference | Mapping[str, Any]] | Split | None,
    config: PairConfig | Callable[[int, PreTrainedModel | Path], PairConfig],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | Path,
) -> tuple[PairConfig, Split, Split]:
    """Return the settings of a training on pairs, its training pairs and its validation pairs.

    Args:
        preferences: Records of pairs, or pairs that are tokenised.
        validation: Likewise; None holds out some of ``preferences``.
        config: Settings, or what makes them of the number of training pairs and ``model``.

    Raises:
        DataError: A record cannot be read, or no pair is usable.
    """
    if isinstance(preferences, Split):
        assert isinstance(validation, Split) and not callable(config)
        return config, preferences, validation
    assert not isinstance(validation, Split)
    train, checks = held_out(Preference, preferences, validation, "preferences")
    settings = config(len(train), model) if callable(config) else config
    longest = fitting_length(settings.max_tokens, model)
    pairs = split_of(train, tokenizer, longest, "preferences")
    return settings, pairs, split_of(checks, tokenizer, longest, "validation")


def token_table(
    given: Iterable[Any] | TokenTable,
    kind: type[Row],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> TokenTable | None:
    """Tokenise records of ``kind``, if there are any; a table is taken as it is."""
    if isinstance(given, TokenTable):
        return given
    listed = records_of(given, name)
    if not listed:
        return None
    return TokenTable.of_rows(tokenizer, kind.KIND, rows_of(kind, listed, name))


def encode_prompts(
    prompts: Iterable[Prompt | Mapping[str, Any] | str] | TrainingPrompts,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel | Path,
    max_new_tokens: int,
) -> TrainingPrompts:
    """Read and encode prompts unless that is done, and check that replies fit the policy too."""
    if not isinstance(prompts, TrainingPrompts):
        records = records_of(prompts, "prompts")
        turns = [row.prompt for row in rows_of(Prompt, records, "prompts")]
        encoded = TrainingPrompts.encode(tokenizer, turns)
        prompts = replace(encoded, columns=columns_beside(records))
    positions = fitting_length(sys.maxsize, policy)
    require_room(prompts.ids, max_new_tokens, positions)
    return prompts


def columns_beside(records: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the other columns of records of prompts; a record that is a string has none."""
    mappings: list[Mapping[str, Any]] = []
    for record in records:
        mappings.append(record if isinstance(record, Mapping) else {})
    return columns_of_records(mappings)


def _require_one_record_each(prompts: TrainingPrompts, read: Sequence[str]) -> None:
    """Refuse two records of one prompt that differ in what is read.

    A reply would not tell which of them it answers.
    """
    if not read:
        return
    first: dict[tuple[int, ...], int] = {}
    for row, ids in enumerate(prompts.ids):
        other = first.setdefault(tuple(ids), row)
        for name in read:
            values = prompts.columns[name]
            if other != row and values[row] != values[other]:
                raise DataError(
                    f"prompts, record {row + 1} repeats the prompt of record {other + 1} with another {name}; join "
                    "them, or take one out"
                )


def checked_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | Path
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template, and with the tokens that end a reply.

    Where it has no template, a copy gets a plain one ("User: … Assistant: …"). A copy also names
    the tokens at which the model's generation config ends a reply. The tokenizer of a folder is
    taken as the base stage, or whoever saved it, has made it.

    Raises:
        ModelError: It has no end-of-sequence token, so that no reply could ever end, or more
            entries than the model.
    """
    require_type(tokenizer, PreTrainedTokenizerBase, "tokenizer")
    if tokenizer is None:
        raise ConfigError(
            "tokenizer is None; give the model's own, such as AutoTokenizer.from_pretrained(NAME)"
        )
    if isinstance(model, Path):
        return tokenizer
    entries = embedding_weight(model).shape[0]
    if len(tokenizer) > entries:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} entries, the model only {entries}: they differ"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set tokenizer.eos_token to one of "
            "its tokens"
        )
    if getattr(tokenizer, "chat_template", None):
        return with_stop_tokens(tokenizer, model)
    plain = copy.deepcopy(tokenizer)
    prepare_tokenizer(plain, f"the tokenizer {tokenizer.name_or_path!r}")
    return with_stop_tokens(plain, model)


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Put the given models on the device and in evaluation mode inside the block.

    Logits are computed in float32, products and norms as engines and loading have them: policy and
    reference of one model then compute the same. This is the one place for models that are read as
    they are: engines place what they train, and loading what comes from a folder. Whatever is no
    model in memory (a folder, a function, None) is left alone.
    """
    held = {id(model): model for model in models if isinstance(model, nn.Module)}
    with ExitStack() as stack:
        for model in held.values():
            stack.enter_context(evaluation_mode(model))
            stack.callback(model.to, next(model.parameters()).device)
            model.to(distributed.device())
            stack.enter_context(kernels_inside(model))
            if isinstance(model, PreTrainedModel):
                stack.enter_context(named_outputs(model))
                stack.enter_context(float32_unembedding(model))
        yield


def reward_folder(reward: Any, context: RunContext) -> Path | None:
    """Return the folder of ``models/reward``; None for a reward that is a function or a model."""
    if isinstance(reward, Path):
        return reward
    return context.folder / OWN_MODEL if reward is None else None


def reward_inputs(
    reward: Any, rollout: RolloutConfig, context: RunContext | None
) -> dict[str, Any]:
    """Return what rewards depend on beside the settings, by name.

    That is the reward that was given, or the functions and models of ``reward.sources``.
    """
    own = reward_folder(reward, context or RunContext(Path()))
    if own is None and isinstance(reward, FunctionReward):
        return {"reward": reward.function, "reward's call": [reward.call, reward.timeout_seconds]}
    if own is None:
        return {"reward": reward}
    if context is None or context.named_by_content:
        return {}  # it is compared with nothing
    workspace = own.parent.parent
    inputs: dict[str, Any] = {"reward": own}
    sources = rollout.reward.sources
    for name, source in zip(source_names(sources), sources, strict=True):
        if isinstance(source, FunctionSource):
            inputs[f"source {name}"] = load_function(source.target, workspace, name, SIGNATURE)
        for plugin in source.plugins:
            inputs[f"source {name}"] = plugin_line(*plugin)
        for folder in model_folders(source):
            inputs[f"source {name}, {folder}"] = workspace / Path(folder).expanduser()
    return inputs


def reward_fn_of(
    reward: RewardFunction | ScalarModel | Path | None,
    rollout: RolloutConfig,
    prompts: TrainingPrompts,
    tokenizer: PreTrainedTokenizerBase,
    frozen: FrozenModels,
    context: RunContext,
) -> RewardFn:
    """Return the reward function that trainers call on tokens.

    It is made of the reward that was given, or of ``reward.sources``.

    Raises:
        ConfigError: It is given twice, or cannot be one.
    """
    limits = MicroBatchLimits(rollout.micro_batch_size, rollout.micro_batch_tokens)
    own = reward_folder(reward, context)
    if own is not None:
        workspace = own.parent.parent
        clean = workspace / "data/clean"
        sources = SourceContext(
            own, clean, tokenizer, prompts, distributed.device(), frozen, limits
        )
        return build_reward_fn(rollout.reward.sources, sources)
    if rollout.reward.sources != DEFAULT_SOURCES:
        raise ConfigError(
            "the reward is given twice, as an argument and by reward.sources: leave one of them out"
        )
    if isinstance(reward, ScalarModel):
        return reward_model_fn(reward.eval(), limits)
    given = reward if isinstance(reward, FunctionReward) else FunctionReward(reward)  # type: ignore[arg-type]
    if not callable(given.function):
        raise ConfigError(
            f"reward is a {type(reward).__name__}; give a function f(prompts, replies) or a reward model"
        )
    who = f"the reward function {getattr(given.function, '__name__', '')}".rstrip()
    function = PythonFunction(given, who, list(prompts.columns))
    _require_one_record_each(prompts, function.read)
    unread = sorted(prompts.columns.keys() - {*function.read})
    if unread:
        logger.info("%s does not read %s of the prompts' records", who, ", ".join(unread))
    source = WeightedSource("function", 1.0, RankShared(function))
    return RewardMixture([source], PromptReader(prompts), tokenizer)


def require_type(value: object, kind: type, name: str) -> None:
    """Check the class of an argument, where a mistake would show much later and as something else.

    Raises:
        ConfigError: ``value`` is neither None nor of that class.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; a {kind.__name__} is needed")


@contextmanager
def run_context(
    context: RunContext | None, name: str, inputs: Mapping[str, Any]
) -> Iterator[RunContext]:
    """Yield the given context, or one whose folder is removed when the block ends.

    Args:
        context: Where to keep partial state; None for a temporary folder.
        name: What is trained.
        inputs: Everything that the run depends on, by name: settings, rows, models, functions.

    Raises:
        RlhfError: The folder holds the state of another run.
    """
    require_type(context, RunContext, "context")
    if context is None:
        with scratch_folder() as folder:
            yield RunContext(folder, kept=False)
        return
    claim_folder(context, name, inputs)
    yield context


def with_safe_rates(
    config: Config, model: PreTrainedModel | Path, insisted: bool, adapters: bool = False
) -> Config:
    """Return settings with a rate that suits ``model`` in every optimiser that has none.

    A model in memory that was loaded from nowhere is a new one; any other counts as pretrained.

    Args:
        config: Settings of a training.
        model: What is trained, or trained on.
        insisted: Whether the caller allows a pretrained model any rate.
        adapters: As in :func:`~rlhf_core.config.rates.trained_parts`.

    Raises:
        ConfigError: A rate is far beyond what suits a pretrained model.
    """
    new = not isinstance(model, Path) and not model.name_or_path
    high = [part for part in trained_parts(config, adapters) if part.too_high]
    if high and not new and not insisted:
        listed = [f"{part.field}.lr {part.optimizer.lr:g} (about {part.usual:g})" for part in high]
        raise ConfigError(
            "the model is a pretrained one, which learning rates this high wreck within a few "
            f"steps: {', '.join(listed)}; lower them, leave them out, or insist with "
            "allow_high_learning_rates=True"
        )
    return with_chosen_rates(config, new, adapters)
