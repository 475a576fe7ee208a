"""Which policy ``rlhf serve`` and ``rlhf chat`` take, what they say and refuse, and the same policy
behind MLflow.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner

from flows.cli import app
from flows.registry.evidence import TrainingSource, source_of_version, source_of_workspace
from flows.registry.model_pyfunc import LIMITS, RequestRefused, ServedModel
from flows.registry.stored_models import signature
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data import template_process
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.models.causal_lm import save_policy, train_tokenizer
from rlhf_core.serving.accepted import accept_request
from rlhf_core.serving.policy import LoadedPolicy
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.serving.protocol import ChatRequest
from rlhf_core.storage.files import sha256_tree
from rlhf_extras.serving.served_policy import TOY, about_folder, served_source


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
    served = served_source(None, folder)
    assert not served.moves and served.source.latest().id == "policy"
    assert served.source.files(served.source.latest()).sampling == SamplingConfig(temperature=0.5)


def test_a_folder_of_a_workspace_is_sampled_as_the_workspace_judges(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text("evaluate: {sampling: {top_p: 0.4}}\n")
    (tmp_path / "dvc.yaml").write_text("{}\n")
    served = served_source(None, folder)
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


def test_vllm_gets_sampling_limits_and_the_token(
    folder: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(folder)
    monkeypatch.setenv("RLHF_SERVE_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/of/this/environment")
    words = [
        "--vllm",
        str(vllm),
        "--vllm-args",
        "--dtype float32",
        "--max-concurrent",
        "3",
        "--port",
        "8123",
    ]
    words += ["--timeout", "30"]
    result = CliRunner().invoke(app, ["serve", "--model", str(folder), *words])
    assert isinstance(result.exception, Replaced)
    program, command, environment = result.exception.args
    assert program == vllm and command[:3] == [
        str(vllm),
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    options = dict(zip(command[3:-1:2], command[4::2], strict=True))
    assert (options["--model"], options["--served-model-name"]) == (str(folder), "policy")
    assert (options["--host"], options["--port"], options["--max-num-seqs"]) == (
        "127.0.0.1",
        "8123",
        "3",
    )
    whole_distribution = {"top_k": 0, "min_p": 0.0}  # whatever the folder's generation config says
    assert (
        json.loads(options["--override-generation-config"])
        == SamplingConfig().model_dump() | whole_distribution
    )
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


def test_vllm_gets_no_folder_that_links_out_of_itself(
    folder: Path, vllm: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere.json")
    assert "outside of the folder" in refusal("--model", str(folder), "--vllm", str(vllm))


def test_a_choice_names_one_policy() -> None:
    with pytest.raises(ConfigError):
        served_source(None, version="1", run="abc")


LOCK = """
stages:
  collect: {params: {params.yaml: {collect: {source: SOURCE, files: {preferences: [a.jsonl, b.jsonl]}}, seed: 1}}}
  base: {params: {params.yaml: {base: {source: BASE}, seed: 1}}}
