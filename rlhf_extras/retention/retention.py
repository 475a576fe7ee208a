"""Retention: which versions of the registered models are kept and why, and the deletion of the
others.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.registry.client import (
    REWARD_VERSION_TAG,
    fluent,
    read_aliases,
    registry_errors,
    versions,
)
from flows.registry.decisions import commit, new_entry, registry_session
from flows.registry.history import RETENTION, ReleaseState
from flows.registry.orphans import Orphans, end_experiments, find_orphans
from flows.registry.promote import MATCH_TAG, MATCHES
from flows.registry.stored_models import kept_copy
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking.stage_run import tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


LOGGED_MODEL = "models:/"


@dataclass(frozen=True)
class RetentionPlan:
    """What is kept and what is deleted.

    Attributes:
        models: For each registered model its versions, newest first, with the reason why one stays;
            empty if it goes.
        matches: The files of matches that only deleted versions played.
        orphans: What killed registrations and experiments have left.
    """

    models: Mapping[str, Sequence[tuple[ModelVersion, str]]]
    matches: Sequence[Path]
    orphans: Orphans

    @property
    def deleted(self) -> Sequence[ModelVersion]:
        """The versions to delete, of all models."""
        gone = []
        for rows in self.models.values():
            gone += [version for version, why in rows if not why]
        return gone

    def describe(self, *, done: bool) -> str:
        """List every version of each model with the reason why it stays, or that it goes.

        Args:
            done: Whether the plan has been carried out.
        """
        lines = []
        gone = "deleted" if done else "would be deleted"
        for name, rows in self.models.items():
            lines.append(name)
            if not rows:
                lines.append("  no version")
            for version, why in rows:
                fate = f"kept: {why}" if why else gone
                lines.append(f"  version {version.version}  {fate}")
        lines += [f"{left}: {gone} and ended" for left in self.orphans.of_registrations]
        ended = "ended" if done else "would be ended"
        lines += [f"{left}: {ended}" for left in self.orphans.of_experiments]
        versions, matches = len(self.deleted), len(self.matches)
        counts = "1 version" if versions == 1 else f"{versions} versions"
        counts += " and 1 match" if matches == 1 else f" and {matches} matches"
        if done:
            lines.append(f"deleted {counts}")
        elif self.deleted:
            lines.append(f"nothing was deleted; `rlhf registry gc --delete` deletes {counts}")
        elif self.orphans:
            lines.append("nothing was deleted; `rlhf registry gc --delete` deletes that")
        else:
            lines.append("no version to delete")
        return "\n".join(lines)


def apply_retention(workspace: Path, *, delete: bool) -> RetentionPlan:
    """Plan by ``registry.retention`` which versions and matches go, and delete them if ``delete``.

    Without a number of versions to keep, only what killed registrations and experiments have left
    goes.

    Of a version its model files and its entry in the registry are deleted. The run that registered
    it stays, with its metrics, gates and promotion reports, and so does the history, which records
    the deletion before it begins; what was interrupted is completed by the next call.

    Raises:
        RlhfError: ``registry.retention.versions`` is not set and nothing killed has left
            anything, another workspace owns the registered policy, or the registry does not answer.
    """
    workspace = workspace.resolve()
    config = load_section(workspace, "registry", RegistryConfig)
    with registry_session(workspace) as state:
        orphans = find_orphans(state.client, workspace)
        if config.retention.versions is None and not orphans:
            raise RlhfError(
                "registry.retention.versions is not set, so every version is kept; set how many newest to keep"
            )
        if owner := state.other_owner:
            raise RlhfError(f"{config.policy} is owned by {owner}; its versions are deleted there")
        plan = RetentionPlan({}, [], orphans)
        if config.retention.versions is not None:
            plan = _plan(state, config.retention.versions, orphans)
        if delete:
            for model in orphans.models:
                with registry_errors(
                    state.client,
                    f"delete the files of {model.model_id}; `rlhf registry gc --delete` goes on",
                ):
                    _delete_logged_model(state.client, workspace, str(model.model_id))
            with registry_errors(state.client, "end the runs that nobody has ended"):
                for run in orphans.runs:
                    state.client.set_terminated(run.info.run_id, "KILLED")
                end_experiments(state.client, orphans.experiments)
        if delete and plan.deleted:
            gone = []
            for name, rows in plan.models.items():
                of_model = [str(version.version) for version, why in rows if not why]
                if of_model:
                    gone.append(f"{name} {', '.join(of_model)}")
            numbers = "; ".join(gone)
            reason = f"beyond the newest {config.retention.versions} and not needed: {numbers}"[
                :1000
            ]
            commit(state, new_entry(config.policy, RETENTION, reason))
            for path in plan.matches:  # before the versions, whose tags name them
                path.unlink(missing_ok=True)
            for version in plan.deleted:
                _delete_version(state.client, workspace, version)
        return plan


def _plan(state: ReleaseState, newest: int, orphans: Orphans) -> RetentionPlan:
    client, config = state.client, state.config
    needed = dict.fromkeys(state.champions, "has been champion: rollback needs it")
    if state.waiting:
        needed[state.waiting] = "waits for approval"
    policies = _with_reasons(client, config.policy, newest, needed)
    kept = [version for version, why in policies if why]
    trained_by = {
        version.tags[REWARD_VERSION_TAG]: f"policy version {version.version} was trained with it"
        for version in kept
        if REWARD_VERSION_TAG in version.tags
    }
    rewards = [
        (version, why or _other_policy(client, config.policy, str(version.version)))
        for version, why in _with_reasons(client, config.reward_model, newest, trained_by)
    ]
    matches = _matches(state.workspace, [version for version, why in policies if not why])
    plan = {config.policy: policies, config.reward_model: rewards}
    return RetentionPlan(plan, sorted(matches - _matches(state.workspace, kept)), orphans)


def _other_policy(client: MlflowClient, policy: str, reward_version: str) -> str:
    """The reason to keep a reward model for a policy of another name, which may share it; the name
    is not recorded.
    """
    users = client.search_model_versions(f"tags.{REWARD_VERSION_TAG} = '{reward_version}'")
    return next(
        (
            f"{of.name} {of.version} may have been trained with it"
            for of in users
            if of.name != policy
        ),
        "",
    )


def _with_reasons(
    client: MlflowClient, name: str, newest: int, needed: Mapping[str, str]
) -> list[tuple[ModelVersion, str]]:
    listed = versions(client, name)
    why = {str(version.version): f"one of the newest {newest}" for version in listed[:newest]}
    why |= {
        **needed,
        **{number: f"@{alias}" for alias, number in read_aliases(client, name).items()},
    }
    return [(version, why.get(str(version.version), "")) for version in listed]


def _matches(workspace: Path, played: Sequence[ModelVersion]) -> set[Path]:
    """The files of the matches that these versions have played as challengers.

    A file of the same question may be of another registry: its hash is then not the tag's.
    """
    prefix = f"{MATCH_TAG}."
    found: set[Path] = set()
    for version in played:
        for tag, digest in version.tags.items():
            name = Path(tag.removeprefix(prefix)).name  # a tag on a server may say anything
            path = workspace / MATCHES / f"{name}.json"
            if tag.startswith(prefix) and path.is_file() and sha256_file(path) == digest:
                found.add(path)
    return found


def _delete_version(client: MlflowClient, workspace: Path, version: ModelVersion) -> None:
    """Delete the model files of a version, then the version; one that has got an alias meanwhile
    stays.
    """
    name, number = version.name, str(version.version)
    if number in read_aliases(client, name).values():
        return
    with registry_errors(
        client, f"delete {name} version {number}; `rlhf registry gc --delete` goes on with it"
    ):
        source = version.source or ""
        same_files = client.search_model_versions(f"source_path = '{source}'")
        if source.startswith(LOGGED_MODEL) and len(same_files) <= 1:
            _delete_logged_model(client, workspace, source.removeprefix(LOGGED_MODEL))
        shutil.rmtree(kept_copy(workspace, name, number), ignore_errors=True)
        client.delete_model_version(name, number)


def _delete_logged_model(client: MlflowClient, workspace: Path, model_id: str) -> None:
    """Delete the files of a logged model wherever they are, and mark it as deleted."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    try:
        model = client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # an interrupted call has deleted it
            return
        raise
    with fluent(workspace):
        get_artifact_repository(
            model.artifact_location, tracking_uri=tracking_uri(workspace)
        ).delete_artifacts()
    client.delete_logged_model(model_id)
