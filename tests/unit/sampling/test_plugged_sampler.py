"""Samplers of other packages: their settings, their replies, and how they are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sampler_contract as contract
import torch
from plugin_distributions import Install, example, refusal

from rlhf_core.commands.config import show
from rlhf_core.config.loading import check_params
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.fingerprint.tracked_files import (
    REWARD_SOURCES_FILE,
    write_evaluation_inputs,
    write_tracked_files,
)
from rlhf_core.plugins import DISTRIBUTION, SAMPLERS, PluginError
from rlhf_core.sampling.sampler import LocalSampler, opened_sampler

CORRECTED = {"importance_sampling_correction": {"mode": "always"}}
KEEP = example("A sampler and a reward source")


def checked(sampler: dict[str, Any]) -> PpoConfig:
    return check_params({"ppo": {"sampler": sampler} | CORRECTED}).ppo


@pytest.fixture
def recorded(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"recorded": "keep_of_docs:RecordedSampler"}
    monkeypatch.delitem(sys.modules, "keep_of_docs", raising=False)
    install("keep", SAMPLERS, entries, keep_of_docs=KEEP)


def test_the_sampler_of_the_docs_samples_as_the_trainer_does_and_records(
    recorded: None, tmp_path: Path
) -> None:
    config = checked({"kind": "recorded", "file": "kept.txt"})
    assert config.rollout.sampler.model_dump() == {"kind": "recorded", "file": "kept.txt"}
    assert config.model_dump()["sampler"]["file"] == "kept.txt"
    local, batch = LocalSampler.of(contract.contract_policy()), contract.batch_of(range(4))
    with opened_sampler(config.sampler, tmp_path / "work", tmp_path) as sampler:
        sampler.sync(contract.contract_policy(), 1)
        ours = contract.drawn(sampler, batch)
    assert torch.equal(ours.tokens, contract.drawn(local, batch, 0).tokens)
    lines = (tmp_path / "kept.txt").read_text().splitlines()
    assert lines == [str(reply) for reply in ours.replies()]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ({}, "parameter 'ppo.sampler.kind' is missing"),
        ({"kind": "record"}, "'ppo.sampler.kind': there is no 'record'; did you mean 'recorded'"),
        ({"kind": "recorded", "fil": "x"}, "'ppo.sampler.fil'; did you mean 'ppo.sampler.file'"),
        ({"kind": "recorded", "file": 3}, "'ppo.sampler.file': input should be a valid string"),
        ({"kind": "vllm", "pyton": "p"}, "'ppo.sampler.pyton'; did you mean 'ppo.sampler.python'"),
        ({"kind": "local", "python": "p"}, "'ppo.sampler.python'; known names: kind"),
        ("recorded", "'ppo.sampler': input should be a mapping"),
    ],
)
def test_settings_of_each_kind_are_checked_with_their_path(
    recorded: None, sampler: Any, said: str
) -> None:
    assert said in refusal(checked, sampler)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("RecordedSampler = 3", "recorded of rlhf.samplers is no SamplerConfig"),
        (KEEP.replace('"recorded"', '"other"'), "must declare kind: Literal['recorded']"),
        (KEEP.replace('Literal["recorded"]', "str"), "must declare kind: Literal['recorded']"),
    ],
)
def test_a_broken_sampler_is_one_line_where_it_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "broken_keep", raising=False)
    install("broken", SAMPLERS, {"recorded": "broken_keep:RecordedSampler"}, broken_keep=module)
    message = refusal(checked, {"kind": "recorded"})
    assert "ppo.sampler" in message and said in message
    assert checked({"kind": "local"}).sampler.kind == "local"
    assert "ppo.sampler[local].kind" in show("ppo.sampler", None, markdown=False)


def test_without_the_extras_the_setting_says_how_to_get_them(install: Install) -> None:
    install(DISTRIBUTION.replace("-", "_"), "other.group", {"a": "b"})  # found first, and alone
    message = refusal(checked, {"kind": "vllm", "python": "p"})
    assert re.search(r"'ppo.sampler': vllm is an extra .*make setup", message)


def test_a_sampler_that_cannot_be_made_is_one_line(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "failing_keep", raising=False)
    failing = KEEP.replace("        return Recorder()", "        return Recorder(1 / 0)")
    install("failing", SAMPLERS, {"recorded": "failing_keep:RecordedSampler"}, failing_keep=failing)
    config = checked({"kind": "recorded"}).sampler
    with (
        pytest.raises(PluginError, match=r"recorded of rlhf\.samplers cannot begin: division"),
        opened_sampler(config, tmp_path, tmp_path),
    ):
        raise AssertionError("it began")


def test_its_settings_are_listed(recorded: None) -> None:
    lines = show("ppo.sampler", None, markdown=False).splitlines()
    assert "ppo.sampler[recorded].file: replies.txt" in lines


def test_stages_that_sample_run_again_when_its_code_changes(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "keep.settings", raising=False)
    monkeypatch.delitem(sys.modules, "keep", raising=False)
    install("keeper", SAMPLERS, {"recorded": "keep.settings:RecordedSampler"})
    package = tmp_path / "keeper" / "keep"
    package.mkdir()
    files = {
        "__init__.py": "",
        "settings.py": f"import keep.more\n{KEEP}",
        "more.py": "X = 1\n",
        "unrelated.py": "Y = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    params = check_params(
        {
            "ppo": {"sampler": {"kind": "recorded"}} | CORRECTED,
            "evaluate": {"sampler": {"kind": "recorded"}, "sampling": {"repetition_penalty": 1.0}},
        }
    )

    def seen() -> list[str]:
        write_tracked_files(tmp_path, params.ppo)
        write_evaluation_inputs(tmp_path, params.evaluate)
        names = (REWARD_SOURCES_FILE, ".fingerprints/verifiable.txt")
        return [(tmp_path / name).read_text() for name in names]

    before = seen()
    assert all("rlhf.samplers recorded: keeper 1" in text for text in before)
    (package / "more.py").write_text('"""Documented."""\nX = 1  # and explained\n')
    (package / "unrelated.py").write_text("Y = 2\n")
    assert seen() == before
    (package / "more.py").write_text("X = 2\n")
    assert all(now != then for now, then in zip(seen(), before, strict=True))


def test_the_sampler_of_the_extras_counts_by_all_of_its_modules(tmp_path: Path) -> None:
    config = checked({"kind": "vllm", "python": "p"})
    write_tracked_files(tmp_path, config)
    line = (tmp_path / REWARD_SOURCES_FILE).read_text()
    assert line.startswith("rlhf.samplers vllm: rlhf-pipeline ") and "code unknown" not in line
