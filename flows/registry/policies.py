"""The door of registry policies, which check versions when they are registered or used.

A policy is an entry point of ``rlhf.registry_policies``: a module or an object with the functions
of :class:`RegistryPolicy`. Only those that settings name are asked, and a policy that is named must
be there: a check that was wanted is never left out in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhf_core.config.operations import RegistryConfig
from rlhf_core.plugins import REGISTRY_POLICIES, load_plugin

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SIGNATURE = "signature"  # the policy that the extra for signatures gives
KEY_VARIABLE = "RLHF_SIGNING_KEY"


class RegistryPolicy(Protocol):
    """What is asked of a policy; each function may raise ``RlhfError`` to prevent what follows."""

    def check_settings(self, workspace: Path, config: RegistryConfig) -> None:
        """Refuse settings that cannot work, for `rlhf doctor` and at the beginning of a run."""

    def name_files(self) -> None:
        """Make paths in the environment absolute, for processes that run in other folders."""

    def before_run(self, workspace: Path, config: RegistryConfig) -> None:
        """Refuse a run that could register nothing in the end."""

    def version_tags(self, config: RegistryConfig) -> dict[str, str]:
        """Return the tags that a version bears once ``register_version`` has been called for it."""

    def register_version(
        self,
        client: MlflowClient,
        workspace: Path,
        version: ModelVersion,
        content: str,
        tags: Mapping[str, str],
    ) -> None:
        """Add to the registration run of a version what its tags announce.

        Args:
            content: Hash of the workspace's own folder of the model.
            tags: The tags that the workspace gives the version.
        """

    def verify_version(
        self,
        client: MlflowClient,
        workspace: Path,
        config: RegistryConfig,
        version: ModelVersion,
        folder: Path | None,
    ) -> None:
        """Refuse a version before it is promoted, served, exported, or gets an alias.

        Args:
            folder: Its model folder, whose content has the registered hash; None before an alias is
                moved, which reads no files.
        """

    def export_folder(self, folder: Path) -> None:
        """Add to an exported model, of which all files are written."""


def active_policies(config: RegistryConfig) -> list[RegistryPolicy]:
    """Import the policies that the settings name, and signatures where they are asked for.

    Raises:
        PluginError: One of them is not installed, or cannot be imported.
    """
    names = list(config.policies)
    if config.signature.required or os.environ.get(KEY_VARIABLE, "").strip():
        names.append(SIGNATURE)
    return [load_plugin(REGISTRY_POLICIES, name) for name in dict.fromkeys(names)]
