"""The base job templates of infra/pools: accepted by Prefect's server, complete for what stages ask
for, and made into jobs that Kubernetes' schema and Docker's client take.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.schema_tools.validation import is_valid_schema, validate
from prefect.utilities.templating import apply_values
from prefect.workers.base import BaseJobConfiguration

import rlhf_core
from flows.prefect_server.pools import check_requests
from rlhf_core.config.loading import check_params
from rlhf_core.config.operations import Placement
from rlhf_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
POOLS = {path.stem: path for path in (ROOT / "infra" / "pools").glob("*.json")}
TEMPLATES = {kind: json.loads(path.read_text()) for kind, path in POOLS.items()}
ASKED = {
    "gpus": 8,
    "cpus": "32",
    "memory": "512Gi",
    "shared_memory": "64Gi",
    "node_selector": {"gpu": "h100"},
    "time_limit_seconds": 3600,
    "image": "registry.example.org/rlhf:1",
    "variables": {"priority_class": "training"},
}


def job_of(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """What Prefect makes of a template: the defaults, then what a job asks for."""
    template = TEMPLATES[kind]
    validate(values, template["variables"], raise_on_error=True)
    defaults = BaseJobConfiguration._get_base_config_defaults(template["variables"]["properties"])
    return apply_values(template["job_configuration"], defaults | values)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_server_takes_the_template_and_every_variable_is_explained_and_used(kind: str) -> None:
    template = TEMPLATES[kind]
    WorkPoolCreate(name="cluster", type=kind, base_job_template=template)
    is_valid_schema(template["variables"])
    variables = template["variables"]["properties"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(variables)
    assert [name for name, variable in variables.items() if not variable["description"]] == []
    assert variables["image"]["default"] == f"rlhf-pipeline:{rlhf_core.__version__}-cuda"


def test_a_stage_may_ask_kubernetes_for_all_that_a_placement_has_and_docker_for_its_gpus() -> None:
    params = check_params(
        {
            "pools": {"ppo": {"pool": "cluster", **ASKED}},
            "compute": {"launch": {"ppo": {"processes": 8}}},
        }
    )
    own = set(Placement.model_fields)
    assert own & set(TEMPLATES["kubernetes"]["variables"]["properties"]) == set(ASKED) & own - {
        "variables"
    }

    def pool(kind: str) -> WorkPool:
        return WorkPool(name="cluster", type=kind, base_job_template=TEMPLATES[kind])

    check_requests(pool("kubernetes"), params)
    with pytest.raises(ConfigError, match="cpus, memory"):
        check_requests(pool("docker"), params)


def manifest_of(values: dict[str, Any]) -> dict[str, Any]:
    manifest = job_of("kubernetes", {"name": "ppo", **values})["job_manifest"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    container["args"] = ["prefect", "flow-run", "execute"]
    return manifest


@pytest.mark.parametrize("values", [{}, {k: v for k, v in ASKED.items() if k != "variables"}])
def test_kubernetes_takes_the_job_that_prefect_makes(values: dict[str, Any]) -> None:
    import kubernetes_validate

    manifest = manifest_of(values)
    pod = manifest["spec"]["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == values.get("gpus")
    assert pod.get("nodeSelector") == values.get("node_selector")
    assert manifest["spec"].get("activeDeadlineSeconds") == values.get("time_limit_seconds")
    # Prefect insists on both in the pod, where Kubernetes ignores them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    kubernetes_validate.validate(manifest, "1.33", strict=True)


@pytest.mark.parametrize("values", [{}, {"gpus": 2, "mem_limit": "64g", "shm_size": "16g"}])
def test_dockers_client_takes_what_prefect_passes_on(values: dict[str, Any]) -> None:
    from docker.types import HostConfig

    job = job_of("docker", values)
    extra = job["container_create_kwargs"]
    host = HostConfig("1.44", binds=job["volumes"], mem_limit=job.get("mem_limit"), **extra)
    assert host["DeviceRequests"][0]["Count"] == values.get("gpus", -1)
    assert host.get("ShmSize") == (16 * 2**30 if values else None)


CONFIGURATIONS = {
    "kubernetes": "KubernetesWorkerJobConfiguration",
    "docker": "DockerWorkerJobConfiguration",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_worker_of_the_kind_makes_a_job_of_it(kind: str) -> None:
    reason = (
        "workers of this kind are not installed (pip install prefect-kubernetes prefect-docker)"
    )
    worker = pytest.importorskip(f"prefect_{kind}.worker", reason=reason)
    values = {"gpus": 2, "env": {"ASKED": "1"}}
    configuration = asyncio.run(
        getattr(worker, CONFIGURATIONS[kind]).from_template_and_values(
            TEMPLATES[kind], values, client=object()
        )
    )
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), name="ppo", flow_id=uuid4()))
    made = json.dumps(configuration.model_dump(mode="json"))
    assert "ASKED" in made and "rlhf-pipeline:" in made and "{{" not in made
