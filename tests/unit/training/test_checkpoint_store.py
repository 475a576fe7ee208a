"""The store of partial state: round trips, manifests last, former states that survive, pruning,
refusals.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from rlhf_core.config.loading import check_params
from rlhf_core.errors import EXIT_USER_ERROR, CheckpointError, ConfigError
from rlhf_core.training.checkpoints.store import CheckpointStore, open_store, state_files


def write_state(work: Path, step: int) -> None:
    """A ``work`` folder as training leaves it after ``step`` steps: two checkpoints, lines, the
    best weights.
    """
    for number in (step - 1, step):
        folder = work / "checkpoints" / f"step-{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.safetensors").write_bytes(f"weights of {number}".encode())
    shutil.rmtree(work / "checkpoints" / f"step-{step - 2:06d}", ignore_errors=True)
    (work / "best").mkdir(exist_ok=True)
    (work / "best" / "weights").write_text("the best")
    (work / "history.jsonl").write_text("row\n" * step)
    (work / "checkpoints" / ".building-000099").mkdir(exist_ok=True)
    (work / "checkpoints" / ".building-000099" / "state.safetensors").write_text("half of it")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in state_files(folder)}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a bucket on an S3 server of this process."""
    pytest.importorskip("s3fs", reason="needs pip install 'rlhf-pipeline[s3]'")
    server = pytest.importorskip(
        "moto.server", reason="needs pip install 'moto[s3]'"
    ).ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("ACCESS_KEY_ID", "key"),
        ("SECRET_ACCESS_KEY", "secret"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    name = f"states-{uuid.uuid4().hex}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    try:
        yield f"s3://{name}/rlhf"
    finally:
        fsspec.filesystem("s3").clear_instance_cache()
        server.stop()


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], CheckpointStore]:
    """Opens the same store anew, as another machine would."""
    urls = {
        "folder": "shared",
        "file": (tmp_path / "there").as_uri(),
        "memory": f"memory://{uuid.uuid4().hex}",
    }
    url = urls.get(request.param) or request.getfixturevalue("bucket")
    return lambda: open_store(url, tmp_path, "sft", "0123abcd")


def test_a_bucket_that_does_not_exist_is_refused_and_not_made(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"s3://elsewhere/rlhf cannot be used .*bucket does not exist"
    ):
        open_store("s3://elsewhere/rlhf", tmp_path, "sft", "0123abcd")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return open_store("shared", tmp_path, "sft", "0123abcd")


