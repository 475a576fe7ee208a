"""A stage's process: its threads and memory, what it is set to before it trains, and how its end is
told.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from clean_files import write_rows
from small_disk import small_disk
from sqlalchemy import create_engine, text
from transformers import LlamaConfig, LlamaForCausalLM
from unit.training.tiny import demonstrations

from rlhf_core.config.operations import ComputeConfig
from rlhf_core.config.policy import Method
from rlhf_core.data.schema import Demonstration, read_rows
from rlhf_core.data.tables import TableWriter, parquet_footer, reads_noted
from rlhf_core.data.tokens import read_tokens
from rlhf_core.errors import EXIT_USER_ERROR, ConfigError, GateFailed, RlhfError
from rlhf_core.fingerprint.stages import write_fingerprints
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime import runner, threads
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.stages.runtime.launcher import StageExit
from rlhf_core.stages.runtime.threads import SPIN_ROUNDS, limit_threads, limit_threads_of
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking.pipeline_run import NOTE_TAG, VERDICT_TAG
from rlhf_core.tracking.stage_run import METRICS_TAG, Tracker


def full(name: str, workspace: Path, preemption: PreemptionSignal) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "history.jsonl")


def test_a_full_disk_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_run", full)
    with pytest.raises(
        RlhfError, match=r"sft: .*No space left on device.*history\.jsonl.*make room"
    ) as raised:
        runner.run_stage("sft", tmp_path)
    assert raised.value.exit_code == EXIT_USER_ERROR and "\n" not in str(raised.value)
    outcome: dict[str, Any] = json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_USER_ERROR and "make room" in outcome["message"]


LOCK_CONFLICT = """schema: '2.0'
stages:
<<<<<<< HEAD
  ppo: {cmd: one}
=======
  ppo: {cmd: other}
>>>>>>> try-2
"""


@pytest.mark.parametrize("name", ["report", "gate-policy", "sft"])
def test_a_stage_refuses_a_lock_with_conflicts_of_a_merge(tmp_path: Path, name: str) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    (tmp_path / "dvc.lock").write_text(LOCK_CONFLICT)
    with pytest.raises(
        ConfigError, match=r"dvc\.lock has conflicts of a merge, the first in line 3"
    ):
        runner.run_stage(name, tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_is_used_up_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def greedy(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(runner, "_run", greedy)
    with pytest.raises(RlhfError, match=r"^reward: main memory is used up; [^\n]*ulimit -v[^\n]*$"):
        runner.run_stage("reward", tmp_path)


def test_a_full_disk_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, disk = pa.schema({"text": pa.string()}), tmp_path / "disk"

    def write(*_: object) -> NoReturn:
        with TableWriter(disk / "raw.parquet", schema) as table:
            for _ in range(20):
                table.write(
                    pa.table({"text": [os.urandom(1000).hex() for _ in range(200)]}, schema)
                )
        raise AssertionError("it had room")

    monkeypatch.setattr(runner, "_run", write)
    with small_disk(disk, 2**20):
        expected = r"^collect: \[Errno 28\] No space left on device.*raw\.parquet.* \(the disk of .* has room"
        with pytest.raises(RlhfError, match=expected) as refused:
            runner.run_stage("collect", disk)
    assert "make room" in str(refused.value)


@pytest.mark.parametrize("content", ["", "[]", '{"exit_code": 75}', "\udcff", "null"])
def test_a_file_that_is_no_outcome_says_nothing_of_the_stage(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sft.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert StageExit.load(path) is None
    StageExit("sft", 2, "why", 1.0, 2.5).save(path)
    assert StageExit.load(path) == StageExit("sft", 2, "why", 1.0, 2.5)


def test_a_clock_that_is_set_back_gives_no_negative_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((1000.0,))
    monkeypatch.setattr(runner, "_run", lambda *_: {})
    with monkeypatch.context() as patch:
        patch.setattr(runner.time, "time", lambda: next(moments, 1.0))
        runner.run_stage("sft", tmp_path)
    outcome = json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["started"] == 1000.0 <= outcome["ended"] < 1060.0
    assert 0 <= outcome["seconds"] < 60


def test_a_database_without_room_is_a_full_disk_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_database(*_: object) -> NoReturn:
        engine = create_engine(f"sqlite:///{tmp_path / 'mlflow.db'}")
        with engine.begin() as connection:
            connection.execute(text("PRAGMA max_page_count = 2"))
            for number in range(9):
                connection.execute(text(f"CREATE TABLE t{number} (\n  a TEXT\n)"))
        raise AssertionError("it had room")

    monkeypatch.setattr(runner, "_run", small_database)
    with pytest.raises(RlhfError, match=r"^base: [^\n]*database or disk is full; make room[^\n]*$"):
        runner.run_stage("base", tmp_path)


def test_an_unwritten_outcome_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_run", full)
    (tmp_path / ".rlhf").write_text("no folder")
    with pytest.raises(RlhfError, match="make room"):
        runner.run_stage("sft", tmp_path)
    assert "the outcome of sft could not be written" in caplog.text


def test_a_stage_runs_once_at_a_time_in_a_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rlhf stage` by hand beside a run: both would go on from the same partial state, and write to
    it.
    """
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    runs: list[str] = []

    def run_another(run: runner._StageRun) -> dict[str, Any]:
        runs.append(run.stage.name)
        if len(runs) == 1:
            with pytest.raises(
                RlhfError, match=rf"another process runs the stage sft in {tmp_path}"
            ):
                runner.run_stage("sft", tmp_path)
            runner.run_stage("reward", tmp_path)
        return {}

    monkeypatch.setattr(runner, "_inputs", lambda *given: Paths({}))
    monkeypatch.setattr(runner, "_run_alone", run_another)
    runner.run_stage("sft", tmp_path)
    runner.run_stage("sft", tmp_path)
    assert runs == ["sft", "reward", "sft"]


