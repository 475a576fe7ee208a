"""A model folder of somebody else's: it names nothing outside of itself, and opening it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from base_stage import run_base
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM
from transformers.utils import import_utils
from unit.models.damages import CONFIG, WEIGHTS, Damage, edit, in_shards
from unit.models.gguf_files import write_gguf

from flows.commands.doctor import base_model_check
from flows.commands.machine_checks import FAIL
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.reward_sources import ClassifierSource
from rlhf_core.data import template_process
from rlhf_core.errors import ModelError
from rlhf_core.models import folder_check, foreign
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.foreign import INDEX, stored_tensors
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import load_model
from rlhf_core.ppo.reward_sources.classifier import load_classifier
from rlhf_core.runtime.limited_call import GIB, CallLimits, limit_reached
from rlhf_core.serving.policy import LoadedPolicy
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.stages.token_lengths import load_counting_tokenizer
from rlhf_extras.chat.session import ChatSession


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library fetches through the package kernels, which stands here installed."""
    asked: list[str] = []

    def get_kernel(name: str, *_: Any, **__: Any) -> None:
        asked.append(name)
        raise RuntimeError("no network here")

    kernels = types.ModuleType("kernels")
    kernels.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda *_: True)
    return asked


def of_a_version(folder: Path) -> None:
    """Name the attention in a configuration that the library prefers to config.json."""
    shutil.copy(folder / CONFIG, folder / "config.5.0.0.json")
    edit("config.5.0.0.json", attn_implementation="owner/kernel")(folder)
    edit(CONFIG, configuration_files=["config.5.0.0.json"])(folder)


