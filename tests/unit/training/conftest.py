"""One tiny workspace for all tests of training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_tiny() -> ModuleType:
    path = Path(__file__).with_name("tiny.py")
    spec = importlib.util.spec_from_file_location("training_tiny", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_tiny"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Helpers of tiny.py."""
    return _load_tiny()


@pytest.fixture(scope="session")
def workspace(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clean data and a base model."""
    root = tmp_path_factory.mktemp("training")
    tiny.make_workspace(root)
    return root