def test_what_one_machine_has_saved_another_gets(
    make: Callable[[], CheckpointStore], tmp_path: Path
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for step in (1, 2, 3, 4):
        write_state(here, step)
        make().publish(here, step, keep=2)
    assert make()._steps() == [3, 4]
    # Contents are kept once, and only those that a state names: the weights of 2, 3 and 4, two
    # histories, the best.
    assert len(make().sizes("files")) == 6
    assert make().fetch(elsewhere, beyond=-1) == 4
    assert contents(elsewhere) == contents(here)
    assert ".building-000099" not in str(contents(elsewhere))
    make().clear()
    assert make()._steps() == [] and make().sizes("files") == {}
    assert make().fetch(elsewhere, beyond=-1) is None


def test_state_that_is_no_newer_is_left_where_it_is(store: CheckpointStore, tmp_path: Path) -> None:
    write_state(tmp_path / "here", 3)
    store.publish(tmp_path / "here", 3, keep=2)
    write_state(tmp_path / "own", 3)
    (tmp_path / "own" / "history.jsonl").write_text("its own")
    assert store.fetch(tmp_path / "own", beyond=3) is None
    assert (tmp_path / "own" / "history.jsonl").read_text() == "its own"
    assert store.fetch(tmp_path / "own", beyond=2) == 3
    assert (tmp_path / "own" / "history.jsonl").read_text() == "row\n" * 3


def test_the_manifest_comes_last_and_an_upload_that_broke_off_changes_nothing(
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = tmp_path / "here"
    write_state(work, 1)
    store.publish(work, 1, keep=2)
    before = contents(work)
    write_state(work, 2)
    order: list[str] = []
    breaking_at = 99
    original_put, original_write = CheckpointStore.put, CheckpointStore.write

    def put(location: CheckpointStore, path: Path, name: str) -> None:
        if len(order) == breaking_at:
            raise OSError("the line went dead")
        order.append(name)
        original_put(location, path, name)

    def write(location: CheckpointStore, name: str, content: bytes) -> None:
        if len(order) == breaking_at:
            raise OSError("the line went dead")
        order.append(name)
        original_write(location, name, content)

    monkeypatch.setattr(CheckpointStore, "put", put)
    monkeypatch.setattr(CheckpointStore, "write", write)
    # Two files are new, the weights of 2 and the history: it breaks before the first, the second
    # and the manifest.
    for attempt, moment in enumerate((0, 1, 1)):
        breaking_at = moment
        order.clear()
        store.publish(work, 2, keep=1)
        assert store.fetch(tmp_path / f"fetched-{attempt}", beyond=-1) == 1
        assert contents(tmp_path / f"fetched-{attempt}") == before
    assert (
        store.failures == 3
        and "failed uploads so far: 3" in caplog.text
        and "line went dead" in caplog.text
    )
    breaking_at = 99
    order.clear()
    store.publish(work, 2, keep=1)
    assert order == ["step-000002.json"]
    assert store.fetch(tmp_path / "whole", beyond=-1) == 2
    assert store.failures == 3


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "missing", "half a manifest", "a file elsewhere"]
)
def test_a_damaged_newest_state_is_passed_over_loudly(
    damage: str, store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "here"
    for step in (1, 2):
        write_state(work, step)
        store.publish(work, step, keep=2)
    manifest = Path(store.root) / "step-000002.json"
    table = json.loads(manifest.read_text())
    newest = Path(store.root) / "files" / table["files"]["history.jsonl"]["sha256"]
    match damage:
        case "flip":
            newest.write_bytes(b"?" + newest.read_bytes()[1:])
        case "cut":
            newest.write_bytes(newest.read_bytes()[:-1])
        case "missing":
            newest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:50])
        case _:
            table["files"]["../../outside"] = table["files"]["history.jsonl"]
            manifest.write_text(json.dumps(table))
    assert store.fetch(tmp_path / "elsewhere", beyond=-1) == 1
    assert (tmp_path / "elsewhere" / "history.jsonl").read_text() == "row\n"
    assert "the one before it is tried" in caplog.text
    assert not (tmp_path.parent / "outside").exists()


def test_an_upload_that_was_cut_short_is_made_whole_by_the_next(
    store: CheckpointStore, tmp_path: Path
) -> None:
    work = tmp_path / "here"
    write_state(work, 1)
    store.publish(work, 1, keep=2)
    for path in (Path(store.root) / "files").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    store.publish(work, 1, keep=2)
    assert store.fetch(tmp_path / "elsewhere", beyond=-1) == 1


def test_states_of_an_abandoned_run_go(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (5, 8, 6):
        write_state(tmp_path / "here", step)
        store.publish(tmp_path / "here", step, keep=2)
    assert store._steps() == [5, 6]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://x", "Protocol not known: nowhere"),
        ("gs://bucket/runs", r"pip install 'rlhf-pipeline\[gcs\]'"),
        ("taken/by/a/file", "check the address and the credentials"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_in_one_line(
    url: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    if url.startswith("gs:") and importlib.util.find_spec("gcsfs") is not None:
        pytest.skip("gcsfs is installed")
    with pytest.raises(CheckpointError, match=message) as raised:
        open_store(url, tmp_path, "sft", "key")
    assert raised.value.exit_code == EXIT_USER_ERROR and "\n" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/runs", "https://host/runs?sig=hunter2"])
def test_credentials_in_the_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"'checkpoints.store': leave user and password out of it"
    ) as raised:
        check_params({"checkpoints": {"store": url}})
    assert "hunter2" not in str(raised.value)


def test_an_address_without_credentials_is_accepted() -> None:
    assert (
        check_params({"checkpoints": {"store": "s3://bucket/runs"}}).checkpoints.store
        == "s3://bucket/runs"
    )
