"""Signed versions: what was signed by the key goes through, and everything else is refused in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from champion import champion_folder
from integration.registry.conftest import copy_workspace, make_policy, policy_name

from flows.commands import run
from flows.commands.init import initialise
from flows.registry.aliases import get_version
from flows.registry.client import connect
from flows.registry.promote import promote, rollback
from flows.registry.register import NotRegistered, register
from flows.release.export import export
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.storage.files import sha256_tree
from rlhf_extras.signing import (
    CERTIFICATES_VARIABLE,
    KEY_VARIABLE,
    PASSWORD_VARIABLE,
    SIGNER_TAG,
    Signer,
    before_run,
)

model_signing = pytest.importorskip("model_signing", reason="model-signing (the extra signing) is not installed")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``key.pem`` and ``other.pem`` with their public keys, ``locked.pem``: the first under a password."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("key", "other"):
        openssl(folder, *f"ecparam -name prime256v1 -genkey -noout -out {name}.pem".split())
        openssl(folder, *f"ec -in {name}.pem -pubout -out {name}.pub".split())
    openssl(folder, *["ec", "-in", "key.pem", "-aes256", "-passout", "pass:hidden", "-out", "locked.pem"])
    return folder


@pytest.fixture
def signing(finished: Path, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace that wants signatures of ``key.pem``, in an environment that names it."""
    workspace = copy_workspace(finished, tmp_path / "my workspace")
    shutil.copy(keys / "key.pub", workspace)
    want(workspace, "public_key: key.pub")
    monkeypatch.setenv(KEY_VARIABLE, str(keys / "key.pem"))
    return workspace


def want(workspace: Path, signature: str) -> None:
    lines = (workspace / "params.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("registry:")]
    (workspace / "params.yaml").write_text("\n".join([*kept, f"registry: {{signature: {{{signature}}}}}"]) + "\n")


@pytest.mark.slow
def test_a_signed_version_is_promoted_and_exported_with_a_signature_of_its_own(
    signing: Path, keys: Path, tmp_path: Path
) -> None:
    register(signing)
    assert promote(signing).promoted and champion_folder(signing).is_dir()
    export(signing, tmp_path / "released")
    verifier = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys / "key.pub")
    verifier.verify(tmp_path / "released", tmp_path / "released" / "model.sig")
    (tmp_path / "released" / "README.md").write_text("another card")
    with pytest.raises(ValueError, match=r"README\.md"):
        verifier.verify(tmp_path / "released", tmp_path / "released" / "model.sig")


@pytest.mark.slow
def test_files_that_were_changed_with_their_hash_are_refused(signing: Path) -> None:
    """Who can write to the registry can change the content's hash with the content, and cannot sign it."""
    register(signing)
    promote(signing)
    folder = champion_folder(signing)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    client, name = connect(signing), policy_name(signing)
    client.set_model_version_tag(name, "1", "content_sha256", sha256_tree(folder))
    with pytest.raises(ModelError, match=r"the signature of .* version 1 does not match .*config.json") as refused:
        champion_folder(signing)
    assert "\n" not in str(refused.value)
    want(signing, "")
    assert champion_folder(signing) == folder, "without registry.signature only the hash counts"


@pytest.mark.slow
def test_a_version_without_a_signature_is_not_promoted_and_is_signed_when_it_is_registered_again(
    signing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want(signing, "")
    with pytest.MonkeyPatch.context() as without:
        without.delenv(KEY_VARIABLE)
        register(signing)
    want(signing, "public_key: key.pub")
    with pytest.raises(ModelError, match="version 1 has no signature"):
        promote(signing)
    with pytest.raises(NotRegistered):
        register(signing, known_only=True)  # it has to be signed
    assert register(signing).registered[policy_name(signing)].reused
    assert promote(signing).promoted and register(signing, known_only=True).registered
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} names no private key"):
        register(signing)


@pytest.mark.slow
def test_the_signature_of_another_key_is_refused_until_the_right_one_signs(
    signing: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(keys / "other.pem"))
    register(signing)
    other = get_version(connect(signing), policy_name(signing), "1").tags[SIGNER_TAG]
    with pytest.raises(ModelError, match=r"does not match registry\.signature"):
        promote(signing)
    monkeypatch.setenv(KEY_VARIABLE, str(keys / "locked.pem"))
    with pytest.raises(ConfigError, match=r"cannot read .*locked.pem"):
        register(signing)
    monkeypatch.setenv(PASSWORD_VARIABLE, "hidden")
    register(signing)
    assert get_version(connect(signing), policy_name(signing), "1").tags[SIGNER_TAG] != other
    assert promote(signing).promoted


