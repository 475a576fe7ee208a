"""The header of a GGUF file: what is read of it, and one line for every place where a file may be cut off."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rlhf_core.errors import EXIT_USER_ERROR, ModelError
from rlhf_core.models.gguf import read_gguf_header

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
        key("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + string("a") + string("") + string("天")),
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


def test_keys_and_tensors_are_read(tmp_path: Path) -> None:
    read = read_gguf_header(file_of(whole(), tmp_path))
    expected = {"general.architecture": "llama", "general.alignment": 64, "scale": None, "tokens": 3, "types": 2}
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
        assert message.startswith(f"{path} {cause}") and "fetch the file again" in message and "\n" not in message
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
    ],
    ids=["version", "byte-order", "kind", "quantisation", "counts", "length"],
)
def test_what_no_reader_knows_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        read_gguf_header(file_of(content, tmp_path))
    assert "\n" not in str(refused.value)
