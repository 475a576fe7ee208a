"""The command that starts vLLM's server with a policy, as it was judged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jinja2 import TemplateError

from rlhf_core.data.chat_template import probe_dialogues, render_turns
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.models.foreign import require_openable
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.serving.protocol import ServingLimits

# Dialogues in which a template that grows with turns, words or tools reaches its limits, if it ever
# does.
TURNS, WORDS = 64, 100_000
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def require_limited(folder: Path) -> None:
    """Try under limits what vLLM does without: open the folder, and write dialogues by each of its
    chat templates.

    A template that waits for certain words to do harm is not found: vLLM renders it for every
    request.

    Raises:
        ModelError: A limit was reached, the files name what lies outside of the folder, or there is
            no tokenizer.
    """
    require_openable(folder)
    tokenizer = load_tokenizer(folder)
    asked, answered = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    short = []
    for messages in probe_dialogues().values():
        short.append([{"role": turn.role, "content": turn.content} for turn in messages])
    dialogues = [
        *short,
        [asked, answered] * (TURNS // 2) + [asked],
        [{**asked, "content": "word " * WORDS}],
    ]
    templates = tokenizer.chat_template or {}
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        tokenizer.chat_template = template
        for turns in dialogues:
            for tools in (None, [TOOL]):
                with suppress(TemplateError):  # it may refuse a dialogue
                    render_turns(tokenizer, turns, add_generation_prompt=True, tools=tools)


def vllm_command(
    python: Path,
    revision: PolicyRevision,
    files: PolicyFiles,
    host: str,
    port: int,
    limits: ServingLimits,
) -> list[str]:
    """Return the command. Requests without sampling settings get those that the policy was judged
    with.

    On SIGTERM replies in flight are finished, within the time limit of a request: vLLM's own
    default drops them.
    """
    judged = files.sampling.model_dump(mode="json")
    unfiltered = {"top_k": 0, "min_p": 0.0}  # vLLM would take the model's own
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(files.folder)),
        *("--served-model-name", *revision.names),
        *("--host", host, "--port", str(port)),
        *("--max-num-seqs", str(limits.max_concurrent)),
        *("--shutdown-timeout", str(math.ceil(limits.timeout_seconds))),
        *("--override-generation-config", json.dumps(judged | unfiltered)),
    ]


def vllm_environment(
    python: Path, environment: Mapping[str, str], token: str | None
) -> dict[str, str]:
    """Return the environment of the server: that of ``python``, without this one's modules, and no
    usage statistics.

    A bearer token is no argument, which every user of the machine could read: vLLM takes it from
    ``VLLM_API_KEY``.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    programs = os.pathsep.join([str(python.absolute().parent), environment.get("PATH", os.defpath)])
    own = {"PATH": programs, "VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1")}
    return {**kept, **own} | ({} if token is None else {"VLLM_API_KEY": token})
