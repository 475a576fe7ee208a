"""Loads the models of the PPO stage, and builds policy and critic with their engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.data.chat.encoding import pad_id
from rlhf_core.data.schema import Demonstration, PretrainText
from rlhf_core.data.tokens.token_cache import read_tokens
from rlhf_core.models.adapters.lora import WithoutAdapters, add_adapters
from rlhf_core.models.adapters.nf4 import pack_linear_layers
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.shared_base import SETTINGS, SharedBase
from rlhf_core.models.starting.base import load_policy
from rlhf_core.ppo.learners.actor_critic_pair import ActorCriticPair, separate_actor_critic, shared_actor_critic
from rlhf_core.ppo.learners.policy_alone import policy_alone
from rlhf_core.ppo.losses.ptx import PtxData, PtxTexts
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import read_json
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

# The data sets that ``ppo.ptx.data`` names.
PTX_KINDS = {
    "demonstrations": (Demonstration.KIND,),
    "pretrain": (PretrainText.KIND,),
    "both": (Demonstration.KIND, PretrainText.KIND),
}


@dataclass
class PolicyModels:
    """Reference, tokenizer and frozen models of a run.

    ``adapted`` is the policy where it is trained as adapters: the reference is then the same model with its adapters
    switched off, and its weights may serve ``frozen`` models too.
    """

    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    frozen: FrozenModels
    adapted: PreTrainedModel | None = None

    @classmethod
    def load(cls, config: PpoConfig, inputs: Paths, context: RunContext) -> PolicyModels:
        """Load the SFT model as the reference."""
        frozen = FrozenModels(context.launch)
        model, tokenizer = load_policy(inputs.sft)
        if config.policy_lora is None:
            return cls(model.requires_grad_(False), tokenizer, frozen)
        if config.share_base:
            model.requires_grad_(False)
            if config.policy_lora.quantize is not None:
                pack_linear_layers(model)
            frozen.base = SharedBase(model, inputs.sft)
        add_adapters(model, config.policy_lora, derive_seed(config.seed, "ppo", "lora"))
        without: Any = WithoutAdapters(model)
        return cls(without, tokenizer, frozen, model)

    def load_trained(self, config: PpoConfig, inputs: Paths) -> PreTrainedModel:
        """Place the reference and load the policy, in this order: the device may have no room for both as loaded."""
        if self.adapted is not None:
            return self.adapted
        self.reference = self.frozen.place(self.reference)
        return load_policy(inputs.sft if config.policy_init == "sft" else inputs.base)[0]


def build_pair(
    config: PpoConfig, inputs: Paths, models: PolicyModels, policy: PreTrainedModel, context: RunContext
) -> ActorCriticPair:
    """Load the pre-trained critic, or put its value head on the policy, and build engines and schedules.

    With critic-free advantages the policy is alone.
    """
    sampling = Sampling.for_rollouts(models.tokenizer, config.rollout)
    if config.advantage.critic_free:
        return policy_alone(config, policy, sampling, context)
    if config.critic_mode == "shared":
        return shared_actor_critic(config, policy, ScalarModel.load(inputs.critic), sampling, context)
    return separate_actor_critic(config, policy, load_critic(config, inputs, models.frozen), sampling, context)


def initial_moments(config: PpoConfig, inputs: Paths) -> RunningMeanStd:
    """The moments of raw rewards that critic pre-training saw; without a critic they begin with the first rollout."""
    if config.advantage.critic_free:
        return RunningMeanStd()
    return RunningMeanStd.from_dict(read_json(inputs.critic / "reward_moments.json"))


def load_critic(config: PpoConfig, inputs: Paths, frozen: FrozenModels) -> ScalarModel:
    """Load the pre-trained critic as a model of its own.

    Pre-trained as adapters, it keeps those on the policy's frozen weights where these are shared.
    """
    if frozen.base is not None and (inputs.critic / SETTINGS).is_file():
        return frozen.base.scalar(inputs.critic, through=inputs.reward)
    critic = ScalarModel.load(inputs.critic)
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, derive_seed(config.seed, "ppo", "critic", "lora"))
    return critic


def ptx_data(
    config: PpoConfig,
    clean: Path,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    tokens: Path | None = None,
) -> PtxData | None:
    """Read the texts of the ptx loss; those longer than the model's positions are left out, never cut.

    Of several ranks all must call it.
    """
    if config.ptx.weight == 0:
        return None
    seed, shares = derive_seed(config.seed, "ppo", "ptx"), config.ptx.category_shares
    files = {kind: clean / kind / "train.parquet" for kind in PTX_KINDS[config.ptx.data]}
    if config.ptx.data == "both":
        files = {kind: file for kind, file in files.items() if file.is_file()}
    tables = [read_tokens(tokens, file, kind, tokenizer) for kind, file in files.items()]
    fitting = [
        PtxTexts.of_table(table, positions).with_category_shares(shares, seed, "ppo.ptx.category_shares")
        for table in tables
    ]
    # It takes all that have a length and items.
    texts: ConcatDataset[tuple[list[int], list[int]]] = ConcatDataset(fitting)  # type: ignore[arg-type]
    return PtxData(texts, config.ptx.batch_size, seed, pad_id(tokenizer))
