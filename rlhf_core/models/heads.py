"""Scalar models (reward model, referee, critic): a backbone with a head of one output per position.

On disk they are plain Hugging Face sequence-classification folders; those of kinds that
transformers has no classifier for are loaded here alone (``models.classifiers``). Shapes: B
sequences, L positions, H hidden, V vocabulary. Reply masks are 1 at the reply's positions (B, L).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import add_adapters
from rlhf_core.models.architecture import (
    backbone_of,
    embedding_weight,
    has_plain_head,
    is_sharded,
    keep_lower_layers,
    probe_ids,
)
from rlhf_core.models.causal_lm import own_copy, say_router_loss
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.forward import (
    LazyLogits,
    hidden_states,
    last_token_indices,
    lazy_logits,
    unembedded,
)
from rlhf_core.models.io import empty_model, load_model, reading, require_same, save_folder
from rlhf_core.models.kernels import linear
from rlhf_core.models.precision import LOW_PRECISION, float32_linear
from rlhf_core.runtime import distributed

# States of zero that the mean so far begins with: few tokens tell little of the whole reply, and
# their mean spreads far more than the one that it predicts. With 10, the head of a reward model
# for SmolLM2-135M explains .63 of the variance of its own scores along the reply; with 1 it
# explains .46, with 96 .42.
PRIOR_TOKENS = 10
SUMMED_TOKENS = 25  # of a short reply, whose scores are summed


def mean_over_reply(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The mean state of each row's reply in float32: (B, L, H), (B, L) -> (B, H)."""
    weights = reply_mask / reply_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.einsum("bl,blh->bh", weights.to(torch.float32), hidden.float())


