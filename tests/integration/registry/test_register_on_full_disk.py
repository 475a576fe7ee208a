"""A registration for which a disk has no room: one line that names the disk, nothing half
registered, and the next registration makes one version.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from integration.registry.conftest import copy_workspace, policy_name, reward_name
from small_disk import small_disk

from flows.commands.failures import report_error
from flows.registry.client import connect, versions
from flows.registry.register import register
from rlhf_core.errors import EXIT_USER_ERROR

ROOM = 48 * 2**20
KIB = 1024
PROGRAM = "rlhf:"


def said_on_a_full_disk(
    workspace: Path, disk: Path, left: int, capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """What the command line says of a registration for which ``disk`` has so many bytes."""
    filler, room = disk / "filler", os.statvfs(disk)
    with filler.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, room.f_bavail * room.f_frsize - left)
    capfd.readouterr()
    try:
        register(workspace)
    except Exception as error:  # as the command line catches it
        assert report_error(error) == EXIT_USER_ERROR
    finally:
        filler.unlink()
    return [line for line in capfd.readouterr().err.splitlines() if PROGRAM in line]


def complete_versions(workspace: Path, name: str) -> list[str]:
    """The versions of a model that can be used; each is one whose registration was finished."""
    listed = versions(connect(workspace), name)
    return [str(each.version) for each in listed if "complete" in each.tags]


@pytest.mark.slow
@pytest.mark.parametrize("full", ["workspace", "temporary folder"])
def test_a_registration_on_a_full_disk_is_told_in_one_line_and_made_once_there_is_room(
    full: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disk, refusals = tmp_path / "disk", 0
    with small_disk(disk, ROOM):
        if full == "workspace":
            workspace = copy_workspace(finished, disk / "my workspace")
            shares = (0, 16, 96, 256, 512)
        else:
            workspace = copy_workspace(finished, tmp_path / "my workspace")
            monkeypatch.setattr(tempfile, "tempdir", str(disk))
            shares = (0, 16, 200)
        for share in shares:
            said = said_on_a_full_disk(workspace, disk, share * KIB, capfd)
            if not said:
                break  # there was room enough
            assert len(said) == 1 and "make room" in said[0], said
            assert str(disk) in said[0], said
            refusals += 1
        registered = register(workspace).registered
        client = connect(workspace)
        for name in (policy_name(workspace), reward_name(workspace)):
            assert complete_versions(workspace, name) == [registered[name].version]
            aliases = client.get_registered_model(name).aliases
            assert str(aliases["challenger"]) == registered[name].version
    assert refusals > 1