@pytest.mark.parametrize("allowed", [True, False])
def test_training_allows_tf32_as_parameters_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    (tmp_path / "params.yaml").write_text(f"compute: {{tf32: {str(allowed).lower()}}}\n")
    calls: list[bool] = []
    monkeypatch.setattr("rlhf_core.models.precision.allow_tf32", calls.append)
    monkeypatch.setattr(runner, "_inputs", lambda *given: Paths({}))
    monkeypatch.setattr(runner, "_run_on_rank_zero", lambda run: {})
    runner.run_stage("sft", tmp_path)
    assert calls == [allowed]


@pytest.mark.parametrize("method", ["ppo", "dpo", "rejection_sampling"])
def test_a_stage_reads_the_remembered_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    (tmp_path / "params.yaml").write_text(f"policy: {{method: {method}}}\n")
    write_fingerprints(tmp_path, ["gate-sft", "gate-policy"], method)
    remembered = (tmp_path / ".rlhf/fingerprints.json").read_bytes()
    monkeypatch.setattr(runner, "_inputs", lambda *given: Paths({}))
    monkeypatch.setattr(runner, "_run_on_rank_zero", lambda run: {"key": runner.work_key(run)})
    assert runner.run_stage("gate-sft", tmp_path)["key"]
    assert (tmp_path / ".rlhf/fingerprints.json").read_bytes() == remembered


