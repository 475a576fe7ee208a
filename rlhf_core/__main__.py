"""``python -m rlhf_core``: the core's own commands, without orchestration."""

from rlhf_core.cli import app

if __name__ == "__main__":
    app(prog_name="python -m rlhf_core")
