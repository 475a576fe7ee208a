"""`rlhf ablate`: shared stages run once per seed, an interruption loses nothing, DVC decides what
is up to date. And a benchmark that needs no finished workspace runs in its smallest form: the code
that it measures changes."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import wait_until
from commands import ROOT
from integration.flow_toys import CommandLine, begin, processes_of, rlhf

from benchmarks.ablation.run import (
    AblationJob,
    AblationRequest,
    definition,
    make_plan,
    run_job,
    run_jobs,
)
from benchmarks.ablation.verdicts import AblationRun
from flows.dvc_repo.root import cache_of
from flows.supervision import signals
from rlhf_core.errors import ConfigError

pytestmark = pytest.mark.slow

TOY = """
import json, pathlib, sys, time
from ruamel.yaml import YAML
base, stage = pathlib.Path(__file__).parent, sys.argv[1]
params, here = YAML(typ="safe").load(pathlib.Path("params.yaml").read_text()), pathlib.Path.cwd()
def log(name, text):
    with open(base / name, "a") as stream: stream.write(text + "\\n")
def put(path, text):
    pathlib.Path(path).parent.mkdir(exist_ok=True); pathlib.Path(path).write_text(text)
if stage == "collect":
    log("collects.log", str(params["seed"])); put("raw.txt", "raw")
elif stage == "ppo":
    saved = here / "work" / "step"; put(saved, saved.read_text() if saved.exists() else "0")
    start = int(saved.read_text()); log("starts.log", f"{here.parent.name} {start}")
    for step in range(start, params["ppo"]["iterations"]):
        time.sleep(0.1); put(here / "work" / "part", str(step + 1)); (here / "work" / "part").replace(saved)
    kl = params["ppo"]["kl"]["coefficient"]
    put("history/ppo.jsonl", "".join(json.dumps({"iteration": i, "kl": kl * i}) + "\\n" for i in (1, 2)))
else:
    import pyarrow, pyarrow.parquet
    kl = params["ppo"]["kl"]["coefficient"]
    put("metrics/evaluation.json", json.dumps({"sft": {"gold": 0.0}, "policy": {"gold": kl}, "kl": 1.0}))
    put("samples/x", ""); pathlib.Path("samples/x").unlink()
    table = {"sft_reward": [0.0, 1.0], "policy_reward": [1.0, 2.0], "policy_finished": [True, True]}
    pyarrow.parquet.write_table(pyarrow.table(table), "samples/comparisons.parquet")
"""
PIPELINE = """
stages:
  collect: {{cmd: python {toy} collect, params: [seed], outs: [raw.txt]}}
  ppo: {{cmd: python {toy} ppo, deps: [raw.txt], params: [ppo], outs: [history/ppo.jsonl]}}
  evaluate:
    cmd: python {toy} evaluate
    deps: [history/ppo.jsonl]
    outs: [metrics/evaluation.json, samples/comparisons.parquet]
"""
ABLATION = """
seeds: [7]
reference: a
variants: [{name: a, about: one}, {name: b, about: two, base: a, change: {ppo.kl.coefficient: 0.2}}]
figures:
  - {name: one, title: t, variants: [a, b], curves: [kl], ends: [gold]}
