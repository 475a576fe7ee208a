"""Transfers between a workspace and a DVC remote by DVC's own commands, each in a supervised process.

Inputs travel by ``dvc push`` and ``dvc pull`` of their paths, a result by ``dvc push --run-cache STAGE`` and ``dvc
repro --single-item --pull STAGE`` under a shell that runs nothing: DVC then restores the stage from the run cache of
the remote, or fails.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from flows.stage.outcome import StageOutcome
from flows.stage.run import StageSpec, run_stage
from flows.supervision.processes import child_environment, dvc_errors, run_module, run_supervised
from flows.supervision.signals import STOP, StopRequested, retry
from flows.workspace.folder import private_path
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError

# Options of a remote that another host needs and that are no secret; the others are set on each host.
PUBLIC_OPTIONS = ("url", "endpointurl", "region", "port", "user", "use_ssl", "account_name", "projectname")
NO_SHELL = {"SHELL": shutil.which("false") or "/bin/false"}


class TransferFailed(Exception):
    """A transfer failed; ``final`` where trying again would not help."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def dvc_transfer(workspace: Path, *arguments: str) -> None:
    """Run ``dvc ARGUMENTS``, which move data; the output goes to ``.rlhf/logs/transfer.log``.

    Raises:
        TransferFailed: with DVC's first error, which names the file and the remote's own message.
        StopRequested: the stop flag was raised.
    """
    log = private_path(workspace, "logs", "transfer.log")
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    result = run_supervised(command, name=arguments[0], cwd=workspace, env=child_environment(workspace), log=log)
    if STOP.is_set():
        raise StopRequested
    if result.exit_code:
        errors = dvc_errors(result.output)
        raise TransferFailed(errors[0] if errors else f"dvc exited with status {result.exit_code}; see {log}")


def transfer_with_retries(
    workspace: Path, arguments: tuple[str, ...], seconds: float, report: Callable[[str], None]
) -> None:
    """Run :func:`dvc_transfer`, again for ``seconds`` while the remote is out of reach.

    ``report`` is given each failure.
    """
    retry(
        lambda: dvc_transfer(workspace, *arguments),
        seconds,
        is_transient=lambda error: isinstance(error, TransferFailed) and not error.final,
        report=report,
    )


def restore_result(spec: StageSpec) -> StageOutcome | None:
    """Take the stage's result from the run cache, here or in the default remote; None where it is in neither.

    Nothing is computed. As before every run of a stage, DVC removes the outputs of an earlier result first.
    """
    environment = {**spec.environment, **NO_SHELL}
    outcome = run_stage(StageSpec(spec.workspace, spec.name, spec.outputs, environment, spec.grace, pull=True))
    return outcome if outcome.ok or outcome.action == "stopped" else None


def describe_remote(workspace: Path, name: str | None) -> dict[str, str]:
    """Return name and public options of a DVC remote, by default of the default one.

    Raises:
        TransferFailed: it is missing or of a kind that cannot serve two hosts.
    """
    listed = run_module(workspace, "dvc", "config", "--list")
    if listed.exit_code:
        raise TransferFailed(listed.error_line, final=True)
    settings = dict(line.partition("=")[::2] for line in listed.stdout.splitlines())
    name = name or settings.get("core.remote")
    if name is None:
        raise TransferFailed("no DVC remote is set; make one with `dvc remote add -d NAME URL`", final=True)
    prefix = f"remote.{name}."
    options = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    if "url" not in options:
        raise TransferFailed(f"there is no DVC remote {name}; make it with `dvc remote add {name} URL`", final=True)
    url = urlsplit(options["url"])
    if url.password:
        raise TransferFailed(
            f"the URL of the DVC remote {name} holds a password, which the server would show; put it into "
            f"`dvc remote modify --local {name} password …` on each host",
            final=True,
        )
    if url.scheme in ("http", "https") or _on(options, "worktree") or _on(options, "version_aware"):
        raise TransferFailed(
            f"the DVC remote {name} ({options['url']}) keeps no run cache; use a folder, ssh or a bucket", final=True
        )
    return {"name": name, **{key: options[key] for key in PUBLIC_OPTIONS if key in options}}


def _on(options: Mapping[str, str], key: str) -> bool:
    return options.get(key, "").lower() in ("1", "true", "yes", "on")


def transfer_outcome(
    stage: str, error: TransferFailed | StopRequested | RlhfError, context: str, started: float
) -> StageOutcome:
    """Return the outcome of a stage whose inputs or result could not be transferred."""
    if isinstance(error, StopRequested):
        return StageOutcome.stopped(stage, started=started)
    final = isinstance(error, RlhfError) or error.final
    return StageOutcome.failed(stage, f"{context}: {error}", EXIT_USER_ERROR if final else 1, started=started)
