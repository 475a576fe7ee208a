"""The server of ``rlhf serve``: the policy that was chosen behind this package's HTTP interface, or
behind vLLM's.
"""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import NoReturn

from flows.supervision import signals
from rlhf_core.commands.data import print_text
from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from rlhf_core.serving.protocol import ServingLimits
from rlhf_core.stages.runtime.threads import limit_threads_of
from rlhf_extras.serving.access import TOKEN_VARIABLE, checked_token
from rlhf_extras.serving.served_policy import ServedSource


def serve(
    served: ServedSource,
    host: str,
    port: int,
    limits: ServingLimits,
    watch_seconds: float,
    vllm: Path | None = None,
    vllm_arguments: str = "",
) -> int:
    """Serve the policy until SIGTERM or Ctrl-C; return the exit status.

    Args:
        watch_seconds: How often the registry is asked whether the alias has moved.
        vllm: A Python that has vLLM, whose server is started instead; None for the own one.
        vllm_arguments: Further arguments of vLLM's server.

    Raises:
        RlhfError: The policy's files are not the registered ones, or the address cannot be used.
    """
    token = checked_token(os.environ.get(TOKEN_VARIABLE), host)
    for line in served.about:
        print_text(line)
    if vllm is not None:
        _become_vllm(served, host, port, limits, token, vllm, vllm_arguments)
    if served.workspace is not None:
        limit_threads_of(served.workspace)
    from rlhf_extras.serving.app import create_app
    from rlhf_extras.serving.completions import Completions
    from rlhf_extras.serving.metrics import ServingMetrics
    from rlhf_extras.serving.server import base_url, bind, run_server
    from rlhf_extras.serving.watch import PolicyWatch

    bound = bind(host, port)  # before the model is loaded, which takes longer
    metrics = ServingMetrics()
    watch = PolicyWatch(served.source, metrics)
    completions = Completions(watch, limits, metrics)
    app = create_app(completions, token, watch_seconds)
    if token is None:
        print_text(
            f"no token: every user of this machine may ask; set {TOKEN_VARIABLE} to require one"
        )
    print_text(f"serving {watch.policy.revision.id} at {base_url(host, bound)}; Ctrl-C stops it")
    signals.install(signal.SIGINT, signal.SIGTERM)
    run_server(app, bound, limits.timeout_seconds)
    return EXIT_INTERRUPTED if signals.last() == signal.SIGINT else EXIT_OK


def _become_vllm(
    served: ServedSource,
    host: str,
    port: int,
    limits: ServingLimits,
    token: str | None,
    python: Path,
    arguments: str,
) -> NoReturn:
    """Replace this process by vLLM's server, which then gets its signals."""
    from rlhf_extras.serving.vllm_command import require_limited, vllm_command, vllm_environment

    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"--vllm {python} is no program; name the Python of an environment that has vLLM"
        )
    revision = served.source.latest()
    files = served.source.files(revision)
    require_limited(files.folder)
    command = vllm_command(python, revision, files, host, port, limits)
    command += shlex.split(arguments)
    if served.moves:
        print_text(
            f"vLLM serves {revision.id} until it is started again; a moved alias is not followed"
        )
    print_text(f"starting {shlex.join(command)}")
    os.execve(python, command, vllm_environment(python, os.environ, token))
