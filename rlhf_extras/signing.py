"""Signatures of registered models: OpenSSF Model Signing with keys in files, without network.

This module is a registry policy (:class:`flows.registry.policies.RegistryPolicy`), whose functions
it has.

Whoever registers a version holds the private key, named by the environment. Whoever promotes,
serves, exports or talks to it needs only ``registry.signature``. Unlike the content hash of a
version, which is a tag, a signature cannot be made by those who can merely write to the registry.

What is signed is a statement about one version of one model in one registry: the hashes of its
files and of the code and settings that MLflow keeps beside them, the sampling that it was judged
with, what its gates said, and the version before it. It is compared with what is there at every use
of a version and before an alias points to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.client import CONTENT_TAG, SIGNED_TAGS, registry_address, versions
from flows.registry.policies import KEY_VARIABLE
from flows.registry.stored_models import REMEDY, own_package, stored_sampling
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig, SignatureConfig
from rlhf_core.errors import ConfigError, ModelError, is_full_disk
from rlhf_core.storage.files import full_disks, scratch_folder, sha256_file, sha256_tree

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


PASSWORD_VARIABLE = "RLHF_SIGNING_KEY_PASSWORD"
CERTIFICATES_VARIABLE = "RLHF_SIGNING_CERTIFICATES"
SIGNATURE_NAME, STATEMENT_NAME = "model.sig", "statement.json"
ARTIFACT_FOLDER = "signature"
SIGNER_TAG = "signer_sha256"
OPEN_TO_OTHERS = 0o027  # write for the group, anything for others
STATEMENT_BYTES = 1_000_000
NOT_ELLIPTIC = "is not an elliptic-curve key; make one with `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`"
INSTALL = "pip install 'rlhf-pipeline[signing]'"


@dataclass(frozen=True)
class Signer:
    """A private key in a PEM file, with its certificate and those that lead to the root, if any."""

    private_key: Path
    certificates: tuple[Path, ...] = ()
    password: str = ""

    @classmethod
    def of_environment(cls) -> Signer | None:
        """The signer that the environment names, None if it names none.

        Raises:
            ConfigError: A file that it names does not exist.
        """
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key:
            return None
        listed = os.environ.get(CERTIFICATES_VARIABLE, "").split(os.pathsep)
        certificates = tuple(Path(os.path.expanduser(path)) for path in listed if path.strip())
        signer = cls(
            Path(os.path.expanduser(key)), certificates, os.environ.get(PASSWORD_VARIABLE, "")
        )
        for variable, paths in (
            (KEY_VARIABLE, [signer.private_key]),
            (CERTIFICATES_VARIABLE, certificates),
        ):
            for path in paths:
                if not path.is_file():
                    raise ConfigError(f"{variable}: there is no file {path}")
        mode = signer.private_key.stat().st_mode & 0o777
        if mode & OPEN_TO_OTHERS:
            raise ConfigError(
                f"{KEY_VARIABLE}: {signer.private_key} has the mode {mode:o}, so that others can read or replace the "
                f"private key; make it yours alone: chmod 600 {signer.private_key}"
            )
        return signer

    def name_files(self) -> None:
        """Name the files by absolute paths in the environment, for processes in other folders."""
        os.environ[KEY_VARIABLE] = str(self.private_key.absolute())
        if self.certificates:
            os.environ[CERTIFICATES_VARIABLE] = os.pathsep.join(
                str(path.absolute()) for path in self.certificates
            )

    @property
    def id(self) -> str:
        """What tells signers apart: a hash of the certificate, else of the public key."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

        if self.certificates:
            return sha256_file(self.certificates[0])
        try:
            key = serialization.load_pem_private_key(
                self.private_key.read_bytes(), self.password.encode() or None
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{KEY_VARIABLE}: cannot read {self.private_key} ({_first_line(error)})"
            ) from error
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ConfigError(f"{KEY_VARIABLE}: {self.private_key} {NOT_ELLIPTIC}")
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(
            key.public_key().public_bytes(serialization.Encoding.DER, form)
        ).hexdigest()

    def sign(self, folder: Path, signature: Path) -> None:
        """Write a signature of all files of ``folder``, itself excepted if it lies there.

        Raises:
            ConfigError: The key or a certificate cannot be used.
        """
        library = _library()
        own = [signature.name] if signature.parent == folder else []
        config = library.signing.Config().set_hashing_config(_every_file(library, own))
        try:
            if self.certificates:
                config.use_certificate_signer(
                    private_key=self.private_key,
                    signing_certificate=self.certificates[0],
                    certificate_chain=self.certificates[1:]
                    or self.certificates,  # it cannot be empty
                )
            else:
                _ = self.id  # refuses a key that is not elliptic
                password = self.password.encode() or None  # what the library hands on must be bytes
                config.use_elliptic_key_signer(private_key=self.private_key, password=password)
            config.sign(folder, signature)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"cannot sign with {self.private_key} ({_first_line(error)})"
            ) from error


