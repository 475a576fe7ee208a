"""Records of stages: in journals on disk while MLflow is away, delivered by a process of their own,
each once.
"""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from requests import HTTPError, Response

from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.report.metrics import glossary, metrics_of
from rlhf_core.runtime.preemption import StopNow
from rlhf_core.tracking import journal
from rlhf_core.tracking.delivery import DEFERRED_VARIABLE, Courier, ServerAway, address, away_errors
from rlhf_core.tracking.journal import Journal, RecordedTime, RunHeader, waiting_records
from rlhf_core.tracking.pipeline_run import legal_name, log_numbers
from rlhf_core.tracking.stage_run import JournalTracker, grouped, results, stage_tracker

URI = "http://user:secret@127.0.0.1:5000"
AWAY = MlflowException(
    "API request to http://127.0.0.1:5000 failed with exception connection refused"
)


@dataclass
class Server:
    """MLflow's client for a server that a test lets go away; ``calls`` are the requests that
    arrived.
    """

    error: Exception | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    attempts: int = 0
    runs: dict[str, Any] = field(default_factory=dict)

    def _request(self, name: str, content: Any) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.calls.append((name, content))

    def create_run(self, experiment: str, start_time: int, tags: dict[str, str]) -> Any:
        self._request("create", (experiment, start_time, tags["stage"]))
        run = SimpleNamespace(info=SimpleNamespace(run_id="run", lifecycle_stage="active"))
        self.runs[tags["rlhf.journal"]] = run
        return run

    def search_runs(self, experiments: list[str], query: str) -> list[Any]:
        return [run for tag, run in self.runs.items() if tag in query]

    def get_run(self, run_id: str) -> Any:
        return next(run for run in self.runs.values() if run.info.run_id == run_id)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        rows = [(m.key, m.value, m.step) for m in metrics] + [
            (row.key, row.value) for row in (*params, *tags)
        ]
        self._request("batch", rows)

    def log_artifact(self, run_id: str, path: str, folder: str | None) -> None:
        self._request("artifact", (Path(path).name, Path(path).read_text(), folder))

    def set_terminated(self, run_id: str, status: str, time: int = 0) -> None:
        self._request("end", status)


