"""The vLLM server that a trainer starts for itself: its process, its socket and its end."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import new_scratch_folder

MODEL = "policy"  # the name that requests give
STOP_SECONDS, POLL_SECONDS = 30.0, 0.2
PR_SET_PDEATHSIG = 1
LOG_CHARACTERS = 400
# What a launcher of ranks sets for the trainer, and would make the server join it.
OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)
OF_LAUNCHER = (
    "TORCHELASTIC_"  # with them vLLM's own process group waits for the store of these ranks
)


class VllmServer:
    """A vLLM server on a socket that only its user can open; it ends with the trainer.

    It offers vLLM's development endpoints, by which weights are loaded. vLLM asks for no token at
    these, so that a port would let every user of the machine load weights and call methods of its
    workers.

    Args:
        python: The Python of an environment that has vLLM; ``RlhfError`` if it cannot be started.
        arguments: Added to the server's command line.
        model: The folder of the policy to start with, in ``precision``, such as ``bfloat16``.
        log: Where the server's output goes.
        sleep: Whether it must be able to give its memory back.
    """

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        model: Path,
        precision: str,
        log: Path,
        sleep: bool = False,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.log = log
        # Not beside the log: sockets have short paths.
        self._folder = new_scratch_folder("rlhf-vllm-")
        self.socket = self._folder / "socket"
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--uds", str(self.socket), "--model", str(model), "--served-model-name", MODEL]
        command += ["--dtype", precision, "--skip-tokenizer-init"]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if sleep:
            command.append("--enable-sleep-mode")
        command += arguments
        environment = {}
        for name, value in os.environ.items():
            if name not in OF_RANKS and not name.startswith(OF_LAUNCHER):
                environment[name] = value
        folders = [str(Path(python).parent), environment.get("PATH", os.defpath)]
        environment |= {
            "PATH": os.pathsep.join(folders),
            "VLLM_API_KEY": self.token,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        prctl = getattr(ctypes.CDLL(None), "prctl", None)

        def end_with_trainer() -> None:
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        try:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True, preexec_fn=end_with_trainer,
                )  # fmt: skip
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise RlhfError(
                f"sampler.python {python} cannot be started ({error.strerror}); name the Python of an environment "
                "that has vLLM"
            ) from error

    def end_report(self) -> str:
        """How the server ended, with the last line of its log; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        # vLLM wraps the error of a worker process in others, whose text says nothing.
        causes = [
            line
            for line in written
            if "Error: " in line and "Engine core initialization failed" not in line
        ]
        last = (causes or written or ["it is empty"])[-1][-LOG_CHARACTERS:]
        return f"vLLM's server ended with status {status}; from its log {self.log}: {last}"

    def stop(self) -> None:
        """End the server and its workers."""
        deadline = time.monotonic() + STOP_SECONDS
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sent)
            except ProcessLookupError:
                break
            while (
                sent == signal.SIGTERM
                and self.process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(POLL_SECONDS)
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
