"""Run a module as a program on the pretended GPU; see device.py."""

import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from pretended_gpu.device import main  # noqa: E402

main()
