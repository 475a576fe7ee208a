"""A tiny world for PPO: a random Llama, scalar models, prompts, and a trainer over them."""

from __future__ import annotations

import pytest
import torch
from unit.ppo.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def _tiny() -> Tiny:
    return make_tiny()


@pytest.fixture
def tiny(_tiny: Tiny) -> Tiny:
    """Models of its own for each test: weights may be changed."""
    torch.manual_seed(0)
    return _tiny.copy()