"""


def workspace_with(folder: Path, source: str, base: str) -> Path:
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).write_text("{}\n")
    (folder / "dvc.lock").write_text(LOCK.replace("SOURCE", source).replace("BASE", base))
    (folder / "metrics").mkdir()
    (folder / "metrics" / "data.json").write_text(
        json.dumps({"preferences": {"clean": 9000.0, "train": 5998.0}})
    )
    return folder


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    written = datetime(2026, 3, 4, 5, 6).timestamp()
    os.utime(folder / "config.json", (written, written))
    return folder


def test_the_policy_of_the_demo_is_said_to_be_a_toy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = workspace_with(tmp_path, "world", "scratch")
    model = served_source(None, model_in(workspace / "models" / "policy"))
    assert model.workspace == workspace
    assert model.about == (
        "the model in models/policy, written 2026-03-04 05:06",
        "trained on 5,998 preference pairs of the synthetic world; base: random weights",
        TOY,
    )
    assert "lamps" in TOY and len(TOY) <= 80


def test_own_data_and_a_pretrained_base_are_named_and_are_no_toy(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "files", "HuggingFaceTB/SmolLM2-135M")
    about = about_folder(model_in(workspace / "models" / "policy"))
    assert about[1:] == (
        "trained on 5,998 preference pairs from a.jsonl, b.jsonl; base: HuggingFaceTB/SmolLM2-135M",
    )


def test_another_model_of_a_workspace_is_not_said_to_be_trained_on_pairs(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "world", "scratch")
    about = about_folder(model_in(workspace / "models" / "sft"))
    assert about[1].startswith("from a pipeline on 5,998 preference pairs")


def test_a_folder_outside_of_workspaces_is_told_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert about_folder(Path("nothing/here")) == ("the model in nothing/here",)


def test_before_the_first_run_nothing_is_known(tmp_path: Path) -> None:
    assert source_of_workspace(tmp_path) is None


class Runs:
    """Runs of an MLflow client by id."""

    def __init__(self, **runs: SimpleNamespace) -> None:
        self.runs = runs

    def get_run(self, run_id: str) -> SimpleNamespace:
        return SimpleNamespace(data=self.runs[run_id])


def test_the_source_of_a_version_is_that_of_the_run_that_registered_it() -> None:
    own = SimpleNamespace(
        tags={"mlflow.parentRunId": "parent"}, metrics={"final/data.preferences.train": 12.0}
    )
    params = {"collect.source": "files", "base.source": "scratch"}
    params["collect.files.preferences"] = "['x.jsonl', 'y.jsonl']"
    client: Any = Runs(own=own, parent=SimpleNamespace(params=params))
    version: Any = SimpleNamespace(run_id="own")
    assert source_of_version(client, version) == TrainingSource(
        "files", "scratch", "x.jsonl, y.jsonl", 12
    )


def test_a_version_without_a_pipeline_run_has_no_known_source() -> None:
    client: Any = Runs(own=SimpleNamespace(tags={}, metrics={}))
    for run_id in ("own", None):
        version: Any = SimpleNamespace(run_id=run_id)
        assert source_of_version(client, version) is None


JUDGED = SamplingConfig(max_new_tokens=8, temperature=1.3, top_p=0.6, repetition_penalty=2.0)
ASKED = [{"role": "user", "content": "what colour is the sky?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "the sky is blue."}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    config = tiny_config(tokenizer, initializer_range=0.4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_policy(root / "policy", LlamaForCausalLM(config).eval(), tokenizer)
        LlamaForSequenceClassification(config).save_pretrained(root / "reward")
    tokenizer.save_pretrained(root / "reward")
    return {kind: root / kind for kind in ("policy", "reward")}


def served(folder: Path) -> ServedModel:
    model = ServedModel()
    config = {
        "kind": folder.name,
        "content_sha256": sha256_tree(folder),
        "sampling": JUDGED.model_dump(),
    }
    model.load_context(SimpleNamespace(model_config=config, artifacts={"hf": str(folder)}))
    return model


def ask(model: ServedModel, *conversations: Any, **params: Any) -> list[dict[str, Any]]:
    return model.predict(None, pandas.DataFrame({"messages": list(conversations)}), params)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"max_tokens": 3, "top_p": 1.0}])
def test_a_request_is_answered_as_rlhf_serve_answers_it(
    folders: dict[str, Path], params: dict[str, Any]
) -> None:
    policy = LoadedPolicy.load(PolicyRevision("policy"), PolicyFiles(folders["policy"], JUDGED))
    request = ChatRequest.model_validate({"messages": ASKED, "seed": 4, **params})
    accepted = accept_request(request, policy, LIMITS, 0)
    expected = accepted.response(policy.reply(accepted.prompt_ids, accepted.settings))
    # MLflow fills in what the signature names as default.
    defaults = {
        param.name: param.default
        for param in signature("policy", JUDGED.model_dump()).params.params
    }
    (answer,) = ask(served(folders["policy"]), ASKED, **{**defaults, "seed": 4, **params})
    assert answer.pop("reply") == expected["choices"][0]["message"]["content"]
    assert answer.keys() == expected.keys()
    assert (answer["choices"], answer["usage"]) == (expected["choices"], expected["usage"])


def test_a_reward_is_the_judges_score(folders: dict[str, Path]) -> None:
    judge = ModelJudge.load(folders["reward"], "reward")
    score = judge.score(
        [[Message("user", ASKED[0]["content"])]], [Reply(ANSWERED[1]["content"], True)]
    )[0]
    assert (
        ask(served(folders["reward"]), ANSWERED, ANSWERED) == [{"score": pytest.approx(score)}] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turns", "params", "reason"),
    [
        ("policy", ANSWERED, {}, "must end with a turn of role user"),
        ("policy", ASKED, {"max_tokens": 500}, "exceeds the 128 of the model's context"),
        ("policy", ASKED, {"temperature": float("nan")}, "NaN is not a JSON number"),
        ("reward", ASKED, {}, "must end with the turn of role assistant"),
        ("reward", ANSWERED[1:], {}, "messages is empty"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    folders: dict[str, Path], kind: str, turns: Any, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        ask(served(folders[kind]), turns, **params)
    assert refused.value.get_http_status_code() == 400 and "\n" not in refused.value.message
