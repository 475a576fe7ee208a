"""Memory of one GPU by what it holds, and the moment of a phase at which it is most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Use:
    """Bytes on one GPU. ``other``: temporary tensors, communication buffers and the rollout itself."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    logits: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, more: Use) -> Use:
        return Use(**{field.name: getattr(self, field.name) + getattr(more, field.name) for field in fields(self)})

    def with_gradients(self, gradients: int) -> Use:
        """The same with more gradients."""
        return replace(self, gradients=self.gradients + gradients)


KINDS = tuple(field.name for field in fields(Use))


def peak(moments: Iterable[Use]) -> Use:
    """The moment that needs most."""
    return max(moments, key=lambda moment: moment.total)


def total(parts: Iterable[Use]) -> Use:
    """All parts together."""
    return sum(parts, Use())