class Clock:
    """Monotonic time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def courier(server: Server, clock: Clock, tmp_path: Path) -> Iterator[Courier]:
    with Courier(server, lambda: "7", tmp_path, URI, clock) as courier:
        yield courier


def begin_stage(
    workspace: Path, name: str = "sft", server: str = URI, run_id: str | None = None, **options: Any
) -> JournalTracker:
    header = RunHeader(address(server), run_id, "rlhf", {"stage": name}, 1000, True)
    return JournalTracker(Journal.new(workspace, header), **options)


def left(workspace: Path) -> list[Path]:
    return list((workspace / ".rlhf" / "tracking").glob("*"))


@pytest.mark.timeout(60)  # it once waited for the lock that it had itself
def test_a_journal_without_room_or_removed_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stage = begin_stage(tmp_path)
    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(journal, "atomic_write_json", full)
        stage.log_metrics({"loss": 1.0}, 1)
    assert waiting_records(tmp_path) == 0
    for _ in range(2):
        stage.log_metrics({"loss": 1.0}, 1)
        assert waiting_records(tmp_path) == 1
        shutil.rmtree(left(tmp_path)[0])


def test_mlflows_page_finds_metrics_in_groups(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics(
        {"reward_mean": 1.0, "kl": 2.0, "kl_k3": 3.0, "loss": 4.0, "final/selected.kl": 5.0}, 1
    )
    courier.deliver_new()
    ((_, batch),) = [call for call in server.calls if call[0] == "batch"]
    assert [name for name, _, _ in batch] == [
        "reward/mean",
        "kl/k1",
        "kl/k3",
        "train/loss",
        "final/selected.kl",
    ]
    stage.end("FINISHED")


def test_a_win_rate_is_named_by_its_judge() -> None:
    """A search for runs by ``metrics.win_rate`` would find the referee's of a training beside the
    judge's of a run.
    """
    names = {grouped(name) for name in ("win_rate", "win_rate_low95", "win_rate_high95")}
    assert names == {f"selection/referee.win_rate{bound}" for bound in ("", "_low95", "_high95")}


def test_every_curve_stands_in_a_group() -> None:
    """Curves without one are 46 sections' worth of charts, in which `length` is a rollout's in one
    run and an evaluation's in another.
    """
    pages = {
        "history/critic.jsonl",
        "history/ppo.jsonl",
        "history/reward.jsonl",
        "history/sft.jsonl",
    }
    alone, elsewhere = set(), set()
    for section in glossary()["sections"]:
        if not pages & set(section.get("files", ())):
            continue
        for name in (name for metric in metrics_of(section) for name in metric.names):
            group, _, rest = grouped(name).rpartition("/")
            if not (group and rest):
                alone.add(name)
            if section["title"] == "Replies" and group != "replies" and name != "unscored":
                elsewhere.add(name)
    replies_of_evaluation = {"gold", "right", "reward", "referee", "judge", "checker", "words"}
    assert alone == set() and elsewhere <= replies_of_evaluation
    names = (
        "loss",
        "length",
        "explained_variance",
        "referee_gap",
        "source_mine_mean",
        "a/b",
        "kl_k2",
    )
    assert [grouped(name) for name in names] == [
        "train/loss", "replies/length", "value/explained_variance", "reward/referee_gap",
        "reward/source_mine_mean", "train/a/b", "kl/k2",
    ]  # fmt: skip
    assert grouped("final/policy.length") == "final/policy.length"


def test_results_are_the_numbers_by_which_runs_are_compared() -> None:
    comparison = {
        "win_rate": 0.6,
        "win_rate_low95": 0.5,
        "win": 0.5,
        "clusters": 9,
        "mean_difference_low95": 0.1,
    }
    metrics = {
        "kl": 2.0,
        "passed": True,
        "comparison": {"judge": comparison},
        "category": {"fact": {"policy_right": 0.5}},
        "losses": {"length": {"loss": 1.0}},
        "probes": {"cut_in_half": 0.9, "cut_in_half_low95": 0.8, "cut_in_half_pairs": 30},
        "preferences": {"train": 10, "failed_not_duplicate": 1, "mean_prompt_chars": 9.0},
        "margin_p05": -1.0,
        "policy": {"regression": 1.0, "gold": 0.5},
        "regression": {"passed": 1.0},
    }
    assert set(results(metrics, "evaluation")) == {
        "final/kl",
        "final/judge.win_rate",
        "final/judge.win_rate_low95",
        "final/probes.cut_in_half",
        "final/preferences.train",
        "final/policy.regression",
        "final/policy.gold",
    }


def test_a_stage_names_the_data_that_it_reads(courier: Courier, tmp_path: Path) -> None:
    courier.client = client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    courier.experiment_id = lambda: experiment
    experiment = client.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    stages = [begin_stage(tmp_path), begin_stage(tmp_path)]
    for stage, context in zip(stages, ("training", "evaluation"), strict=True):
        stage.log_datasets(
            {"rows": {"digest": "0" * 40, "uri": "file:///rows", "context": context, "rows": "7"}}
        )
        stage.end("FINISHED")
    courier.deliver_rest()
    inputs = [run.inputs.dataset_inputs for run in client.search_runs([experiment])]
    assert [(given.dataset.name, given.dataset.digest) for (given,) in inputs] == [
        ("rows", "0" * 36)
    ] * 2
    assert {given.dataset.profile for (given,) in inputs} == {'{"num_rows": 7}'}
    assert {tag.value for (given,) in inputs for tag in given.tags} == {"training", "evaluation"}


def test_no_category_of_the_data_costs_a_stage_its_metrics(tmp_path: Path) -> None:
    odd = [
        "Q&A",
        "C++",
        "what is it?",
        "code (python)",
        "don't",
        "a//b",
        "open/",
        "x/../y",
        "x/./y",
        "x" * 300,
    ]
    names = [
        grouped(f"final/category.{category}") for category in (*odd, "plain", "问答 1:2", "a/b")
    ]
    assert names[-3:] == ["final/category.plain", "final/category.问答 1:2", "final/category.a/b"]
    assert names[0] == "final/category.Q_A" and len(set(names)) == len(names)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.create_run(
        client.create_experiment("x", artifact_location=str(tmp_path))
    ).info.run_id
    client.log_batch(run, metrics=[Metric(name, 0.5, 0, 0) for name in names])
    assert client.get_run(run).data.metrics == dict.fromkeys(names, 0.5)
    # What runs of the pipeline and of registrations record of themselves.
    beginnings = ["/a", "../a", "./a", ".", "..", "/", ".a", "..a/b"]
    own = [f"reward/{category}" for category in odd] + beginnings
    log_numbers(client, run, dict.fromkeys(own, 0.25))
    assert set(client.get_run(run).data.metrics) == {*names, *map(legal_name, own)}


def test_use_of_the_machine_is_recorded_beside_a_stages_metrics_where_mlflows_setting_says_so(
    server: Server, courier: Courier, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    stage = begin_stage(tmp_path, clock=clock)
    for step in (1, 2):
        stage.log_metrics({"loss": 1.0}, step)
    courier.deliver_new()
    logged = [
        (name, step) for kind, batch in server.calls if kind == "batch" for name, _, step in batch
    ]
    assert [entry for entry in logged if not entry[0].startswith("system/")] == [
        ("train/loss", 1),
        ("train/loss", 2),
    ]
    sampled = {name: step for name, step in logged if name.startswith("system/")}
    assert (
        sampled["system/cpu_utilization_percentage"]
        == sampled["system/system_memory_usage_megabytes"]
        == 1
    )
    assert logged.count(("system/cpu_utilization_percentage", 2)) == 0, "not at every step"
    stage.end("FINISHED")


def test_records_arrive_while_the_stage_runs_each_once(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.txt"
    plot.write_text("as it was")
    stage = begin_stage(tmp_path)
    stage.log_params({"lr": 0.1})
    courier.deliver_new()
    assert server.calls == [("create", ("7", 1000, "sft")), ("batch", [("lr", "0.1")])]
    stage.log_metrics({"loss": 1.0, "bad": float("nan")}, 3)
    stage.log_artifact(plot, "plots")
    plot.write_text("overwritten since")
    assert waiting_records(tmp_path) == 2
    courier.deliver_new()
    courier.deliver_new()
    assert server.calls[2:] == [
        ("batch", [("train/loss", 1.0, 3)]),
        ("artifact", ("plot.txt", "as it was", "plots")),
    ]
    assert waiting_records(tmp_path) == 0 and len(left(tmp_path)) == 1
    stage.end("FINISHED")
    courier.deliver_new()
    assert server.calls[4:] == [("end", "FINISHED")] and left(tmp_path) == []


def test_a_killed_stage_is_delivered_when_all_have_ended(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    stage.journal.release()  # the kernel does
    courier.deliver_new()
    assert len(left(tmp_path)) == 1, (
        "another host's lock may be invisible: only the last record tells the end"
    )
    courier.deliver_rest()
    assert left(tmp_path) == [] and server.calls[2:] == [("end", "FAILED")]


def test_a_job_that_outlives_the_run_keeps_its_journal(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    courier.deliver_rest()
    stage.log_metrics({"loss": 0.5}, 2)
    stage.end("FINISHED")
    courier.lock.__exit__(None, None, None)
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 2
    assert [name for name, _ in server.calls] == ["create", "batch", "batch", "end"] and left(
        tmp_path
    ) == []


def test_a_removed_journal_does_not_end_the_stage(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    shutil.rmtree(stage.journal.folder)
    stage.log_metrics({"loss": 0.5}, 2)
    stage.end("FINISHED")
    courier.deliver_new()
    assert (
        server.calls[1:] == [("batch", [("train/loss", 0.5, 2)]), ("end", "FINISHED")]
        and left(tmp_path) == []
    )


def test_what_is_left_at_the_end_is_said_and_goes_on_where_it_stopped(
    server: Server, courier: Courier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    courier.deliver_new()
    server.error = AWAY
    stage.end("FAILED")
    courier.deliver_rest()
    assert "1 records wait for MLflow to answer again" in caplog.text
    server.error, server.calls = None, []
    courier.lock.__exit__(None, None, None)
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 1 and server.calls == [
        ("end", "FAILED")
    ]


def test_nobody_else_delivers_meanwhile(server: Server, courier: Courier, tmp_path: Path) -> None:
    stage = begin_stage(tmp_path)
    stage.end("FINISHED")
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 0 and server.calls == []
    courier.deliver_new()
    assert [name for name, _ in server.calls] == ["create", "end"]


def test_runs_of_a_server_at_another_address_are_left(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    elsewhere = "http://127.0.0.1:6000"
    begun, new = (
        begin_stage(tmp_path, "sft", elsewhere, "theirs"),
        begin_stage(tmp_path, "ppo", elsewhere),
    )
    for stage in (begun, new):
        stage.end("FINISHED")
    courier.deliver_new()
    assert [content for name, content in server.calls if name == "create"] == [("7", 1000, "ppo")]
    assert left(tmp_path) == [begun.journal.folder], (
        "a run that no server has made is made by the one of this process"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (StopNow("now"), "KILLED"), (ValueError("x"), "FAILED")],
)
def test_a_stage_says_how_it_ended(
    error: BaseException | None, status: str, server: Server, courier: Courier, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(DEFERRED_VARIABLE, "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    monkeypatch.delenv("RLHF_TRACKING", raising=False)
    try:
        with stage_tracker("sft", tmp_path, "rlhf") as tracker:
            tracker.log_metrics({"loss": 1.0})
            if error is not None:
                raise error
    except (StopNow, ValueError):
        pass
    courier.deliver_new()
    begun, logged, *reason, ended = server.calls
    assert begun == ("create", ("7", begun[1][1], "sft"))
    assert logged == ("batch", [("train/loss", 1.0, 0)])
    assert reason == ([("batch", [("rlhf.error", "x")])] if status == "FAILED" else [])
    assert ended == ("end", status)
    assert left(tmp_path) == []


def test_a_stage_whose_records_are_delivered_does_not_load_mlflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhf_core.tracking.stage_run import stage_tracker\n"
        "with stage_tracker('sft', Path(sys.argv[1]), 'rlhf') as tracker: tracker.log_metrics({'loss': 1.0})\n"
        "print('mlflow' in sys.modules)"
    )
    environment = {DEFERRED_VARIABLE: "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "False\n" and waiting_records(tmp_path) == 2


def test_a_run_that_a_killed_process_did_not_note_is_found(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    header = stage.journal.header
    server.create_run("7", header.started, dict(header.tags))
    courier.deliver_new()
    assert [name for name, _ in server.calls] == ["create", "batch"]


def test_journals_of_stages_that_deliver_alone_stay(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    direct = JournalTracker(
        Journal.new(tmp_path, RunHeader(address(URI), None, "rlhf", {"stage": "sft"}, 1000))
    )
    direct.log_metrics({"loss": 1.0}, 1)
    courier.deliver_new()
    courier.deliver_rest()
    assert server.calls == [] and waiting_records(tmp_path) == 1


@pytest.mark.parametrize("position", ["", "what", "99999999", "-3"])
def test_an_impossible_position_delivers_again(
    position: str, server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    (stage.journal.folder / "delivered").write_text(position)
    courier.deliver_new()
    assert server.calls[1:] == [("batch", [("train/loss", 1.0, 1)])]


def test_a_damaged_record_or_journal_holds_up_no_other(
    server: Server, courier: Courier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, sound = begin_stage(tmp_path, "damaged"), begin_stage(tmp_path, "sound")
    for stage in (damaged, sound):
        stage.log_metrics({"loss": 1.0}, 1)
    with (damaged.journal.folder / "records.jsonl").open("ab") as stream:
        stream.write(b'{"kind": "metrics", "values": {"lo\0\n{"kind": 3}\n')
    damaged.end("FINISHED")
    unreadable = begin_stage(tmp_path, "unreadable")
    unreadable.end("FINISHED")
    (unreadable.journal.folder / "run.json").write_text('{"server": ')
    (tmp_path / ".rlhf" / "tracking" / "empty").mkdir()
    sound.end("FINISHED")
    courier.deliver_new()
    batches = [content for name, content in server.calls if name == "batch"]
    assert batches == [[("train/loss", 1.0, 1)]] * 2
    assert "a damaged record was left out" in caplog.text and "run.json is damaged" in caplog.text
    assert {path.name for path in left(tmp_path)} == {unreadable.journal.folder.name, "empty"}


def test_a_file_that_cannot_be_stored_is_a_warning(
    server: Server,
    courier: Courier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_store(*_: object) -> None:
        raise PermissionError("/no/such/store")

    monkeypatch.setattr(server, "log_artifact", no_store)
    stage = begin_stage(tmp_path)
    plot = tmp_path / "plot.svg"
    plot.write_text("<svg/>")
    stage.log_artifact(plot)
    stage.log_metrics({"loss": 1.0}, 1)
    stage.end("FINISHED")
    courier.deliver_new()
    assert [name for name, _ in server.calls] == ["create", "batch", "end"] and left(tmp_path) == []
    assert "PermissionError: /no/such/store" in caplog.text


def test_a_full_disk_leaves_no_half_record(
    server: Server, courier: Courier, tmp_path: Path
) -> None:
    stage = begin_stage(tmp_path)
    stage.log_metrics({"loss": 1.0}, 1)
    size = (stage.journal.folder / "records.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match=r"No space left|File too large"):
            stage.log_metrics({"loss": 0.5}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    stage.end("FAILED")
    courier.deliver_new()
    assert server.calls[1:] == [("batch", [("train/loss", 1.0, 1)]), ("end", "FAILED")]


def new_tracker(server: Server, workspace: Path, clock: Clock | None = None) -> JournalTracker:
    header = RunHeader(address(URI), None, "rlhf", {"stage": "sft"}, 1000)
    clock = clock or Clock()
    courier = Courier(server, lambda: "7", workspace, URI, clock)
    return JournalTracker(Journal.new(workspace, header), courier, clock)


def test_while_the_server_answers_nothing_is_left(server: Server, tmp_path: Path) -> None:
    tracker = new_tracker(server, tmp_path)
    assert tracker.begin()
    tracker.log_metrics({"loss": 1.0, "bad": float("nan")}, 3)
    tracker.log_params({"lr": 0.1})
    tracker.set_tags({"one": "1", "two": "2"})
    tracker.end("FINISHED")
    assert server.calls == [
        ("create", ("7", 1000, "sft")),
        ("batch", [("train/loss", 1.0, 3)]),
        ("batch", [("lr", "0.1")]),
        ("batch", [("one", "1"), ("two", "2")]),
        ("end", "FINISHED"),
    ]
    assert waiting_records(tmp_path) == 0 and not list((tmp_path / ".rlhf/tracking").iterdir())


def test_records_wait_and_arrive_in_order_in_few_requests(
    server: Server, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_tracker(server, tmp_path, clock)
    tracker.begin()
    plot = tmp_path / "plot.txt"
    server.error = AWAY
    for step in range(1, 1101):
        tracker.log_metrics({"loss": float(step)}, step)
    plot.write_text("as it was")
    tracker.log_artifact(plot, "plots")
    plot.write_text("overwritten since")
    assert (
        server.attempts == 2 and waiting_records(tmp_path) == 1101
    )  # that of the run, and that of step 1
    server.error, server.calls, clock.now = None, [], 2.0
    tracker.log_metrics({"loss": 0.5}, 1101)
    names = [name for name, _ in server.calls]
    assert names == ["batch", "batch", "artifact", "batch"] and waiting_records(tmp_path) == 0
    clock.now = 3.0
    assert len(server.calls[0][1]) == 1000 and server.calls[1][1][-1] == (
        "train/loss",
        1100.0,
        1100,
    )
    assert server.calls[2][1] == ("plot.txt", "as it was", "plots")
    tracker.log_metrics({"loss": 0.4}, 1102)
    assert server.calls[-1][1] == [("train/loss", 0.4, 1102)]
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "http://127.0.0.1:5000 is away" in messages[0] and "the stage goes on" in messages[0]
    assert (
        messages[1] == "MLflow at http://127.0.0.1:5000 answers again; 1102 records were delivered"
    )


@pytest.mark.slow
def test_a_server_that_lets_requests_hang_costs_a_fifth_of_the_time_at_most(
    server: Server, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = new_tracker(server, tmp_path, clock)
    tracker.begin()
    waited = 0.0

    def hang(*_: Any, **__: Any) -> None:
        nonlocal waited
        clock.now += 20.0
        waited += 20.0
        raise AWAY

    monkeypatch.setattr(server, "log_batch", hang)
    while clock.now < 3600:
        tracker.log_metrics({"loss": 1.0}, 1)
        clock.now += 1.0
    assert 0 < waited <= 3600 / 5 + 20


def test_a_run_that_begins_and_ends_without_its_server_is_delivered_by_the_next(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    assert not tracker.begin()
    tracker.log_metrics({"loss": 1.0}, 1)
    tracker.end("FINISHED")
    assert "2 records wait in" in caplog.records[-1].message
    server.error = None
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 2
    assert server.calls == [
        ("create", ("7", 1000, "sft")),
        ("batch", [("train/loss", 1.0, 1)]),
        ("end", "FINISHED"),
    ]
    assert (
        Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 0
        and waiting_records(tmp_path) == 0
    )


def test_records_of_a_stage_that_still_runs_or_of_another_server_are_left(
    server: Server, tmp_path: Path
) -> None:
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    server.error = AWAY
    tracker.log_metrics({"loss": 1.0}, 1)
    server.error, server.calls = None, []
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 0
    tracker.journal.release()
    assert Courier(server, lambda: "7", tmp_path, "http://127.0.0.1:6000").deliver_waiting() == 0
    assert server.calls == [] and Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 1


def test_a_killed_stage_leaves_what_it_had_written(server: Server, tmp_path: Path) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    tracker.log_metrics({"loss": 1.0}, 1)
    with (tracker.journal.folder / "records.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "metrics"})[:9])  # killed while it wrote
    tracker.journal.release()  # the kernel does
    server.error = None
    assert Courier(server, lambda: "7", tmp_path, URI).deliver_waiting() == 1
    assert server.calls[-2:] == [("batch", [("train/loss", 1.0, 1)]), ("end", "FAILED")]


def test_no_name_or_password_is_written(server: Server, tmp_path: Path) -> None:
    server.error = AWAY
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    tracker.log_params({"lr": 1})
    written = [path.read_text() for path in (tmp_path / ".rlhf").rglob("*") if path.is_file()]
    assert len(written) == 3 and not any("secret" in text for text in written)


def refused(status: int) -> HTTPError:
    response = Response()
    response.status_code = status
    return HTTPError("no", response=response)


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (AWAY, True),
        (refused(503), True),
        (refused(429), True),
        (refused(401), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (refused(413), False),
        (MlflowException("changed", INVALID_PARAMETER_VALUE), False),
    ],
)
def test_only_what_may_go_away_by_itself_makes_records_wait(error: Exception, waits: bool) -> None:
    with pytest.raises(ServerAway if waits else type(error)), away_errors():
        raise error


@pytest.mark.parametrize(
    "refusal", [refused(413), MlflowException("changed", INVALID_PARAMETER_VALUE)]
)
def test_a_refused_record_is_a_warning(
    refusal: Exception, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    server.error = refusal
    tracker.log_params({"lr": 1})
    assert "MLflow refused records of run run: " in caplog.text and waiting_records(tmp_path) == 0


@pytest.mark.parametrize("gone", [False, True], ids=["deleted", "deleted for good"])
def test_a_run_that_somebody_deleted_is_not_asked_value_by_value(
    gone: bool,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = new_tracker(server, tmp_path)
    tracker.begin()
    server.error = MlflowException(
        "The run run must be in the 'active' state", INVALID_PARAMETER_VALUE
    )
    for run in server.runs.values():
        run.info.lifecycle_stage = "deleted"
    if gone:
        monkeypatch.setattr(
            server, "get_run", Mock(side_effect=MlflowException("no run", RESOURCE_DOES_NOT_EXIST))
        )
    before = server.attempts
    tracker.log_params({f"p{number}": number for number in range(50)})
    assert server.attempts == before + 1 and waiting_records(tmp_path) == 0
    assert "(50 values are lost)" in caplog.text


def test_what_mlflow_refuses_costs_no_other_record(
    courier: Courier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    courier.client = client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    courier.experiment_id = lambda: experiment
    experiment = client.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    stage = begin_stage(tmp_path)
    for step in range(1, 4):
        stage.log_metrics({"loss": float(step), "../odd": 1.0, "kl": 2.0, ".": 0.0}, step)
    stage.log_params({"lr": 1, "sft//lr": 2, "seed": 3})
    stage.log_params({"lr": 9, "late": 4})  # parameters are written once
    stage.set_tags({"who": "ann", "/odd": "x"})
    courier.deliver_new()
    (run,) = client.search_runs([experiment])
    assert run.data.metrics == {
        "train/loss": 3.0,
        "kl/k1": 2.0,
        "train_../odd": 1.0,
        "train_.": 0.0,
    }
    assert run.data.tags["who"] == "ann"
    curve = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.value for metric in curve] == [1.0, 2.0, 3.0]
    assert run.data.params == {"lr": "1", "seed": "3", "late": "4"}
    assert (
        caplog.text.count("MLflow refused records of run ") == 1
        and "values are lost" in caplog.text
    )
    stage.end("FINISHED")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, r"does not accept the login .*MLFLOW_TRACKING_USERNAME"),
        (403, r"does not let ann write to the experiment .*EDIT"),
    ],
)
def test_a_login_that_may_not_write_is_one_line_at_the_start(
    server: Server, tmp_path: Path, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    server.error = refused(status)
    with pytest.raises(ConfigError, match=says):
        new_tracker(server, tmp_path).begin()


def test_the_time_of_records_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RecordedTime()
    moments = iter((100.0, 105.0, 90.0, 104.0, 110.0))
    monkeypatch.setattr(journal.time, "time", lambda: next(moments))
    assert [clock.now() for _ in range(5)] == [100_000, 105_000, 105_000, 105_000, 110_000]