"""
PARAMS = "seed: 1\nppo: {iterations: 12, kl: {coefficient: 0.1}}\n"


def make_base(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "toy.py").write_text(TOY)
    (folder / "params.yaml").write_text(PARAMS)
    (folder / "dvc.yaml").write_text(PIPELINE.format(toy=folder / "toy.py"))
    (folder / "ablation.yaml").write_text(ABLATION)
    (folder / ".dvc").mkdir()  # what `dvc init` would take a second for
    (folder / ".dvc" / "config").write_text("[core]\n    no_scm = True\n    analytics = false\n")
    return folder


def workspace(base: Path, variant: str) -> Path:
    return base / "workspaces" / "ablation" / "demo" / variant / "seed-7"


def in_the_middle(base: Path, variant: str, step: int) -> subprocess.Popen[bytes]:
    """Start an ablation and wait until the PPO of ``variant`` has reached ``step``."""
    process = begin("ablate", "--jobs", "1", cwd=base)
    saved = workspace(base, variant) / "work" / "step"
    wait_until(
        lambda: saved.exists() and int(saved.read_text()) >= step, 240, f"step {step} of {variant}"
    )
    return process


def nothing_runs(base: Path) -> bool:
    return not any(processes_of(workspace(base, name)) for name in ("shared", "a", "b"))


@pytest.mark.services
def test_it_resumes_after_a_stop_and_after_a_kill(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    first = in_the_middle(base, "a", 3)
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 130 and nothing_runs(base)

    second = in_the_middle(base, "b", 3)
    second.kill()
    second.wait()
    wait_until(lambda: nothing_runs(base), 60, "end of all processes")

    answer = rlhf("ablate", "--jobs", "2", cwd=base)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "a, seed 7: up to date" in answer.stdout and "b, seed 7: trained" in answer.stdout
    assert (
        base / "collects.log"
    ).read_text() == "7\n"  # the other workspaces had it from the cache
    starts = [line.split() for line in (base / "starts.log").read_text().splitlines()]
    assert [name for name, _ in starts] == ["a", "a", "b", "b"]
    assert [int(step) > 0 for _, step in starts] == [False, True, False, True]
    rows = list(csv.DictReader((base / "ablation" / "demo" / "results.csv").open()))
    assert [(row["variant"], row["state"], row["gold"]) for row in rows] == [
        ("a", "done", "0.1"),
        ("b", "done", "0.2"),
    ]
    assert (base / "ablation" / "demo" / "figures" / "one.png").is_file()


def test_a_job_of_the_real_pipeline_begins_in_a_workspace_of_its_own(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert rlhf("init", str(base), "--profile", "smoke", cwd=tmp_path).returncode == 0
    job = AblationJob("a", 3, base / "workspaces" / "a", ("seed=3",), ("collect",))
    ended = run_job(base, None, job, cache_of(base))
    assert (ended.state, ended.message) == ("done", "")
    assert (job.workspace / "data" / "raw").is_dir()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--variants", "aa"), "no variant 'aa'; did you mean 'a'?"),
        (("--seeds", "x"), "'x' is not a seed"),
        (("--set", "ppo.kl.coeficient=1"), "did you mean 'coefficient'?"),
        (("--file", "missing.yaml"), "missing.yaml does not exist"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    options: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = make_base(tmp_path)
    answer = CommandLine(monkeypatch, capsys)("ablate", *options, cwd=base)
    assert answer.returncode == 2 and expected in answer.stderr and answer.stderr.count("\n") == 1
    assert not (base / "workspaces").exists()


def test_a_variants_own_change_wins_over_set_and_common(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    request = AblationRequest(
        sets=("ppo.kl.coefficient=0.5", "ppo.iterations=6"), variants=("b",), seeds=(1, 2)
    )
    jobs, folder = make_plan(base, request, definition(base, request))
    assert [(job.variant, job.seed) for job in jobs] == [(None, 1), (None, 2), ("b", 1), ("b", 2)]
    shared, own = jobs[0], jobs[-1]
    assert shared.targets == ("collect",) and own.targets == ("evaluate",)
    assert own.sets == (
        "ppo.kl.coefficient=0.5",
        "ppo.iterations=6",
        "seed=2",
        "ppo.kl.coefficient=0.2",
    )
    assert folder.name == f"{request.name}-part" and request.name != "demo"


@pytest.mark.parametrize(
    ("variants", "seeds", "part"),
    [((), (), False), (("a",), (), True), ((), (8,), True), ((), (8, 7), False)],
)
def test_results_of_a_part_never_replace_those_of_the_whole(
    tmp_path: Path, variants: tuple[str, ...], seeds: tuple[int, ...], part: bool
) -> None:
    request = AblationRequest(variants=variants, seeds=seeds)
    assert request.is_part_of(definition(make_base(tmp_path), request)) is part


def test_a_pipeline_without_ppo_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    (base / "dvc.yaml").write_text("stages:\n  evaluate: {cmd: 'true', outs: [x]}\n")
    with pytest.raises(ConfigError, match="no stage 'ppo'"):
        make_plan(base, AblationRequest(), definition(base, AblationRequest()))


def job(variant: str | None, seed: int) -> AblationJob:
    return AblationJob(variant, seed, Path(f"{variant}{seed}"), (), ())


def test_variants_wait_for_what_their_seed_shares_and_are_skipped_without_it() -> None:
    jobs = [job(None, 1), job(None, 2), job("a", 1), job("a", 2), job("b", 2)]
    started: list[AblationJob] = []

    def run(one: AblationJob) -> AblationRun:
        started.append(one)
        return one.ended("failed", "no data") if one == jobs[0] else one.ended("done")

    ended = run_jobs(jobs, 2, run, lambda _: None)
    assert [e.state for e in ended] == ["failed", "done", "skipped", "done", "done"]
    assert ended[2].message == "shared stages, seed 1: no data"
    assert jobs[2] not in started and started.index(jobs[1]) < started.index(jobs[3])


def test_a_raised_stop_flag_starts_nothing_more() -> None:
    jobs = [job(None, 1), job("a", 1), job("b", 1)]

    def run(one: AblationJob) -> AblationRun:
        signals.STOP.set()
        return one.ended("stopped")

    try:
        ended = run_jobs(jobs, 1, run, lambda _: None)
    finally:
        signals.STOP.clear()
    assert [e.state for e in ended] == ["stopped"] * 3


def test_ppo_throughput_prints_its_table() -> None:
    options = "--prompt 4 --reply 4 --iterations 1 --threads 1 --set ppo.batch_size=8"
    command = [sys.executable, "-m", "benchmarks.ppo_throughput", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of the roofline" in done.stdout
