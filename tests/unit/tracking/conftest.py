"""A server and a clock that tests of the tracker and of the courier move."""

from __future__ import annotations

import pytest
from unit.tracking.fake_mlflow import Clock, Server


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()
