"""Write the whole tensors of a checkpoint into one file.

The command is ``python -m rlhf_core.training.checkpoints.consolidate STEP FILE``.

A run never needs that: it resumes from the files of all ranks, and finished models are saved whole.
STEP is the folder of a checkpoint (``work/STAGE/KEY/checkpoints/step-000123``), FILE the
safetensors file to write. Its tensors are named as in the checkpoint: ``engine.weights.NAME``, or
``policy/weights.NAME`` in PPO, and their moments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from rlhf_core.errors import CheckpointError
from rlhf_core.storage.files import replacing
from rlhf_core.training.checkpoints.checkpoint import verified


def main(arguments: list[str] | None = None) -> int:
    """Consolidate the checkpoint that the command line names.

    Returns 0, or 2 after one line that says what is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.training.checkpoints.consolidate", description=__doc__
    )
    parser.add_argument("step", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--weights", action="store_true", help="leave out the optimiser's moments and random states"
    )
    given = parser.parse_args(arguments)
    try:
        tensors = verified(given.step).tensors
        names = sorted(name for name in tensors.names if not given.weights or "weights." in name)
        with replacing(given.file) as part:
            save_file({name: tensors.whole(name).contiguous() for name in names}, part)
    except CheckpointError as error:
        print(f"rlhf: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, SafetensorError) as error:
        print(
            f"rlhf: {given.file} cannot be written: {error}; choose another file or make room",
            file=sys.stderr,
        )
        return CheckpointError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
