"""``python -m rlhf_core``: the core's own commands, without orchestration."""

from __future__ import annotations

import sys

from rlhf_core.cli import app, write_plain_logs
from rlhf_core.data.text import for_terminal
from rlhf_core.errors import RlhfError


def main() -> None:
    """Run a command. A mistake of the user ends it with its message and exit code, anything else
    with a traceback.
    """
    write_plain_logs()
    try:
        app(prog_name="python -m rlhf_core")
    except RlhfError as error:
        print(for_terminal(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
