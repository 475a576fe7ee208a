"""Signed versions: what was signed by the key goes through, and everything else is refused in one
line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from champion import champion_folder
from integration.registry.conftest import copy_workspace, make_policy, policy_name
from mlflow import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path

from flows.commands import run
from flows.commands.init import initialise
from flows.registry.client import connect, get_version
from flows.registry.promote import promote, rollback
from flows.registry.register import NotRegistered, register
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig, SignatureConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.storage.files import sha256_tree
from rlhf_extras.release.export import export
from rlhf_extras.signing import (
    CERTIFICATES_VARIABLE,
    KEY_VARIABLE,
    PASSWORD_VARIABLE,
    SIGNER_TAG,
    Signer,
    before_run,
    package_digest,
    registry_identity,
    verify_version,
)

model_signing = pytest.importorskip(
    "model_signing", reason="model-signing (the extra signing) is not installed"
)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``key.pem`` and ``other.pem`` with their public keys, ``locked.pem``: the first under a
    password.
    """
    folder = tmp_path_factory.mktemp("keys")
    for name in ("key", "other"):
        openssl(folder, *f"ecparam -name prime256v1 -genkey -noout -out {name}.pem".split())
        openssl(folder, *f"ec -in {name}.pem -pubout -out {name}.pub".split())
    openssl(
        folder,
        *["ec", "-in", "key.pem", "-aes256", "-passout", "pass:hidden", "-out", "locked.pem"],
    )
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
    (workspace / "params.yaml").write_text(
        "\n".join([*kept, f"registry: {{signature: {{{signature}}}}}"]) + "\n"
    )


@pytest.mark.slow
def test_a_signed_version_is_promoted_and_exported_with_a_signature_of_its_own(
    signing: Path, keys: Path, tmp_path: Path
) -> None:
    register(signing)
    assert promote(signing).promoted and champion_folder(signing).is_dir()
    export(signing, tmp_path / "released")
    verifier = model_signing.verifying.Config().use_elliptic_key_verifier(
        public_key=keys / "key.pub"
    )
    verifier.verify(tmp_path / "released", tmp_path / "released" / "model.sig")
    (tmp_path / "released" / "README.md").write_text("another card")
    with pytest.raises(ValueError, match=r"README\.md"):
        verifier.verify(tmp_path / "released", tmp_path / "released" / "model.sig")


