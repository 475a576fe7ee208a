"""The default recipe: where params.yaml and dvc.yaml lie, and what dvc.lock says was made."""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

from rlhf_core.config.yaml_text import plain, read, require_merged
from rlhf_core.errors import ConfigError, RlhfError


def recipe_folder() -> Path:
    """Return the checkout's root, or ``share/rlhf-pipeline`` of an installation."""
    checkout = Path(__file__).resolve().parents[2]
    installed = Path(sysconfig.get_path("data")) / "share" / "rlhf-pipeline"
    for folder in (checkout, installed):
        if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
            return folder
    raise ConfigError(
        f"the default recipe is neither in {checkout} nor in {installed}; install rlhf-pipeline again"
    )


def profiles_of(base: Path) -> Path:
    """Return the folder of profiles: the workspace's own if it has one, else the project's."""
    own = base / "profiles"
    return own if own.is_dir() else recipe_folder() / "profiles"


def expectations_of(base: Path) -> Path:
    """Return the folder of expectations: the workspace's own if it has one, else the project's."""
    own = base / "expectations"
    return own if own.is_dir() else recipe_folder() / "expectations"


def profile_headers(folder: Path) -> dict[str, str]:
    """Return the comment that opens each profile, as one paragraph, by the profile's name."""
    headers = {}
    for path in sorted(folder.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
        headers[path.stem] = " ".join(line.lstrip("# ") for line in comments)
    return headers


def require_merged_lock(workspace: Path) -> None:
    """Refuse a dvc.lock that git could not merge, of which only half would be read.

    Raises:
        ConfigError: names the first of git's marks, and what to do.
    """
    lock = workspace / "dvc.lock"
    if lock.is_file():
        require_merged(lock.read_text(encoding="utf-8", errors="replace"), str(lock))


def recorded_outputs(lock: Path) -> dict[str, str]:
    """Return the hash of every output in dvc.lock by path, without those of the report.

    There are none where the file cannot be read.
    """
    try:
        stages = plain(read(lock)).get("stages") or {}
    except RlhfError:
        return {}
    recorded = {}
    for name, stage in sorted(stages.items()):
        if name != "report":
            for out in stage.get("outs") or []:
                recorded[str(out["path"])] = str(out.get("md5", ""))
    return recorded
