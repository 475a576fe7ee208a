"""The selector of PPO's stage: the referee on fixed validation prompts."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.selection import CheckpointSelector
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.generation import OnPolicyReplies, on_policy_replies
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.selection import SelectionEvaluator
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed


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
    prompts = [row.prompt for row in rows]
    seed, rows_together = derive_seed(config.seed, "ppo", "selection"), config.selection.batch_size
    sampling = Sampling.for_rollouts(tokenizer, config.rollout)

    def sample(model: PreTrainedModel) -> OnPolicyReplies:
        return on_policy_replies(model, tokenizer, prompts, sampling, seed, rows_together)

    referee, reward = (
        ModelJudge(frozen.scalar(inputs[name]), tokenizer, name, rows_together) for name in ("referee", "reward")
    )
    with frozen.on_device():
        evaluate = SelectionEvaluator(reference, prompts, referee, sample, reward)
    return CheckpointSelector(evaluate, config.selection)
