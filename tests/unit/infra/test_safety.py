"""No secret in a file, nothing listens beyond loopback by itself, nothing runs as root, everything is pinned."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from unit.infra import places

import rlhf_core

USER = 10001
SECRETS = {"PASSWORD", "SECRET", "TOKEN", "AUTH", "ACCESS_KEY"}


def test_examples_hold_no_value_for_a_secret() -> None:
    for path in (places.UNTRIED / ".env.example", places.KUBERNETES / "secrets.env.example"):
        rows = re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE)
        secret = [(name, value) for name, value in rows if any(word in name for word in SECRETS)]
        assert len(secret) >= 4 and not [name for name, value in secret if value]


def test_secrets_reach_containers_by_reference_only() -> None:
    job = places.template()["job_configuration"]["job_manifest"]
    pods = [places.pod(m) for _, m in places.manifests() if m["kind"] in ("Deployment", "Job")] + [places.pod(job)]
    for entry in (entry for pod in pods for entry in pod["containers"][0]["env"]):
        names_one = any(word in entry["name"] for word in SECRETS) and not entry["name"].endswith(("_NAME", "_KEY"))
        assert "value" not in entry or not names_one
    for name, service in places.services().items():
        for key, value in service.get("environment", {}).items():
            if any(word in key for word in SECRETS):
                assert re.fullmatch(r"\$\{[A-Z_]+(:\?.*|:-)\}", value), f"{name} {key}"


def test_git_and_image_leave_filled_in_secrets_out() -> None:
    ignored = (places.ROOT / ".gitignore").read_text().splitlines()
    assert {"/infra/untried/.env", "/infra/untried/kubernetes/*.env", "!/infra/untried/kubernetes/settings.env"} <= set(
        ignored
    )
    lines = (places.ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*" and {"infra/untried/.env", "infra/untried/kubernetes/secrets.env"} <= set(lines)


def test_the_image_is_built_from_files_that_exist() -> None:
    lines = (places.ROOT / ".dockerignore").read_text().splitlines()
    wanted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert wanted and all((places.ROOT / name).exists() for name in wanted)
    built_from = tomllib.loads((places.ROOT / "pyproject.toml").read_text())
    assert {built_from["project"]["readme"], *built_from["project"]["license-files"]} <= set(wanted)
    data = built_from["tool"]["setuptools"]["data-files"]
    assert {name.split("/")[0] for names in data.values() for name in names} <= set(wanted)


def test_published_ports_are_on_loopback_unless_somebody_says_otherwise() -> None:
    ports = [port for service in places.services().values() for port in service.get("ports", [])]
    assert len(ports) == 3 and all(port.startswith("${RLHF_BIND:-127.0.0.1}:") for port in ports)
    assert "RLHF_BIND=127.0.0.1\n" in (places.UNTRIED / ".env.example").read_text()


def test_every_lasting_service_has_a_health_check_and_its_volumes_are_named() -> None:
    document = places.documents(places.COMPOSE[0])[0]
    for name, service in document["services"].items():
        assert "healthcheck" in service or service.get("profiles"), name
    mounted = {v.split(":")[0] for s in document["services"].values() for v in s.get("volumes", [])}
    assert {volume for volume in mounted if not volume.startswith(".")} == set(document["volumes"])


@pytest.mark.parametrize(("where", "manifest"), [pytest.param(w, m, id=w) for w, m in places.manifests()])
def test_pods_run_without_root_and_without_privileges(where: str, manifest: dict[str, Any]) -> None:
    if manifest["kind"] in ("Deployment", "Job"):
        check_pod(places.pod(manifest))


def test_jobs_of_the_pool_run_without_root_and_without_privileges() -> None:
    check_pod(places.pod(places.template()["job_configuration"]["job_manifest"]))


def check_pod(pod: dict[str, Any]) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == USER
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_image_runs_as_the_user_that_the_pods_name() -> None:
    text = places.DOCKERFILE.read_text()
    assert f"USER {USER}:{USER}" in text and f"--uid {USER}" in text and f"--gid {USER}" in text


def test_images_are_pinned_by_tag_and_ours_by_version() -> None:
    text = places.DOCKERFILE.read_text()
    bases = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    assert {"cpu", "cuda"} <= stages
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert base in stages or base == "${PYTHON_IMAGE}"
    foreign = [s["image"] for s in places.services().values() if not s["image"].startswith("rlhf-pipeline")]
    for image in [*bases, *foreign]:
        assert re.search(r":v?\d+\.\d+(\.\d+)?", image), image
    ours = re.findall(r"rlhf-pipeline:([\w.]+)", "".join(p.read_text() for p in places.INFRA.rglob("*.*ml")))
    ours += re.findall(r"rlhf-pipeline:([\d.]+)", places.TEMPLATE.read_text() + text)
    assert set(ours) == {rlhf_core.__version__}


def test_the_images_own_lock_pins_every_extra_they_need_and_repeats_nothing() -> None:
    lines = (places.INFRA / "docker" / "requirements-cluster.lock").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    main = (places.ROOT / "requirements.lock").read_text().split()
    names = [Requirement(line).name.lower().replace("_", "-") for line in [*main, *lines]]
    assert len(names) == len(set(names))
    pins = dict(zip(names, [*main, *lines], strict=True))
    extras = tomllib.loads((places.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, [*extras["cluster"], *extras["gpu"], *extras["lora"]]):
        assert requirement.specifier.contains(pins[requirement.name.lower()].split("==")[1])
