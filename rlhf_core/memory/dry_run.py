"""The passes of PPO run on shapes alone: models, optimisers and batches of any size, none of them with any storage.

Tensors live on torch's meta device behind a pretended CPU, so the real code takes the paths that it takes with data.
The bytes that it would have allocated are counted and stand beside the plan's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
)

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.memory.estimate import GIB
from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.logits import policy_backward_copies
from rlhf_core.memory.passes import SCALAR, Loss, sampling_pass, scoring_pass, training_pass
from rlhf_core.memory.reinforcement import changes_logits, rollout_batch
from rlhf_core.memory.roles import trained
from rlhf_core.memory.setting import Recipe, Setting
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.tensor_memory import TensorMemory
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.importance_sampling import ratios
from rlhf_core.ppo.kl import full_kl
from rlhf_core.ppo.loss_reduction import StepSize, aggregate
from rlhf_core.ppo.policy_loss import surrogate
from rlhf_core.ppo.value_loss import value_loss
from rlhf_core.sampling.distribution import Sampling, inverse_cdf, log_distribution
from rlhf_core.sampling.token_scoring import (
    Tokens,
    entropy,
    gather_logprobs,
    response_log_distribution,
    response_values,
)
from rlhf_core.training.engine.gradient_checkpointing import recomputing
from rlhf_core.training.optim import build_adamw


@dataclass(frozen=True)
class Pass:
    """``planned`` and ``counted`` bytes of one pass beyond what was there before it, and the shape of what it makes."""

    name: str
    planned: int
    counted: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DryRun:
    """Parameters of each model as built, and the passes."""

    parameters: dict[str, int]
    passes: tuple[Pass, ...]

    def as_json(self) -> dict[str, Any]:
        """All figures in bytes."""
        return {"parameters": self.parameters, "passes": {one.name: _described(one) for one in self.passes}}

    def text(self) -> str:
        """Each pass in a line: the shape of what it makes, and the plan's figure beside what was counted."""
        built = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in self.parameters.items())
        lines = [f"dry run on shapes alone; built {built} parameters"]
        for one in self.passes:
            shape = " x ".join(str(size) for size in one.shape)
            figures = f"planned {one.planned / GIB:.2f}, counted {one.counted / GIB:.2f} GiB"
            lines.append(f"  {one.name.ljust(14)} {figures} ({one.planned / one.counted - 1:+.1%}), makes {shape}")
        return "\n".join(lines)


def llama_config(shape: Shape) -> LlamaConfig:
    """A Llama of these sizes."""
    settings: dict[str, Any] = {"num_labels": 1, "attn_implementation": "sdpa"}
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions or 2048,
        attention_bias=shape.bias > 0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )


def dry_run(recipe: Recipe) -> DryRun:
    """Build policy, reference, critic, reward model and optimisers, and run one GPU's share of a PPO iteration.

    All weights are trained and whole here: adapters and sharding change what is held, not the passes that are counted.
    """
    setting = recipe.setting("ppo")
    rollout = rollout_batch(setting, setting.params.ppo.batch_size)
    whole = replace(setting.placement, engine="local", gpus=1, zero=0, frozen="device")
    with FakeTensorMode(), TensorMemory() as memory:
        run = _Run(replace(setting, placement=whole), rollout, memory)
        passes = (run.sampling(), run.scoring(), run.policy_update(), *run.critic_update())
        models = {"policy": run.policy, "reference": run.reference, "critic": run.critic, "reward": run.reward}
        return DryRun({name: _size(model) for name, model in models.items()}, passes)


