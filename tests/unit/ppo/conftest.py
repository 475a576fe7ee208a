"""A tiny world for PPO: a random Llama, scalar models, prompts, and a trainer over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from unit.ppo.tiny import Tiny, make_tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other, for seconds where the
    machine is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _tiny() -> Tiny:
    return make_tiny()


@pytest.fixture
def tiny(_tiny: Tiny) -> Tiny:
    """Models of its own for each test: weights may be changed."""
    torch.manual_seed(0)
    return _tiny.copy()
