"""Policy and critic on one backbone: a causal LM with a value head on its last hidden states."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.models.forward import has_plain_head, hidden_states, lazy_logits, unembedded
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.lazy_logits import LazyLogits

POLICY = "policy."  # what the policy's parameters are called inside


class ActorCritic(nn.Module):
    """``policy`` stays the plain model that samples and is saved; ``score`` (H -> 1) reads its last hidden states.

    Shapes: B sequences, L positions, H hidden, V vocabulary.
    """

    def __init__(self, policy: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.policy, self.score = policy, score
        self.train(policy.training)

    @classmethod
    def with_head_of(cls, critic: ScalarModel, policy: PreTrainedModel) -> ActorCritic:
        """``policy`` with the value head that critic pre-training fitted to its hidden states.

        The critic's own backbone is not used: it is the policy's, as it was before PPO. ``ModelError`` when the head
        was made for another width.
        """
        head = critic.model.get_submodule("score")
        width = policy.get_input_embeddings().get_parameter("weight").shape[1]
        if not isinstance(head, nn.Linear) or head.in_features != width:
            raise ModelError(
                f"the critic's value head does not fit the policy's {width} hidden units; run the critic stage again"
            )
        return cls(policy, head.to(policy.device, policy.dtype))

    def token_scores(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The value at every position in float32: (B, L) -> (B, L)."""
        return self._values(hidden_states(self.policy.base_model, input_ids, attention_mask, position_ids))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> tuple[LazyLogits, Tensor]:
        """Logits of the last ``logits_to_keep`` positions (B, logits_to_keep, V) and values (B, L), in one pass."""
        hidden = hidden_states(self.policy.base_model, input_ids, attention_mask, position_ids)
        if has_plain_head(self.policy):
            logits = unembedded(self.policy, hidden[:, -logits_to_keep:])
        else:
            # Such a model does more to its logits than unembed, so that only its own forward is right.
            logits = lazy_logits(self.policy, input_ids, attention_mask, position_ids, logits_to_keep)
        return logits, self._values(hidden)

    def _values(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.score(hidden)
        return values.squeeze(-1).float()


def policy_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The policy's share of an :class:`ActorCritic`'s weights, under the policy's own names."""
    return {name.removeprefix(POLICY): tensor for name, tensor in weights.items() if name.startswith(POLICY)}