class _Run:
    """The models, and each pass in turn. ``rollout``: one GPU's rows, and a micro-batch for scoring and updates."""

    def __init__(self, setting: Setting, rollout: tuple[int, Batch], memory: TensorMemory) -> None:
        self.setting, self.memory, self.config = setting, memory, setting.params.ppo
        self.rows, self.batch = rollout
        self.prompt, self.reply = setting.lengths.prompt, self.config.max_new_tokens
        self.sampler = Sampling(-1, 0, self.reply, self.config.temperature, self.config.min_new_tokens)
        place = setting.placement
        self.policy = _built(AutoModelForCausalLM, setting.shape, place.precision)
        self.reference = _built(AutoModelForCausalLM, setting.shape, place.precision).requires_grad_(False)
        scalars = [_built(AutoModelForSequenceClassification, setting.shape, place.precision) for _ in range(2)]
        self.critic, self.reward = ScalarModel(scalars[0]), ScalarModel(scalars[1]).requires_grad_(False)

    def sampling(self) -> Pass:
        """Read the prompts, then sample the last token of replies of full length."""
        before = self._start()
        with torch.inference_mode():
            logits = self._decode(self.prompt, 0)
            del logits
            logits = self._decode(1, self.prompt + self.reply - 1)
            picked = inverse_cdf(log_distribution(logits, self.sampler).squeeze(1), torch.rand(self.rows).double())
        planned = sampling_pass(self.setting.shape, self.rows, self.prompt, self.reply, self.setting.placement)
        return Pass("generation", planned.total, self.memory.peak - before, tuple(picked.shape))

    def _decode(self, width: int, cached: int) -> Tensor:
        """Last logits of ``width`` tokens after ``cached`` ones, (rows, 1, V)."""
        ids = torch.zeros(self.rows, width, dtype=torch.long)
        cache = DynamicCache(config=self.policy.config)
        shape = self.setting.shape
        for layer in range(shape.layers if cached else 0):
            keys = torch.zeros(self.rows, shape.kv_heads, cached, shape.head_dim, dtype=self.policy.dtype)
            cache.update(keys, torch.zeros_like(keys), layer)
            del keys
        logits: Tensor = self.policy(
            input_ids=ids,
            attention_mask=torch.ones(self.rows, cached + width, dtype=torch.long),
            position_ids=ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits

    def scoring(self) -> Pass:
        """Policy, reference and critic over one micro-batch, and the reward model."""
        part, before = self._part(), self._start()
        with torch.inference_mode():
            policy = response_log_distribution(self.policy, part, self.sampler)
            reference = response_log_distribution(self.reference, part, self.sampler)
            full_kl(policy, reference)
            entropy(policy)
            shape = tuple(policy.shape)
            response_values(self.critic, part)
            del policy, reference
            self.reward.last_token_scores(part.tokens, part.attention_mask)
        place, changed = self.setting.placement, changes_logits(self.config)
        planned = scoring_pass(self.setting.shape, self.batch, place, same=False, changed=changed)
        return Pass("scoring", planned.total, self.memory.peak - before, shape)

    def policy_update(self) -> Pass:
        """Surrogate loss, backward and optimiser step of the policy on one micro-batch."""
        config = self.config

        def compute(part: Tokens) -> tuple[Tensor, tuple[int, ...]]:
            log_probabilities = response_log_distribution(self.policy, part, self.sampler)
            logprobs = gather_logprobs(log_probabilities, part.response)
            terms = surrogate(
                ratios(logprobs, logprobs.detach(), part.response_mask), logprobs.detach(), config.surrogate
            )
            return self._mean(terms, part), tuple(log_probabilities.shape)

        plain = config.model_copy(update={"entropy": type(config.entropy)(), "kl": type(config.kl)()})
        loss = Loss(policy_backward_copies(plain), held=False, changed=changes_logits(config))
        return self._update("update policy", self.policy, config.policy_optimizer, loss, compute)

    def critic_update(self) -> Iterator[Pass]:
        """Value loss, backward and optimiser step of the critic on one micro-batch; none where it has no optimiser,
        since it shares the policy's backbone."""
        optimizer = self.config.critic_optimizer
        if optimizer is None:
            return

        def compute(part: Tokens) -> tuple[Tensor, tuple[int, ...]]:
            values = response_values(self.critic, part)
            return self._mean(value_loss(values, values.detach(), values.detach(), None), part), tuple(values.shape)

        yield self._update("update critic", self.critic, optimizer, SCALAR, compute)

    def _update(
        self,
        name: str,
        model: nn.Module,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute: Callable[[Tokens], tuple[Tensor, tuple[int, ...]]],
    ) -> Pass:
        steps = build_adamw(model, optimizer)
        checkpointing = recomputing(model) if self.setting.placement.gradient_checkpointing else nullcontext
        part, before = self._part(), self._start()
        with checkpointing():
            value, shape = compute(part)
            value.backward()
        counted = self.memory.peak - before
        steps.step()
        steps.zero_grad(set_to_none=True)
        batch = self.batch if loss.copies else replace(self.batch, scored=0)
        role = trained(name, _size(model), self.setting.shape, self.setting.placement)
        planned = training_pass(self.setting.shape, batch, role, loss, accumulated=False)
        return Pass(name, planned.total, counted, shape)

    def _mean(self, terms: Tensor, part: Tokens) -> Tensor:
        size = StepSize(self.batch.rows * self.reply, self.batch.rows)
        return aggregate(terms, part.response_mask, size, self.config.surrogate.aggregation)

    def _part(self) -> Tokens:
        ids = torch.zeros(self.batch.rows, self.batch.width, dtype=torch.long)
        return Tokens(ids, torch.ones_like(ids), torch.ones(self.batch.rows, self.reply, dtype=torch.bool))

    def _start(self) -> int:
        self.memory.restart()
        return self.memory.live


def _built(kind: Any, shape: Shape, precision: str) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_config(llama_config(shape), dtype=getattr(torch, precision))
    return model.eval()


def _described(one: Pass) -> dict[str, Any]:
    return {"planned": one.planned, "counted": one.counted, "shape": list(one.shape)}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
