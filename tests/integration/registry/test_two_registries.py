"""What was signed for one MLflow server is refused by promote, serve and export of another."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run
from integration.registry.conftest import Backend, copy_workspace, policy_name, running_mlflow
from mlflow import MlflowClient

from flows.registry.client import OWNER_TAG, connect, get_version
from flows.registry.register import register
from rlhf_extras.signing import KEY_VARIABLE

pytest.importorskip("model_signing", reason="model-signing (the extra signing) is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.services]
USES = (
    ("promote",),
    ("promote", "--force", "--reason", "trial"),
    ("promote", "--version", "1", "--force", "--reason", "trial"),
    ("serve", "--port", "0"),
    ("serve", "--alias", "challenger", "--port", "0"),
    ("export", "out"),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two servers, which know nothing of each other."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with running_mlflow(folders[0]) as first, running_mlflow(folders[1]) as second:
        yield first, second


def replay(source: MlflowClient, target: MlflowClient, name: str, folder: Path) -> None:
    """Put version 1 of a server, with files, signature and tags, as version 1 into another.

    Whoever does that can write to both, and has no key.
    """
    version = get_version(source, name, "1")
    run_id = target.create_run(target.create_experiment("replayed")).info.run_id
    signature = source.download_artifacts(str(version.run_id), "signature", str(folder))
    target.log_artifacts(run_id, signature, "signature")
    from mlflow.artifacts import download_artifacts

    package = download_artifacts(
        artifact_uri=version.source,
        dst_path=str(folder / "package"),
        tracking_uri=source.tracking_uri,
    )
    (Path(package) / "registered_model_meta").unlink(missing_ok=True)
    target.log_artifacts(run_id, package, "model")
    # The record of decisions stays where it is: none was made there.
    tags = {OWNER_TAG: source.get_registered_model(name).tags[OWNER_TAG]}
    target.create_registered_model(name, tags=tags)
    copied = target.create_model_version(name, f"runs:/{run_id}/model", run_id, tags=version.tags)
    assert copied.version == version.version
    target.set_registered_model_alias(name, "challenger", "1")


def test_a_version_of_another_server_is_not_promoted_served_or_exported(
    finished: Path, tmp_path: Path, servers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    workspace = copy_workspace(finished, tmp_path / "my workspace")
    Backend(first).adopt(workspace, monkeypatch)
    for words in (
        "ecparam -name prime256v1 -genkey -noout -out key.pem",
        "ec -in key.pem -pubout -out workspace.pub",
    ):
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    os.chmod(tmp_path / "key.pem", 0o600)
    shutil.copy(tmp_path / "workspace.pub", workspace / "key.pub")
    params = workspace / "params.yaml"
    params.write_text(
        params.read_text().replace("registry: {", "registry: {signature: {public_key: key.pub}, ")
    )
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key.pem"))
    (tmp_path / "package").mkdir()
    register(workspace)
    name = policy_name(workspace)
    signed = connect(workspace)
    monkeypatch.delenv(KEY_VARIABLE)
    assert run("rlhf", "promote", cwd=workspace).returncode == 0
    other = MlflowClient(second)
    replay(signed, other, name, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", second)
    for words in USES:
        if words[0] != "promote":  # a champion is not promoted again
            other.set_registered_model_alias(name, "champion", "1")
        aliases = dict(other.get_registered_model(name).aliases)
        done = run("rlhf", *words, cwd=workspace)
        said = done.stderr.strip().splitlines()
        print(words, done.returncode, said, done.stdout.strip())
        assert done.returncode not in (0, 1), (words, done.stdout, done.stderr)
        refusal = f"{name} version 1 was signed for the registry {first}, and this one is {second}"
        assert sum(refusal in line for line in said) == 1, (words, done.stdout, done.stderr)
        assert not (workspace / "out").exists()
        assert other.get_registered_model(name).aliases == aliases
