"""One tiny workspace for all tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.training.tiny import make_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clean data and a base model."""
    root = tmp_path_factory.mktemp("training")
    make_workspace(root)
    return root
