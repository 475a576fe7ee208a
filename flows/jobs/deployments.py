"""What the server must know: for each work pool in use a deployment of the job that runs there, and the schedules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.utilities.callables import parameter_schema

from flows.jobs.job import JOB_FLOW, job_name
from flows.prefect_server.pools import apply_pools
from flows.supervision.environment import child_environment
from flows.workspace.folder import private_path
from rlhf_core.config.loading.load import Params
from rlhf_core.errors import RlhfError

JOB_ENTRYPOINT = "flows.jobs.stage_job.stage_job"
PREFECT_FILE = "prefect.yaml"
# For jobs on other hosts: heartbeats, so that a lost host does not keep its slot, and a client that waits eight minutes
# for a server that it cannot reach.
AWAY_SETTINGS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "PREFECT_CLIENT_MAX_RETRIES": "8"}


def deploy_jobs(workspace: Path, params: Params) -> None:
    """Pools and job deployments on the server of this process's settings; both may be there already."""
    from flows.jobs.stage_job import stage_job

    with get_client(sync_client=True) as client:
        apply_pools(client, params)
        flow_id = client.create_flow_from_name(JOB_FLOW)
        away = params.pools_away()
        there = [{"prefect.deployments.steps.set_working_directory": {"directory": str(workspace)}}]
        for pool in params.pool_names():
            client.create_deployment(
                flow_id,
                job_name(pool, pool not in away),
                entrypoint=JOB_ENTRYPOINT,
                pull_steps=None if pool in away else there,
                job_variables={"env": AWAY_SETTINGS} if pool in away else None,
                work_pool_name=pool,
                parameter_openapi_schema=parameter_schema(stage_job).model_dump_for_openapi(),
                enforce_parameter_schema=False,
                description="One stage of the pipeline on this pool",
            )


def prefect_file(workspace: Path) -> Path:
    """The workspace's own prefect.yaml, else the one that comes with this project."""
    from rlhf_core.config.loading.recipe import recipe_folder

    own = workspace / PREFECT_FILE
    return own if own.is_file() else recipe_folder() / PREFECT_FILE


def deploy_all(workspace: Path) -> None:
    """Every deployment of prefect.yaml, schedules included, with Prefect's own command; ``RlhfError`` if it refuses."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    answer = subprocess.run(
        [*command, "--prefect-file", str(prefect_file(workspace))],
        cwd=workspace,
        env={**child_environment(workspace), "PWD": str(workspace), **_api_settings()},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    if answer.returncode:
        log = private_path(workspace, "logs", "deploy.log")
        log.write_text(answer.stdout + answer.stderr, encoding="utf-8")
        lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        reason = lines[-1] if lines else "no message"
        raise RlhfError(f"`prefect deploy --all` of {prefect_file(workspace)} failed ({reason}); see {log}")


def _api_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("PREFECT_")}
