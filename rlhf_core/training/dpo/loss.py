"""The loss of DPO (Rafailov et al. 2023, equation 7; algorithms.md §10). Shapes: B pairs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of the chosen and the rejected reply of each pair, in nats (B,)."""

    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True)
class ImplicitRewards:
    """What DPO's policy rewards: ``beta * log(pi(y | x) / pi_ref(y | x))`` of both replies (B,)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margins(self) -> Tensor:
        """Reward of the chosen minus that of the rejected reply (B,)."""
        return self.chosen - self.rejected


def implicit_rewards(policy: PairLogprobs, reference: PairLogprobs, beta: float) -> ImplicitRewards:
    """The rewards for which ``policy`` is optimal under a KL penalty of ``beta``, up to a constant per prompt."""
    return ImplicitRewards(
        beta * (policy.chosen - reference.chosen),
        beta * (policy.rejected - reference.rejected),
    )


def dpo_loss(margins: Tensor, label_smoothing: float, total: int) -> Tensor:
    """``-(1 - e) logsigmoid(margin) - e logsigmoid(-margin)`` summed over pairs, divided by ``total``: (B,) -> ().

    With ``e`` 0 it is equation 7; above, cDPO (Mitchell 2023): ``e`` of the labels are taken to be wrong, so that the
    loss is smallest at a margin of ``log((1 - e) / e)`` instead of at infinity.
    """
    right, wrong = functional.logsigmoid(margins), functional.logsigmoid(-margins)
    return -((1.0 - label_smoothing) * right + label_smoothing * wrong).sum() / total
