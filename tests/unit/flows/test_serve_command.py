"""Which policy ``rlhf serve`` takes, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.serve import PolicyChoice, served_source
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data import template_process
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.models.starting.base import train_tokenizer


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("models/policy", "--host", "0.0.0.0"), "set RLHF_SERVE_TOKEN"),
        (("models/policy", "--alias", "challenger"), "give one of them"),
        (("models",), "no model at"),
        (("models/policy", "--vllm", "missing"), "is no program"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_served_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal("--model", *words)


def test_an_address_that_is_taken_is_refused(folder: Path) -> None:
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


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that is never started: the call that would become it raises :class:`Replaced`."""

    def execve(*arguments: Any) -> None:
        raise Replaced(*arguments)

    monkeypatch.setattr(os, "execve", execve)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return python


def save_tokenizer(folder: Path, **options: Any) -> None:
    tokenizer = train_tokenizer(["what colour is the sky?"] * 4, 280)
    for name, value in options.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")


def test_vllm_gets_the_judged_sampling_the_limits_and_the_token(
    folder: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(folder)
    monkeypatch.setenv("RLHF_SERVE_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/of/this/environment")
    words = ["--vllm", str(vllm), "--vllm-args", "--dtype float32", "--max-concurrent", "3", "--port", "8123"]
    words += ["--timeout", "30"]
    result = CliRunner().invoke(app, ["serve", "--model", str(folder), *words])
    assert isinstance(result.exception, Replaced)
    program, command, environment = result.exception.args
    assert program == vllm and command[:3] == [str(vllm), "-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(command[3:-1:2], command[4::2], strict=True))
    assert (options["--model"], options["--served-model-name"]) == (str(folder), "policy")
    assert (options["--host"], options["--port"], options["--max-num-seqs"]) == ("127.0.0.1", "8123", "3")
    assert json.loads(options["--override-generation-config"]) == SamplingConfig().model_dump()
    assert options["--dtype"] == "float32" and options["--shutdown-timeout"] == "30"
    assert "PYTHONPATH" not in environment and environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["PATH"].startswith(f"{vllm.parent}{os.pathsep}")
    assert environment["VLLM_API_KEY"] == "secret" and "secret" not in " ".join(command)


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOP,
    "writes without end": "{% for m in messages %}{{ 'x' * 10 ** 7 }}{% endfor %}",
    "doubles with every turn": "{% set ns = namespace(t='xx') %}{% for m in messages %}{% set ns.t = ns.t + ns.t %}"
    "{% endfor %}{{ ns.t }}",
    "loops for tools": f"{{% if tools %}}{LOOP}{{% endif %}}{PLAIN}",
    "has a second one that loops": {"default": PLAIN, "tool_use": LOOP},
}


@pytest.mark.slow
@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_vllm_gets_no_folder_whose_chat_template_does_not_end(
    folder: Path, vllm: Path, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1)
    save_tokenizer(folder, chat_template=template)
    assert "made to do harm" in refusal("--model", str(folder), "--vllm", str(vllm))


def test_vllm_gets_no_folder_that_links_out_of_itself(folder: Path, vllm: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere.json")
    assert "outside of the folder" in refusal("--model", str(folder), "--vllm", str(vllm))


def test_a_choice_names_one_policy() -> None:
    with pytest.raises(ConfigError):
        PolicyChoice(version="1", run="abc")
