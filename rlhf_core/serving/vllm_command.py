"""The command that starts vLLM's server with a policy, as it was judged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.serving.limits import ServingLimits
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision


def vllm_command(
    python: Path, revision: PolicyRevision, files: PolicyFiles, host: str, port: int, limits: ServingLimits
) -> list[str]:
    """Return the command. Requests without sampling settings get those that the policy was judged with.

    On SIGTERM replies in flight are finished, within the time limit of a request: vLLM's own default drops them.
    """
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(files.folder)),
        *("--served-model-name", *revision.names),
        *("--host", host, "--port", str(port)),
        *("--max-num-seqs", str(limits.max_concurrent)),
        *("--shutdown-timeout", str(math.ceil(limits.timeout_seconds))),
        *("--override-generation-config", json.dumps(files.sampling.model_dump(mode="json"))),
    ]


def vllm_environment(python: Path, environment: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Return the environment of the server: that of ``python``, without this one's modules, and no usage statistics.

    A bearer token is no argument, which every user of the machine could read: vLLM takes it from ``VLLM_API_KEY``.
    """
    kept = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    programs = os.pathsep.join([str(python.absolute().parent), environment.get("PATH", os.defpath)])
    own = {"PATH": programs, "VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1")}
    return {**kept, **own} | ({} if token is None else {"VLLM_API_KEY": token})
