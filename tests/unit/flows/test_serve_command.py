"""Which policy ``rlhf serve`` takes, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.serve import PolicyChoice, served_source
from rlhf_core.config.model import SamplingConfig
from rlhf_core.errors import ConfigError, RlhfError


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_SERVE_TOKEN", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, RlhfError), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def test_other_addresses_than_loopback_need_a_token(folder: Path) -> None:
    assert "set RLHF_SERVE_TOKEN" in refusal("--model", str(folder), "--host", "0.0.0.0")


def test_only_one_policy_can_be_named(folder: Path) -> None:
    assert "give one of them" in refusal("--model", str(folder), "--alias", "challenger")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "no model at" in refusal("--model", str(tmp_path))


def test_an_address_that_is_taken_is_refused(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refusal("--model", str(folder), "--port", port)


def test_a_folder_is_sampled_as_its_generation_config_says(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    served = served_source(None, PolicyChoice(folder=folder))
    assert not served.moves and served.source.latest().id == "policy"
    assert served.source.files(served.source.latest()).sampling == SamplingConfig(temperature=0.5)


def test_a_folder_of_a_workspace_is_sampled_as_the_workspace_judges(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("evaluate: {sampling: {top_p: 0.4}}\n")
    (tmp_path / "dvc.yaml").write_text("{}\n")
    served = served_source(None, PolicyChoice(folder=folder))
    assert served.source.files(served.source.latest()).sampling == SamplingConfig(top_p=0.4)


class Replaced(Exception):
    """This process would be another program now."""


def test_vllm_gets_the_judged_sampling_the_limits_and_the_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def execve(*arguments: Any) -> None:
        started.extend(arguments)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("RLHF_SERVE_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/of/this/environment")
    python = folder / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    words = ["--vllm", str(python), "--vllm-args", "--dtype float32", "--max-concurrent", "3", "--port", "8123"]
    words += ["--timeout", "30"]
    result = CliRunner().invoke(app, ["serve", "--model", str(folder), *words])
    assert isinstance(result.exception, Replaced)
    program, command, environment = started
    assert program == python and command[:3] == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(command[3:-1:2], command[4::2], strict=True))
    assert (options["--model"], options["--served-model-name"]) == (str(folder), "policy")
    assert (options["--host"], options["--port"], options["--max-num-seqs"]) == ("127.0.0.1", "8123", "3")
    assert json.loads(options["--override-generation-config"]) == SamplingConfig().model_dump()
    assert options["--dtype"] == "float32" and options["--shutdown-timeout"] == "30"
    assert "PYTHONPATH" not in environment and environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["PATH"].startswith(f"{folder}{os.pathsep}")
    assert environment["VLLM_API_KEY"] == "secret" and "secret" not in " ".join(command)


def test_vllm_must_be_there(folder: Path) -> None:
    assert "is no program" in refusal("--model", str(folder), "--vllm", str(folder / "missing"))
    with pytest.raises(ConfigError):
        PolicyChoice(version="1", run="abc")
