"""What somebody else wrote into a real MLflow server: tags, names, descriptions and aliases.

Commands show it on harmless lines, and promote and serve nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from champion import champion_folder
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from servers.small_registry import SmallRegistry
from typer.testing import CliRunner
from unit.flows.registry.conftest import ScriptedMatch
from unit.flows.registry.test_hostile_tags import HOSTILE, OF_A_VERSION, require_harmless
from unit.flows.registry.test_release_page import REPORT
from unit.flows.test_compare import workspace as finished_run

from flows.cli import app
from flows.commands.failures import report_error
from flows.registry.client import OWNER_TAG
from flows.registry.history import DONE_TAG, LEDGER_TAG
from flows.registry.promote import promote
from flows.registry.register import RegisteredHere, write_registered
from rlhf_core.errors import RlhfError
from rlhf_extras.serving.served_policy import served_source

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]
LONG = {"very long": "x" * 90_000, "very long markup": "[red]" * 18_000}
# What looks like an alias or a version that this program uses.
FAKE_ALIASES = (
    "Champion",
    "champion.",
    "champion_",
    "CHALLENGER",
    "prev\u0456ous",
    "champion\u202e",
    "1",
)
SHOWN = (("status",), ("history",), ("registry", "terms"), ("registry", "gc"), ("approve",))


@pytest.fixture
def contest(registry: SmallRegistry) -> Path:
    """The owner of version 1, the champion; it registered version 2, the challenger."""
    owner = registry.contested()
    params = (owner / "params.yaml").read_text()
    finished_run(owner / "made")
    for path in (owner / "made").iterdir():
        if not (owner / path.name).exists():
            path.rename(owner / path.name)
    (owner / "params.yaml").write_text(params)
    (owner / "report.html").write_text(REPORT)
    write_registered(owner, {"models/policy": RegisteredHere(registry.name, "2")})
    return owner


def said(*words: str | Path, workspace: Path) -> list[str]:
    """All lines that a command prints, its error as the program prints it."""
    if words[0] != "compare":
        words = (*words, "--workspace", workspace)
    ended = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [*map(str, words)])
    error = ended.exception
    if error is None or isinstance(error, SystemExit):
        return ended.output.splitlines()
    assert isinstance(error, RlhfError), (words, error)
    return [*ended.output.splitlines(), f"rlhf: {error}"]


def why_not_promoted(contest: Path) -> str:
    """The reason why the challenger, which lost its match, is not promoted."""
    try:
        decision = promote(contest, version="2", dry_run=True, play=ScriptedMatch(0.4))
    except RlhfError as error:
        return str(error)
    assert not decision.promoted
    return decision.reason


def require_nothing_came_of_it(registry: SmallRegistry, contest: Path) -> None:
    """Check what commands say, and that neither promotion nor server takes the challenger."""
    lines: list[str] = []
    for words in (*SHOWN, ("compare", contest)):
        lines += [line for line in said(*words, workspace=contest) if not line.startswith("rlhf: ")]
    page = contest / "release.html"
    require_harmless(lines, page.read_text() if page.is_file() else "")
    reason = why_not_promoted(contest)
    assert "\n" not in reason and len(reason) < 1500, reason
    for chosen in ({"version": "2"}, {"alias": "challenger"}, {}):
        try:
            served = served_source(contest, **chosen)
            about = served.about
            served.source.files(served.source.latest())
        except RlhfError as error:
            about = (str(error),)
        assert all(len(line) < 1500 for line in about)
    assert registry.champion() == "1"


def set_where_allowed(write: Callable[[], object]) -> bool:
    """Whether the server takes what was written: it has limits of its own."""
    try:
        write()
    except MlflowException:
        return False
    return True


@pytest.mark.parametrize("name", [*HOSTILE, *LONG])
def test_tags_of_a_version_and_of_the_model(
    name: str, registry: SmallRegistry, contest: Path
) -> None:
    client, value, taken = registry.client, {**HOSTILE, **LONG}[name], 0
    for key in OF_A_VERSION:
        taken += set_where_allowed(
            lambda key=key: client.set_model_version_tag(registry.name, "2", key, value)
        )
    require_nothing_came_of_it(registry, contest)
    before = client.get_registered_model(registry.name).tags
    for key in (OWNER_TAG, DONE_TAG, LEDGER_TAG):
        taken += set_where_allowed(
            lambda key=key: client.set_registered_model_tag(registry.name, key, value)
        )
        lines = said("history", workspace=contest)
        require_harmless([line for line in lines if not line.startswith("rlhf: ")], "")
        assert "\n" not in why_not_promoted(contest)
        client.set_registered_model_tag(registry.name, key, before[key])
    assert taken >= len(OF_A_VERSION) and registry.champion() == "1"


def test_descriptions_and_tags_that_nobody_reads(registry: SmallRegistry, contest: Path) -> None:
    client, name = registry.client, registry.name
    run = client.get_model_version(name, "2").run_id
    for value in (*HOSTILE.values(), *LONG.values()):
        for write in (
            lambda value=value: client.update_registered_model(name, value),
            lambda value=value: client.update_model_version(name, "2", value),
            lambda value=value: client.set_tag(run, "mlflow.runName", value),
            lambda value=value: client.set_tag(run, "mlflow.parentRunId", value),
            lambda value=value: client.set_tag(run, "mlflow.note.content", value),
            lambda value=value: client.set_model_version_tag(name, "2", value[:200], value),
            lambda value=value: client.set_registered_model_tag(name, value[:200], value),
            lambda value=value: client.set_experiment_tag(registry.experiment, "note", value),
        ):
            set_where_allowed(write)
        require_nothing_came_of_it(registry, contest)
    assert promote(contest, version=registry.add_version(), play=ScriptedMatch(0.9)).promoted


def test_fake_aliases_are_nobodys(registry: SmallRegistry, contest: Path) -> None:
    champion = champion_folder(contest)
    taken = 0
    for alias in FAKE_ALIASES:
        taken += set_where_allowed(
            lambda alias=alias: registry.client.set_registered_model_alias(
                registry.name, alias, "2"
            )
        )
    assert taken > 2
    require_nothing_came_of_it(registry, contest)
    assert champion_folder(contest) == champion


def test_a_champion_that_somebody_made_by_hand_is_named_as_that(
    registry: SmallRegistry, contest: Path
) -> None:
    registry.client.set_registered_model_alias(registry.name, "champion", "2")
    assert "moved by something else than rlhf" in "\n".join(said("history", workspace=contest))
    registry.client.delete_registered_model_alias(registry.name, "champion")
    assert "moved by something else than rlhf" in "\n".join(said("history", workspace=contest))


@pytest.mark.parametrize("text", ["{}", "[]", "5", "null", '{"number": 1}', "{" * 4000])
def test_a_history_of_wrong_types_is_one_line(
    text: str, registry: SmallRegistry, contest: Path
) -> None:
    run = registry.client.create_run(registry.experiment).info.run_id
    entry = json.dumps({"action": "promote"}) if text == "[]" else text
    own = registry.client.get_registered_model(registry.name).tags[LEDGER_TAG]
    kept = registry.client.get_run(own).data.params
    for key in kept:
        registry.client.log_param(run, key, entry)
    registry.client.set_registered_model_tag(registry.name, LEDGER_TAG, run)
    for words in (("status",), ("history",), ("registry", "terms")):
        assert said(*words, workspace=contest)
    with pytest.raises(RlhfError) as refused:
        promote(contest, play=ScriptedMatch(0.9))
    assert "\n" not in str(refused.value) and report_error(refused.value) == 2


def test_two_servers_that_a_workspace_uses_one_after_another(
    registry: SmallRegistry, contest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions on the server are not those of the workspace's own database, and it has them back."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    own = SmallRegistry.create(tmp_path / "own", f"sqlite:///{contest / 'mlflow.db'}")
    with pytest.raises(RlhfError, match="has no @challenger"):
        promote(contest, play=ScriptedMatch(0.9))
    assert not MlflowClient(own.client.tracking_uri).search_model_versions(
        f"name='{registry.name}'"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.client.tracking_uri)
    assert promote(contest, play=ScriptedMatch(0.9)).promoted
    assert registry.consistent_champions() == ["1", "2"]
