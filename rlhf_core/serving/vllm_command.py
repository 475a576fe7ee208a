"""The command that starts vLLM's server with a policy, as it was judged."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision


def vllm_command(python: Path, revision: PolicyRevision, files: PolicyFiles, host: str, port: int) -> list[str]:
    """Return the command. Requests without sampling settings get those that the policy was judged with.

    A bearer token is no argument, which every user of the machine could read: vLLM takes it from ``VLLM_API_KEY``.
    """
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(files.folder)),
        *("--served-model-name", *revision.names),
        *("--host", host, "--port", str(port)),
        *("--override-generation-config", json.dumps(files.sampling.model_dump(mode="json"))),
    ]
