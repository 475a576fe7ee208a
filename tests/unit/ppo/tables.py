"""Models that are nothing but tables of logits and values, so that a test decides every number they
give.

Row numbers travel in the first prompt token; all prompts have the same length.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.training.engine.base import StepResult

PROMPT = 2


class TableLM(nn.Module):
    """Logits (B, P+T, V) by row and position, without a head that makes them."""

    config = SimpleNamespace()

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **_: Any) -> SimpleNamespace:
        logits = self.table[input_ids[:, 0]][:, : input_ids.shape[1]]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


class TableCritic(nn.Module):
    """Scalars (B, P+T) by row and position."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def token_scores(self, input_ids: Tensor, *_: Tensor) -> Tensor:
        return self.table[input_ids[:, 0]][:, : input_ids.shape[1]]


class TableBackbone(nn.Module):
    """Hidden states (B, P+T, H) by row and position."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(
            last_hidden_state=self.table[input_ids[:, 0]][:, : input_ids.shape[1]]
        )


class HiddenTableLM(nn.Module):
    """A causal LM over :class:`TableBackbone`: logits are ``hidden @ unembedding.T``, for (V, H)
    ``unembedding``.
    """

    def __init__(self, table: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        text = SimpleNamespace(vocab_size=len(unembedding))
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.base_model, self.head = TableBackbone(table), linear(unembedding)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(
            logits=self.head(self.base_model(input_ids).last_hidden_state[:, -logits_to_keep:])
        )


def linear(weight: Tensor) -> nn.Linear:
    """A layer without bias and with this ``weight`` (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


class RecordingEngine:
    """Adds up losses and gradients, and never steps."""

    name, steps, skipped_steps, max_grad_norm = "recorder", 0, 0, None

    def __init__(self, model: nn.Module) -> None:
        self.model, self.total = model, 0.0

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()

    def backward(self, loss: Tensor) -> None:
        self.total += float(loss.detach())
        loss.backward()

    def step(self) -> StepResult:
        return StepResult(0.0, False, 0.0)