@dataclass(frozen=True)
class Statement:
    """What the holder of the key says about one version of a registered model.

    Attributes:
        registry: Where it is registered; see :func:`registry_identity`.
        model: Name of the registered model.
        version: Its number.
        content_sha256: Hash of the Hugging Face folder.
        package_sha256: Hash of everything that MLflow keeps beside that folder, its code among it.
        sampling: The settings that the model was judged with and is served with.
        tags: What the tags of the version say about its gates and the reward model behind it.
        predecessor: Number and content hash of the version before it, both empty for the first.
    """

    registry: str
    model: str
    version: str
    content_sha256: str
    package_sha256: str
    sampling: Mapping[str, Any]
    tags: Mapping[str, str]
    predecessor: tuple[str, str]

    @property
    def text(self) -> str:
        """The statement as it is signed: equal statements are equal texts."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, indent=1) + "\n"

    def differences(self, other: Statement) -> list[str]:
        """Names of what the two say differently."""
        own, others = json.loads(self.text), json.loads(other.text)
        return [name for name in own if own[name] != others[name]]


def registry_identity(workspace: Path, config: SignatureConfig) -> str:
    """What tells registries apart: ``registry.signature.registry``, else the address."""
    return registry_address(workspace) if config.registry is None else config.registry


def check_settings(workspace: Path, config: RegistryConfig) -> None:
    """Refuse a ``registry.signature`` that names a file which is not there."""
    key_files(workspace, config.signature)


def name_files() -> None:
    """Name the files of the environment's signer by absolute paths there, where it names one."""
    signer = Signer.of_environment()
    if signer is not None:
        signer.name_files()


def version_tags(config: RegistryConfig) -> dict[str, str]:
    """The tag that says by whom a version is signed; none where nobody signs."""
    signer = require_signer(config.signature)
    return {} if signer is None else {SIGNER_TAG: signer.id}


def export_folder(folder: Path) -> None:
    """Sign all files of an exported model, in ``model.sig``, if there is a signer."""
    signer = Signer.of_environment()
    if signer is not None:
        signer.sign(folder, folder / SIGNATURE_NAME)


def register_version(
    client: MlflowClient,
    workspace: Path,
    version: ModelVersion,
    content: str,
    tags: Mapping[str, str],
) -> None:
    """Keep a signed statement about a version in its registration run.

    Raises:
        ModelError: What the registry keeps is not what was registered here, so that nobody can
            vouch for it.
    """
    signer = Signer.of_environment()
    if signer is None:
        return
    config = load_section(workspace, "registry", RegistryConfig).signature
    number = int(version.version)
    earlier = [other for other in versions(client, version.name) if int(other.version) < number]
    before = (
        (str(earlier[0].version), earlier[0].tags.get(CONTENT_TAG, "")) if earlier else ("", "")
    )
    statement = statement_of(
        workspace, config, version, own_package(client, workspace, version), before
    )
    if (statement.content_sha256, statement.tags) != (content, signed_tags(tags)):
        raise ModelError(
            f"{version.name} version {number} is not signed: its files or tags in the registry are not the ones that "
            f"were registered; {REMEDY}"
        )
    with scratch_folder() as folder, scratch_folder() as beside:
        (folder / STATEMENT_NAME).write_text(statement.text, encoding="utf-8")
        signer.sign(folder, beside / SIGNATURE_NAME)
        for file in (folder / STATEMENT_NAME, beside / SIGNATURE_NAME):
            client.log_artifact(str(version.run_id), str(file), ARTIFACT_FOLDER)


