"""Signatures of registered models: OpenSSF Model Signing with keys or certificates in files, without any network.

This module is a registry policy (:class:`flows.registry.policies.RegistryPolicy`), whose functions it has.

Whoever registers a version holds the private key, named by the environment. Whoever promotes, serves, exports or talks
to it needs only ``registry.signature``. Unlike the content hash of a version, which is a tag, a signature cannot be
made by those who can merely write to the registry.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.policies import KEY_VARIABLE
from rlhf_core.config.operations import RegistryConfig, SignatureConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.storage.files import sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient


PASSWORD_VARIABLE = "RLHF_SIGNING_KEY_PASSWORD"
CERTIFICATES_VARIABLE = "RLHF_SIGNING_CERTIFICATES"
SIGNATURE_NAME = "model.sig"
ARTIFACT_FOLDER = "signature"
SIGNER_TAG = "signer_sha256"
INSTALL = "pip install 'rlhf-pipeline[signing]'"


@dataclass(frozen=True)
class Signer:
    """A private key in a PEM file; with ``certificates``, its own certificate and those that lead to the root."""

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
        signer = cls(Path(os.path.expanduser(key)), certificates, os.environ.get(PASSWORD_VARIABLE, ""))
        for variable, paths in ((KEY_VARIABLE, [signer.private_key]), (CERTIFICATES_VARIABLE, certificates)):
            for path in paths:
                if not path.is_file():
                    raise ConfigError(f"{variable}: there is no file {path}")
        return signer

    def name_files(self) -> None:
        """Name the files by absolute paths in the environment, for processes that run in other folders."""
        os.environ[KEY_VARIABLE] = str(self.private_key.absolute())
        if self.certificates:
            os.environ[CERTIFICATES_VARIABLE] = os.pathsep.join(str(path.absolute()) for path in self.certificates)

    @property
    def id(self) -> str:
        """What tells this signer from another: a hash of its certificate, else of its public key."""
        from cryptography.hazmat.primitives import serialization

        if self.certificates:
            return sha256_file(self.certificates[0])
        try:
            key = serialization.load_pem_private_key(self.private_key.read_bytes(), self.password.encode() or None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{KEY_VARIABLE}: cannot read {self.private_key} ({_first_line(error)})") from error
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(key.public_key().public_bytes(serialization.Encoding.DER, form)).hexdigest()

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
                    certificate_chain=self.certificates[1:] or self.certificates,  # it cannot be empty
                )
            else:
                password = self.password.encode() or None  # what the library hands on must be bytes
                config.use_elliptic_key_signer(private_key=self.private_key, password=password)
            config.sign(folder, signature)
        except Exception as error:
            raise ConfigError(f"cannot sign with {self.private_key} ({_first_line(error)})") from error


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
    """Sign all files of an exported model, in ``model.sig``, where the environment names a signer."""
    signer = Signer.of_environment()
    if signer is not None:
        signer.sign(folder, folder / SIGNATURE_NAME)


def register_version(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Keep a signature of ``folder``, whose content was registered, beside the model in its registration run."""
    signer = Signer.of_environment()
    assert signer is not None, "a version without a signer has no tag that announces a signature"
    with tempfile.TemporaryDirectory() as temporary:
        signature = Path(temporary) / SIGNATURE_NAME
        signer.sign(folder, signature)
        client.log_artifact(run_id, str(signature), ARTIFACT_FOLDER)


def require_signer(config: SignatureConfig) -> Signer | None:
    """The signer of the environment; None where there is none and none is needed.

    Raises:
        ConfigError: Versions must be signed and the environment names no key, or the library is not installed.
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
    """Sign and verify a folder as a run will do with its models, and let the run's processes find the signer's files.

    Raises:
        ConfigError: Versions cannot be signed so that ``registry.signature`` accepts them.
    """
    signer = require_signer(config.signature)
    if signer is None:
        return
    signer.name_files()
    with tempfile.TemporaryDirectory() as temporary:
        folder, signature = Path(temporary, "model"), Path(temporary, SIGNATURE_NAME)
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
    client: MlflowClient, workspace: Path, config: RegistryConfig, label: str, run_id: str | None, folder: Path
) -> None:
    """Check the signature of a version whose registration run is ``run_id``, where ``registry.signature`` wants one.

    Raises:
        ModelError: It has none, or it is not that of these files by the holder of the key.
        ConfigError: A key or certificate of ``registry.signature`` is missing or unusable.
    """
    if not config.signature.required:
        return
    verifiers = _verifiers(workspace, config.signature)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            signature = client.download_artifacts(str(run_id), f"{ARTIFACT_FOLDER}/{SIGNATURE_NAME}", temporary)
        except Exception as error:
            raise ModelError(
                f"{label} has no signature, and registry.signature wants one; register it again with {KEY_VARIABLE} set"
            ) from error
        refusals = [refusal for verifier in verifiers if (refusal := _refusal(verifier, folder, Path(signature)))]
        if len(refusals) == len(verifiers):
            raise ModelError(
                f"the signature of {label} does not match registry.signature ({_first_line(refusals[0])}); "
                "it is not used: register the model again, or roll back"
            ) from refusals[0]


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
                verifiers.append(verifier.use_elliptic_key_verifier(public_key=path))
            else:
                verifiers.append(verifier.use_certificate_verifier(certificate_chain=paths))
        except Exception as error:
            raise ConfigError(f"registry.signature: cannot use {path} ({_first_line(error)})") from error
    return verifiers


def _refusal(verifier: Any, folder: Path, signature: Path) -> Exception | None:
    """Why a signature is not one of these files; None if it is."""
    try:
        verifier.verify(folder, signature)
    except Exception as error:
        return error
    return None


def _every_file(library: Any, ignored: Sequence[str] = ()) -> Any:
    """All files of a folder but git's own, by their SHA-256; DVC may have linked them from its cache."""
    hashing = library.hashing.Config().set_allow_symlinks(True)
    return hashing.set_ignored_paths(paths=ignored, ignore_git_paths=True)  # as the library's own command does


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