@pytest.mark.slow
def test_files_that_were_changed_with_their_hash_are_refused(signing: Path) -> None:
    """Who can write to the registry can change the content's hash with the content, and cannot sign
    it.
    """
    register(signing)
    promote(signing)
    folder = champion_folder(signing)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    client, name = connect(signing), policy_name(signing)
    client.set_model_version_tag(name, "1", "content_sha256", sha256_tree(folder))
    with pytest.raises(
        ModelError, match=r"the signature of .* version 1 does not match .*content_sha256"
    ) as refused:
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
    with pytest.raises(ModelError, match=r"does not match registry\.signature"):
        register(signing)
    reward_model = load_section(signing, "registry", RegistryConfig).reward_model
    other = get_version(connect(signing), reward_model, "1").tags[SIGNER_TAG]
    monkeypatch.setenv(KEY_VARIABLE, str(keys / "locked.pem"))
    with pytest.raises(ConfigError, match=r"cannot read .*locked.pem"):
        register(signing)
    monkeypatch.setenv(PASSWORD_VARIABLE, "hidden")
    register(signing)
    assert get_version(connect(signing), reward_model, "1").tags[SIGNER_TAG] != other
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
    with pytest.raises(
        ConfigError, match=r"what .*key.pem signs does not match registry\.signature"
    ):
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
        (
            "key.pem",
            "public_key: key.pub, earlier_public_keys: [gone.pub]",
            "there is no file .*gone.pub",
        ),
        (None, "public_key: key.pub", f"{KEY_VARIABLE} names no private key"),
        ("gone.pem", "public_key: key.pub", f"{KEY_VARIABLE}: there is no file gone.pem"),
        ("locked.pem", "public_key: key.pub", "cannot read .*locked.pem"),
        ("locked.pem", "", "cannot read .*locked.pem"),
        (
            "other.pem",
            "public_key: key.pub",
            "what .*other.pem signs does not match registry.signature",
        ),
        ("key.pem", "public_key: locked.pem", "registry.signature: cannot use .*locked.pem"),
    ],
)
def test_a_run_whose_versions_could_not_be_signed_is_refused_before_it_starts_anything(
    tmp_path: Path,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    signature: str,
    message: str,
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
    assert Signer.of_environment() == Signer(
        keys / "key.pem", (keys / "key.pub", keys / "other.pub")
    )


@pytest.mark.slow
def test_a_signature_of_other_files_by_the_right_key_is_refused(signing: Path) -> None:
    register(signing)
    make_policy(signing, 7)
    register(signing)
    client, name = connect(signing), policy_name(signing)
    first, second = (get_version(client, name, number).run_id for number in ("1", "2"))
    stolen = client.download_artifacts(first, "signature/model.sig", str(signing))
    client.log_artifact(second, stolen, "signature")
    with pytest.raises(ModelError, match=r"version 2 does not match registry\.signature"):
        promote(signing)
    stolen = client.download_artifacts(first, "signature/statement.json", str(signing))
    client.log_artifact(second, stolen, "signature")
    with pytest.raises(ModelError, match=r"version 2 does not match .*version differ"):
        promote(signing)


@dataclass
class SignedVersion:
    """A signed champion as somebody finds it who can write to the registry and has no key."""

    workspace: Path
    client: MlflowClient
    name: str
    folder: Path

    @property
    def package(self) -> Path:
        return self.folder.parents[1]

    def replace_text(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def set_tag(self, key: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, "1", key, value)


def other_model(version: SignedVersion) -> None:
    """Another model with a signature of its own by the same key, that of its files alone."""
    (version.folder / "config.json").write_text("{}")
    signer = Signer.of_environment()
    assert signer is not None
    signer.sign(version.folder, version.workspace / "model.sig")
    run_id = version.client.get_model_version(version.name, "1").run_id
    version.client.log_artifact(run_id, str(version.workspace / "model.sig"), "signature")
    version.set_tag("content_sha256", sha256_tree(version.folder))


def hidden_file(version: SignedVersion) -> None:
    (version.folder / ".git").mkdir()
    (version.folder / ".git" / "config").write_text("x")
    version.set_tag("content_sha256", sha256_tree(version.folder))


def linked_folder(version: SignedVersion) -> None:
    (version.workspace / "elsewhere").mkdir()
    (version.folder / "original").symlink_to(version.workspace / "elsewhere")


TAMPERED: dict[str, tuple[Callable[[SignedVersion], object], str]] = {
    "another model with its signature": (other_model, r"registry\.signature"),
    "sampling": (
        lambda v: v.replace_text(v.package / "MLmodel", "max_new_tokens: 8", "max_new_tokens: 3"),
        "sampling",
    ),
    "code": (lambda v: (v.package / "model_pyfunc.py").write_text("print(1)"), "package_sha256"),
    "more code": (lambda v: (v.package / "later.py").write_text(""), "package_sha256"),
    "packages that are installed": (
        lambda v: (v.package / "requirements.txt").write_text("evil"),
        "package_sha256",
    ),
    "a hidden file": (hidden_file, "content_sha256"),
    "a folder by a link": (linked_folder, "is a link to a folder"),
    "what its gates said": (lambda v: v.set_tag("gates", "ungated"), "tags"),
    "the conditions of its gates": (lambda v: v.set_tag("gate_conditions", "{}"), "tags"),
    "its reward model": (lambda v: v.set_tag("reward_model_version", "7"), "tags"),
}


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lambda path: path.symlink_to("/nonexistent/later"), "a link to no file"),
        (lambda path: path.symlink_to(path.name), "a link to no file"),
        (lambda path: path.symlink_to(path.parent), "a link to a folder"),
        (os.mkfifo, "no plain file"),
    ],
)
@pytest.mark.parametrize("place", ["artifacts/model", "artifacts", ".", "artifacts/model/.hidden"])
def test_what_no_hash_covers_is_refused(
    plant: Callable[[Path], object], kind: str, place: str, tmp_path: Path
) -> None:
    folder = tmp_path / "artifacts" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    before = package_digest(folder)
    planted = tmp_path / place / "chat_template.jinja"
    planted.parent.mkdir(exist_ok=True)
    plant(planted)
    with pytest.raises(ModelError, match=kind) as refused:
        package_digest(folder)
    assert "\n" not in str(refused.value)
    planted.unlink()
    assert package_digest(folder) == before