def statement_of(
    workspace: Path,
    config: SignatureConfig,
    version: ModelVersion,
    folder: Path,
    predecessor: tuple[str, str],
) -> Statement:
    """What there is to say of a version, whose Hugging Face folder is ``folder``."""
    return Statement(
        registry=registry_identity(workspace, config),
        model=version.name,
        version=str(version.version),
        content_sha256=sha256_tree(folder),
        package_sha256=package_digest(folder),
        sampling=stored_sampling(folder),
        tags=signed_tags(version.tags),
        predecessor=predecessor,
    )


def package_digest(folder: Path) -> str:
    """A hash of all files that MLflow keeps of a model but those of its Hugging Face ``folder``.

    Raises:
        ModelError: One of them is a link to a folder or to nothing, or no file, such as a pipe: what
            could be there later is covered by no hash.
    """
    root, digest = folder.parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        kind = ""
        if path.is_symlink() and not path.is_file():
            kind = "a link to a folder" if path.is_dir() else "a link to no file"
        elif not path.is_dir() and not path.is_file():
            kind = "no plain file"
        if kind:
            shown = os.fsencode(path).decode("utf-8", "backslashreplace")
            raise ModelError(f"{shown} is {kind}, which a registered model has none of; {REMEDY}")
        # MLflow writes this one into what it downloads.
        is_of_package = path.name != "registered_model_meta" and not path.is_relative_to(folder)
        if is_of_package and path.is_file():
            name = os.fsencode(path.relative_to(root).as_posix())
            digest.update(name + f"\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def require_signer(config: SignatureConfig) -> Signer | None:
    """The signer of the environment; None where there is none and none is needed.

    Raises:
        ConfigError: Versions must be signed and the environment names no key, or the library is not
            installed.
    """
    signer = Signer.of_environment()
    if signer is None and config.required:
        raise ConfigError(
            f"registry.signature wants signed versions, and {KEY_VARIABLE} names no private key to sign with; set it "
            "where models are registered"
        )
    if signer is not None:
        _library()
    return signer


def before_run(workspace: Path, config: RegistryConfig) -> None:
    """Sign and verify a folder as a run will, and name the signer's files for its processes.

    Raises:
        ConfigError: Versions cannot be signed so that ``registry.signature`` accepts them.
    """
    signer = require_signer(config.signature)
    if signer is None:
        return
    signer.name_files()
    with scratch_folder() as temporary:
        folder, signature = temporary / "model", temporary / SIGNATURE_NAME
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        signer.sign(folder, signature)
        if not config.signature.required:
            return
        try:
            _verifiers(workspace, config.signature)[0].verify(folder, signature)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"what {signer.private_key} signs does not match registry.signature ({_first_line(error)}), so no "
                "version could be promoted; name the key that belongs to it"
            ) from error


def verify_version(
    client: MlflowClient,
    workspace: Path,
    config: RegistryConfig,
    version: ModelVersion,
    folder: Path | None,
) -> None:
    """Compare a version with what was signed about it, where ``registry.signature`` wants that.

    Without a ``folder`` it is compared with its record in the registry alone, as an alias needs
    that will point to it.

    Raises:
        ModelError: It has no signature, or that is about something else.
        ConfigError: A key or certificate of ``registry.signature`` is missing or unusable.
    """
    wanted = config.signature
    if not wanted.required:
        return
    signed = signed_statement(client, workspace, wanted, version)
    if folder is not None:
        found = statement_of(workspace, wanted, version, folder, signed.predecessor)
    else:
        found = replace(
            signed,
            registry=registry_identity(workspace, wanted),
            model=version.name,
            version=str(version.version),
            content_sha256=version.tags.get(CONTENT_TAG, ""),
            tags=signed_tags(version.tags),
        )
    require_stated(client, signed, found)


