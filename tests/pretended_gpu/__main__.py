"""Run a module as a program on the pretended GPU; see device.py."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS / "support"), str(TESTS.parent)]
from pretended_gpu.device import main  # noqa: E402

main()
