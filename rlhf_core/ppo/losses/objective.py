"""The losses of policy and critic as training sees them: of what a model says of a micro-batch, within a step."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses.loss_reduction import StepSize
from rlhf_core.ppo.metrics import MetricRecord
from rlhf_core.sampling.token_statistics import TokenStatistics

MetricsCo = TypeVar("MetricsCo", bound=MetricRecord, covariant=True)
OutputsContra = TypeVar("OutputsContra", contravariant=True)


class Objective(Protocol[OutputsContra, MetricsCo]):
    """The loss of one model in one optimiser step, from what the model says of a micro-batch."""

    def loss(self, outputs: OutputsContra, batch: Experience, size: StepSize) -> tuple[Tensor, MetricsCo]:
        """The share of one micro-batch in the loss of a step of ``size``, a scalar, and its share in the metrics."""


ValueLoss = Objective[Tensor, MetricsCo]


class PolicyLoss(Objective[TokenStatistics, MetricsCo], Protocol[MetricsCo]):
    """The policy's loss. It says what it needs beside the log-probabilities of tokens."""

    @property
    def entropy_weight(self) -> float:
        """Weight of the entropies; with 0 they are not computed."""

    @property
    def exact_kl_reference(self) -> PreTrainedModel | None:
        """The model to which the exact KL over the vocabulary is needed; None where it is not."""