def mean_so_far(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The mean over the states from before the reply up to each position, in float32.

    Shapes: (B, L, H), (B, L) -> (B, L, H).

    With the states :math:`h_0` before the reply and :math:`h_1, ..., h_t` of its first ``t``
    tokens, it is :math:`(h_0 + ... + h_t) / (t + m)` for :math:`m` = ``PRIOR_TOKENS``. Positions
    further ahead are zero.
    """
    mask = reply_mask.float()
    from_before = torch.maximum(mask, torch.nn.functional.pad(mask[:, 1:], (0, 1)))
    total = (hidden.float() * from_before.unsqueeze(-1)).cumsum(dim=1)
    return total / (from_before.cumsum(dim=1) - 1 + PRIOR_TOKENS).unsqueeze(-1)


def sum_over_reply(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The sum of the states of each row's reply in float32: (B, L, H), (B, L) -> (B, H)."""
    return torch.einsum("bl,blh->bh", reply_mask.to(torch.float32), hidden.float())


def sum_so_far(hidden: Tensor, reply_mask: Tensor) -> Tensor:
    """The sum of the states of the reply up to each position, in float32.

    Shapes: (B, L, H), (B, L) -> (B, L, H).
    """
    return (hidden.float() * reply_mask.float().unsqueeze(-1)).cumsum(dim=1)


Pooling = Literal["last", "mean", "sum"]
POOLING = "reply_pooling"  # its name in config.json


class ReplyScorer(Protocol):
    """A reward model, referee or judge, whole or sharded."""

    def reply_scores(
        self, input_ids: Tensor, attention_mask: Tensor, reply_mask: Tensor | None = None
    ) -> Tensor:
        """(B, L) each -> the scalar of each row's reply (B,)."""


class ScalarModel(nn.Module):
    """A Hugging Face sequence-classification model with one label, whose head computes in float32.

    Attributes:
        model: The sequence-classification model.
        unembedding: Output embedding (V, H) of the language model it was made from, for the
            imitation loss. None with tied embeddings, where the input embedding serves. It is
            trained and checkpointed, but not saved.
    """

    def __init__(self, model: PreTrainedModel, unembedding: Tensor | None = None) -> None:
        super().__init__()
        self.model = model
        head = model.get_submodule("score")
        if type(head) is nn.Linear and head.weight.dtype in LOW_PRECISION:
            model.add_module("score", float32_linear(head))
        self.unembedding = nn.Parameter(unembedding.clone()) if unembedding is not None else None

    @classmethod
    def from_causal_lm(
        cls,
        source: str | Path | PreTrainedModel,
        seed: int,
        layers: int | None = None,
        pooling: Pooling = "last",
        device: torch.device | None = None,
    ) -> ScalarModel:
        """Put a small random head on the backbone of a causal LM.

        Its standard deviation is 1/sqrt(H + 1), of a sum of tokens a share of it, so that margins
        are small at first; ``seed`` alone decides it.

        Args:
            source: Its folder or hub id, or the model itself, of which a copy is made.
            seed: Determines the head.
            layers: Decoder layers to keep, from the embedding up; None for all.
            pooling: What the head reads of a reply, see :meth:`pool`. Other than "last" it is kept
                in config.json.
            device: Where it is loaded; None for this process's own.
        """
        lm: PreTrainedModel
        if isinstance(source, PreTrainedModel):
            name, lm = type(source).__name__, own_copy(source)
        else:
            # Layers that are left out need not be on a device.
            first = torch.device("cpu") if layers is not None else device
            name, lm = str(source), load_model(AutoModelForCausalLM, source, None, device=first)
        if type(lm.config) not in AutoScalarModel._model_mapping:
            raise ModelError(
                f"{name}: a {type(lm).__name__} has no backbone that transformers knows of, and so no reward model and "
                "no critic: give another model, or reward functions and advantage.estimator rloo or grpo"
            )
        say_router_loss(lm, False, f"{name} as a scalar model")
        if layers is not None:
            keep_lower_layers(lm, layers)
            nn.Module.to(lm, device or distributed.device())
        backbone = backbone_of(lm)
        # A model in memory is not on the hub, which would be asked for its name.
        with nullcontext() if isinstance(source, PreTrainedModel) else reading(name):
            lm.config.num_labels = 1
            model = empty_model(AutoScalarModel, lm.config)
        if type(model.base_model) is not type(backbone) or not hasattr(model, "score"):
            raise ModelError(
                f"{name}: {type(lm).__name__} has no sequence-classification form with a score head"
            )
        setattr(model, model.base_model_prefix, backbone)
        width = model.score.in_features
        generator = torch.Generator().manual_seed(seed)
        model.score = nn.Linear(width, 1, bias=False, device=lm.device, dtype=lm.dtype)
        if pooling != "last":
            model.config.update({POOLING: pooling})
        with torch.no_grad():
            random = torch.randn(1, width, generator=generator)
            summed = SUMMED_TOKENS if pooling == "sum" else 1
            model.score.weight.copy_(random / (math.sqrt(width + 1) * summed))
        output = lm.get_output_embeddings().weight
        tied = output is embedding_weight(lm)
        return cls(model.eval(), None if tied else output.detach())

    @classmethod
    def load(
        cls, path: str | Path, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> ScalarModel:
        """Load a folder of :meth:`save`, or another sequence classifier with one label.

        Without ``device`` it is on this process's own.
        """
        model = load_model(AutoScalarModel, path, dtype, device=device)
        if model.config.num_labels != 1 or not hasattr(model, "score"):
            raise ModelError(
                f"{path} is not a scalar model ({model.config.num_labels} labels); exactly one is needed"
            )
        return cls(model)

    @property
    def pooling(self) -> Pooling:
        """What the head reads of a reply."""
        pooling: Pooling = getattr(self.model.config, POOLING, "last")
        return pooling

    def add_adapters(self, config: LoraConfig, seed: int) -> None:
        """Make adapters (see ``models.lora``) and the head trainable in place of all weights."""
        self.requires_grad_(False)
        add_adapters(self.model, config, seed)
        self.model.get_submodule("score").requires_grad_(True)

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Last hidden states (B, L, H)."""
        return hidden_states(self.model.base_model, input_ids, attention_mask, position_ids)

    def scores(self, hidden: Tensor) -> Tensor:
        """The scalar of each hidden state in float32: (..., H) -> (...)."""
        head: nn.Module = self.model.get_submodule("score")
        scores: Tensor = head(hidden)
        return scores.squeeze(-1).float()

    def token_scores(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        reply_mask: Tensor | None = None,
    ) -> Tensor:
        """The scalar at every position: (B, L) each -> (B, L).

        Positions default to those of the mask.

        Where the head reads a mean or a sum, it reads here that of the reply so far, if
        ``reply_mask`` says where the reply is: a critic made from a reward model then predicts at
        each token what the reward model will read at the last.
        """
        hidden = self.hidden(input_ids, attention_mask, position_ids)
        if self.pooling != "last" and reply_mask is not None:
            so_far = mean_so_far if self.pooling == "mean" else sum_so_far
            hidden = so_far(hidden, reply_mask)
        return self.scores(hidden)

    def pool(self, hidden: Tensor, attention_mask: Tensor, reply_mask: Tensor | None) -> Tensor:
        """What the head reads of each row's reply: (B, L, H) -> (B, H). The masks are (B, L).

        It is the state of the last real token, the end-of-sequence that closes the reply, or the
        mean or sum of the reply's. With the sum each token has a score of its own, and a reply the
        sum of them.

        Raises:
            ModelError: A mean or sum is to be taken, and ``reply_mask`` does not say of which
                positions.
        """
        if self.pooling == "last":
            return hidden[
                torch.arange(hidden.shape[0], device=hidden.device),
                last_token_indices(attention_mask),
            ]
        if reply_mask is None:
            what = f"this scalar model reads the {self.pooling} over a reply"
            raise ModelError(f"{what}, so it needs to know where replies begin")
        over_reply = mean_over_reply if self.pooling == "mean" else sum_over_reply
        return over_reply(hidden, reply_mask)

    def reply_scores(
        self, input_ids: Tensor, attention_mask: Tensor, reply_mask: Tensor | None = None
    ) -> Tensor:
        """The scalar of each row's reply, read as :meth:`pool` says: (B, L) -> (B,)."""
        return self.scores(
            self.pool(self.hidden(input_ids, attention_mask), attention_mask, reply_mask)
        )

    def lm_logits(self, hidden: Tensor) -> LazyLogits:
        """Next-token logits of hidden states, for the imitation loss: (..., H) -> (..., V)."""
        weight = self.unembedding if self.unembedding is not None else embedding_weight(self.model)
        sharded = is_sharded(weight)
        if weight.dtype in LOW_PRECISION:
            hidden, weight = hidden.float(), weight.float()
        head = partial(linear, weight=weight)
        return LazyLogits(hidden, head, weight.shape[0], sharded=sharded)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """Same as :meth:`token_scores`."""
        return self.token_scores(input_ids, attention_mask, position_ids)

    def save(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        json_files: dict[str, Any] | None = None,
        tensor_files: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """Save the folder, after checking that the saved copy computes the same.

        Args:
            json_files: Further files by name, written as JSON.
            tensor_files: Further files by name, written as safetensors.

        Raises:
            ModelError: The saved copy differs; nothing is published.
        """
        self.model.config.pad_token_id = tokenizer.pad_token_id
        ids = probe_ids(len(tokenizer)).to(self.model.device)

        def verify(folder: Path) -> None:
            kind, mask = AutoScalarModel, torch.ones_like(ids)
            require_same(
                path,
                folder,
                self.model,
                kind,
                lambda each: ScalarModel(each).token_scores(ids, mask),
            )

        save_folder(
            path, self.model, tokenizer, json_files, verify=verify, tensor_files=tensor_files
        )


class ActorCritic(nn.Module):
    """``policy`` stays the plain model that samples and is saved.

    ``score`` (H -> 1) reads its last hidden states.
    """

    def __init__(self, policy: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.policy, self.score = policy, score
        self.train(policy.training)

    @classmethod
    def with_head_of(cls, critic: ScalarModel, policy: PreTrainedModel) -> ActorCritic:
        """``policy`` with the value head that critic pre-training fitted to its hidden states.

        The critic's own backbone is not used: it is the policy's, as it was before PPO.
        ``ModelError`` when the head was made for another width.
        """
        head = critic.model.get_submodule("score")
        width = embedding_weight(policy).shape[1]
        if not isinstance(head, nn.Linear) or head.in_features != width:
            raise ModelError(
                f"the critic's value head does not fit the policy's {width} hidden units; pre-train the critic again"
            )
        return cls(policy, head.to(policy.device, policy.dtype))

    def token_scores(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """The value at every position in float32: (B, L) -> (B, L)."""
        return self._values(
            hidden_states(backbone_of(self.policy), input_ids, attention_mask, position_ids)
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        logits_to_keep: int,
    ) -> tuple[LazyLogits, Tensor]:
        """Compute logits of the last positions and all values in one pass.

        Logits are (B, logits_to_keep, V), values (B, L).
        """
        hidden = hidden_states(backbone_of(self.policy), input_ids, attention_mask, position_ids)
        if has_plain_head(self.policy):
            logits = unembedded(self.policy, hidden[:, -logits_to_keep:])
        else:
            # Such a model does more to its logits than unembed, so that only its own forward is
            # right.
            logits = lazy_logits(
                self.policy, input_ids, attention_mask, position_ids, logits_to_keep
            )
        return logits, self._values(hidden)

    def _values(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.score(hidden)
        return values.squeeze(-1).float()
