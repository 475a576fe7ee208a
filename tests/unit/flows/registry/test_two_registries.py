"""Two registries that one workspace uses after another: numbers, pages, copies, locks, matches and
signatures are of the one that is used now.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.registry import stored_models
from flows.registry.client import get_version
from flows.registry.decisions import registry_lock
from flows.registry.promote import MATCHES, promote
from flows.registry.register import RegisteredHere, read_registered, write_registered
from flows.registry.release_page import RunNotes, read_release_decision
from flows.registry.stored_models import verified_folder
from rlhf_core.config.operations import SignatureConfig
from rlhf_core.errors import RlhfError
from rlhf_extras.retention.retention import apply_retention
from rlhf_extras.signing import registry_identity

from .conftest import MODEL, PARAMS, Registry, ScriptedMatch

POLICY = "models/policy"


@pytest.fixture
def both(
    registry: Registry, contest: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Registry, Registry]:
    """A registry whose version 2 was refused after a match, and one without versions, now used.

    Both databases lie in one folder.
    """
    (contest / "dvc.lock").write_text(
        "stages: {ppo: {cmd: ppo, outs: [{path: models/policy, md5: p}]}}\n"
    )
    write_registered(contest, {POLICY: RegisteredHere(MODEL, "2")})
    assert not promote(contest, play=ScriptedMatch(0.4)).promoted
    uri = f"sqlite:///{shutil.copy(empty_database, registry.folder / 'shared' / 'second.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return registry, Registry(registry.folder, MlflowClient(uri))


def use(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.client._tracking_client.tracking_uri)


@pytest.mark.dear("two registries, each with versions of its own")
def test_a_version_of_the_other_registry_is_not_taken_for_one_of_this(
    both: tuple[Registry, Registry], contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    assert read_registered(contest, POLICY) is None
    assert read_release_decision(contest, RunNotes()).headline == "Not registered"
    promote(contest, version=second.add_version())
    second.add_version()  # another version 2, which nobody has decided on
    write_registered(contest, {POLICY: RegisteredHere(MODEL, "2")})
    assert "nobody has decided" in read_release_decision(contest, RunNotes()).headline
    use(first, monkeypatch)
    assert read_registered(contest, POLICY) is None
    write_registered(contest, {POLICY: RegisteredHere(MODEL, "2")})
    assert "was not promoted" in read_release_decision(contest, RunNotes()).headline


def test_a_copy_of_one_registry_is_not_served_for_the_other(
    both: tuple[Registry, Registry], contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    second.add_version()
    monkeypatch.setattr(stored_models, "_local_root", lambda *_: None)  # as of a server's artifacts
    folders = {}
    for registry in (second, first, second):
        use(registry, monkeypatch)
        version = get_version(registry.client, MODEL, "1")
        folder = verified_folder(contest, version, registry.client)
        assert folders.setdefault(registry, folder) == folder
    assert folders[first] != folders[second] and all(each.is_dir() for each in folders.values())


def test_a_decision_in_one_registry_does_not_wait_for_the_other(
    both: tuple[Registry, Registry], contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = both
    with registry_lock(contest, MODEL):
        use(first, monkeypatch)
        with registry_lock(contest, MODEL):
            pass


def test_matches_and_versions_of_the_other_registry_are_not_deleted(
    both: tuple[Registry, Registry], contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    (kept,) = (contest / MATCHES).glob("*.json")
    (contest / "params.yaml").write_text(PARAMS + "registry: {retention: {versions: 1}}\n")
    for _ in range(3):
        number = second.add_version()
    # The same question, of which the other registry has another result.
    second.client.set_model_version_tag(MODEL, "1", f"match.{kept.stem}", "0" * 64)
    plan = apply_retention(contest, delete=True)
    assert [str(version.version) for version in plan.deleted] == ["2", "1"]
    assert kept.is_file() and not plan.matches
    assert second.aliases() == {"challenger": number}
    use(first, monkeypatch)
    assert first.aliases() == {"champion": "1", "challenger": "2"}
    assert get_version(first.client, MODEL, "1") and get_version(first.client, MODEL, "2")


def test_a_statement_names_the_registry(
    both: tuple[Registry, Registry], contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = registry_identity(contest, SignatureConfig())
    use(both[0], monkeypatch)
    assert registry_identity(contest, SignatureConfig()) != here
    with pytest.raises(RlhfError, match="has no version 3"):
        get_version(both[0].client, MODEL, "3")
