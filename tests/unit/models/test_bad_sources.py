"""A starting model that cannot be opened: one line and exit 2, by the base stage and by
``rlhf doctor`` before it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from base_stage import run_base
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from scripted_server import serving
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer
from unit.models.damages import CONFIG, INDEX, WEIGHTS, Damage, edit, in_shards
from unit.models.gguf_files import write_gguf
from unit.training.tiny import SHAPE

from flows.commands.doctor import base_model_check
from flows.commands.machine_checks import FAIL, OK, WARN
from flows.prefect_server.services import free_port
from rlhf_core import hub
from rlhf_core.config.base import BaseConfig
from rlhf_core.errors import EXIT_USER_ERROR, ModelError
from rlhf_core.models.causal_lm import load_policy, new_model
from rlhf_core.models.heads import ScalarModel
from rlhf_extras.memory.architecture import starting_architecture


def require_one_line(source: Path, message: str, target: Path) -> None:
    """Check that the stage refuses a source in one line, publishes nothing, and that the doctor
    says so before.
    """
    with pytest.raises(ModelError) as refused:
        run_base(source, target)
    text_of_error = str(refused.value)
    assert message in text_of_error and str(source) in text_of_error and "\n" not in text_of_error
    assert refused.value.exit_code == EXIT_USER_ERROR and not (target / "base").exists()
    check = base_model_check(target, str(source), None)
    assert (check.level, message in check.finding, "\n" in check.finding) == (FAIL, True, False), (
        check
    )


def write(name: str, content: str | bytes) -> Damage:
    return lambda folder: (
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        and None
    )


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return damage


def cut(name: str, keep: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep]) and None


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def set_template(template: str | None) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        edit("tokenizer_config.json", chat_template=template)(folder)

    return damage


def remove_end(folder: Path) -> None:
    set_template(None)(folder)
    edit("tokenizer_config.json", eos_token=None)(folder)


NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
DAMAGES = {
    "config-missing": (lambda folder: (folder / CONFIG).unlink(), "has no config.json"),
    "config-cut": (cut(CONFIG, 40), "cannot load the model folder"),
    "config-list": (write(CONFIG, "[1, 2]"), "cannot load the model folder"),
    "config-binary": (write(CONFIG, b"\xff\xfe\x00"), "cannot load the model folder"),
    "config-without-type": (write(CONFIG, "{}"), "cannot load the model folder"),
    "unknown-type": (edit(CONFIG, model_type="no-such-model"), "cannot load the model folder"),
    "encoder-decoder": (write(CONFIG, '{"model_type": "t5"}'), "is an encoder-decoder (of type 't5')"),
    "encoder": (write(CONFIG, '{"model_type": "bert"}'), "is an encoder, which reads a text in both directions"),
    "vision": (write(CONFIG, '{"model_type": "vit"}'), "is no language model (of type 'vit')"),
    "own-code": (edit(CONFIG, model_type="own", auto_map={"AutoConfig": "a.B"}), "that comes with a model is never"),
    "layers-text": (edit(CONFIG, num_hidden_layers="two"), "cannot load the model folder"),
    "heads-zero": (edit(CONFIG, num_attention_heads=0), "cannot load the model folder"),
    "other-width": (edit(CONFIG, hidden_size=8), "but config.json asks for"),
    "more-layers": (edit(CONFIG, num_hidden_layers=SHAPE.layers + 1), "lacks"),
    "quantised": (edit(CONFIG, quantization_config={"quant_method": "awq"}), "has quantised weights (awq)"),
    "weights-missing": (lambda folder: (folder / WEIGHTS).unlink(), "has no .safetensors weights"),
    "weights-pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "pickled weights are"),
    "weights-odd-name": (lambda folder: (folder / WEIGHTS).rename(folder / "other.safetensors"), "has neither model."),
    "weights-cut": (cut(WEIGHTS, 5000), "is not a readable safetensors file"),
    "weights-empty": (write(WEIGHTS, ""), "is not a readable safetensors file"),
    "weights-long-header": (write(WEIGHTS, b"\xff" * 64), "is not a readable safetensors file"),
    "weight-missing": (edit_weights(lambda tensors: tensors.pop(NORM)), "lacks 1 of the weights of a LlamaForCausalLM"),
    "weight-shape": (edit_weights(lambda tensors: tensors.update({NORM: torch.zeros(3)})), "has the shape [3]"),
    "shard-missing": (lambda folder: in_shards(folder, "c.safetensors"), "lacks 1 of 2 shards, such as c.safetensors"),
    "index-cut": (
        lambda folder: (in_shards(folder, "b.safetensors"), cut(INDEX, 30)(folder)), "cannot load the model folder"
    ),
    "tokenizer-missing": (remove_tokenizer, "has no tokenizer"),
    "tokenizer-cut": (cut("tokenizer.json", 400), "its tokenizer.json is not valid JSON"),
    "no-vocabulary": (lambda folder: (folder / "tokenizer.json").unlink(), "it has no vocabulary (tokenizer.json)"),
    "generation-cut": (write("generation_config.json", "{"), "its generation_config.json is not valid JSON"),
    "generation-list": (write("generation_config.json", "[]"), "its generation_config.json holds no JSON object"),
    "tokenizer-list": (write("tokenizer.json", "[]"), "cannot load the model folder"),
    "tokenizer-config-cut": (cut("tokenizer_config.json", 20), "cannot load the model folder"),
    "stop-tokens-number": (edit("tokenizer_config.json", stop_tokens=5), "cannot load the model folder"),
    "length-text": (edit("tokenizer_config.json", model_max_length="long"), "cannot load the model folder"),
    "architecture-number": (edit(CONFIG, architectures=[5]), "cannot load the model folder"),
    "template-refuses": (set_template("{{ raise_exception('No.') }}"), "the chat template refuses a dialogue"),
    "template-broken": (set_template("{% for m in %}"), "the chat template refuses a dialogue"),
    "end-missing": (remove_end, "has no end-of-sequence token"),
    "adapter-beside": (write("adapter_config.json", '{"peft_type": "LORA"}'), "holds an adapter beside a model"),
    "adapter": (lambda folder: (folder / CONFIG).rename(folder / "adapter_config.json"), "holds an adapter beside"),
}  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [NORM, EMBEDDING])
def test_weights_that_are_not_finite_are_refused_where_a_model_is_loaded(
    weight: str, value: float, folder: Path
) -> None:
    edit_weights(lambda tensors: tensors[weight].view(-1)[-1:].fill_(value))(folder)
    with pytest.raises(
        ModelError,
        match=rf"has weights that are not finite numbers, in {weight} \(1 such tensors\)",
    ):
        load_policy(folder)


OF_A_STAGE = (
    "config-missing", "weights-missing", "weights-pickled", "weights-cut", "tokenizer-missing", "weight-missing",
    "weight-shape", "unknown-type",
)  # fmt: skip


@pytest.mark.parametrize("damage", OF_A_STAGE)
def test_a_damaged_folder_that_a_stage_has_made_is_refused_with_a_remedy(
    damage: str, folder: Path
) -> None:
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(
        ModelError, match=rf"^[^\n]*{re.escape(message)}[^\n]*make it again[^\n]*$"
    ) as refused:
        load_policy(folder)
    assert str(folder) in str(refused.value)


def test_a_folder_that_is_not_there_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"no model folder at {tmp_path}/absent[^\n]*make it again"
    ):
        load_policy(tmp_path / "absent")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_line(damage: str, folder: Path, tmp_path: Path) -> None:
    spoil, message = DAMAGES[damage]
    spoil(folder)
    require_one_line(folder, message, tmp_path)


def test_a_good_folder_is_opened_by_its_headers(folder: Path, tmp_path: Path) -> None:
    check = base_model_check(tmp_path, "source", None)
    assert (
        check.level == OK
        and "config, tokenizer and the headers of the weights are readable" in check.finding
    )
    set_template(None)(folder)
    check = base_model_check(tmp_path, "source", None)
    assert (
        check.level == WARN
        and "has no chat template" in check.finding
        and "gets a plain one" in check.remedy
    )


def test_a_tied_weight_may_be_stored_under_either_name(folder: Path, tmp_path: Path) -> None:
    edit_weights(lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))(folder)
    assert base_model_check(tmp_path, "source", None).level == OK
    run_base(folder, tmp_path)
    assert (tmp_path / "base").is_dir()


@pytest.mark.slow
def test_files_that_are_no_model_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "weights.bin").write_bytes(b"x")
    for name, message in (
        ("folder.gguf", "no GGUF file at"),
        ("empty.gguf", "is not a GGUF file"),
        ("text.gguf", "is not a GGUF file"),
        ("weights.bin", "no model folder at"),
    ):
        require_one_line(tmp_path / name, message, tmp_path)
    assert base_model_check(tmp_path, "./absent", None).level == FAIL


def test_a_gguf_file_of_another_architecture_is_seen_before_it_is_loaded(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "other.gguf", model, tokenizer, architecture="clip")
    require_one_line(tmp_path / "other.gguf", "holds a model of the architecture 'clip'", tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    name = b"general.architecture" + struct.pack("<IQ", 8, 5)
    patched = (tmp_path / "tiny.gguf").read_bytes().replace(name + b"llama", name + b"qwen2")
    (tmp_path / "tiny.gguf").write_bytes(patched)
    require_one_line(tmp_path / "tiny.gguf", "its header has no qwen2.block_count", tmp_path)


def test_the_vocabulary_of_a_gguf_file_must_fit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for spare, fits in ((7, True), (-1, False)):
        model = new_model(SHAPE, tokenizer, seed=3)
        model.resize_token_embeddings(len(tokenizer) + spare, mean_resizing=False)
        source = tmp_path / f"{spare}.gguf"
        write_gguf(source, model, tokenizer)
        if fits:
            run_base(source, tmp_path / "padded")
        else:
            require_one_line(source, f"the tokenizer has {len(tokenizer)} entries", tmp_path)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_alone_is_refused_by_name(
    with_config: bool, folder: Path, tmp_path: Path
) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "owner/name"}'
    )
    if not with_config:
        (folder / CONFIG).unlink()
    require_one_line(folder, "holds an adapter without its model", tmp_path)
    with pytest.raises(ModelError, match="holds an adapter without its model"):
        starting_architecture(BaseConfig(source=str(folder)), tmp_path)


def test_a_reward_model_is_no_policy_although_its_weights_would_load_as_one(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    scores = ScalarModel.from_causal_lm(model, seed=1)
    scores.save(tmp_path / "reward", tokenizer)
    message = "holds a LlamaForSequenceClassification, which gives scores and no replies"
    require_one_line(tmp_path / "reward", message, tmp_path)
    for load in (
        load_policy,
        lambda path: starting_architecture(BaseConfig(source=str(path)), tmp_path),
    ):
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "reward")


def test_a_hub_id_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check = base_model_check(tmp_path, "owner/name", None)
    assert check.level == FAIL and "not in the cache" in check.finding
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    check = base_model_check(tmp_path, "owner/name", None)
    assert check.level == FAIL and "does not answer" in check.finding and "\n" not in check.finding
    with pytest.raises(
        ModelError, match=r"^owner/name cannot be loaded: .* does not answer .*--config FILE$"
    ):
        starting_architecture(BaseConfig(source="owner/name"), tmp_path)


class StubHub(BaseHTTPRequestHandler):
    """Answers every request with one status, and with what the hub says of the cause in its
    headers.
    """

    status, cause = HTTPStatus.OK, ""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.cause)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}" if self.command == "GET" else b"")

    do_HEAD = do_GET


@pytest.mark.parametrize(
    ("status", "cause", "message"),
    [
        (404, "RepoNotFound", "is neither a folder here nor on the hub"),
        (404, "RevisionNotFound", "has no revision None on the hub; correct base.revision"),
        (401, "RepoNotFound", "A private one needs a token in HF_TOKEN"),
        (401, "", "set HF_TOKEN to a token that may read it"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (503, "", "answers 503; try later, or set HF_HUB_OFFLINE=1"),
        (200, "", "does not answer as a hub does"),
    ],
)
def test_a_hubs_answer_is_one_line(
    status: int, cause: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handler = type("Handler", (StubHub,), {"status": status, "cause": cause})
    with serving(handler) as address:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(ModelError) as refused:
            run_base("owner/name", tmp_path)
    text_of_error = str(refused.value)
    assert message in text_of_error and "owner/name" in text_of_error and "\n" not in text_of_error
    assert not (tmp_path / "base").exists()
