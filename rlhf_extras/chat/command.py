"""``rlhf chat``: a conversation with a policy. Heavy imports wait until it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import AnyFolder
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def chat(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder, such as models/sft; default: the champion.")
    ] = None,
    workspace: AnyFolder = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature: above 1 more varied, below 1 less.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = 0.9,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum length of a reply.")] = 64,
    seed: Annotated[int, typer.Option(help="The same seed gives the same replies.")] = 1,
) -> None:
    """Chat with the champion, or with a model folder. One reply per line when input is not a
    terminal.

    Examples:
    $ rlhf chat
    $ rlhf chat models/sft
    $ echo "what color is the lamp?" | rlhf chat models/policy
    """
    from flows.workspace import model_folder

    if model is not None:
        model_folder(model, workspace)  # before seconds of imports
    with busy("looking up the model"):
        from rlhf_core.stages.runtime.threads import limit_threads_of
        from rlhf_extras.chat.terminal import talk
        from rlhf_extras.serving.served_policy import not_released, served_source

        chosen = served_source(workspace, model)
        folder = chosen.source.files(chosen.source.latest()).folder
        if chosen.workspace is not None:
            limit_threads_of(chosen.workspace)
    stopped = not_released(folder)
    if stopped and not sys.stdin.isatty():  # a terminal is told in the introduction
        from flows.commands.text import print_line

        print_line(stopped, sys.stderr)
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    talk(folder, sampling, seed, chosen.about, chosen.workspace)
