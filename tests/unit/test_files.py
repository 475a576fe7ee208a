"""Locks that end with their process, files as private as the umask asks, JSON lines, and rare
garbage collection.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from killed_call import killed_before_file_change

from rlhf_core.data.schema import write_table
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.storage import files
from rlhf_core.storage.garbage_collection import collect_rarely, paused_collector


def test_a_lock_excludes_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with files.LockFile(path) as first:
        first.acquire()
        with files.LockFile(path) as second:
            assert not second.try_acquire()
    with files.LockFile(path) as second:
        assert second.try_acquire()


def test_a_lock_is_released_with_its_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        files.LockFile(tmp_path / "lock").__enter__().acquire()
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with files.LockFile(tmp_path / "lock") as lock:
        assert lock.try_acquire()


def test_nested_values_become_dotted_names() -> None:
    assert files.flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}, "x.") == {
        "x.a.b": 1,
        "x.a.c.d": [2],
        "x.e": None,
    }


def test_separators_of_unicode_end_no_json_line(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\x85d\x0b\x0c\x1c\r\ne"}, {"text": ""}]
    files.atomic_write_lines(tmp_path / "x.jsonl", rows)
    assert [
        json.loads(line) for line in files.split_json_lines((tmp_path / "x.jsonl").read_text())
    ] == rows
    assert files.split_json_lines("") == [] and files.split_json_lines('{"cut": ') == ['{"cut": ']


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o077, 0o600, 0o700), (0o027, 0o640, 0o750), (0, 0o644, 0o755)]
)
def test_what_is_written_is_as_private_as_the_umask_asks(
    umask: int, file: int, folder: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        files.atomic_write_json(tmp_path / "a.json", {})
        write_table(tmp_path / "a.parquet", pa.table({"a": [1]}))
        with files.atomic_dir(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a.json", "a.parquet", "folder")]
    assert modes == [file, file, folder]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room or choose another"),
        (errno.EACCES, "make the folder writable or choose another"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.ENFILE, "raise the limit of open files"),
    ],
)
def test_what_to_do_depends_on_why_a_file_cannot_be_written(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(RlhfError, match=f"cannot write .*; {remedy}"):
        files.atomic_write_text(tmp_path / "x.txt", "x")
    with pytest.raises(RlhfError, match=f"cannot write .*; {remedy}"):
        write_table(tmp_path / "x.parquet", pa.table({"a": [1]}))
    with (
        pytest.raises(RlhfError, match=f"cannot write .*; {remedy}"),
        files.atomic_dir(tmp_path / "x"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_the_collector_pauses_and_goes_on_even_after_an_error() -> None:
    with pytest.raises(ValueError, match="once"), paused_collector():
        assert not gc.isenabled()
        raise ValueError("once")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_of_two_threads_that_overlap_leave_the_collector_as_it_was() -> None:
    first, second = paused_collector(), paused_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled(), "the second block still runs"
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.slow
def test_a_stage_collects_rarely_and_still_frees_cycles() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    gc.collect()
    try:
        collect_rarely()
        cycle = weakref.ref(Cycle())
        kept = [[number] for number in range(10_000)]
        assert cycle() is not None, "it was collected among the first thousands of objects"
        kept += [[number] for number in range(gc.get_threshold()[0])]
        assert cycle() is None and kept
    finally:
        gc.set_threshold(*before)


def test_at_exit_handlers_run_and_then_nothing_is_left_to_search() -> None:
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects())))\n"
        "from rlhf_core.storage.garbage_collection import skip_last_collection\n"
        "skip_last_collection()\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    later, last = done.stdout.splitlines()
    assert later == "0" and last.startswith("True ") and int(last.split()[1]) < 100


def no_file(kind: str, path: Path) -> None:
    """Put something else in the place of a file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.symlink_to({"link to itself": path, "device": "/dev/zero"}[kind])


OPENED: dict[str, Callable[[Path], object]] = {
    "lock": lambda path: files.LockFile(path).__enter__(),
    "private file": files.open_private,
}


@pytest.mark.parametrize("way", OPENED)
@pytest.mark.parametrize("planted", ["link", "dangling link"])
def test_a_lock_follows_no_link(planted: str, way: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "lock"
    if planted == "link":
        victim.write_text("years of work")
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="a link is in the place of this file"):
        OPENED[way](lock)
    assert victim.exists() == (planted == "link")
    assert planted != "link" or victim.read_text() == "years of work"


@pytest.mark.parametrize("way", OPENED)
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link to itself", "device"])
def test_what_is_no_file_is_neither_locked_nor_waited_for(
    kind: str, way: str, tmp_path: Path
) -> None:
    no_file(kind, tmp_path / "lock")
    with pytest.raises(OSError, match=r"is in the place of this file; remove it.*lock"):
        OPENED[way](tmp_path / "lock")


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_what_is_no_file_is_not_read_as_json(kind: str, tmp_path: Path) -> None:
    no_file(kind, tmp_path / "x.json")
    with pytest.raises(DataError, match=r"x.json is no file; remove it"):
        files.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5_000, '"\\ud8', '{"a": nul}'])
def test_what_is_no_json_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(
        DataError, match=r"^[^\n]*x.json is not valid JSON \([^\n]*run its stage again$"
    ):
        files.read_json(tmp_path / "x.json")


def test_the_own_temporary_folder_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = files.own_temporary_folder()
    assert own.parent == tmp_path and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    assert files.own_temporary_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "planted", ["open to others", "open to the group", "link", "file", "of another user"]
)
def test_a_temporary_folder_that_others_may_fill_is_refused(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"rlhf-{os.getuid()}"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        own.write_text("")
    else:
        own.mkdir()
        own.chmod({"open to others": 0o777, "open to the group": 0o770}.get(planted, 0o700))
    if planted == "of another user":
        monkeypatch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
        own.rename(tmp_path / f"rlhf-{os.getuid()}")
    with pytest.raises(RlhfError, match=r"not a folder that this user alone can write to.*TMPDIR"):
        files.own_temporary_folder()


def fill(folder: Path) -> None:
    with files.filled_dir(folder) as content:
        (content / "model").write_text("weights")
        (content / "sub").mkdir()
        (content / "sub" / "card").write_text("text")


def test_a_folder_is_filled_as_a_whole_whenever_it_is_killed(tmp_path: Path) -> None:
    number, ended = 0, set()
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        killed = killed_before_file_change(number, lambda folder=folder: fill(folder))  # type: ignore[misc]
        files.clear_unfinished(folder)
        ended.add(tuple(sorted(path.name for path in folder.iterdir())))
        assert ended <= {(), ("model", "sub")}
        if not killed:
            break
    assert number > 4 and len(ended) == 2


def test_what_somebody_adds_to_an_unfinished_folder_stays(tmp_path: Path) -> None:
    assert killed_before_file_change(3, lambda: fill(tmp_path))
    (tmp_path / "notes").write_text("mine")
    files.clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_folder_that_is_being_filled_is_left_alone(tmp_path: Path) -> None:
    with (
        files.filled_dir(tmp_path),
        pytest.raises(RlhfError, match="another process is writing into"),
    ):
        files.clear_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []
