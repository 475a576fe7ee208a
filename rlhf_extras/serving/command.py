"""``rlhf serve``: its options. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import AnyFolder
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Option("--model", help="A model folder; default: the champion.")
    ] = None,
    alias: Annotated[
        str | None, typer.Option(help="Follow this alias instead, such as challenger.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="This version of the registered policy.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="The version that this MLflow run registered.")
    ] = None,
    workspace: AnyFolder = None,
    host: Annotated[
        str, typer.Option(help="Address; any but loopback needs RLHF_SERVE_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; default: what the model takes.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest reply that may be asked for.")
    ] = 1024,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Replies at a time; more get status 429.")
    ] = 8,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a request may take.")
    ] = 120.0,
    watch_seconds: Annotated[
        float, typer.Option(min=0.01, help="How often to look whether the alias moved.")
    ] = 10.0,
    vllm: Annotated[
        Path | None, typer.Option(help="A Python with vLLM, whose server is started instead.")
    ] = None,
    vllm_args: Annotated[
        str, typer.Option(help="More arguments of vLLM's server, in quotes.")
    ] = "",
) -> None:
    """Serve the champion, or another policy, behind an API like OpenAI's.

    When the alias moves, the new version is loaded beside the old one and takes over; replies in
    flight are finished. With RLHF_SERVE_TOKEN in the environment requests need it as bearer token.

    Exit codes: 0 stopped by SIGTERM or SIGHUP, 2 it could not be served, 130 stopped by Ctrl-C;
    with --vllm, vLLM's.

    Examples:
    $ rlhf serve
    $ rlhf serve --model models/sft --port 8001
    $ rlhf serve --alias challenger
    """
    with busy("looking up the model"):
        from rlhf_core.serving.protocol import ServingLimits
        from rlhf_extras.serving.serve import serve as run_server
        from rlhf_extras.serving.served_policy import served_source

        served = served_source(workspace, model, alias, version, run)
    limits = ServingLimits(max_prompt_tokens, max_new_tokens, max_concurrent, timeout)
    raise typer.Exit(run_server(served, host, port, limits, watch_seconds, vllm, vllm_args))
