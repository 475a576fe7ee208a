"""The Prefect deployments of a workspace: one for the jobs of each work pool in use, and those of
prefect.yaml.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import DeploymentSort
from prefect.exceptions import Abort
from prefect.utilities.callables import parameter_schema

from flows.jobs.job import JOB_FLOW, job_name
from flows.pipeline.events import failed_state
from flows.prefect_server.flow_runs import PAGE, told
from flows.prefect_server.pools import apply_pools, ensure_deployed_pools
from flows.prefect_server.services import embedded_database
from flows.supervision.processes import PREFECT_SETTINGS, run_module
from flows.workspace import private_path, workspace_slug
from rlhf_core.config.params import Params
from rlhf_core.config.recipe import recipe_folder
from rlhf_core.errors import EXIT_USER_ERROR, ConfigError, RlhfError

JOB_ENTRYPOINT = "flows.jobs.stage_job.stage_job"
PREFECT_FILE = "prefect.yaml"
FLOWS = ("rlhf-pipeline", "rlhf-data-watch", "rlhf-promotion")  # of the deployments of prefect.yaml
# The client tries for eight minutes to reach a server that is being restarted.
JOB_SETTINGS = {**PREFECT_SETTINGS, "PREFECT_CLIENT_MAX_RETRIES": "8"}


def deploy_jobs(workspace: Path, params: Params) -> None:
    """Create or update the work pools of the workspace's stages, and a deployment of the stage job
    for each.
    """
    from flows.jobs.stage_job import stage_job

    with get_client(sync_client=True) as client:
        require_own_names(client, workspace)
        apply_pools(client, params)
        flow_id = client.create_flow_from_name(JOB_FLOW)
        remote_pools = params.pools_away()
        in_workspace = [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(workspace)}}
        ]
        form = closed(parameter_schema(stage_job).model_dump_for_openapi())
        for pool in params.pool_names():
            client.create_deployment(
                flow_id,
                job_name(workspace, pool, pool not in remote_pools),
                entrypoint=JOB_ENTRYPOINT,
                parameters={"workspace": str(workspace)},
                pull_steps=None if pool in remote_pools else in_workspace,
                job_variables={"env": JOB_SETTINGS},
                work_pool_name=pool,
                parameter_openapi_schema=form,
                enforce_parameter_schema=True,
                description="One stage of the pipeline on this pool",
            )


def _our_deployments(client: SyncPrefectClient, ending: str | None) -> list[DeploymentResponse]:
    """The deployments of this project's flows whose names hold ``ending``, or all."""
    named = DeploymentFilter(name=DeploymentFilterName(like_=ending)) if ending else None
    ours = FlowFilter(name=FlowFilterName(any_=[JOB_FLOW, *FLOWS]))
    found: list[DeploymentResponse] = []
    page = None
    while page is None or len(page) == PAGE:
        page = client.read_deployments(
            flow_filter=ours,
            deployment_filter=named,
            sort=DeploymentSort.NAME_ASC,
            limit=PAGE,
            offset=len(found),
        )
        found += page
    return found


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a deployment's parameters, by which the server refuses other names than its own.

    It names those that there are, which it does not for ``additionalProperties``.
    """
    return {**schema, "propertyNames": {"enum": sorted(schema["properties"])}}


def close_forms(client: SyncPrefectClient, workspace: Path) -> None:
    """Let the server refuse runs of the workspace's deployments with unknown parameters.

    Prefect's command deploys schemas that let them pass, and its engine then crashes in the run.
    """
    for deployment in _our_deployments(client, f"-{workspace_slug(workspace)}"):
        schema = deployment.parameter_openapi_schema
        if deployment.parameters.get("workspace") == str(workspace) and schema:
            form = closed(schema)
            update = DeploymentUpdate(parameter_openapi_schema=form, enforce_parameter_schema=True)
            client.update_deployment(deployment.id, update)


def check_parameters() -> dict[str, Any]:
    """Step of prefect.yaml at the start of a run: refuse parameters that its flow does not take.

    The server has let them pass by a form that Prefect's command has deployed, which is closed now.
    Prefect's engine would crash.

    Raises:
        Abort: The run has ended, with the reason in a line.
    """
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(os.environ["PREFECT__FLOW_RUN_ID"]))
        if flow_run.deployment_id is None:
            return {}
        deployment = client.read_deployment(flow_run.deployment_id)
        schema = deployment.parameter_openapi_schema
        if not schema:
            return {}
        form = closed(schema)
        if form != schema:
            client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=form))
        known = form["propertyNames"]["enum"]
        unknown = [repr(name) for name in sorted({*flow_run.parameters} - {*known})]
        if not unknown:
            return {}
        message = f"{deployment.name} takes no {' and no '.join(unknown)}, but {', '.join(known)}"
        if "settings" in known:
            message += "; settings of params.yaml go into settings, by dotted name"
        state = failed_state(EXIT_USER_ERROR, message)
        client.set_flow_run_state(flow_run.id, told(state), force=True)
    raise Abort(message)


def require_own_names(client: SyncPrefectClient, workspace: Path) -> None:
    """Refuse names of deployments that those of another workspace on this server have: it would
    lose its schedules.

    On the workspace's own server they are those of the folder that it was in before it was moved,
    and are deleted.

    Raises:
        ConfigError: names the other workspace.
    """
    is_own = os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL") == embedded_database(workspace)
    slug = workspace_slug(workspace)
    for deployment in _our_deployments(client, None if is_own else f"-{slug}"):
        owner = deployment.parameters.get("workspace")
        if not owner or os.path.realpath(owner) == os.path.realpath(workspace):
            continue
        if is_own:
            client.delete_deployment(deployment.id)
        elif workspace_slug(Path(owner)) == slug:
            raise ConfigError(
                f"the deployment {deployment.name} on this Prefect server belongs to the workspace {owner}; rename the "
                f"folder {workspace}, use another server, or, if that workspace is gone, delete its deployments "
                f"(`prefect deployment ls`, `prefect deployment delete FLOW/{deployment.name}`)"
            )


def claim_names(directory: str) -> dict[str, Any]:
    """Step of prefect.yaml: return the workspace's name and its jobs' settings, if it may use the name.

    Raises:
        SystemExit: the names are taken. Prefect would print forty lines of tracebacks around any
            other error.
    """
    with get_client(sync_client=True) as client:
        try:
            require_own_names(client, Path(directory))
        except ConfigError as error:
            raise SystemExit(f"rlhf: {error}") from None
    return {"name": workspace_slug(Path(directory)), "settings": JOB_SETTINGS}


def deploy_all(workspace: Path, params: Params) -> None:
    """Create or update all work pools and deployments of a workspace: those of its jobs, and those
    of prefect.yaml.

    The latter, the workspace's own or the one of this project, with its schedules and Prefect's own
    command.

    Raises:
        RlhfError: a name belongs to another workspace, or the command fails; its output is in
            ``.rlhf/logs/deploy.log``.
    """
    deploy_jobs(workspace, params)
    ensure_deployed_pools(params)
    own = workspace / PREFECT_FILE
    file = own if own.is_file() else recipe_folder() / PREFECT_FILE
    arguments = ("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
    result = run_module(workspace, "prefect", *arguments, PWD=str(workspace))
    if result.exit_code:
        log = private_path(workspace, "logs", "deploy.log")
        log.write_text(result.stdout + result.stderr, encoding="utf-8")
        raise RlhfError(f"`prefect deploy --all` of {file} failed ({result.error_line}); see {log}")
    with get_client(sync_client=True) as client:
        close_forms(client, workspace)
