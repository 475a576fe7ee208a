"""The base stage and the chat template of a loaded model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from base_stage import run_base
from clean_files import write_rows
from real_templates import CHATML, REAL_TEMPLATES, RealTemplate
from safetensors.torch import load_file, save_file
from unit.models.test_stop_tokens import tiny_model

from rlhf_core.data.schema import Demonstration, Message, Preference, PretrainText
from rlhf_core.data.tokens import decode_reply, encode_dialogue, encode_prompt, encode_text
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.causal_lm import load_policy, load_tokenizer, save_policy
from rlhf_core.models.foreign import prepare_tokenizer
from rlhf_core.models.io import save_folder
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages import base
from rlhf_core.storage.files import sha256_tree

DIALOGUE = [
    Message("user", "Why?"),
    Message("assistant", "Because."),
    Message("user", "What is that?"),
]
BASE = RealTemplate("base", "", ("<|begin|>", "<|end|>"), "<|end|>", "<|end|>", bos="<|begin|>")


def base_of_template(real: RealTemplate, folder: Path) -> Path:
    """Run the stage on a tiny model with the tokenizer of ``real``; returns the folder that it
    writes.
    """
    tokenizer = real.tokenizer
    tokenizer.chat_template = real.template or None
    save_policy(folder / "source", tiny_model(tokenizer), tokenizer)
    run_base(folder / "source", folder)
    return folder / "base"


def test_a_model_without_template_gets_a_plain_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(base_of_template(BASE, tmp_path))
    assert "has no chat template; it gets a plain one" in caplog.text
    prompt, reply = encode_dialogue(tokenizer, DIALOGUE, "The sky is blue.")
    text = "User: Why?\n\nAssistant: Because.<|end|>\n\nUser: What is that?\n\nAssistant:"
    assert tokenizer.decode(prompt) == "<|begin|>" + text
    assert tokenizer.decode(reply) == " The sky is blue.<|end|>"
    assert decode_reply(tokenizer, reply) == ("The sky is blue.", True)
    whole = tokenizer.encode(f"<|begin|>{text} The sky is blue.<|end|>", add_special_tokens=False)
    assert [*prompt, *reply] == whole


@pytest.mark.parametrize(
    "source", ["extra/model", "./extra/model", "../ws/extra/model", "~/ws/extra/model"]
)
def test_a_relative_source_is_the_workspaces_wherever_the_stage_is_started(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = BASE.tokenizer
    tokenizer.chat_template = None
    save_policy(tmp_path / "ws/extra/model", tiny_model(tokenizer), tokenizer)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, folder in enumerate(("elsewhere", "ws")):
        monkeypatch.chdir(tmp_path / folder)
        run_base(source, tmp_path / str(number), workspace=tmp_path / "ws")
    assert sha256_tree(tmp_path / "0/base") == sha256_tree(tmp_path / "1/base")
    assert not [
        file
        for file in (tmp_path / "0/base").iterdir()
        if str(tmp_path).encode() in file.read_bytes()
    ]


def test_a_plain_template_begins_as_the_tokenizer_does() -> None:
    chatml = RealTemplate("no-bos", "", CHATML, "<|endoftext|>", "<|endoftext|>").tokenizer
    chatml.chat_template = None
    prepare_tokenizer(chatml, "x")
    assert chatml.decode(encode_prompt(chatml, DIALOGUE[:1])) == "User: Why?\n\nAssistant:"


def test_dialogues_that_a_template_does_not_take_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gemma = next(real for real in REAL_TEMPLATES if real.name == "gemma-2")
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(base_of_template(gemma, tmp_path))
    (line,) = [record.getMessage() for record in caplog.records if record.name == base.logger.name]
    assert line.endswith("does not take a system turn: System role not supported")
    assert tokenizer.init_kwargs["stop_tokens"] == ["<end_of_turn>", "<eos>"]


@pytest.mark.parametrize(
    ("template", "cause"), [("{{ raise_exception('No.') }}", ": No; leave"), ("{% for m in %}", "")]
)
def test_a_template_that_writes_no_question_is_one_line(template: str, cause: str) -> None:
    useless = RealTemplate("useless", template, CHATML, "<|endoftext|>", "<|endoftext|>")
    with pytest.raises(
        ModelError, match=rf"^owner/model: the chat template refuses[^\n]*{cause}[^\n]*$"
    ):
        prepare_tokenizer(useless.tokenizer, "owner/model")


def test_a_vocabulary_beyond_the_embedding_is_refused_and_a_smaller_one_is_not(
    tmp_path: Path,
) -> None:
    tokenizer = next(real.tokenizer for real in REAL_TEMPLATES if real.name == "smollm-2")
    for spare, folder in ((7, "smaller"), (-1, "larger")):
        model = tiny_model(tokenizer)
        model.resize_token_embeddings(len(tokenizer) + spare, mean_resizing=False)
        save_folder(tmp_path / folder, model, tokenizer)
    run_base(tmp_path / "smaller", tmp_path)
    sampling = Sampling.for_tokenizer(load_tokenizer(tmp_path / "base"), 4)
    assert sampling.vocabulary_size == len(tokenizer), (
        "ids that the tokenizer cannot write are never sampled"
    )
    with pytest.raises(
        ModelError, match=rf"has {len(tokenizer)} entries, the model only {len(tokenizer) - 1}"
    ):
        run_base(tmp_path / "larger", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "I8", "F8_E4M3"])
def test_quantised_weights_are_refused_by_their_kind(kind: str, tmp_path: Path) -> None:
    tokenizer, source = BASE.tokenizer, tmp_path / "source"
    save_policy(source, tiny_model(tokenizer), tokenizer)
    weights, config = source / "model.safetensors", source / "config.json"
    if kind == "gptq":
        settings = {"quant_method": "gptq", "bits": 4}
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"quantization_config": settings})
        )
    else:
        dtype = torch.int8 if kind == "I8" else torch.float8_e4m3fn
        save_file({name: tensor.to(dtype) for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(
        ModelError, match=rf"has quantised weights \({kind}\), which cannot be trained"
    ) as caught:
        run_base(source, tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "base").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_become_those_of_the_settings(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tokenizer, source = BASE.tokenizer, tmp_path / "source"
    save_policy(source, tiny_model(tokenizer).to(dtype), tokenizer)
    run_base(source, tmp_path)
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "base" / "model.safetensors").values()
    } == {torch.float32}


def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = BASE.tokenizer
    save_policy(tmp_path / "source", tiny_model(tokenizer), tokenizer)
    file = tmp_path / "source" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"not finite numbers, in {name} \(1 such tensors\)"):
        run_base(tmp_path / "source", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_prompt_that_leaves_no_room_for_a_reply_stops_the_stage(
    split: str, tmp_path: Path
) -> None:
    tokenizer = BASE.tokenizer
    model = tiny_model(tokenizer)
    model.config.max_position_embeddings = 40
    save_policy(tmp_path / "source", model, tokenizer)
    prepare_tokenizer(tokenizer, "x")
    question = "Why? " * 5
    tokens = len(encode_prompt(tokenizer, [Message("user", question)]))
    run_base(tmp_path / "source", tmp_path, [question], split, ppo={"max_new_tokens": 40 - tokens})
    too_long = rf"40 positions: the longest has {tokens} tokens, a reply up to {41 - tokens} "
    with pytest.raises(DataError, match=too_long):
        run_base(
            tmp_path / "source", tmp_path, [question], split, ppo={"max_new_tokens": 41 - tokens}
        )


@pytest.mark.parametrize(
    ("ppo", "reason"),
    [
        ({"policy_lora": {"targets": ["query"]}}, "no linear layer query"),
        ({"critic_lora": {"upper_layers": 99}}, "upper_layers is 99"),
    ],
)
def test_adapters_that_the_model_has_no_layers_for_stop_the_stage(
    ppo: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tokenizer = BASE.tokenizer
    save_policy(tmp_path / "source", tiny_model(tokenizer), tokenizer)
    with pytest.raises(ModelError, match=reason):
        run_base(tmp_path / "source", tmp_path, ppo=ppo)


def texts_in(folder: Path, texts: list[str]) -> None:
    """Write clean data with these plain texts in every split, and one demonstration and pair for
    the tokenizer.
    """
    rows = [PretrainText(str(number), text, "", "files", text) for number, text in enumerate(texts)]
    for split in ("train", "validation", "test"):
        write_rows(folder / "clean" / "pretrain" / f"{split}.parquet", rows)
    asked = [Message("user", "where?")]
    shown = Demonstration("1", asked, "there.", "", "files", "g")
    write_rows(folder / "clean" / "demonstrations" / "train.parquet", [shown])
    pair = Preference("1", asked, "there.", "nowhere.", None, "", "files", "g")
    for name in ("preferences", "preferences_referee"):
        write_rows(folder / "clean" / name / "train.parquet", [pair])


TINY = {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2, "vocab_size": 300}


def test_a_new_model_learns_from_plain_texts(tmp_path: Path) -> None:
    texts_in(
        tmp_path, ["the cat sat on the mat.", "the dog sat on the mat.", "the cow sat on the mat."]
    )
    settings = {"steps": 60, "batch_size": 3, "optimizer": {"lr": 1e-2}}
    metrics = run_base("scratch", tmp_path, pretraining=settings, **TINY)
    assert metrics["perplexity"] < 5 < metrics["vocabulary"] / 10
    model, tokenizer = load_policy(tmp_path / "base")
    ids = torch.tensor([encode_text(tokenizer, "the cat sat on the mat.")])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert float(loss.exp()) < 5


def test_a_new_model_without_plain_texts_is_refused(tmp_path: Path) -> None:
    texts_in(tmp_path, ["this text is longer than two tokens."])
    with pytest.raises(DataError, match=r"base\.pretraining"):
        run_base("scratch", tmp_path, pretraining={"steps": 1, "max_tokens": 2}, **TINY)