class NotedTracker(Tracker):
    """Keeps what a stage records."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.datasets: dict[str, Mapping[str, str]] = {}
        self.calls = 0

    def log_datasets(self, datasets: Mapping[str, Mapping[str, str]]) -> None:
        self.datasets |= datasets
        self.calls += 1

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.metrics |= metrics

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tags |= tags


def test_results_are_recorded_once_and_the_run_can_be_found_by_them(tmp_path: Path) -> None:
    tracker = NotedTracker()
    metrics = {"kl": 1.0, "selected": {"reward": 2.0}, "last": {"reward": 3.0}}
    runner._record(metrics, Paths({"metrics": tmp_path / "ppo.json"}), tracker)
    assert tracker.metrics == {"final/kl": 1.0, "final/selected.reward": 2.0}
    assert tracker.tags == {METRICS_TAG: sha256_file(tmp_path / "ppo.json")}


def test_the_policy_gate_tells_the_verdict_when_it_shuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text("gates: {policy: [{metric: kl, at_most: 1, why: far}]}\n")
    rate = {"win_rate": 0.6, "win_rate_low95": 0.5, "win_rate_high95": 0.7}
    compared = {"judge": rate | {"prompts": 9, "clusters": 8}}
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/evaluation.json").write_text(
        json.dumps({"comparison": compared, "kl": 2.0})
    )
    for name in ("ppo", "judge"):
        (tmp_path / f"metrics/{name}.json").write_text("{}")
    tracker = NotedTracker()
    monkeypatch.setattr(runner, "stage_tracker", lambda *given: nullcontext(tracker))
    with pytest.raises(GateFailed):
        runner.run_stage("gate-policy", tmp_path)
    assert "the policy gate failed: kl is 2, required ≤ 1" in tracker.tags[VERDICT_TAG]
    assert tracker.tags[NOTE_TAG].startswith("**Not shown better than SFT: wins 60.0 %")


def test_a_stage_names_each_file_of_rows_that_it_reads_by_its_content(tmp_path: Path) -> None:
    clean, raw = tmp_path / "data/clean", tmp_path / "data/raw"
    rows = demonstrations(3)
    for split in ("train", "validation", "test"):
        write_rows(clean / f"demonstrations/{split}.parquet", rows)
    # Neither of the stage's inputs, nor rows, nor in the workspace.
    others = [
        raw / "demonstrations/data.parquet",
        clean / "findings.parquet",
        tmp_path / "train.parquet",
    ]
    for other in others:
        write_rows(other, rows)
    tracker = NotedTracker()
    data = runner.DataInputs(runner.load_stage("sft"), tmp_path, tracker)

    def replies() -> Iterator[str]:  # which a thread of the library asks for
        for row in read_rows(clean / "demonstrations/test.parquet", Demonstration):
            yield row.reply

    with reads_noted(data.note):
        tokenizer = train_tokenizer(replies(), 300)
        for path in (clean / "demonstrations/train.parquet", *others):
            parquet_footer(path)
            read_rows(path, Demonstration)
        for _ in range(2):  # the second time its tokens are known
            file = clean / "demonstrations/validation.parquet"
            read_tokens(tmp_path / "tokens", file, Demonstration.KIND, tokenizer)
    named = {name: (facts["context"], facts["rows"]) for name, facts in tracker.datasets.items()}
    assert named == {
        "data/clean/demonstrations/train": ("training", "3"),
        "data/clean/demonstrations/validation": ("validation", "3"),
        "data/clean/demonstrations/test": ("test", "3"),
    }
    assert tracker.calls == 3 and data.named == tracker.datasets
    content = (clean / "demonstrations/train.parquet").read_bytes()
    digest = tracker.datasets["data/clean/demonstrations/train"]["digest"]
    assert digest == hashlib.md5(content).hexdigest(), "by which DVC names it"
    validate = runner.DataInputs(runner.load_stage("validate"), tmp_path, tracker)
    with reads_noted(validate.note):
        for path in tmp_path.rglob("*.parquet"):
            parquet_footer(path)
    assert list(validate.named) == ["data/raw/demonstrations/data"]


def test_parameters_have_the_names_of_params_yaml() -> None:
    stage = runner.load_stage("critic")
    names = runner.named_parameters(stage, stage.config())
    assert {"seed", "critic.optimizer.lr", "ppo.max_new_tokens", "policy.method"} <= set(names)


NAMES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "GOMP_SPINCOUNT")

SMALLEST = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
}  # fmt: skip
COMMANDS = {
    "match": [
        "match",
        "--champion",
        "models/sft",
        "--challenger",
        "models/policy",
        "--output",
        "match.json",
    ],
    "chat": ["chat", "models/policy"],
    "serve": ["serve", "--model", "models/policy", "--port", "0"],
}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)


def test_the_environment_goes_before_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(ComputeConfig(threads=3), parallel=1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["RAYON_NUM_THREADS"]) == ("3", "3")
    limit_threads(ComputeConfig(threads=2, spin=True), parallel=1)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_threads(ComputeConfig(spin=True), parallel=1)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_workspace_limits_the_threads_of_other_commands(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("compute: {threads: 2}\nflow: {parallel: 3}\n")
    limit_threads_of(tmp_path)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    (tmp_path / "params.yaml").write_text("compute: {thread: 2}\n")
    with pytest.raises(ConfigError, match="did you mean"):
        limit_threads_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["match", "chat", "serve"])
def test_pytorch_is_loaded_after_the_threads_are_limited(command: str, tmp_path: Path) -> None:
    """OpenMP reads its settings once, when PyTorch loads it."""
    program = f"""
import sys
from rlhf_core.stages.runtime import threads
def limited(workspace):
    print("loaded" if "torch" in sys.modules else "not loaded", workspace)
    raise SystemExit(0)
