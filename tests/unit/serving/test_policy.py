"""The served revision changes only for one that works, and the pieces of a stream join to the whole
reply.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from unit.serving.conftest import CONTEXT, JUDGED, HeldPolicy, Served

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.causal_lm import save_policy, train_tokenizer
from rlhf_core.sampling.reply import ReplyPieces
from rlhf_core.serving.policy import LoadedPolicy, ReplySettings
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_extras.serving.metrics import ServingMetrics
from rlhf_extras.serving.sources import FolderSource, sampling_of_folder
from rlhf_extras.serving.watch import RETRY_SECONDS, PolicyWatch

GREEDY = ReplySettings(temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_new_tokens=8, seed=0)


@pytest.fixture
def loads(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Revisions whose loading was tried; all but version 1 are damaged."""
    tried: list[str] = []

    def load(revision: PolicyRevision, files: PolicyFiles) -> HeldPolicy:
        tried.append(revision.id)
        raise ModelError(f"{files.folder} is\ndamaged")

    monkeypatch.setattr(served.watch, "_load", load)
    return tried


def test_a_damaged_revision_leaves_the_old_one(
    served: Served, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before, served.source.version = served.policy, 2
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            served.watch.check()
    assert served.policy is before and loads == ["policy:2"]  # not tried again at once
    assert served.watch.problem == "policy:2 cannot be loaded (policy:2 is damaged)"
    assert [record.getMessage() for record in caplog.records] == [
        f"{served.watch.problem}; policy:1 is still served"
    ]
    assert served.metric("rlhf_serve_reloads_total", result="failed") == 1
    assert served.metric("rlhf_serve_reload_failing") == 1


def test_it_is_tried_again_later_and_another_at_once(served: Served, loads: list[str]) -> None:
    for version, seconds, problem in (
        (2, 0, True),
        (2, RETRY_SECONDS, True),
        (3, 0, True),
        (1, 0, False),
        (2, 0, True),
    ):
        served.source.version = version
        served.now += seconds
        served.watch.check()
        assert bool(served.watch.problem) is problem
    assert loads == ["policy:2", "policy:2", "policy:3", "policy:2"]
    before, served.source.version, served.source.error = served.policy, 1, "connection refused"
    served.watch.check()
    assert (
        served.watch.problem
        == "cannot find out which revision to serve (OSError: connection refused)"
    )
    served.source.error = ""
    served.watch.check()
    assert served.policy is before and not served.watch.problem


def test_a_folder_is_loaded_and_writes_what_its_model_writes(
    served: Served, tmp_path: Path
) -> None:
    policy = served.policy
    save_policy(tmp_path / "policy", policy.model, policy._decoder)
    source = FolderSource(tmp_path / "policy", JUDGED)
    assert source.latest() == PolicyRevision("policy") and source.latest().names == ("policy",)
    loaded = LoadedPolicy.load(source.latest(), source.files(source.latest()))
    ids = loaded.encode([Message("user", "the sky")])
    assert loaded.reply(ids, GREEDY) == policy.reply(ids, GREEDY)


def test_a_setting_that_only_a_reply_comes_upon_is_one_line(served: Served, tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", served.policy.model, served.policy._decoder)
    config = tmp_path / "policy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": "wide"}))
    source = FolderSource(tmp_path / "policy", JUDGED)
    with pytest.raises(ModelError, match=r"^cannot load the model folder [^\n]*$"):
        LoadedPolicy.load(source.latest(), source.files(source.latest()))


