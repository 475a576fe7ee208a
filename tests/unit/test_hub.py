"""A hub that does not answer is refused in one line and within the time limit, before the library
begins to retry.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from flows.prefect_server.services import free_port
from rlhf_core import hub
from rlhf_core.data.collection.sources import load_hub_records
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.causal_lm import load_policy


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    return monkeypatch


def test_models_and_data_of_a_hub_that_is_away(online: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    online.setattr(constants, "ENDPOINT", address)
    with pytest.raises(
        ModelError, match=rf"^owner/name cannot be loaded: the hub {address} does not"
    ) as caught:
        load_policy("owner/name")
    assert "\n" not in str(caught.value) and "HF_ENDPOINT" in str(caught.value)
    with pytest.raises(DataError, match="hub:owner/name cannot be loaded"):
        load_hub_records("hub:owner/name")


def test_a_server_that_never_answers_is_given_up(online: pytest.MonkeyPatch, silent: str) -> None:
    online.setattr(constants, "ENDPOINT", silent)
    with pytest.raises(ModelError, match=r"does not answer \(timed out\)"):
        load_policy("owner/name")


def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", silent)
    hub.require_hub("owner/name", ModelError)
