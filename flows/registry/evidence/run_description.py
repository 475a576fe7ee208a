"""The verdict of a run in MLflow: as the description of the run, of the versions it registered and of their models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.registry.mlflow_client import connect, experiment_id
from flows.registry.transactions.aliases import registry_errors
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import RegistryConfig

NOTE_TAG = "mlflow.note.content"
VERDICT_TAG = "verdict"


def describe_run(workspace: Path, run_id: str, verdict: str, description: str) -> None:
    """Write what came of the pipeline run ``run_id``.

    Args:
        verdict: The verdict in a few words, a tag of the run.
        description: The verdict with its numbers, in Markdown.
    """
    from mlflow.entities import RunTag

    client = connect(workspace)
    with registry_errors("describe the run"):
        run = client.get_run(run_id)
        client.log_batch(run_id, tags=[RunTag(VERDICT_TAG, verdict), RunTag(NOTE_TAG, description)])
        experiments = [experiment_id(client, workspace)]
        children = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{run_id}'")
        about = model_descriptions(load_section(workspace, "registry", RegistryConfig))
        for child in children:
            for version in client.search_model_versions(f"run_id = '{child.info.run_id}'"):
                text = f"Registered by the run {run.info.run_name}.\n\n{description}"
                client.update_model_version(version.name, version.version, text)
                latest = f"Latest: version {version.version}, from a run whose verdict on the policy is: {verdict}."
                client.update_registered_model(version.name, f"{about.get(version.name, '')}\n\n{latest}".strip())


def model_descriptions(config: RegistryConfig) -> Mapping[str, str]:
    """Return what each registered model is, by its name."""
    return {
        config.policy: "The policy. Its version @champion is the one that `rlhf chat` talks to.",
        config.reward_model: "The reward model that the policy was optimised against; it is no judge of the policy.",
    }
