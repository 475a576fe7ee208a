"""MLflow's webhooks: a promotion reaches a receiver, signed with the secret of the webhook."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from integration.registry.conftest import policy_name
from integration.registry.test_promotion import ScriptedMatch
from scripted_server import serving

from flows.registry.client import connect
from flows.registry.promote import promote

pytestmark = pytest.mark.services
SECRET = "a secret of this test"
SECONDS = 120


@dataclass(frozen=True)
class Receiver:
    """The address of an HTTP server on loopback, and what was posted to it."""

    url: str
    received: queue.Queue[tuple[Mapping[str, str], bytes]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    received: queue.Queue[tuple[Mapping[str, str], bytes]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with serving(Handler) as address:
        yield Receiver(f"{address}/champion", received)


def is_signed(headers: Mapping[str, str], body: bytes) -> bool:
    """As docs/operations.md has it."""
    signed = f"{headers['X-MLflow-Delivery-Id']}.{headers['X-MLflow-Timestamp']}.".encode() + body
    digest = hmac.new(SECRET.encode(), signed, hashlib.sha256).digest()
    return hmac.compare_digest(
        headers["X-MLflow-Signature"], f"v1,{base64.b64encode(digest).decode()}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["server"], indirect=True)
def test_a_promotion_reaches_the_receiver_of_a_webhook(contest: Path, receiver: Receiver) -> None:
    client = connect(contest)
    webhook = client.create_webhook(
        "champion", receiver.url, ["model_version_alias.created"], secret=SECRET
    )
    try:
        promote(contest, play=ScriptedMatch(judge=0.9))
        while True:
            headers, body = receiver.received.get(timeout=SECONDS)
            assert is_signed(headers, body) and not is_signed(headers, body + b" ")
            message = json.loads(body)
            assert (message["entity"], message["action"]) == ("model_version_alias", "created")
            if (message["data"]["name"], message["data"]["alias"]) == (
                policy_name(contest),
                "champion",
            ):
                break
        assert message["data"]["version"] == "2"
    finally:
        client.delete_webhook(webhook.webhook_id)
