"""The selector of PPO's stage: the referee on fixed validation prompts."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.selection import CheckpointSelector, referee_selector
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.engine.frozen import FrozenModels


def make_selector(
    config: PpoConfig,
    inputs: Paths,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frozen: FrozenModels,
) -> CheckpointSelector:
    """The referee on fixed validation prompts; ids are content hashes, so the first of them are a fixed sample.

    Its judges are the models that also score rollouts: the reward model and the referee.
    """
    path = inputs.clean / "prompts" / "validation.parquet"
    rows = sorted(read_rows(path, Prompt), key=lambda row: row.id)[: config.selection.prompts]
    if not rows:
        raise DataError(f"{path} has no rows; raise validate.split.validation")
    referee, reward = frozen.scalar(inputs.referee), frozen.scalar(inputs.reward)
    with frozen.on_device():
        return referee_selector(config, reference, tokenizer, [row.prompt for row in rows], referee, reward)
