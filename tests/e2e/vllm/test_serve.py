"""``rlhf serve --vllm`` for real: OpenAI's client, the token, a moved alias, and a stop that lets
replies end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import run
from e2e.vllm.conftest import JUDGED_WITH, ServedChampion
from integration.registry.conftest import make_policy, policy_name
from smollm2 import needs_smollm2
from vllm_service import VLLM_MARKS, VLLM_PYTHON

from flows.registry.client import connect
from flows.registry.register import register

pytestmark = [*VLLM_MARKS, needs_smollm2]
QUESTION = "What is the capital of France?"
# Runs in vLLM's environment, which has the package openai.
CLIENT = """
import json, os, sys
import openai

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=os.environ["TOKEN"], max_retries=0, timeout=600)
messages = [{"role": "user", "content": question}]
whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
stream = client.chat.completions.create(
    model=model, messages=messages, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
refused = []
for other, name in ((client.with_options(api_key="wrong"), model), (client, "another")):
    try:
        other.chat.completions.create(model=name, messages=messages)
    except openai.APIStatusError as error:
        refused.append(type(error).__name__)
print(json.dumps({
    "models": [each.id for each in client.models.list()],
    "whole": whole.choices[0].message.content,
    "usage": whole.usage.completion_tokens,
    "pieces": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
    "stream_usage": chunks[-1].usage.completion_tokens,
    "refused": refused,
}))
"""


def openai_client(served: ServedChampion, model: str) -> dict[str, Any]:
    """What OpenAI's client was answered."""
    command = [str(VLLM_PYTHON), "-c", CLIENT, f"{served.service.url}/v1", model, QUESTION]
    environment = {**os.environ, "TOKEN": str(served.service.token)}
    environment.pop("PYTHONPATH", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_client_of_openai_gets_replies_whole_and_in_pieces(
    champion_in_vllm: ServedChampion,
) -> None:
    name = policy_name(champion_in_vllm.workspace)
    seen = openai_client(champion_in_vllm, f"{name}@champion")
    assert seen["models"] == [f"{name}:1", f"{name}@champion"]
    assert "Paris" in seen["whole"] and len(seen["pieces"]) > 4
    assert "".join(seen["pieces"]) == seen["whole"] and seen["usage"] == seen["stream_usage"]
    assert seen["refused"] == ["AuthenticationError", "NotFoundError"]
    assert str(champion_in_vllm.service.token) not in champion_in_vllm.service.log.read_text()


def test_no_request_gets_more_tokens_than_the_policy_was_judged_with(
    champion_in_vllm: ServedChampion,
) -> None:
    choice = champion_in_vllm.service.chat("Tell me a story.", max_tokens=1000, ignore_eos=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (
        JUDGED_WITH["max_new_tokens"],
        "length",
    )


def test_a_moved_alias_is_served_after_the_next_start(
    champion_in_vllm: ServedChampion, tmp_path: Path
) -> None:
    workspace, name = champion_in_vllm.workspace, policy_name(champion_in_vllm.workspace)
    make_policy(workspace, 7)
    register(workspace)
    connect(workspace).set_registered_model_alias(name, "champion", "2")
    answered = httpx.get(
        f"{champion_in_vllm.service.url}/v1/models", headers=champion_in_vllm.service.headers
    )
    assert [model["id"] for model in answered.json()["data"]] == [f"{name}:1", f"{name}@champion"]
    assert (
        f"vLLM serves {name}:1 until it is started again"
        in champion_in_vllm.service.log.read_text()
    )
    recorder = tmp_path / "python"
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    recorder.chmod(0o755)
    words = [
        sys.executable,
        "-m",
        "flows.cli",
        "serve",
        "--workspace",
        workspace,
        "--vllm",
        recorder,
    ]
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"vLLM serves {name}:2 until it is started again" in ended.stdout
    arguments = (tmp_path / "arguments").read_text().split("\n")
    names = arguments.index("--served-model-name")
    assert arguments[names + 1 : names + 3] == [f"{name}:2", f"{name}@champion"]


def test_a_stop_lets_the_reply_in_flight_end(champion_in_vllm: ServedChampion) -> None:
    """The last test of the folder: it ends the server that the others share."""
    service = champion_in_vllm.service
    body = {
        "model": service.model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "ignore_eos": True,
    }
    url, pieces = f"{service.url}/v1/chat/completions", 0
    with httpx.stream("POST", url, json=body, headers=service.headers, timeout=1500) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines).startswith("data: ")
        os.kill(service.process.pid, signal.SIGTERM)
        for line in lines:
            last, pieces = line, pieces + 1
    assert last == "data: [DONE]" and pieces > JUDGED_WITH["max_new_tokens"] / 2
    assert service.process.wait(600) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/health")
