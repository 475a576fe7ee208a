"""Before a run: the next step of a new workspace, what a judge lacks, a model that cannot be
opened, and names of runs and registered models."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import pytest
from commands import ROOT

from flows.commands import init
from flows.commands.doctor import gate_checks, workspace_checks
from flows.commands.init import next_step
from flows.commands.machine_checks import FAIL, OK, WARN
from flows.dvc_repo import recipe
from flows.dvc_repo.recipe import trial_workspace
from flows.pipeline.preflight import open_starting_model
from flows.workspace import job_label, run_label, run_tags
from rlhf_core.config.gates import GatesConfig
from rlhf_core.config.loading import load_params, load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.config.yaml_text import plain, read
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError


@pytest.mark.parametrize(
    ("collect", "expected"),
    [
        ("source: world", "my-run is ready; next: rlhf run --workspace my-run"),
        (
            "{files: {preferences: [here.jsonl]}}",
            "on the synthetic world: collect.files are read with",
        ),
        (
            "source: files",
            "its data are missing: name files with pairs of replies under collect.files.preferences in",
        ),
        ("{source: files, files: {preferences: [here.jsonl]}}", "my-run is ready"),
        ('{source: files, files: {preferences: ["hub:a/b", "s3://c/d"]}}', "my-run is ready"),
        (
            "{source: files, files: {preferences: [here.jsonl, gone.jsonl]}}",
            "but no file matches gone.jsonl, seen",
        ),
        ("{source: files, files: {demonstrations: [here.jsonl]}}", "its data are missing"),
        ("{source: files, files: {preferences: [here.jsonl, odd.jsonl]}}", "odd.jsonl"),
        (
            "{source: files, files: {preferences: [prompts.jsonl]}}",
            "prompts.jsonl has prompts, but pairs of replies",
        ),
    ],
)
def test_the_next_step_names_what_is_missing(
    collect: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "here.jsonl").write_text('{"prompt": "a?", "chosen": "b", "rejected": "c"}\n')
    (folder / "odd.jsonl").write_text('{"winner": "b", "loser": "c"}\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "a?"}\n')
    text = collect if collect.startswith("{") else f"{{{collect}}}"
    (folder / "params.yaml").write_text(f"collect: {text}\n")
    said, is_ready = next_step(folder)
    assert is_ready == ("is ready" in said), "what scripts learn from the exit code"
    assert expected in said and said.endswith("rlhf run --workspace my-run")
    assert said.lower().count("correct the file") <= 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("./gone", "there is no starting model at ./gone, seen from there"),
        ("x.gguf", "no starting model"),
    ],
)
def test_a_starting_model_that_is_not_there_is_named(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "params.yaml").write_text(f"base: {{source: {source}}}\n")
    message, is_ready = next_step(folder)
    assert expected in message and message.endswith("rlhf run --workspace my-run")
    assert "is ready" not in message and not is_ready


def test_a_starting_model_of_a_hub_is_said_to_be_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-run"
    folder.mkdir()
    for source, is_told in (("owner/model", True), ("scratch", False), ("./here", False)):
        (folder / "here").mkdir(exist_ok=True)
        (folder / "params.yaml").write_text(f"base: {{source: {source}}}\n")
        message, is_ready = next_step(folder)
        assert "my-run is ready" in message and is_ready
        assert (f"{source} is not on this machine" in message) == is_told


def levels(workspace: Path) -> dict[str, str]:
    return {check.name: check.level for check in workspace_checks(workspace)}


def test_a_missing_key_and_a_missing_file_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text(
        "evaluate:\n  llm_judge: {base_url: 'http://127.0.0.1:9/v1', model: m, token_env: JUDGE_KEY_OF_TEST}\n"
        "  verifiable: {path: checks.jsonl}\n"
    )
    assert levels(tmp_path)["llm judge"] == WARN and levels(tmp_path)["verifiable prompts"] == FAIL
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "x")
    (tmp_path / "checks.jsonl").touch()
    assert levels(tmp_path)["llm judge"] == levels(tmp_path)["verifiable prompts"] == OK


@pytest.mark.parametrize(
    ("row", "options", "level"),
    [
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "", OK),
        ('{"prompt": "a", "reply": "b"}', "", FAIL),
        ('{"question": "a", "good": "b", "bad": "c"}', "", FAIL),
        (
            '{"question": "a", "good": "b", "bad": "c"}',
            "columns: {prompt: question, chosen: good, rejected: bad}",
            OK,
        ),
        ("", "", FAIL),
    ],
    ids=["pairs", "single-replies", "names-of-its-own", "columns", "empty"],
)
def test_a_file_that_gives_no_pairs_is_named(
    row: str, options: str, level: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    named = f"{{path: rows.jsonl{f', {options}' if options else ''}}}"
    (tmp_path / "params.yaml").write_text(
        f"collect: {{source: files, files: {{preferences: [{named}]}}}}\n"
    )
    failed = [
        check
        for check in workspace_checks(tmp_path)
        if check.name == "data" and check.level == FAIL
    ]
    assert bool(failed) == (level == FAIL), failed
    assert all("rows.jsonl" in check.finding and check.remedy for check in failed)


def test_a_gates_metric_that_looks_misspelt_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(
        "gates:\n  policy:\n  - {metric: comparison.judge.win_rat_low95, at_least: 0.5, why: x}\n"
        "  - {metric: repetitoin, worse_by_less_than: 0.02, why: x}\n"
        "  - {metric: llm_judge.order_disagreement, at_most: 0.5, why: x}\n"
        "  - {metric: comparison.policy_gold.clusters_won, at_least: 1, why: x}\n"
    )
    found = [check for check in workspace_checks(tmp_path) if check.name == "gates"]
    assert [check.level for check in found] == [WARN, WARN]
    assert (
        "comparison.judge.win_rat_low95 has win_rat_low95: did you mean 'comparison.judge.win_rate_low95'?"
        in found[0].finding
    )
    assert found[1].finding.startswith("repetitoin ") and "'repetition'" in found[1].finding


def test_no_metric_of_a_profile_looks_misspelt() -> None:
    files = [ROOT / "params.yaml", *(ROOT / "profiles").glob("*.yaml")]
    sections = [GatesConfig.model_validate(plain(read(file)).get("gates") or {}) for file in files]
    assert [check.finding for gates in sections for check in gate_checks(gates)] == []


VLLM = (
    "ppo: {{importance_sampling_correction: {{mode: always}}, sampler: {{kind: vllm, python: {}}}}}"
)


@pytest.mark.parametrize(
    ("params", "level"),
    [
        (
            "ppo: {reward: {sources: [{kind: model}, {kind: function, target: 'gone_rules:score'}]}}",
            FAIL,
        ),
        ("ppo: {reward: {sources: [{kind: model}, {kind: function, target: 'rules:gone'}]}}", FAIL),
        ("ppo: {reward: {sources: [{kind: model}, {kind: function, target: 'rules:score'}]}}", OK),
        ("ppo: {reward: {sources: [{kind: model}, {kind: function, target: 'json:dumps'}]}}", OK),
        (
            "ppo: {reward: {sources: [{kind: model}, {kind: model, path: gone/model, weight: 0.5}]}}",
            FAIL,
        ),
        ("ppo: {reward: {sources: [{kind: ensemble, paths: [models/reward, gone/model]}]}}", FAIL),
        ("ppo: {reward: {sources: [{kind: model}, {kind: classifier, model: ./gone}]}}", FAIL),
        ("ppo: {reward: {sources: [{kind: model}, {kind: classifier, model: owner/name}]}}", OK),
        ("registry: {signature: {public_key: gone.pem}}", FAIL),
        ("registry: {signature: {certificates: [checks.jsonl, gone/root.pem]}}", FAIL),
        ("registry: {signature: {public_key: checks.jsonl}}", OK),
        ("registry: {signature: {public_key: '~gone/key.pem'}}", FAIL),
        ("base: {source: '~gone/model', allow_high_learning_rates: true}", FAIL),
        (
            "ppo: {reward: {sources: [{kind: model}, {kind: model, path: '~gone/model', weight: 0.5}]}}",
            FAIL,
        ),
        ("compute: {launch: {ppo: {engine: deepspeed, deepspeed: gone.json}}}", FAIL),
        ("compute: {launch: {ppo: {engine: deepspeed, deepspeed: checks.jsonl}}}", OK),
        (VLLM.format("gone/bin/python"), FAIL),
        (VLLM.format("gone-python"), FAIL),
        (VLLM.format("bin/python"), OK),
        (VLLM.format("~/bin/python"), OK),
        (VLLM.format("sh"), OK),
        (VLLM.format("gone/bin/python") + "\npools: {ppo: gpus}", OK),
        (
            "evaluate: {sampling: {repetition_penalty: 1.0}, sampler: {kind: vllm, python: ./gone}}",
            FAIL,
        ),
        (
            "evaluate: {verifiable: {path: checks.jsonl, functions: {mine: 'gone_rules:check'}}}",
            FAIL,
        ),
        ("evaluate: {verifiable: {path: checks.jsonl, functions: {mine: 'rules:score'}}}", OK),
    ],
)
def test_what_a_run_needs_and_is_not_there_ends_it(
    params: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "params.yaml").write_text(params + "\n")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "checks.jsonl").touch()
    (tmp_path / "rules.py").write_text(
        "import of_another_machine\n\n\ndef score(prompts, replies): ...\n"
    )
    failed = [check for check in workspace_checks(tmp_path) if check.level == FAIL]
    assert bool(failed) == (level == FAIL), failed
    assert all("gone" in check.finding and "\n" not in check.finding for check in failed)


def opened(workspace: Path, params: str) -> str:
    (workspace / "params.yaml").write_text(params)
    return open_starting_model(workspace, load_params(workspace))


@pytest.mark.slow
def test_a_model_that_base_would_refuse_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(
        RlhfError, match=r"cut\.gguf is cut off: it ends within its header, after 8 bytes"
    ) as refused:
        opened(tmp_path, "base: {source: cut.gguf, allow_high_learning_rates: true}\n")
    assert refused.value.exit_code == EXIT_USER_ERROR and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "params",
    [
        "seed: 1\n",
        "base: {source: ./gone, allow_high_learning_rates: true}\npools: {base: {pool: away, shared: false}}\n",
    ],
    ids=["from-nothing", "on-another-host"],
)
def test_what_is_not_loaded_here_is_not_opened(params: str, tmp_path: Path) -> None:
    assert opened(tmp_path, params) == ""


MOMENT = datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("profile", "label"),
    [
        ("smoke", "trial · smoke · 2026-01-02 03:04:05"),
        ("", "trial · 2026-01-02 03:04:05"),
        ("trial", "trial · 2026-01-02 03:04:05"),
    ],
)
def test_a_run_is_named_by_workspace_profile_and_time(
    tmp_path: Path, profile: str, label: str
) -> None:
    assert run_label(tmp_path / "trial", profile, MOMENT) == label


def test_a_job_is_named_by_workspace_and_stage() -> None:
    assert job_label("/a/b/trial", "ppo") == "trial · ppo"


def test_the_tags_are_what_a_person_looks_for(tmp_path: Path) -> None:
    assert run_tags(tmp_path / "trial", "smoke") == {"workspace": "trial", "profile": "smoke"}
    assert run_tags(tmp_path / "trial", "") == {"workspace": "trial"}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(init, "ensure_dvc", lambda *_: None)
    monkeypatch.setattr(recipe, "ensure_dvc", lambda *_: None)
    monkeypatch.setattr(recipe, "share_settings", lambda *_: None)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml"])
def test_a_file_of_another_project_is_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine: 1\n")
    with pytest.raises(RlhfError, match=f"has a {name} already, which would be lost"):
        init.initialise(tmp_path, "smoke", [])
    assert (tmp_path / name).read_text() == "mine: 1\n" and [*tmp_path.iterdir()] == [
        tmp_path / name
    ]


def names(workspace: Path) -> tuple[str, str]:
    config = load_section(workspace, "registry", RegistryConfig)
    return config.policy, config.reward_model


def test_a_trial_does_not_use_the_names_of_its_base(base: Path) -> None:
    trial = trial_workspace(base, None, ["seed=2"])
    assert trial.name.startswith("demo-")
    assert names(trial) == (f"rlhf-policy-{trial.name}", f"rlhf-reward-model-{trial.name}")
    assert names(base) == ("rlhf-policy", "rlhf-reward-model")


@pytest.mark.slow
def test_gates_of_smoke_do_not_meet_the_models_in_use(base: Path) -> None:
    expected = ("rlhf-policy-smoke", "rlhf-reward-model-smoke")
    assert names(trial_workspace(base, "smoke", [])) == expected
    trial = trial_workspace(base, "smoke", ["seed=3"])
    assert names(trial) == (f"rlhf-policy-{trial.name}", f"rlhf-reward-model-{trial.name}")
    assert names(init.initialise(base / "other", "smoke", [])) == expected


@pytest.mark.slow
def test_whoever_names_a_model_gets_that_name(base: Path) -> None:
    trial = trial_workspace(base, None, ["registry.policy=mine"])
    assert names(trial) == ("mine", f"rlhf-reward-model-{trial.name}")


@pytest.mark.slow
def test_a_trial_that_exists_keeps_its_names_and_so_its_champion(base: Path) -> None:
    trial = trial_workspace(base, None, ["seed=2"])
    params = trial / "params.yaml"
    params.write_text(
        params.read_text().replace(f"policy: rlhf-policy-{trial.name}", "policy: rlhf-policy")
    )
    assert names(trial_workspace(base, None, ["seed=2"]))[0] == "rlhf-policy"


def test_a_trial_has_the_functions_of_its_base_as_they_are_now(base: Path) -> None:
    (base / "own_rules.py").write_text(
        "from own_wording import polite\n\ndef ends_politely(prompts, replies):\n    return [1.0]\n"
    )
    (base / "own_checks").mkdir()
    for name in ("own_wording.py", "own_checks/__init__.py", "own_checks/all.py", "unrelated.py"):
        (base / name).write_text("def polite(*_):\n    return True\n")
    (base / "checks.jsonl").write_text("")
    sets = [
        "ppo.reward.sources=[{kind: function, target: 'own_rules:ends_politely'}]",
        "evaluate.verifiable={path: checks.jsonl, functions: {polite: 'own_checks.all:polite'}}",
    ]
    trial = trial_workspace(base, None, sets)
    modules = {path.relative_to(trial).as_posix() for path in trial.rglob("*.py")}
    assert (
        modules >= {"own_rules.py", "own_wording.py", "own_checks/all.py"}
        and "unrelated.py" not in modules
    )
    assert "function" not in {
        check.name for check in workspace_checks(trial, opens_files=False) if check.level == FAIL
    }
    (base / "own_wording.py").write_text("polite = None\n")
    assert (trial_workspace(base, None, sets) / "own_wording.py").read_text() == "polite = None\n"
