"""A registry that answers about another model or version than it was asked for, and registries whose
addresses read alike.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.store.entities import PagedList

from flows.registry.client import get_version, registered_model, registry_address, versions
from rlhf_core.errors import RlhfError

NAME = "rlhf-policy"
# As databases that compare without case, accents or spaces at the end find them.
LOOK_ALIKES = (
    "RLHF-policy", "rlhf-p\u043elicy", "rlhf-policy ", "rlhf\u2010policy", "rlhf-pol\u00edcy", "rlhf-poli\u0301cy",
    "rlhf-reward-model", "",
)  # fmt: skip


class Answering:
    """A client of a registry that has one version of one model for everybody who asks."""

    def __init__(self, name: str, version: str) -> None:
        self.version = SimpleNamespace(name=name, version=version)

    def get_model_version(self, *_: str) -> Any:
        return self.version

    def get_registered_model(self, _: str) -> Any:
        return SimpleNamespace(name=self.version.name, aliases={"champion": 1}, tags={})

    def search_model_versions(self, *_: object, **__: object) -> PagedList[Any]:
        return PagedList([self.version], None)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_another_model_is_not_used_in_place_of_the_one_asked_for(name: str) -> None:
    client: Any = Answering(name, "1")
    for ask in (lambda: get_version(client, NAME, "1"), lambda: registered_model(client, NAME)):
        with pytest.raises(RlhfError, match=f"asked for {NAME}.*answers with") as refused:
            ask()
        assert "\n" not in str(refused.value)
    assert versions(client, NAME) == []


@pytest.mark.parametrize("number", ["1", "3", "20", 1])
def test_another_version_is_not_used_in_place_of_the_one_asked_for(number: str) -> None:
    client: Any = Answering(NAME, number)
    with pytest.raises(RlhfError, match=r"asked for rlhf-policy version 2,.*answers with"):
        get_version(client, NAME, "2")
    assert str(get_version(client, NAME, str(number)).version) == str(number)
    assert len(versions(client, NAME)) == 1


APART = (
    "postgresql:///db?host=/run/a", "postgresql:///db?host=/run/b", "postgresql:///db?host=/run/a&port=5433",
    "postgresql://host/db?options=-csearch_path%3Da", "postgresql://host/db?options=-csearch_path%3Db",
    "postgresql://host/db", "postgresql://host:5433/db", "mysql+pymysql://localhost/db?unix_socket=/run/a",
    "mysql+pymysql://localhost/db?unix_socket=/run/b",
    "mssql+pyodbc:///?odbc_connect=Server%3Da%3BDatabase%3Ddb%3BUID%3Dme%3BPWD%3Dhunter2",
    "mssql+pyodbc:///?odbc_connect=Server%3Db%3BDatabase%3Ddb%3BUID%3Dme%3BPWD%3Dhunter2",
    "https://host/hooks/q7Wm2XkP9vLr4TzB8nCc3YhJ6sDf", "https://host/hooks/z3Kp8RfT2yHn6WvC1xQb9MdJ5sLg",
    "https://host:5000/a", "https://host:5000/b", "http://host:5000/a",
)  # fmt: skip
ALIKE = (
    ("https://host:5000/a", "https://me:hunter2@host:5000/a/?token=hunter2#x"),
    ("postgresql://host/db", "postgresql://me:hunter2@host/db?sslmode=require&password=hunter2"),
    ("postgresql:///db?port=1&host=/run/a", "postgresql://me@/db?host=/run/a&port=1"),
    (
        "mssql+pyodbc:///?odbc_connect=Server%3Da%3BUID%3Dme%3BPWD%3Dhunter2",
        "mssql+pyodbc:///?odbc_connect=Server%3Da%3BUID%3Dyou%3BPWD%3D%7Bhun%3Bter2%7D",
    ),
)


def address_of(uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    address = registry_address(Path())
    assert "hunter2" not in address and "ter2" not in address
    return address


@pytest.mark.parametrize(("one", "other"), combinations(APART, 2))
def test_registries_in_other_places_are_told_apart(
    one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address_of(one, monkeypatch) != address_of(other, monkeypatch)


def test_registries_are_told_apart_also_where_a_variable_hides_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIRST_TOKEN", "team-one")
    monkeypatch.setenv("SECOND_TOKEN", "team-two")
    first, second = (
        address_of(f"https://host/{name}", monkeypatch) for name in ("team-one", "team-two")
    )
    assert first != second and "team" not in first + second


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_logins_and_other_options_tell_no_registries_apart(
    one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address_of(one, monkeypatch) == address_of(other, monkeypatch)
