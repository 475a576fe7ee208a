"""The DVC root of a workspace and its cache."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

from flows.supervision.processes import run_module
from rlhf_core.errors import RlhfError, cannot_write
from rlhf_core.storage.files import atomic_write_text

# Each root has them as it needs them.
NO_SCM = "core.no_scm"
OWN_SETTINGS = (NO_SCM, "core.analytics", "core.check_update")
IGNORED = "/config.local\n/tmp\n/cache\n"  # as `dvc init` writes it within git


def ensure_dvc(workspace: Path, cache: Path | None = None) -> None:
    """Make the folder a DVC root unless it is one, within git where git tracks the folder.

    A root that was made before there was git joins it: DVC would refuse experiments in it for ever.
    One that was moved
    out of git leaves it: DVC would refuse every command.

    Args:
        cache: a DVC cache to share with other workspaces; by default the root gets its own.

    Raises:
        RlhfError: DVC fails, or the folder cannot be written to.
    """
    folder = workspace / ".dvc"
    try:
        if not (folder / "config").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            indexed = _indexed(workspace)
            _run_dvc(workspace, "init", "--quiet", *_scm_options(workspace))
            if staged := _indexed(workspace) - indexed:  # what is committed is the user's to say
                git_output(workspace, "rm", "--cached", "--quiet", "--", *staged)
            # `dvc config` does it too, in a process of a third of a second for each setting.
            text = (folder / "config").read_text(encoding="utf-8")  # at most the section core
            text = text or "[core]\n"
            settings = f"{text}    analytics = false\n    check_update = false\n"
            (folder / "config").write_text(settings, encoding="utf-8")
        else:
            follow_git(workspace)
        if cache is not None:
            _set_locally(workspace, {"cache.dir": str(cache.resolve())})
        if not (folder / ".gitignore").is_file():
            (folder / ".gitignore").write_text(IGNORED, encoding="utf-8")
    except OSError as error:
        raise cannot_write(workspace, error) from error


def follow_git(workspace: Path) -> None:
    """Let DVC's settings say whether git tracks the folder, which may have changed.

    Settings that are committed stay as they are, or no run would be of a commit: those of this
    folder alone, which git ignores, overrule them.

    Raises:
        RlhfError: DVC fails.
    """
    config = workspace / ".dvc" / "config"
    if not config.is_file():
        return
    without = _without_scm(config)
    local = _without_scm(config.with_name("config.local"))
    outside = "--no-scm" in _scm_options(workspace)
    if outside == (without if local is None else local):
        return
    if git_output(workspace, "ls-files", "--error-unmatch", ".dvc/config") is not None:
        _set_locally(workspace, {NO_SCM: str(outside).lower()})
        return
    if local is not None:
        _run_dvc(workspace, "config", "--local", "--unset", NO_SCM)
    if without and not outside:
        _run_dvc(workspace, "config", "--unset", NO_SCM)
    elif outside and not without and shutil.which("git") is not None:
        _run_dvc(workspace, "config", NO_SCM, "true")


def _without_scm(config: Path) -> bool | None:
    """Whether a file of DVC's settings says that there is no git; None where it says nothing."""
    from configobj import ConfigObj

    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    said = ConfigObj(text.splitlines(), interpolation=False).get("core", {}).get("no_scm")
    return None if said is None else str(said).lower() == "true"


def share_settings(base: Path, workspace: Path) -> None:
    """Give the DVC root ``workspace`` the cache, the kinds of links and the remotes of ``base``.

    Raises:
        RlhfError: DVC fails, or the settings cannot be written.
    """
    cache = (base / ".dvc" / "cache").resolve()
    shared = {"cache.dir": str(cache)}
    for name, value in dvc_settings(base).items():
        if name not in OWN_SETTINGS:
            shared[name] = value
    local = base / ".dvc" / "config.local"
    # Of a remote in the user's own settings, too, they may have the password.
    mode = 0o600
    if local.is_file():
        mode = stat.S_IMODE(local.stat().st_mode)
    _set_locally(workspace, shared, mode)
    (workspace / ".dvc" / "config.local").chmod(mode)


def _set_locally(workspace: Path, settings: Mapping[str, str], mode: int = 0o644) -> None:
    """Set DVC's settings in ``config.local``; DVC itself cannot write letters beyond ASCII."""
    from configobj import ConfigObj

    file = workspace / ".dvc" / "config.local"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    content = ConfigObj(text.splitlines(), interpolation=False)
    for name, value in settings.items():
        section, *middle, key = name.split(".")
        if middle:
            remote = ".".join(middle)
            section = f'{section} "{remote}"'
        content.setdefault(section, {})[key] = value
    changed = "\n".join(content.write()) + "\n"
    if changed != text:
        atomic_write_text(file, changed, mode)


def dvc_settings(workspace: Path) -> dict[str, str]:
    """Return DVC's settings by their dotted names, such as ``core.remote``, with absolute paths.

    Raises:
        RlhfError: DVC fails.
    """
    listed = _run_dvc(workspace, "config", "--list")
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name] = value
    return settings


def cache_of(workspace: Path) -> Path:
    """Return the DVC cache folder that a workspace uses."""
    folder = _run_dvc(workspace, "cache", "dir").strip()
    return (workspace / folder).resolve()


def _scm_options(workspace: Path) -> list[str]:
    """Choose how ``dvc init`` relates to git, where DVC refuses folders that git ignores."""
    top = git_output(workspace, "rev-parse", "--show-toplevel")
    ignored = git_output(workspace, "check-ignore", "-q", str(workspace))
    if top is None or ignored is not None:
        return ["--no-scm"]
    if Path(top).resolve() == workspace.resolve():
        return []
    return ["--subdir"]


def _indexed(workspace: Path) -> set[str]:
    """The files of the DVC root that git knows."""
    listed = git_output(workspace, "ls-files", "--", ".dvc", ".dvcignore")
    return set(listed.splitlines()) if listed else set()


def git_output(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(folder), *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def _run_dvc(workspace: Path, *arguments: str) -> str:
    result = run_module(workspace, "dvc", *arguments)
    if result.exit_code:
        raise RlhfError(f"dvc {' '.join(arguments)} in {workspace} failed: {result.error_line}")
    return result.stdout
