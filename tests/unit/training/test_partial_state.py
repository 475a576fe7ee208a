"""Partial state of a finished training: removed as a whole, and never resumed when a part of it is
missing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from killed_call import killed_before_file_change
from unit.training.four_stages import OUTPUTS, results, train

from rlhf_core.errors import CheckpointError
from rlhf_core.storage.files import remove_tree, removed_name, sha256_tree


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_missing_or_cut_file_is_refused_each_time_or_changes_nothing(
    name: str, workspace: Path, tmp_path: Path
) -> None:
    """Whichever file is gone, the next run ends as the control did, or says each time to delete the
    folder.
    """
    control, out = tmp_path / "control", tmp_path / "out"
    expected = results(name, control, train(name, workspace, control))
    files = [
        path.relative_to(control / "work")
        for path in sorted((control / "work").rglob("*"))
        if path.is_file()
    ]
    refused: set[str] = set()
    for file in files:
        for damage in (Path.unlink, cut_short):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(control / "work", out / "work")
            damage(out / "work" / file)
            try:
                left = results(name, out, train(name, workspace, out))
            except CheckpointError as error:
                refused.add(file.name)
                with pytest.raises(
                    CheckpointError, match="delete the folder to start over"
                ) as again:
                    train(name, workspace, out)
                assert str(again.value) == str(error) and "\n" not in str(error)
            else:
                assert left == expected, f"{file}: {damage.__name__}"
    assert "history.jsonl" in refused and (name != "ppo" or "weights.safetensors" in refused)


def cut_short(path: Path) -> None:
    """Cut a file to half its size; one that is empty already gets no content by that."""
    os.truncate(path, path.stat().st_size // 2)


def test_a_kill_at_any_change_of_a_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    number, left = 0, []
    while True:
        number += 1
        folder = tmp_path / f"{number}" / "sft"
        for name in (
            "checkpoints/step-000001/meta.json",
            "checkpoints/step-000001/state",
            "history.jsonl",
            "best/w",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        whole = sha256_tree(folder)
        killed = killed_before_file_change(number, lambda folder=folder: remove_tree(folder))  # type: ignore[misc]
        assert not folder.exists() or sha256_tree(folder) == whole
        left.append(folder.exists())
        remove_tree(folder)
        assert not folder.exists() and not removed_name(folder).exists()
        if not killed:
            break
    assert number > 6 and left[0] and not any(left[1:])


def test_what_a_link_leads_to_is_not_removed_with_it(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.mkdir()
    (kept / "file").write_text("text")
    link.symlink_to(kept)
    remove_tree(link)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").is_file()