def test_names_that_are_no_utf8_are_hashed_like_others(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "model"
    folder.mkdir(parents=True)
    digests = set()
    for name in (b"a", b"\xff", b"\xfe", b"\\xff"):
        for where in (folder, tmp_path):
            file = where / os.fsdecode(name)
            file.write_text("x")
            digests.add((sha256_tree(folder), package_digest(folder)))
            file.unlink()
    assert len(digests) == 8


@pytest.mark.slow
def test_whatever_is_changed_of_a_signed_version_it_is_refused(
    signing: Path, tmp_path: Path
) -> None:
    register(signing)
    assert promote(signing).promoted
    client, name, folder = connect(signing), policy_name(signing), champion_folder(signing)
    version = SignedVersion(signing, client, name, folder)
    run_folder = Path(
        local_file_uri_to_path(
            client.get_run(client.get_model_version(name, "1").run_id).info.artifact_uri
        )
    )
    tags = dict(client.get_model_version(name, "1").tags)
    shutil.copytree(version.package, tmp_path / "package")
    shutil.copytree(run_folder, tmp_path / "run")
    for what, (tamper, message) in TAMPERED.items():
        tamper(version)
        with pytest.raises(ModelError, match=message) as refused:
            champion_folder(signing)
        assert "\n" not in str(refused.value), what
        for kept, place in (
            (tmp_path / "package", version.package),
            (tmp_path / "run", run_folder),
        ):
            shutil.rmtree(place)
            shutil.copytree(kept, place)
        for key in ("content_sha256", "gates", "gate_conditions", "reward_model_version"):
            version.set_tag(key, tags[key])
        assert champion_folder(signing) == folder, what


@pytest.mark.slow
def test_no_alias_is_moved_to_a_version_that_is_not_signed_as_it_is(signing: Path) -> None:
    register(signing)
    client, name = connect(signing), policy_name(signing)
    client.set_model_version_tag(name, "1", "gates", "ungated")
    with pytest.raises(ModelError, match="tags differ"):
        config = load_section(signing, "registry", RegistryConfig)
        verify_version(client, signing, config, get_version(client, name, "1"), None)
    with pytest.raises(ModelError, match="tags differ"):
        promote(signing, force_reason="trial")
    assert "champion" not in client.get_registered_model(name).aliases


@pytest.mark.slow
def test_a_version_of_another_registry_is_refused_until_that_is_named(
    signing: Path, tmp_path: Path
) -> None:
    register(signing)
    assert promote(signing).promoted
    moved = tmp_path / "moved"
    shutil.copytree(signing, moved, symlinks=True)
    for workspace, name in ((moved, "of this host"), (moved, None)):
        registry = f", registry: {name}" if name else ""
        want(workspace, f"public_key: key.pub{registry}")
        with pytest.raises(
            ModelError,
            match=r"was signed for the registry sqlite:.*my workspace.*registry\.signature",
        ):
            champion_folder(workspace)
    want(moved, f"public_key: key.pub, registry: 'sqlite:///{signing / 'mlflow.db'}'")
    assert champion_folder(moved).is_dir()


def test_a_database_or_server_is_told_apart_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    for address, expected in (
        (
            "https://user:secret@mlflow.host:5000/base/?token=secret",
            "https://mlflow.host:5000/base",
        ),
        ("postgresql://user:secret@host/db", "postgresql://host/db"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        assert registry_identity(tmp_path, SignatureConfig()) == expected


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o660, 0o604])
def test_a_key_that_others_can_read_or_replace_is_refused(
    mode: int, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(keys / "key.pem", tmp_path)
    (tmp_path / "key.pem").chmod(mode)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match=f"has the mode {mode:o}.*chmod 600"):
        Signer.of_environment()


def test_a_key_of_another_kind_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl(tmp_path, *["genrsa", "-out", "rsa.pem", "2048"])
    openssl(tmp_path, *["rsa", "-in", "rsa.pem", "-pubout", "-out", "rsa.pub"])
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "rsa.pem"))
    for signature in (SignatureConfig(), SignatureConfig(public_key="rsa.pub")):
        with pytest.raises(
            ConfigError, match=r"rsa\.pem is not an elliptic-curve key; make one with"
        ):
            before_run(tmp_path, RegistryConfig(signature=signature))


@pytest.mark.slow
def test_certificates_lead_to_a_root(
    signing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    (tmp_path / "use").write_text(
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=codeSigning\n"
    )
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
        (
            "/nowhere/key.pem",
            "public_key: key.pub",
            f"{KEY_VARIABLE}: there is no file /nowhere/key.pem",
        ),
        (None, "public_key: gone.pub", "registry.signature: there is no file .*gone.pub"),
        (None, "public_key: params.yaml", "registry.signature: cannot use .*params.yaml"),
    ],
)
def test_a_missing_or_unusable_key_is_one_line(
    signing: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    signature: str,
    message: str,
) -> None:
    want(signing, signature)
    if variable is not None:
        monkeypatch.setenv(KEY_VARIABLE, variable)
    with pytest.raises(ConfigError, match=message) as refused:
        register(signing)
        promote(signing)
    assert "\n" not in str(refused.value)