def test_the_sampling_of_a_folder_is_that_of_its_generation_config(tmp_path: Path) -> None:
    assert sampling_of_folder(tmp_path, JUDGED) == JUDGED
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.5, "top_k": 3, "top_p": None})
    )
    assert sampling_of_folder(tmp_path, JUDGED) == SamplingConfig(
        **{**JUDGED.model_dump(), "temperature": 0.5}
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    with pytest.raises(DataError, match=r"top_p is 7; correct it"):
        sampling_of_folder(tmp_path, JUDGED)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(
        DataError, match=r"generation_config\.json holds no JSON object; correct it"
    ):
        sampling_of_folder(tmp_path, JUDGED)


def overwrite(file: Path) -> None:
    """Zeros in place of the second half of ``file``, whose size and inode stay."""
    with file.open("r+b") as opened:
        size = file.stat().st_size
        opened.seek(size // 2)
        opened.write(bytes(size - size // 2))


@pytest.mark.slow
@pytest.mark.parametrize("change", [overwrite, lambda file: os.truncate(file, 100), Path.unlink])
def test_loaded_files_are_served_and_a_change_is_noticed(
    change: Callable[[Path], object], served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, served.policy.model, served.policy._decoder)
    watch = PolicyWatch(FolderSource(folder, JUDGED), ServingMetrics())
    prompt = watch.policy.encode([Message("user", "Hello")])
    before = watch.policy.reply(prompt, GREEDY)
    watch.check()
    assert not watch.problem
    change(folder / "model.safetensors")
    assert watch.policy.reply(prompt, GREEDY) == before
    watch.check()
    assert watch.trouble == "files of policy have changed since they were loaded"
    assert watch.policy.reply(prompt, GREEDY) == before


def test_files_that_change_while_they_are_loaded_are_not_served(
    served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, served.policy.model, served.policy._decoder)

    def slow_load(revision: PolicyRevision, files: PolicyFiles) -> LoadedPolicy:
        policy = LoadedPolicy.load(revision, files)
        overwrite(folder / "model.safetensors")
        return policy

    with pytest.raises(ModelError, match="changed while they were loaded"):
        PolicyWatch(FolderSource(folder, JUDGED), ServingMetrics(), slow_load)


@given(
    text=st.text("ab\n ", max_size=20), endings=st.lists(st.text("ab\n ", max_size=3), max_size=3)
)
def test_pieces_join_to_the_reply_whatever_is_held_back(text: str, endings: list[str]) -> None:
    reply = text[
        : min(
            (text.find(ending) for ending in endings if ending and ending in text),
            default=len(text),
        )
    ]
    pieces = ReplyPieces("", endings)
    sent = [pieces.next(reply[:length]) for length in range(1, len(reply) + 1)]
    assert "".join(sent) + pieces.rest(reply) == reply


@pytest.mark.parametrize(
    ("lead", "endings", "texts", "sent"),
    [
        ("", [], ["a", "ab", "ab"], ["a", "b", ""]),
        ("", ["STOP"], ["x", "xS", "xST", "xSTa"], ["x", "", "", "STa"]),
        ("\n\n", [], ["\n", "a"], ["", "a"]),
        ("", [" "], ["a", "a ", "a b"], ["a", "", " b"]),
        ("", [], ["a", "b", "ac"], ["a", "", "c"]),
    ],
)
def test_what_may_not_be_sent_is_held_back(
    lead: str, endings: list[str], texts: list[str], sent: list[str]
) -> None:
    pieces = ReplyPieces(lead, endings)
    assert [pieces.next(text) for text in texts] == sent


class CountedSlices(str):
    """A text that counts how often a part of it is taken."""

    taken = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        self.taken += 1
        return super().__getitem__(key)


def test_a_stop_string_far_longer_than_the_reply_costs_no_more_than_the_reply() -> None:
    ending = CountedSlices("z" * 1000)
    pieces = ReplyPieces("", [ending])
    assert [pieces.next(text) for text in ("a", "az", "azz")] == ["a", "", ""]
    assert ending.taken <= 1 + 2 + 3


def test_messages_longer_than_the_context_warn_of_no_errors(
    model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    limited = train_tokenizer(
        ["what colour is the sky? the sky is blue."] * 4, 280, max_length=CONTEXT
    )
    policy = LoadedPolicy(PolicyRevision("policy"), model, limited, JUDGED)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(policy.encode([Message("user", "x" * 200)])) > CONTEXT
    finally:
        logger.removeHandler(caplog.handler)
    assert "indexing errors" not in caplog.text
