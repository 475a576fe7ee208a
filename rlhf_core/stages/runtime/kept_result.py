"""What a finished stage wrote, kept until DVC has recorded it.

DVC hashes and caches outputs after the stage has ended. Killed meanwhile, it knows nothing of them:
its next run deletes them and runs the stage again, whose partial state is gone by then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.yaml_text import plain, read
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import (
    atomic_dir,
    atomic_write_json,
    read_json,
    remove_tree,
)

logger = logging.getLogger(__name__)

FOLDER = Path(".rlhf") / "finished"
MANIFEST, DATASETS = "manifest.json", "datasets.json"


class KeptResult:
    """The outputs of a stage of ``workspace`` as links, which take no room on the disk."""

    def __init__(self, workspace: Path, stage: str) -> None:
        self.workspace, self.stage = workspace, stage
        self.folder = workspace / FOLDER / stage

    def is_of(self, key: str) -> bool:
        """Whether it is the result of the computation ``key`` and DVC has not recorded it.

        Where a person runs the stage without DVC, it is run.
        """
        if not self.runs_in_dvc() or not (self.folder / MANIFEST).is_file():
            return False
        manifest = read_json(self.folder / MANIFEST)
        return bool(manifest == self._manifest(key))

    def exists(self) -> bool:
        """Whether there is one, of whatever computation."""
        return (self.folder / MANIFEST).is_file()

    def runs_in_dvc(self) -> bool:
        """Whether DVC runs this stage."""
        return os.environ.get("DVC_STAGE", "").rpartition(":")[2] == self.stage

    def keep(
        self, key: str, outputs: Mapping[str, Path], datasets: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Keep what the computation ``key`` has written to ``outputs``, and what data it read."""
        if not self.runs_in_dvc():
            return
        try:
            with atomic_dir(self.folder) as folder:
                for name, path in outputs.items():
                    if path.is_dir():
                        shutil.copytree(path, folder / name, copy_function=os.link)
                    elif path.exists():
                        os.link(path, folder / name)
                atomic_write_json(folder / DATASETS, datasets)
                atomic_write_json(folder / MANIFEST, self._manifest(key))
        except (OSError, RlhfError) as error:  # as where the file system has no links
            logger.info("the result of %s is not kept for DVC: %s", self.stage, error)

    def datasets(self) -> dict[str, dict[str, str]]:
        """The data that the computation read, as a tracker takes them."""
        return dict(read_json(self.folder / DATASETS))

    def restore(self, outputs: Mapping[str, Path]) -> dict[str, Any]:
        """Write the outputs again, as copies, and return the metrics among them."""
        logger.warning(
            "%s: finished in an earlier run, which ended before DVC had recorded it; its result is taken",
            self.stage,
        )
        for name, path in outputs.items():
            kept = self.folder / name
            if kept.is_dir():
                with atomic_dir(path) as folder:
                    shutil.copytree(kept, folder, dirs_exist_ok=True)
            elif kept.exists():
                hidden = path.with_name(f".{path.name}.restored")
                shutil.copy2(kept, hidden)
                os.replace(hidden, path)
        metrics = outputs.get("metrics")
        return dict(read_json(metrics)) if metrics is not None and metrics.is_file() else {}

    def drop(self) -> None:
        """Let go of it."""
        if self.folder.exists():
            remove_tree(self.folder)

    def _manifest(self, key: str) -> dict[str, str]:
        """The computation, and what dvc.lock says of the stage: that changes once DVC is done."""
        lock = self.workspace / "dvc.lock"
        try:
            stages = plain(read(lock)).get("stages") or {} if lock.is_file() else {}
        except RlhfError:
            stages = {}
        recorded = json.dumps(stages.get(self.stage), sort_keys=True, default=str)
        return {"key": key, "recorded": hashlib.sha256(recorded.encode()).hexdigest()}