@pytest.mark.slow
def test_versions_of_an_earlier_key_are_used_on_while_a_new_one_signs(
    signing: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(signing)
    assert promote(signing).promoted
    shutil.copy(keys / "other.pub", signing)
    want(signing, "public_key: other.pub")
    with pytest.raises(ModelError, match=r"version 1 does not match registry\.signature"):
        champion_folder(signing)
    want(signing, "public_key: other.pub, earlier_public_keys: [key.pub]")
    assert champion_folder(signing).is_dir()
    with pytest.raises(ConfigError, match=r"what .*key.pem signs does not match registry\.signature"):
        before_run(signing, load_section(signing, "registry", RegistryConfig))
    monkeypatch.setenv(KEY_VARIABLE, str(keys / "other.pem"))
    before_run(signing, load_section(signing, "registry", RegistryConfig))
    make_policy(signing, 7)
    register(signing)
    assert promote(signing, force_reason="trial").promoted
    rollback(signing, reason="trial")
    (champion_folder(signing) / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="version 1"):
        champion_folder(signing)


@pytest.mark.parametrize(
    ("key", "signature", "message"),
    [
        ("key.pem", "public_key: key.pub, earlier_public_keys: [gone.pub]", "there is no file .*gone.pub"),
        (None, "public_key: key.pub", f"{KEY_VARIABLE} names no private key"),
        ("gone.pem", "public_key: key.pub", f"{KEY_VARIABLE}: there is no file gone.pem"),
        ("locked.pem", "public_key: key.pub", "cannot sign with .*locked.pem"),
        ("locked.pem", "", "cannot sign with .*locked.pem"),
        ("other.pem", "public_key: key.pub", "what .*other.pem signs does not match registry.signature"),
        ("key.pem", "public_key: locked.pem", "registry.signature: cannot use .*locked.pem"),
    ],
)
def test_a_run_whose_versions_could_not_be_signed_is_refused_before_it_starts_anything(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, signature: str, message: str
) -> None:
    monkeypatch.chdir(keys)
    workspace = initialise(tmp_path / "ws", "smoke", [f"registry.signature={{{signature}}}"])
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    monkeypatch.setattr(run, "require_ready", lambda _: None)
    monkeypatch.setattr(run, "PipelineRun", lambda *_: pytest.fail("the run was started"))
    with pytest.raises(ConfigError, match=message) as refused:
        run.run(workspace)
    assert "\n" not in str(refused.value)


def test_a_key_is_found_by_processes_in_other_folders(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(keys)
    monkeypatch.setenv(KEY_VARIABLE, "key.pem")
    monkeypatch.setenv(CERTIFICATES_VARIABLE, os.pathsep.join(["key.pub", "other.pub"]))
    signer = Signer.of_environment()
    assert signer is not None
    signer.name_files()
    monkeypatch.chdir(tmp_path)
    assert Signer.of_environment() == Signer(keys / "key.pem", (keys / "key.pub", keys / "other.pub"))


@pytest.mark.slow
def test_a_signature_of_other_files_by_the_right_key_is_refused(signing: Path) -> None:
    register(signing)
    make_policy(signing, 7)
    register(signing)
    client, name = connect(signing), policy_name(signing)
    first, second = (get_version(client, name, number).run_id for number in ("1", "2"))
    stolen = client.download_artifacts(first, "signature/model.sig", str(signing))
    client.log_artifact(second, stolen, "signature")
    with pytest.raises(ModelError, match=r"version 2 does not match .*model.safetensors"):
        promote(signing)


@pytest.mark.slow
def test_certificates_lead_to_a_root(signing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root_request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30"
    for root in ("root", "foreign"):
        use = ["-addext", "keyUsage=critical,keyCertSign"]
        openssl(
            tmp_path,
            *root_request.split(),
            "-subj",
            f"/CN={root}",
            *use,
            "-keyout",
            f"{root}.key",
            "-out",
            f"{root}.pem",
        )
    (tmp_path / "use").write_text("keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning\n")
    request = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=ci -keyout ci.key -out ci.csr"
    openssl(tmp_path, *request.split())
    issue = "x509 -req -in ci.csr -CA root.pem -CAkey root.key -CAcreateserial -days 30 -extfile use -out ci.pem"
    openssl(tmp_path, *issue.split())
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "ci.key"))
    monkeypatch.setenv(CERTIFICATES_VARIABLE, str(tmp_path / "ci.pem"))
    want(signing, f"certificates: ['{tmp_path / 'root.pem'}']")
    register(signing)
    assert promote(signing, dry_run=True).promoted
    want(signing, f"certificates: ['{tmp_path / 'foreign.pem'}']")
    with pytest.raises(ModelError, match=r"does not match registry\.signature"):
        promote(signing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "signature", "message"),
    [
        ("/nowhere/key.pem", "public_key: key.pub", f"{KEY_VARIABLE}: there is no file /nowhere/key.pem"),
        (None, "public_key: gone.pub", "registry.signature: there is no file .*gone.pub"),
        (None, "public_key: params.yaml", "registry.signature: cannot use .*params.yaml"),
    ],
)
def test_a_missing_or_unusable_key_is_one_line(
    signing: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, signature: str, message: str
) -> None:
    want(signing, signature)
    if variable is not None:
        monkeypatch.setenv(KEY_VARIABLE, variable)
    with pytest.raises(ConfigError, match=message) as refused:
        register(signing)
        promote(signing)
    assert "\n" not in str(refused.value)
