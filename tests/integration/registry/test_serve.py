"""``rlhf serve`` as a process: the champion, a moved alias under load, and a stop that lets replies
end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from background import wait_until
from commands import command_environment
from integration.registry.conftest import policy_name, reward_name

from flows.registry.client import connect
from flows.registry.promote import promote
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.pipeline_run import PARENT_TAG
from rlhf_extras.serving.served_policy import served_source

pytestmark = [pytest.mark.services, pytest.mark.parametrize("backend", ["sqlite"], indirect=True)]
ASK = {
    "messages": [{"role": "user", "content": "what colour is the sky?"}],
    "max_tokens": 8,
    "seed": 1,
}
PATIENCE = 240  # seconds until a server that does nothing fails the test


class Server:
    """A running ``rlhf serve`` and its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("serving "):
                self.url = line.split(" at ")[1].partition("/v1;")[0]
                return
        raise AssertionError(f"the server ended: {self.lines}")

    def ask(self, client: httpx.Client, **fields: Any) -> httpx.Response:
        return client.post(f"{self.url}/v1/chat/completions", json={**ASK, **fields})


@contextmanager
def serving(workspace: Path, *options: str, **environment: str) -> Iterator[Server]:
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "serve",
        "--workspace",
        str(workspace),
        "--port",
        "0",
        *options,
    ]
    process = subprocess.Popen(
        command,
        env=command_environment(**environment),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.dear("a champion that changes under load, served by the real command")
def test_the_alias_moves_under_load_and_a_stop_lets_replies_end(contest: Path) -> None:
    name = policy_name(contest)
    served: Counter[str] = Counter()
    stop, timeout = threading.Event(), httpx.Timeout(PATIENCE)
    with (
        serving(contest, "--watch-seconds", "0.1", RLHF_SERVE_TOKEN="secret") as server,
        httpx.Client(timeout=timeout, headers={"Authorization": "Bearer secret"}) as client,
    ):
        assert httpx.get(f"{server.url}/v1/models", timeout=timeout).status_code == 401
        assert server.lines[0].startswith(f"{name} version 1 (@champion), registered ")
        assert not any("no token" in line for line in server.lines)

        def load() -> None:
            while not stop.is_set():
                answer = server.ask(client)
                served[answer.json()["model"] if answer.status_code == 200 else answer.text] += 1

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: served[f"{name}:1"] > 1, PATIENCE, "reply of the first version")
            assert promote(contest, force_reason="test").promoted
            wait_until(lambda: served[f"{name}:2"] > 1, PATIENCE, "reply of the second version")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert set(served) == {f"{name}:1", f"{name}:2"}  # no request failed
        models = client.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == [f"{name}:2", f"{name}@champion"]
        body = {**ASK, "max_tokens": 200, "stream": True}
        with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(server.process.pid, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_version_is_found_by_number_run_and_alias(contest: Path) -> None:
    name, client = policy_name(contest), connect(contest)
    run = client.get_run(client.get_model_version(name, "2").run_id).info
    parent = client.create_run(run.experiment_id).info.run_id
    client.set_tag(run.run_id, PARENT_TAG, parent)
    for choice in ({"version": "2"}, {"run": run.run_id}, {"run": parent}):
        served = served_source(contest, **choice)
        assert served.source.latest().names == (f"{name}:2",) and not served.moves
        assert served.source.files(served.source.latest()).sampling.max_new_tokens == 8
    challenger = served_source(contest, alias="challenger")
    assert (
        challenger.source.latest().names == (f"{name}:2", f"{name}@challenger") and challenger.moves
    )
    client.delete_registered_model_alias(name, "challenger")
    with pytest.raises(RlhfError, match=r"no version of .* has the alias challenger"):
        challenger.source.latest()
    other = client.get_model_version(reward_name(contest), "1").run_id
    for choice, words in (
        ({"version": "9"}, "has no version 9"),
        ({"run": "0" * 32}, "MLflow has no run 0000"),
        ({"run": other}, "registered no version of"),
        ({"alias": "nobody"}, "no nobody of .*; its aliases are champion$"),
    ):
        with pytest.raises(RlhfError, match=words):
            served_source(contest, **choice)
