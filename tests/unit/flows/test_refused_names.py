"""A name that is wrong is refused in one line before the libraries that take seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import sys
sys.argv = ["rlhf", *sys.argv[1:]]
from flows.cli import main
try:
    main()
except SystemExit as end:
    slow = sorted({"torch", "transformers", "datasets", "mlflow", "prefect", "pyarrow", "pandas"} & sys.modules.keys())
    print(end.code, slow)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("chat", "/nowhere"), "no model at /nowhere (it has no config.json); name a model folder such as models/sft"),
        (("data", "/nowhere"), "no file matches '/nowhere'; correct the path"),
        (("data", "pairs/*.jsonl"), "no file matches 'pairs/*.jsonl' (looked in "),
        (("data", "hub:a/b/c/d"), "'hub:a/b/c/d' is not a hub id; write hub:owner/name"),
        (("data", "."), "the folder . holds no file of data; correct the path"),
    ],
)
def test_wrong_names_are_refused_before_slow_imports(command: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", REPORT, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 []\n", done.stdout + done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1 and "collect.files" not in done.stderr
