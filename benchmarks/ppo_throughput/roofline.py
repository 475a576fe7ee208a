"""The roofline of a PPO iteration: the least time in which a device could compute it, by its two
limits.

A phase is bound by matrix products (scoring, rewards, update, the prompts of a generation) or by
reading weights and keys and values once per token (the rest of a generation). What is measured is
stated as a share of that. Source of the model: Williams, Waterman and Patterson 2009,
"Roofline: An Insightful Visual Performance Model for Multicore Architectures".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.harness import matmul_flops, seconds
from benchmarks.random_models import launch_of
from rlhf_core.config.params import Params
from rlhf_core.models.precision import weights_precision
from rlhf_core.runtime import distributed
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.dry_run import ModelVariant, model_size

BYTES = {"float32": 4, "bfloat16": 2}
PHASES = ("generation", "forward", "rewards", "update")


@dataclass(frozen=True)
class Device:
    """Limits of one process's device: products in FLOP/s, in the precision of the weights, and
    memory in bytes/s.
    """

    name: str
    flops: float
    bandwidth: float

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Device:
        """The device of this process: a product of large square matrices, and a copy larger than
        its caches.
        """
        device = distributed.device()
        on_gpu = device.type == "cuda"
        size, length = (8192, 1 << 28) if on_gpu else (2048, 1 << 26)
        source, target = (torch.zeros(length, dtype=torch.float32, device=device) for _ in range(2))
        flops = matmul_flops(size, 10, dtype, device)
        copy = seconds(lambda: target.copy_(source), 10)
        name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        return cls(name, flops, 2 * source.nbytes / copy)


@dataclass(frozen=True)
class Model:
    """What a model costs: ``linear`` parameters of its layers' products, ``width`` of all query
    heads together.
    """

    linear: int
    layers: int
    width: int
    head: int
    cache_bytes: int
    weight_bytes: int

    @classmethod
    def of(cls, architecture: Architecture, precision: Literal["float32", "bfloat16"]) -> Model:
        """That of a language model; ``head`` are the parameters of its unembedding."""
        size = model_size(ModelVariant(architecture, "causal_lm", precision))
        config: Any = architecture.config()
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_width = getattr(config, "head_dim", None) or hidden // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            linear=size.linear,
            layers=config.num_hidden_layers,
            width=heads * head_width,
            head=hidden * config.vocab_size,
            cache_bytes=2 * config.num_hidden_layers * shared * head_width * BYTES[precision],
            weight_bytes=(size.linear + hidden * config.vocab_size) * BYTES[precision],
        )

    def forward(self, rows: int, length: int, scored: int = 0) -> float:
        """FLOP of a causal pass over sequences of ``length`` tokens, with logits at ``scored``
        positions of each.
        """
        layers = 2 * self.linear * length + 2 * self.layers * self.width * length**2
        return float(rows * (layers + 2 * self.head * scored))


@dataclass(frozen=True)
class Iteration:
    """What one process computes in an iteration of PPO, each prompt and each reply of the same
    length.

    Attributes:
        policy: Also the reference's size.
        critic: That of the value model.
        reward: That of the model that gives the reward.
        rows: Replies.
        prompt: Tokens of a prompt.
        reply: Tokens of a reply.
        epochs: Passes of the update over the rollout.
        ptx_tokens: Tokens of all texts of ptx in an iteration.
        adapters: Whether weights are frozen under adapters: no gradient of them is computed.
        critic_adapters: The same of the critic.
        recomputed: Whether the update computes activations twice (gradient checkpointing).
        critic_free: Whether there is no critic.
        scored_every: Of so many replies the policy scores one before the update.
    """

    policy: Model
    critic: Model
    reward: Model
    rows: int
    prompt: int
    reply: int
    epochs: int
    ptx_tokens: int
    adapters: bool
    critic_adapters: bool
    recomputed: bool
    critic_free: bool = False
    scored_every: int = 1

    @classmethod
    def of(
        cls, params: Params, architecture: Architecture, prompt: int, reply: int, processes: int
    ) -> Iteration:
        """By a recipe, whose batch ``processes`` divide among themselves; of reward models its own
        alone.
        """
        ppo, precision = params.ppo, weights_precision(params.base.dtype)
        reward = Model.of(architecture.lower(params.reward.layers), precision)
        ptx = ppo.ptx.batch_size * ppo.minibatches * ppo.epochs if ppo.ptx.weight else 0
        return cls(
            policy=Model.of(architecture, precision),
            critic=reward,
            reward=reward,
            rows=ppo.batch_size // processes,
            prompt=prompt,
            reply=reply,
            epochs=ppo.epochs,
            ptx_tokens=ptx * (prompt + reply) // processes,
            adapters=ppo.policy_lora is not None,
            critic_adapters=ppo.critic_lora is not None,
            recomputed=launch_of(params, "ppo").gradient_checkpointing,
            critic_free=ppo.advantage.critic_free,
            scored_every=ppo.importance_sampling_correction.scored_every,
        )

    @property
    def length(self) -> int:
        """Tokens of a prompt with its reply."""
        return self.prompt + self.reply

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and replies."""
        return self.rows * self.length

    def scoring_flops(self) -> float:
        """Policy and reference with logits of the reply, and the critic."""
        scored = (1 + 1 / self.scored_every) * self.policy.forward(
            self.rows, self.length, self.reply
        )
        return scored + (0.0 if self.critic_free else self.critic.forward(self.rows, self.length))

    def reward_flops(self) -> float:
        """The model that gives the reward."""
        return self.reward.forward(self.rows, self.length)

    def update_flops(self) -> float:
        """Forward pass, with ``recomputed`` a second one, gradients of activations, and of weights
        that are trained.
        """
        policy = self.policy.forward(self.rows, self.length, self.reply) * self.epochs
        if self.ptx_tokens:
            policy += (
                self.policy.forward(1, self.length, self.length) * self.ptx_tokens / self.length
            )
        critic = (
            0.0 if self.critic_free else self.critic.forward(self.rows, self.length) * self.epochs
        )
        again = 1 if self.recomputed else 0
        return policy * (2 + (not self.adapters) + again) + critic * (
            2 + (not self.critic_adapters) + again
        )

    def generation_seconds(self, device: Device) -> float:
        """Prompts in one pass; then each step of all rows reads weights, keys and values, or is
        bound by products.
        """
        step = self.policy.forward(self.rows, 1, 1)
        decoding = 0.0
        for held in range(self.prompt, self.length):
            read = self.policy.weight_bytes + self.rows * held * self.policy.cache_bytes
            attention = 4 * self.rows * self.policy.layers * self.policy.width * held
            decoding += max(read / device.bandwidth, (step + attention) / device.flops)
        return self.policy.forward(self.rows, self.prompt) / device.flops + decoding

    def roofline(self, device: Device) -> dict[str, float]:
        """The least seconds of each of :data:`PHASES`."""
        return {
            "generation": self.generation_seconds(device),
            "forward": self.scoring_flops() / device.flops,
            "rewards": self.reward_flops() / device.flops,
            "update": self.update_flops() / device.flops,
        }
