"""What was signed for one MLflow server is refused by every command that uses it from another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from integration.registry.conftest import (
    Backend,
    copy_workspace,
    make_policy,
    policy_name,
    running_mlflow,
)
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from unit.flows.registry.conftest import ScriptedMatch

from flows.cli import main
from flows.registry.client import OWNER_TAG, connect, get_version
from flows.registry.history import LEDGER_TAG
from flows.registry.promote import promote
from flows.registry.register import register
from rlhf_extras.signing import KEY_VARIABLE

pytest.importorskip("model_signing", reason="model-signing (the extra signing) is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(3000)]
# What is asked of the other server, and which version that would use.
USES = (
    (("promote", "--version", "1", "--force", "--reason", "trial"), "1"),
    (("rollback", "--reason", "trial"), "1"),
    (("rollback", "--to", "1", "--reason", "trial"), "1"),
    (("serve", "--port", "0"), "2"),
    (("serve", "--alias", "challenger", "--port", "0"), "2"),
    (("serve", "--version", "1", "--port", "0"), "1"),
    (("serve", "--run", "{run}", "--port", "0"), "1"),
    (("chat",), "2"),
    (("export", "out"), "2"),
    (("export", "out", "--version", "1"), "1"),
    (("export", "out", "--version", "1", "--force", "--reason", "trial"), "1"),
    (("init", "next", "--no-probe", "--from", "."), "2"),
    (("init", "next", "--no-probe", "--from", ".@challenger"), "2"),
    (("init", "next", "--no-probe", "--from", ".@previous"), "1"),
)
# A champion is not promoted again.
WITHOUT_CHAMPION = (
    (("promote",), "2"),
    (("promote", "--force", "--reason", "trial"), "2"),
    (("promote", "--version", "1", "--force", "--reason", "trial"), "1"),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two servers, which know nothing of each other."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with running_mlflow(folders[0]) as first, running_mlflow(folders[1]) as second:
        yield first, second


def replay(source: MlflowClient, target: MlflowClient, name: str, folder: Path) -> dict[str, str]:
    """Put a model of a server, with files, signatures, tags, history and aliases, into another.

    Whoever does that can write to both, and has no key. Returns the runs of the new versions.
    """
    model = source.get_registered_model(name)
    ledger = target.create_run(target.create_experiment("history")).info.run_id
    for key, value in source.get_run(model.tags[LEDGER_TAG]).data.params.items():
        target.log_param(ledger, key, value)
    target.create_registered_model(name, tags={**model.tags, LEDGER_TAG: ledger})
    runs = {}
    for number in ("1", "2"):
        version = get_version(source, name, number)
        run_id = target.create_run(target.create_experiment(f"replayed {number}")).info.run_id
        place = folder / number
        place.mkdir()
        signature = source.download_artifacts(str(version.run_id), "signature", str(place))
        target.log_artifacts(run_id, signature, "signature")
        package = download_artifacts(
            artifact_uri=version.source,
            dst_path=str(place / "package"),
            tracking_uri=source.tracking_uri,
        )
        (Path(package) / "registered_model_meta").unlink(missing_ok=True)
        target.log_artifacts(run_id, package, "model")
        copied = target.create_model_version(
            name, f"runs:/{run_id}/model", run_id, tags=version.tags
        )
        assert copied.version == version.version
        runs[number] = run_id
    for alias, number in {**model.aliases, "challenger": "2"}.items():
        target.set_registered_model_alias(name, alias, number)
    return runs


@pytest.fixture
def replayed(
    finished: Path, tmp_path: Path, servers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, dict[str, str]]:
    """A workspace whose two signed versions have been champions of the first server, and are now
    asked of the second; their model, and their runs there.
    """
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
    for reason in ("", "trial"):
        if reason:
            make_policy(workspace, 7)
        with monkeypatch.context() as signing:
            signing.setenv(KEY_VARIABLE, str(tmp_path / "key.pem"))
            register(workspace)
        assert promote(workspace, force_reason=reason or None, play=ScriptedMatch(0.5)).promoted
    name = policy_name(workspace)
    runs = replay(connect(workspace), MlflowClient(second), name, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", second)
    return workspace, name, runs


@dataclass(frozen=True)
class Other:
    """The second server, as a workspace's commands see it."""

    servers: tuple[str, str]
    workspace: Path
    name: str
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def refuses(self, words: tuple[str, ...], number: str) -> None:
        """A command says once which server a version was signed for, and changes nothing."""
        first, second = self.servers
        client = MlflowClient(second)
        before = client.get_registered_model(self.name)
        self.patch.chdir(self.workspace)
        self.patch.setattr(sys, "argv", ["rlhf", *words])
        self.patch.setattr(sys, "stdin", StringIO("what colour is the sky?\n"))
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = self.capsys.readouterr()
        assert ended.value.code not in (None, 0, 1), (words, said)
        refusal = f"{self.name} version {number} was signed for the registry {first}, and this one is {second}"
        assert sum(refusal in line for line in said.err.splitlines()) == 1, (words, said)
        assert not list(self.workspace.glob("out*")) + list(self.workspace.glob("next*")), words
        after = client.get_registered_model(self.name)
        assert (after.aliases, after.tags) == (before.aliases, before.tags), words


def test_a_version_of_another_server_is_not_used_by_any_command(
    replayed: tuple[Path, str, dict[str, str]],
    servers: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workspace, name, runs = replayed
    other = Other(servers, workspace, name, monkeypatch, capsys)
    for words, number in USES:
        other.refuses(tuple(word.format(run=runs["1"]) for word in words), number)
    client = MlflowClient(servers[1])
    client.delete_registered_model_alias(name, "champion")
    for key in client.get_registered_model(name).tags:
        if key != OWNER_TAG:
            client.delete_registered_model_tag(name, key)
    for words, number in WITHOUT_CHAMPION:
        other.refuses(words, number)
