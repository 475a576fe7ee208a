"""What is handed over and what is refused, and a log that arrives once and whole though the server was away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient

from flows.jobs import log_shipping as job_log
from flows.jobs import transfer
from flows.jobs.job import Handoff
from flows.jobs.log_shipping import LogFollower, LogShipper
from flows.jobs.remote_client import CARRIED_BYTES, _carried, _files_beside_dvc
from flows.jobs.remote_host import other_code, rebuild
from flows.jobs.transfer import TransferFailed, TransferStopped, patiently
from flows.jobs.transfer_worker import Refused, StageTransfer
from rlhf_core.config.loading.load import load_params
from rlhf_core.fingerprint import fingerprint
from rlhf_core.ppo.reward_sources.tracked_files import write_tracked_files

RUN = UUID(int=7)


def handoff(remote: str = "/remote", **files: str) -> Handoff:
    return Handoff("ppo-1", {"name": "store", "url": remote}, files, "none", 300)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "no DVC remote is set"),
        ({"url": "ssh://me:secret@host/cache"}, "holds a password"),
        ({"url": "https://host/cache"}, "keeps no run cache"),
        ({"url": "s3://bucket/cache", "version_aware": "true"}, "keeps no run cache"),
    ],
)
def test_a_remote_that_cannot_serve_two_hosts_is_refused(
    tmp_path: Path, options: dict[str, str], complaint: str
) -> None:
    lines = ["[core]\n  no_scm = True\n  remote = store\n" if options else "[core]\n  no_scm = True\n"]
    lines += ["['remote \"store\"']\n" if options else "", *(f"  {key} = {value}\n" for key, value in options.items())]
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("".join(lines))
    with pytest.raises(Refused, match=complaint) as refusal:
        StageTransfer(tmp_path, "", "").describe()
    assert "secret" not in str(refusal.value)


def test_secrets_of_a_remote_stay_on_their_host(tmp_path: Path) -> None:
    rebuild(tmp_path, handoff("s3://bucket/cache"), tmp_path / "cache")
    with (tmp_path / ".dvc" / "config.local").open("w") as file:
        file.write("['remote \"store\"']\n  secret_access_key = hush\n  region = north\n")
    told = StageTransfer(tmp_path, "", "").describe()
    assert told == {"name": "store", "url": "s3://bucket/cache", "region": "north", "use_ssl": "True"}


def test_a_submission_writes_nothing_outside_the_workspace_it_rebuilds(tmp_path: Path) -> None:
    for path in ("../elsewhere", "/elsewhere", "a/../../b"):
        with pytest.raises(ValueError, match="outside the workspace"):
            rebuild(tmp_path / "job", handoff(**{path: "x"}), tmp_path / "cache")
    assert not (tmp_path / "job").exists()


def test_a_host_with_other_code_says_which_and_computes_nothing(tmp_path: Path) -> None:
    same = {"params.yaml": "seed: 1\n", "dvc.yaml": "stages: {}\n", ".fingerprints/sft.txt": fingerprint("sft") + "\n"}
    rebuild(tmp_path / "same", handoff(**same), tmp_path / "cache")
    assert other_code(tmp_path / "same", handoff(**same)) == ""
    other = {**same, ".fingerprints/ppo.txt": "0" * 64 + "\n"}
    rebuild(tmp_path / "other", handoff(**other), tmp_path / "cache")
    told = other_code(tmp_path / "other", handoff(**other))
    assert "other code" in told and ".fingerprints/ppo.txt" in told and "sft.txt" not in told and "\n" not in told


def test_a_function_that_scores_travels_with_the_job(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    source = "ppo: {reward: {sources: [{kind: function, target: 'own_rewards:score'}]}}\n"
    (here / "params.yaml").write_text(source)
    (here / "dvc.yaml").write_text("stages: {}\n")
    (here / "own_rewards.py").write_text("import own_words\n\ndef score(prompts, replies):\n    return [1.0]\n")
    (here / "own_words.py").write_text("GOOD = ['please']\n")
    (here / "unrelated.py").write_text("pass\n")
    write_tracked_files(here, load_params(here).ppo.reward.sources)
    carried = _carried(here, ["params.yaml", "dvc.yaml", ".fingerprints", *_files_beside_dvc(here, "ppo")])
    assert {path for path in carried if path.endswith(".py")} == {"own_rewards.py", "own_words.py"}
    assert _files_beside_dvc(here, "sft") == []
    rebuild(there, handoff(**carried), tmp_path / "cache")
    assert other_code(there, handoff(**carried)) == ""
    (there / "own_words.py").write_text("GOOD = ['thanks']\n")
    assert "reward_sources.txt" in other_code(there, handoff(**carried))


def test_small_text_travels_with_the_job_and_the_rest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("pass\n")
    assert _carried(tmp_path, ["scripts", "dvc.lock"]) == {"scripts/a.py": "pass\n"}
    (tmp_path / "table").write_bytes(b"\xff\xfe")
    with pytest.raises(TransferFailed, match="table is an input that DVC does not keep, and no text"):
        _carried(tmp_path, ["table"])
    (tmp_path / "large").write_text("x" * (CARRIED_BYTES + 1))
    with pytest.raises(TransferFailed, match="the largest is large"):
        _carried(tmp_path, ["scripts", "large"])


def test_a_transfer_is_tried_again_for_a_while_unless_that_is_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = [0.0]

    class Clock:
        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            now[0] += seconds
            return False

    monkeypatch.setattr(transfer, "STOP", Clock())
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now[0])

    def unreachable() -> dict[str, Any]:
        raise TransferFailed("no route to host")

    def useless() -> dict[str, Any]:
        raise TransferFailed("no such remote", final=True)

    told: list[str] = []
    with pytest.raises(TransferFailed):
        patiently(unreachable, 20, told.append)
    assert pauses == [2, 4, 8] and told[0] == "no route to host; trying again in 2 s"
    with pytest.raises(TransferFailed):
        patiently(useless, 20, told.append)
    assert pauses == [2, 4, 8]


def test_a_stopped_job_does_not_wait_for_its_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(transfer, "STOP", stop)

    def unreachable() -> dict[str, Any]:
        raise TransferFailed("no route to host")

    with pytest.raises(TransferStopped):
        patiently(unreachable, 1000, lambda _: None)


@dataclass
class Record:
    id: UUID
    name: str
    message: str
    timestamp: Any


class LogServer:
    """Keeps log records; refuses every other call, and mixes in records of somebody else."""

    def __init__(self) -> None:
        self.kept: list[Record] = []
        self.calls = 0

    def create_logs(self, logs: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            raise OSError("unreachable")
        for log in logs:
            self.kept.append(Record(uuid4(), "prefect.flow_runs", "not the stage's", log.timestamp))
            self.kept.append(Record(uuid4(), log.name, log.message, log.timestamp))

    def read_logs(self, wanted: Any, limit: int, offset: int, sort: Any) -> list[Record]:
        since = wanted.timestamp.after_ if wanted.timestamp else None
        found = [log for log in self.kept if since is None or log.timestamp >= since]
        return found[offset : offset + limit]


def test_each_line_of_the_log_arrives_once_though_the_server_is_away_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LogServer()

    @contextmanager
    def get_client(sync_client: bool) -> Iterator[LogServer]:
        yield server

    monkeypatch.setattr(job_log, "get_client", get_client)
    monkeypatch.setattr(job_log, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(job_log, "PIECE_BYTES", 64)
    there, here = tmp_path / "there.log", tmp_path / "here.log"
    there.write_text("of an earlier attempt\n")
    follower, client = LogFollower(here), cast(SyncPrefectClient, server)
    lines = [f"ppo: {number}/100\n" for number in range(100)]
    with LogShipper(there, RUN), there.open("a") as log:
        for line in lines:
            log.write(line)
            log.flush()
            follower.look(client, RUN, now=True)
        log.write("the last one has no end")
    follower.look(client, RUN, now=True)
    assert here.read_text() == "".join(lines) + "the last one has no end"