def signed_statement(
    client: MlflowClient, workspace: Path, config: SignatureConfig, version: ModelVersion
) -> Statement:
    """What the holder of the key of ``registry.signature`` says about a version.

    Raises:
        ModelError: The version has no statement, or it is not signed by that key.
        ConfigError: A key or certificate of ``registry.signature`` is missing or unusable.
    """
    label = f"{version.name} version {version.version}"
    verifiers = _verifiers(workspace, config)
    with scratch_folder() as downloads, scratch_folder() as folder:
        try:
            paths = []
            for name in (SIGNATURE_NAME, STATEMENT_NAME):
                file = client.download_artifacts(
                    str(version.run_id), f"{ARTIFACT_FOLDER}/{name}", str(downloads)
                )
                paths.append(Path(file))
            signature, stated = paths
            with stated.open("rb") as stream:
                text = stream.read(STATEMENT_BYTES).decode("utf-8")
        except Exception as error:
            full = full_disks(downloads)
            if full or is_full_disk(error):
                raise ModelError(
                    f"there is no room for the signature of {label}{full}; make some and run the command again"
                ) from error
            raise ModelError(
                f"{label} has no signature, and registry.signature wants one; register it again with {KEY_VARIABLE} set"
            ) from error
        (folder / STATEMENT_NAME).write_text(text, encoding="utf-8")
        refusals: list[Exception] = []
        for verifier in verifiers:
            try:
                verifier.verify(folder, signature)
            except Exception as error:
                refusals.append(error)
    if len(refusals) == len(verifiers):
        raise ModelError(
            f"the signature of {label} does not match registry.signature ({_first_line(refusals[0])}); "
            "it is not used: register the model again, or roll back"
        ) from refusals[0]
    try:
        values = json.loads(text)
        return Statement(**values | {"predecessor": tuple(values["predecessor"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(
            f"what was signed about {label} is no statement about a version; register it again"
        ) from error


def require_stated(client: MlflowClient, signed: Statement, found: Statement) -> None:
    """Compare what was ``signed`` about a version with what was ``found`` in the registry.

    Raises:
        ModelError: They differ, or the version before it is another than when it was signed.
    """
    label = f"{found.model} version {found.version}"
    if signed.registry != found.registry:
        raise ModelError(
            f"{label} was signed for the registry {signed.registry}, and this one is {found.registry}; if it has "
            "moved, set registry.signature.registry to the first"
        )
    differences = signed.differences(found)
    number, content = signed.predecessor
    if (
        number
        and "predecessor" not in differences
        and _content(client, found.model, number) not in (None, content)
    ):
        differences.append("predecessor")
    if differences:
        raise ModelError(
            f"the signature of {label} does not match what is in the registry ({', '.join(differences)} differ); "
            "it is not used: register the model again, or roll back"
        )


def signed_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Those tags of a version that its statement repeats."""
    return {key: tags[key] for key in SIGNED_TAGS if key in tags}


def _content(client: MlflowClient, model: str, number: str) -> str | None:
    """The content hash of a version; None where there is no such version any more."""
    from mlflow.exceptions import MlflowException

    try:
        tags: Mapping[str, str] = client.get_model_version(model, number).tags
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return tags.get(CONTENT_TAG, "")


def key_files(workspace: Path, config: SignatureConfig) -> list[Path]:
    """Return the files that ``registry.signature`` names.

    Raises:
        ConfigError: One of them is not there.
    """
    names = (config.public_key, *config.earlier_public_keys, *config.certificates)
    paths = [workspace / Path(os.path.expanduser(path)) for path in names if path]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"registry.signature: there is no file {path}")
    return paths


def _verifiers(workspace: Path, config: SignatureConfig) -> list[Any]:
    """One for each key, of which the first signs now, or one for the certificates."""
    paths = key_files(workspace, config)
    library = _library()
    verifiers = []
    for path in paths if config.public_key else paths[:1]:
        verifier = library.verifying.Config().set_hashing_config(_every_file(library))
        try:
            if config.public_key:
                _require_elliptic(path)
                verifiers.append(verifier.use_elliptic_key_verifier(public_key=path))
            else:
                verifiers.append(verifier.use_certificate_verifier(certificate_chain=paths))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"registry.signature: cannot use {path} ({_first_line(error)})"
            ) from error
    return verifiers


def _require_elliptic(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    key = serialization.load_pem_public_key(path.read_bytes())
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(f"registry.signature: {path} {NOT_ELLIPTIC}")


def _every_file(library: Any, ignored: Sequence[str] = ()) -> Any:
    """All files of a folder but git's own, by their SHA-256, through the links of DVC's cache."""
    hashing = library.hashing.Config().set_allow_symlinks(True)
    return hashing.set_ignored_paths(
        paths=ignored, ignore_git_paths=True
    )  # as the library's own command does


def _library() -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise ConfigError(f"signatures need model-signing and pyOpenSSL: {INSTALL}") from error
    return model_signing


def _first_line(error: Exception) -> str:
    """What the library says, without the bytes of hashes."""
    text = re.sub(r": Expected '.*", "", " ".join(str(error).split()))
    return text[:200] or type(error).__name__
