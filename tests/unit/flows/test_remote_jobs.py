"""Jobs on hosts that do not see the workspace: what travels, what is refused, and a log that loses no line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from unit.flows.fake_clock import FakeClock

from flows.jobs import transfer
from flows.jobs.job import Handoff
from flows.jobs.remote_client import CARRIED_BYTES, _untracked_inputs, read_carried_files
from flows.jobs.remote_host import code_difference, rebuild_workspace
from flows.jobs.transfer import LogFollower, LogShipper, TransferFailed, describe_remote
from flows.supervision.processes import SupervisedResult
from rlhf_core.config.loading import load_params
from rlhf_core.fingerprint import fingerprint
from rlhf_core.fingerprint.tracked_files import write_tracked_files

RUN = UUID(int=7)


def handoff(remote: str = "/remote", **files: str) -> Handoff:
    return Handoff("ppo-1", {"name": "store", "url": remote}, (), files, "none", 300)


@pytest.mark.slow
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
    with pytest.raises(TransferFailed, match=complaint) as refusal:
        describe_remote(tmp_path, None)
    assert refusal.value.final
    assert "secret" not in str(refusal.value)


def test_secrets_of_a_remote_stay_on_their_host(tmp_path: Path) -> None:
    rebuild_workspace(tmp_path, handoff("s3://bucket/cache"), tmp_path / "cache")
    with (tmp_path / ".dvc" / "config.local").open("w") as file:
        file.write("['remote \"store\"']\n  secret_access_key = hush\n  region = north\n")
    public = describe_remote(tmp_path, None)
    assert public == {"name": "store", "url": "s3://bucket/cache", "region": "north"}


def test_a_submission_writes_nothing_outside_the_workspace_it_rebuilds(tmp_path: Path) -> None:
    for path in ("../elsewhere", "/elsewhere", "a/../../b"):
        with pytest.raises(ValueError, match="outside the workspace"):
            rebuild_workspace(tmp_path / "job", handoff(**{path: "x"}), tmp_path / "cache")
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_a_host_with_other_code_names_the_difference(tmp_path: Path) -> None:
    same = {"params.yaml": "seed: 1\n", "dvc.yaml": "stages: {}\n", ".fingerprints/sft.txt": fingerprint("sft") + "\n"}
    rebuild_workspace(tmp_path / "same", handoff(**same), tmp_path / "cache")
    assert code_difference(tmp_path / "same", handoff(**same)) == ""
    other = {**same, ".fingerprints/ppo.txt": "0" * 64 + "\n"}
    rebuild_workspace(tmp_path / "other", handoff(**other), tmp_path / "cache")
    difference = code_difference(tmp_path / "other", handoff(**other))
    assert "differ from the pipeline's" in difference and ".fingerprints/ppo.txt" in difference
    assert "sft.txt" not in difference and "\n" not in difference


@pytest.mark.slow
def test_a_reward_function_travels_with_the_job(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    source = "ppo: {reward: {sources: [{kind: function, target: 'own_rewards:score'}]}}\n"
    (here / "params.yaml").write_text(source)
    (here / "dvc.yaml").write_text("stages: {}\n")
    (here / "own_rewards.py").write_text("import own_vocabulary\n\ndef score(prompts, replies):\n    return [1.0]\n")
    (here / "own_vocabulary.py").write_text("GOOD = ['please']\n")
    (here / "unrelated.py").write_text("pass\n")
    write_tracked_files(here, load_params(here).ppo.reward.sources)
    carried = read_carried_files(here, ["params.yaml", "dvc.yaml", ".fingerprints", *_untracked_inputs(here, "ppo")])
    assert {path for path in carried if path.endswith(".py")} == {"own_rewards.py", "own_vocabulary.py"}
    assert _untracked_inputs(here, "sft") == []
    rebuild_workspace(there, handoff(**carried), tmp_path / "cache")
    assert code_difference(there, handoff(**carried)) == ""
    (there / "own_vocabulary.py").write_text("GOOD = ['thanks']\n")
    assert "reward_sources.txt" in code_difference(there, handoff(**carried))


def test_small_text_travels_with_the_job_and_the_rest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("pass\n")
    assert read_carried_files(tmp_path, ["scripts", "dvc.lock"]) == {"scripts/a.py": "pass\n"}
    (tmp_path / "table").write_bytes(b"\xff\xfe")
    with pytest.raises(TransferFailed, match="table is an input that DVC does not cache, and it is not text"):
        read_carried_files(tmp_path, ["table"])
    (tmp_path / "large").write_text("x" * (CARRIED_BYTES + 1))
    with pytest.raises(TransferFailed, match="the largest is large"):
        read_carried_files(tmp_path, ["scripts", "large"])


def test_a_transfer_is_tried_again_while_the_remote_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def unreachable(command: list[str], **_: Any) -> SupervisedResult:
        calls.append(command[-2])
        return SupervisedResult(1, "ERROR: no route to host\n")

    monkeypatch.setattr(transfer, "run_supervised", unreachable)
    clock = FakeClock(monkeypatch)
    reported: list[str] = []
    with pytest.raises(TransferFailed):
        transfer.dvc_transfer(tmp_path, ("push", "ppo"), 20, reported.append)
    assert calls == ["push"] * 4 and clock.pauses == [2, 4, 8]
    assert reported[0] == "no route to host; trying again in 2 s"


@dataclass
class Record:
    id: UUID
    name: str
    message: str
    timestamp: Any


class LogServer:
    """Keeps log records; refuses every other call, and mixes in records of another logger."""

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
        logs = [log for log in self.kept if since is None or log.timestamp >= since]
        return logs[offset : offset + limit]


def test_each_line_of_the_log_arrives_once_although_the_server_refuses_some_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LogServer()

    @contextmanager
    def get_client(sync_client: bool) -> Iterator[LogServer]:
        yield server

    monkeypatch.setattr(transfer, "get_client", get_client)
    monkeypatch.setattr(transfer, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 64)
    there, here = tmp_path / "there.log", tmp_path / "here.log"
    there.write_text("of an earlier attempt\n")
    follower, client = LogFollower(here), cast(SyncPrefectClient, server)
    lines = [f"ppo: {number}/100\n" for number in range(100)]
    with LogShipper(there, RUN), there.open("a") as log:
        for line in lines:
            log.write(line)
            log.flush()
            follower.fetch(client, RUN, now=True)
        log.write("the last one has no end")
    follower.fetch(client, RUN, now=True)
    assert here.read_text() == "".join(lines) + "the last one has no end"
