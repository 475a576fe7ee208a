"""Servers with a certificate of a private authority: taken where its file is named, else refused
at once.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flows.prefect_server.services import connection_problem
from flows.registry.client import CA_VARIABLES, connect, knock
from rlhf_core.errors import RlhfError

LOOPBACK = "127.0.0.1"
OTHER_VARIABLES = (
    "MLFLOW_TRACKING_INSECURE_TLS",
    "PREFECT_API_SSL_CERT_FILE",
    "PREFECT_API_TLS_INSECURE_SKIP_VERIFY",
    "SSL_CERT_FILE",
)


@dataclass(frozen=True)
class PrivateServer:
    url: str
    authority: Path


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def write_certificate(folder: Path) -> Path:
    """A certificate of the loopback address with its key, signed by itself; it is its own
    authority.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "private")])
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    year = datetime.timedelta(days=365)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - year)
        .not_valid_after(now + year)
        .add_extension(addresses, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    (folder / "authority.pem").write_bytes(certificate.public_bytes(pem))
    return folder / "authority.pem"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateServer]:
    for name in (*CA_VARIABLES, *OTHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    authority = write_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority, tmp_path / "key.pem")
    http = ThreadingHTTPServer((LOOPBACK, 0), Healthy)
    http.socket = tls.wrap_socket(http.socket, server_side=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield PrivateServer(f"https://{LOOPBACK}:{http.server_address[1]}", authority)
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("variable", ["PREFECT_API_SSL_CERT_FILE", "SSL_CERT_FILE"])
def test_a_prefect_server_is_found_with_its_authority(
    server: PrivateServer, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = connection_problem(f"{server.url}/api")
    assert problem and "PREFECT_API_SSL_CERT_FILE" in problem
    monkeypatch.setenv(variable, str(server.authority))
    assert connection_problem(f"{server.url}/api") is None
    monkeypatch.setenv(variable, str(server.authority.with_name("gone.pem")))
    problem = connection_problem(f"{server.url}/api")
    assert problem and f"{variable} names" in problem
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "true")
    assert connection_problem(f"{server.url}/api") is None


@pytest.mark.parametrize("variable", CA_VARIABLES)
def test_an_mlflow_server_is_found_with_its_authority(
    server: PrivateServer, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        knock(server.url)
    monkeypatch.setenv(variable, str(server.authority))
    knock(server.url)
    monkeypatch.setenv(variable, str(server.authority.with_name("gone.pem")))
    with pytest.raises(FileNotFoundError, match=f"{variable} names .*gone.pem"):
        knock(server.url)
    monkeypatch.delenv(variable)
    monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    knock(server.url)


def test_a_certificate_that_is_not_trusted_is_named_at_once(
    server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow itself tries for minutes, and then says that the server does not answer."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    with pytest.raises(RlhfError, match=r"is not trusted .*MLFLOW_TRACKING_SERVER_CERT_PATH"):
        connect(tmp_path)