OTHERS: dict[str, Damage] = {
    "a name": edit(CONFIG, attn_implementation="owner/kernel"),
    "a name of the property": edit(CONFIG, _attn_implementation="owner/kernel"),
    "a revision": edit(CONFIG, attn_implementation="owner/kernel@main:function"),
    "paged": edit(CONFIG, attn_implementation="paged|owner/kernel"),
    "by part": edit(CONFIG, attn_implementation={"": "sdpa", "text_config": "owner/kernel"}),
    "a part": edit(CONFIG, text_config={"attn_implementation": "owner/kernel"}),
    "a part of a part": edit(CONFIG, a={"b": [{"_attn_implementation": "owner/kernel"}]}),
    "another name": edit(CONFIG, attn_implementation="my_attention"),
    "of a version": lambda folder: of_a_version(folder),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_attention_of_elsewhere_is_refused_unfetched(
    kind: str, folder: Path, fetched: list[str], tmp_path: Path
) -> None:
    OTHERS[kind](folder)
    for call in (
        lambda: run_base(folder, tmp_path),
        lambda: load_policy(folder),
        lambda: load_model(AutoModelForSequenceClassification, folder, None),
        lambda: ScalarModel.from_causal_lm(folder, seed=0),
    ):
        with pytest.raises(ModelError, match=r"^[^\n]*asks for the attention [^\n]*$"):
            call()
    assert base_model_check(tmp_path, "source", None).level == FAIL and not fetched


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_weights": "adapter_model.bin"},
        {"transformers_weights": "../outside/model.safetensors"},
        {"transformers_weights": "other.safetensors"},
        {"text_config": {"transformers_weights": "sub/model.safetensors.index.json"}},
    ],
)
def test_weights_other_than_those_that_are_checked_are_refused(
    change: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    edit(CONFIG, **change)(folder)
    for call in (lambda: run_base(folder, tmp_path), lambda: load_policy(folder)):
        with pytest.raises(
            ModelError, match=r"^[^\n]*names other weights \(transformers_weights\)[^\n]*$"
        ):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", None])
def test_attention_of_the_library_is_taken(
    name: str | None, folder: Path, fetched: list[str], tmp_path: Path
) -> None:
    edit(CONFIG, attn_implementation=name)(folder)
    run_base(folder, tmp_path)
    assert (tmp_path / "base").is_dir() and not fetched


SHARDS = [
    "evil.bin",
    "../b.safetensors",
    "./b.safetensors",
    "/b.safetensors",
    "sub/b.safetensors",
    "..",
    "",
    3,
]


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_no_plain_name_is_refused(
    name: object, folder: Path, tmp_path: Path
) -> None:
    in_shards(folder, name)
    for call in (lambda: run_base(folder, tmp_path), lambda: load_policy(folder)):
        with pytest.raises(
            ModelError, match=r"^[^\n]*a shard is a \.safetensors file in the folder itself$"
        ):
            call()


def test_plain_shards_are_taken(folder: Path, tmp_path: Path) -> None:
    in_shards(folder, "b.safetensors")
    run_base(folder, tmp_path)


@pytest.mark.parametrize(
    "file", [WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json", "extra.jinja"]
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_out_of_the_folder_is_refused(
    file: str, absolute: bool, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / file
    shutil.move(folder / file, target) if (folder / file).exists() else target.write_text(
        "{{ messages }}"
    )
    (folder / file).symlink_to(target if absolute else Path("../other") / file)
    with pytest.raises(
        ModelError, match=r"^[^\n]*is a link to [^\n]* outside of the folder[^\n]*$"
    ):
        run_base(folder, tmp_path)


def test_links_into_stores_of_contents_are_taken(good: Path, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = store / "snapshots" / "0a1b", store / "blobs"
    cache = tmp_path / "cache" / "files" / "md5" / "ab"
    for made in (snapshot, blobs, cache):
        made.mkdir(parents=True)
    for number, file in enumerate(sorted(good.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    (tmp_path / "link").symlink_to(snapshot)
    shutil.move(folder / WEIGHTS, cache / f"{7:030x}")
    (folder / WEIGHTS).symlink_to(cache / f"{7:030x}")
    (folder / "same.jinja").symlink_to("chat_template.jinja")
    for source in (snapshot, tmp_path / "link", folder):
        load_policy(source)


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json"])
def test_a_link_to_itself_and_a_pipe_are_no_files(file: str, folder: Path, tmp_path: Path) -> None:
    (folder / file).unlink()
    if file == "tokenizer_config.json":
        os.mkfifo(folder / file)
    else:
        (folder / file).symlink_to(file)
    with pytest.raises(
        ModelError,
        match=rf"^[^\n]*{'is no plain file' if file == 'tokenizer_config.json' else ''}[^\n]*$",
    ):
        run_base(folder, tmp_path)


@pytest.mark.parametrize(
    "file",
    [CONFIG, INDEX, "tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt",
     "config.5.0.0.json", "params.json", "tokenizer.model", "additional_chat_templates/a.jinja"],
)  # fmt: skip
def test_a_file_of_holes_that_would_fill_the_memory_is_not_read(file: str, folder: Path) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("ab") as stream:
        stream.truncate(2**40)
    for check in (folder_check.check_folder, foreign.require_openable):
        with pytest.raises(
            ModelError, match=rf"^{folder}: its {Path(file).name} has 1,[\d,]+ bytes, [^\n]*$"
        ):
            check(folder)


MANY: dict[str, bytes] = {
    "lists": b"[" + b"[]," * 3_000_001 + b"1]",
    "objects": b"[" + b"{}," * 3_000_001 + b"1]",
    "numbers": b"[" + b"1," * 6_000_001 + b"1]",
    "names": b'{"weight_map":{' + b'"":0,' * 6_000_001 + b'"":0}}',
    "nested": b"[" * 6_000_001,
}


@pytest.mark.parametrize("content", MANY)
@pytest.mark.parametrize(
    "file", [CONFIG, INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.5.0.0.json"]
)  # fmt: skip
def test_json_of_more_values_than_any_model_has_is_not_parsed(
    file: str, content: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / file).write_bytes(MANY[content])
    monkeypatch.setattr(folder_check.json, "loads", lambda *_: pytest.fail("it was parsed"))
    for check in (folder_check.check_folder, foreign.require_openable):
        with pytest.raises(
            ModelError, match=rf"^{folder}: its {file} has more than [\d,]+ lists, [^\n]*$"
        ):
            check(folder)


@pytest.mark.parametrize("number", [10_001, 2_000_000, 10**9, 10**400, 1e30])
@pytest.mark.parametrize("part", [None, "text_config", "encoders"])
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels", "num_local_experts", "n_routed_experts"]
)  # fmt: skip
def test_a_configuration_of_parts_without_number_is_refused_unbuilt(
    key: str, part: str | None, number: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {key: number}
    edit(
        CONFIG, **(counts if part is None else {part: [counts] if part == "encoders" else counts})
    )(folder)
    monkeypatch.setattr(foreign, "limit_reached", lambda *_: pytest.fail("it was built"))
    with pytest.raises(
        ModelError,
        match=rf"^{folder}: its {CONFIG} has {key} [^\n]{{1,20}}, and no model has more than 10,000; [^\n]*$",
    ):
        foreign.require_openable(folder)


@pytest.mark.parametrize(
    "file", [CONFIG, "generation_config.json", "config.5.0.0.json", "params.json"]
)
def test_a_configuration_has_fewer_values_than_a_tokenizer(file: str, folder: Path) -> None:
    (folder / file).write_text(json.dumps({"bad_words_ids": [[1]] * 300_000}))
    with pytest.raises(ModelError, match=rf"^{folder}: its {file} has more than 500,000 lists"):
        folder_check.check_folder(folder)


HEADERS: dict[str, bytes] = {
    "metadata": b'{"__metadata__":{' + b'"":"",' * 1_300_000 + b'"a":"b"}}',
    "names": b"{" + b'"":{},' * 2_600_000 + b'"a":{}}',
    "no json": b'"' * 5_100_000,
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_of_more_names_than_any_model_has_is_not_parsed(
    header: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = HEADERS[header]
    (folder / WEIGHTS).write_bytes(len(content).to_bytes(8, "little") + content)
    monkeypatch.setattr(folder_check, "safe_open", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ModelError, match=rf"^{folder} names [\d,]+ tensors, [^\n]*$"):
        folder_check.check_folder(folder)


VOCABULARIES: dict[str, tuple[str, str, str]] = {
    "tokens": ('{"model":{"vocab":{', '"t":1,', '"t":1}}}'),
    "tokens far from their numbers": ('{"model":{"vocab":{', '"t" :\n 1,', '"t":1}}}'),
    "scores": ('{"model":{"vocab":[', '["t",-1.5],', '["t",0]]}}'),
    "tokens alone": ("{", '"t":1,', '"t":1}'),
    "merges": ('{"model":{"merges":[', '"a b",', '"a b"]}}'),
    "merges of pairs": ('{"model":{"merges":[', '["a","b"],', '["a","b"]]}}'),
}


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", VOCABULARIES)
def test_a_vocabulary_of_more_entries_than_any_model_has_is_not_parsed(
    content: str, file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, entry, end = VOCABULARIES[content]
    (folder / file).write_text(head + entry * 1_900_000 + end)
    monkeypatch.setattr(folder_check.json, "loads", lambda *_: pytest.fail("it was parsed"))
    monkeypatch.setattr(foreign, "limit_reached", lambda *_: pytest.fail("it was opened"))
    for check in (folder_check.check_folder, foreign.require_openable):
        with pytest.raises(
            ModelError, match=rf"^{folder}: its {file} has more than [\d,]+ [^\n]*$"
        ):
            check(folder)


def test_the_largest_vocabularies_are_taken(folder: Path) -> None:
    tokens, merges = 300_000, 600_000
    kept = json.loads((folder / "tokenizer.json").read_text())
    kept["model"] |= {
        "vocab": {f"t{number}": number for number in range(tokens)},
        "merges": [["a", "b"]] * merges,
    }
    (folder / "tokenizer.json").write_text(json.dumps(kept))
    folder_check.check_folder(folder)


LINES = ("vocab.txt", "merges.txt", "bpe.codes", "prophetnet.tokenizer")
TABLES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("file", LINES)
def test_a_list_of_more_lines_than_any_vocabulary_has_is_not_opened(
    file: str, end: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "limit_reached", lambda *_: pytest.fail("it was opened"))
    (folder / file).write_bytes(f"t{end}".encode() * 1_000_001)
    for check in (folder_check.check_folder, foreign.require_openable):
        with pytest.raises(
            ModelError, match=rf"^{folder}: its {file} has more than 1,000,000 lines, [^\n]*$"
        ):
            check(folder)


@pytest.mark.parametrize("file", LINES)
def test_the_longest_lists_of_a_vocabulary_are_taken(file: str, folder: Path) -> None:
    (folder / file).write_bytes(b"token\r\n" * 999_000)
    folder_check.check_folder(folder)


@pytest.mark.parametrize("size", [16 * 2**20 + 1, 100 * 2**20])
@pytest.mark.parametrize("file", TABLES)
def test_a_table_of_more_bytes_than_any_vocabulary_has_is_not_opened(
    file: str, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "limit_reached", lambda *_: pytest.fail("it was opened"))
    with (folder / file).open("wb") as stream:
        stream.truncate(size)
    for check in (folder_check.check_folder, foreign.require_openable):
        with pytest.raises(
            ModelError, match=rf"^{folder}: its {file} has more than 16,777,216 bytes, [^\n]*$"
        ):
            check(folder)


@pytest.mark.parametrize("file", TABLES)
def test_the_largest_tables_of_a_vocabulary_are_taken(file: str, folder: Path) -> None:
    with (folder / file).open("wb") as stream:
        stream.truncate(16 * 2**20)
    folder_check.check_folder(folder)


def files_of_tokenizers() -> set[str]:
    """The names of all files that tokenizers of the installed transformers read."""
    tables = []
    for source in (Path(transformers.__file__).parent / "models").glob("*/tokenization*.py"):
        tables += re.findall(r"VOCAB_FILES_NAMES = \{[^}]*\}", source.read_text(encoding="utf-8"))
    return set(re.findall(r":\s*\"([\w.-]+\.\w+)\"", "".join(tables)))


def test_no_file_of_a_tokenizer_is_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    names = files_of_tokenizers()
    assert {*LINES, *TABLES} <= names
    outside = tmp_path / "outside"
    outside.write_text("secret\n")
    for name in sorted(names):
        copied = tmp_path / name / "model"
        shutil.copytree(folder, copied)
        (copied / name).unlink(missing_ok=True)
        (copied / name).symlink_to(outside)
        with pytest.raises(ModelError, match=rf"its {name} is a link to {outside}, outside"):
            folder_check.check_folder(copied)


@pytest.mark.parametrize("spaces", ["", " ", "\n  "])
def test_an_index_of_more_names_than_any_model_has_is_not_parsed(
    spaces: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = f'"w":{spaces}"a.safetensors",{spaces}' * 250_001
    (folder / INDEX).write_text(f'{{"weight_map":{{{names}"w":"a.safetensors"}}}}')
    monkeypatch.setattr(folder_check.json, "loads", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ModelError, match=rf"^{folder} names 250,\d+ tensors, [^\n]*$"):
        folder_check.check_folder(folder)


def test_a_header_is_read_once_to_open_a_starting_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the names of hundreds of thousands of tensors takes seconds."""
    opened: list[str] = []
    monkeypatch.setattr(
        foreign, "safe_open", lambda file, **of: opened.append(str(file)) or safe_open(file, **of)
    )
    foreign.open_model_folder(folder)
    assert opened == [str(folder / WEIGHTS)]


@pytest.mark.parametrize("name", ["a\n\x1b[31mforged", "x" * 1_000_000, "a\r\u2028b"])
def test_a_weight_that_is_left_out_is_told_in_one_short_line(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(
        load_file(folder / WEIGHTS) | {name: torch.zeros(1)}, folder / WEIGHTS, {"format": "pt"}
    )
    load_policy(folder)
    (said,) = [
        record.getMessage() for record in caplog.records if "left out" in record.getMessage()
    ]
    assert len(said) < 600 and len(said.splitlines()) == 1 and "\x1b" not in said


def normaliser(*steps: dict[str, object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text())
        document["normalizer"] = {"type": "Sequence", "normalizers": list(steps)}
        path.write_text(json.dumps(document))

    return damage


def template(source: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(source)

    return damage


def refusing_and_wide(folder: Path) -> None:
    template("{{ raise_exception('no') }}")(folder)
    edit(CONFIG, vocab_size=10**12)(folder)


DOUBLE: dict[str, object] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
RARER: dict[str, object] = DOUBLE | {"pattern": {"String": "~"}, "content": "~~"}
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
ENDLESS: dict[str, tuple[Damage, str]] = {
    "a template that loops": (template(NESTED), "the chat template takes"),
    "a template that loops on an answer": (
        template("{% if messages|length > 1 %}" + NESTED + "{% endif %}{{ messages }}"),
        "the chat template takes",
    ),
    "a normaliser that doubles": (normaliser(*[DOUBLE] * 45), "opening its tokenizer"),
    "a normaliser that doubles a rarer letter": (
        normaliser(*[RARER] * 45),
        "opening its tokenizer",
    ),
    "a vocabulary of which no file has the rows": (
        edit(CONFIG, vocab_size=10**12),
        "opening the model",
    ),
    "a vocabulary behind a template that refuses": (refusing_and_wide, "opening the model"),
}


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(x+x+)+y", r"^(([a-z])+.)+[A-Z]([a-z])+$", "(0|0?)+$", r"(\w|\d|a)+\z!", "( *)*\t*( +)+$"]
)  # fmt: skip
def test_a_pattern_that_tries_all_ways_to_part_a_text_is_refused(
    pattern: str, folder: Path
) -> None:
    """The library gives up after some millions, in the middle of a request or a stage."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, document["pre_tokenizer"]],
    }
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=rf"^{folder}: opening its tokenizer [^\n]*$"):
        foreign.require_openable(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_folder_over_the_limits_is_one_line(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    damage, message = ENDLESS[kind]
    damage(folder)
    with pytest.raises(ModelError, match=rf"^{folder}: {message} [^\n]*$"):
        run_base(folder, tmp_path)


@pytest.mark.parametrize("kind", ["one file", "an index", "shards"])
def test_a_folder_of_more_tensors_than_any_model_has_is_refused(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "one file":
        in_shards(folder, "b.safetensors")
    most = len(stored_tensors(folder)) - 1
    if kind == "an index":
        names = {f"weight {number}": "a.safetensors" for number in range(250_001)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        monkeypatch.setattr(folder_check, "MOST_TENSORS", most)
    with pytest.raises(
        ModelError,
        match=rf"^{folder} names [\d,]+ tensors, and no model has more than [\d,]+; [^\n]*$",
    ):
        run_base(folder, tmp_path)


def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "LIMITS", CallLimits(cpu_seconds=1, memory=GIB))
    monkeypatch.setattr(template_process, "SECONDS", 1)


def callers(folder: Path, workspace: Path) -> dict[str, Callable[[], object]]:
    revision, files = PolicyRevision("source"), PolicyFiles(folder, SamplingConfig())
    classifier = ClassifierSource(kind="classifier", model=str(folder), template="reply")
    return {
        "serve": lambda: LoadedPolicy.load(revision, files),
        "chat": lambda: ChatSession.open(folder),
        "classifier": lambda: load_classifier(
            folder, classifier, torch.device("cpu"), "reward source"
        ),
        "tokenizer": lambda: load_counting_tokenizer(str(folder), workspace),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serve", "chat", "classifier", "tokenizer"])
def test_every_caller_opens_under_limits(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    normaliser(*[DOUBLE] * 45)(folder)
    with pytest.raises(ModelError, match="opening its tokenizer took more than"):
        callers(folder, tmp_path)[name]()
    check = base_model_check(tmp_path, "source", None)
    assert check.level == FAIL and "took more than" in check.finding


@pytest.mark.slow
def test_a_gguf_file_is_opened_under_limits(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief(monkeypatch)
    model, tokenizer = load_policy(good)
    assert isinstance(model, LlamaForCausalLM)
    foreign.require_openable(good)
    tokenizer.chat_template = NESTED
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    with pytest.raises(ModelError, match="the chat template takes more than"):
        run_base(tmp_path / "tiny.gguf", tmp_path)


def test_what_ends_within_limits_leaves_no_trace(tmp_path: Path) -> None:
    limits = CallLimits(cpu_seconds=5, seconds=30.0, memory=GIB)
    seen: list[int] = []
    before = set(psutil.Process().children())
    for call in (lambda: seen.append(1), lambda: sys.exit(9), lambda: 1 / 0, lambda: print("loud")):
        assert limit_reached(call, limits) is None
    assert not seen
    assert "GiB of memory" in (limit_reached(lambda: bytearray(2 * GIB), limits) or "")
    assert "SIGSEGV" in (limit_reached(lambda: os.kill(os.getpid(), 11), limits) or "")
    waiting = limit_reached(lambda: __import__("time").sleep(60), replace(limits, seconds=0.2))
    assert "took more than" in (waiting or "")
    assert set(psutil.Process().children()) == before