threads.limit_threads_of = limited
from {"rlhf_core" if command == "match" else "flows"}.cli import app
app({COMMANDS[command]!r})
"""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    for name in ("sft", "policy"):
        LlamaForCausalLM(LlamaConfig(**SMALLEST)).save_pretrained(tmp_path / "models" / name)
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip().splitlines()[-1:] == [f"not loaded {tmp_path}"], ran.stderr


@pytest.mark.parametrize(
    ("threads", "parallel", "spin", "expected"),
    [
        (None, 1, True, str(SPIN_ROUNDS)),
        (2, 2, True, str(SPIN_ROUNDS)),
        (3, 2, True, None),
        (None, 2, True, None),
        (1, 1, False, None),
    ],
)
def test_threads_spin_where_every_stage_has_cores_for_them(
    threads: int | None,
    parallel: int,
    spin: bool,
    expected: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit_threads(ComputeConfig(threads=threads, spin=spin), parallel)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert ("compute.spin is left out" in caplog.text) == (spin and expected is None)


ROOT = Path(__file__).parents[3]
# As activations do: blocks of changing sizes, with small ones between them that outlive them. The
# first block, freed, raises glibc's own limit for mapping blocks. Prints how many MiB the process
# has more than at its start.
CHANGING_SIZES = """
import ctypes, sys
from rlhf_core.stages.runtime.threads import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

if sys.argv[1] == "return":
    return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = resident()
libc.free(libc.malloc(30 << 20))
for size in (5, 11, 7, 19, 23, 13):
    blocks = []
    for _ in range(4):
        blocks.append(libc.malloc(size << 20))
        ctypes.memset(blocks[-1], 1, size << 20)
        libc.malloc(100_000)
    for block in blocks:
        libc.free(block)
print(resident() - before)
"""
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator"
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that names neither allocator nor cache, which the test may change."""
    for name in (*threads.ALLOCATOR_VARIABLES, *threads.ONEDNN_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def growth(mode: str, environment: dict[str, str]) -> int:
    command = [sys.executable, "-c", CHANGING_SIZES, mode]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@needs_glibc
def test_blocks_of_changing_sizes_do_not_stay_with_the_process(environment: dict[str, str]) -> None:
    assert growth("keep", environment) > 50  # what is to be avoided
    assert growth("return", environment) < 10
    # Whoever has set the allocator up keeps it so.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    assert growth("return", environment) > 50


@pytest.mark.parametrize(
    ("system", "library"), [("linux", object()), ("darwin", None)], ids=["musl", "macOS"]
)
def test_other_systems_are_left(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, system: str, library: Any
) -> None:
    def load(name: None) -> Any:
        assert library is not None, "only Linux has what is looked for"
        return library

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", load)
    threads.return_freed_memory()
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(threads.ONEDNN_CAPACITY)


@pytest.mark.parametrize("name", threads.ONEDNN_VARIABLES)
def test_a_bound_of_the_environment_on_onednns_cache_stays(
    environment: dict[str, str], name: str
) -> None:
    environment[name] = "7"
    threads.return_freed_memory()
    assert {key: value for key, value in environment.items() if "CACHE_CAPACITY" in key} == {
        name: "7"
    }


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        ("sft", "", True),
        ("evaluate", "", True),
        ("sft", "compute: {return_freed_memory: false}", False),
        ("collect", "", False),
    ],
)
def test_stages_that_run_models_return_it_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, settings: str, expected: bool
) -> None:
    (tmp_path / "params.yaml").write_text(f"seed: 1\n{settings}\n")
    calls: list[str] = []
    monkeypatch.setattr(runner, "return_freed_memory", lambda: calls.append(stage))
    monkeypatch.setattr(runner, "_inputs", lambda *given: Paths({}))
    monkeypatch.setattr(runner, "_run_on_rank_zero", lambda run: {})
    runner.run_stage(stage, tmp_path)
    assert calls == ([stage] if expected else [])


@pytest.mark.parametrize("status", [0, 1, None, "done"])
def test_code_that_ends_the_program_ends_no_stage_as_if_it_were_done(
    status: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(runner, "_run", leave)
    with pytest.raises(RlhfError, match=r"^sft: .*raised SystemExit: .*\(test_runner.py, line"):
        runner.run_stage("sft", tmp_path)
    outcome = json.loads((tmp_path / ".rlhf/outcomes/sft.json").read_text())
    assert outcome["exit_code"] == EXIT_USER_ERROR
