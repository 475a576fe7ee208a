"""``rlhf plan``: its options. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import ProbeOption, WorkspaceOption, print_text
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def plan(
    workspace: WorkspaceOption = None,
    profiles: Annotated[
        list[str] | None, typer.Option("--profile", "-p", help="Overlay on params.yaml.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="section.key=value over params.yaml.")
    ] = None,
    stages: Annotated[
        list[str] | None, typer.Option("--stage", help="Only this stage; may be repeated.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs that share a job: one process on each.")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Memory of one GPU in GiB.")] = None,
    zero: Annotated[
        int | None, typer.Option("--zero-stage", help="DeepSpeed's ZeRO stage, 0 to 3.")
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help="What waits in host memory: none, optimizer or parameters.")
    ] = None,
    frozen: Annotated[
        str | None, typer.Option(help="Frozen models: device, offload or sharded.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Gradient checkpointing: compute activations again in the backward pass.",
        ),
    ] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="Weights in bfloat16 or float32.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="Adapters of this rank instead of all weights.")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt of rollouts.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json in place of the starting model's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print one line; exit with 2 if it cannot fit.")
    ] = False,
    time: Annotated[
        bool, typer.Option("--time", help="Project the time of each stage on GPUs like an H100.")
    ] = False,
    probe: ProbeOption = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Estimate memory per GPU by model and phase of every training stage, what to change when it
    does not fit, and with --time how long each takes.

    The passes of each stage run on shapes alone: no weights are downloaded or loaded. Options stand
    for settings of every stage that is planned; those left out are as in params.yaml. Lengths come
    from the workspace's data; before there are any, from the files that settings name; where these
    or the model's tokenizer are not here, and with --config, from the limits of the settings. For
    data from files it also forecasts what so many pairs can show, and where no GPU's memory is
    given, whether a run fits this machine and how long it takes.

    Exit codes: 0 it fits or nothing is known against it, 2 it does not fit, the pairs do not
    suffice, or the settings are wrong.

    Examples:
    $ rlhf plan --profile paper-7b --gpus 8 --gpu-memory 80
    $ rlhf plan --profile paper-7b --prompt-tokens 256 --time
    """
    with busy("running the stages on shapes, to see what memory they need"):
        from rlhf_core.stages.runtime.runner import workspace_root
        from rlhf_core.storage.garbage_collection import skip_last_collection

        skip_last_collection()
        root = workspace_root(workspace)
        from rlhf_extras.memory.command import PlanRequest, describe

        options = (
            gpus,
            gpu_memory,
            zero,
            offload,
            frozen,
            gradient_checkpointing,
            bf16,
            lora_rank,
            prompt_tokens,
        )
        request = PlanRequest(
            root, ",".join(profiles or ()) or None, sets or (), stages or (), config, *options
        )
        plans = [] if check else request.plans()
        is_refused = False
        if check:
            answer = request.check()
        else:
            sections = request.sections(plans, on_gpus=time, probe=probe)
            is_refused = any(document.get("is_refused") for _, _, document in sections)
            answer = describe(plans, sections, as_json=as_json)
    print_text(answer)
    is_possible = all(plan.fits for plan in plans) and not is_refused
    raise typer.Exit(EXIT_OK if is_possible else EXIT_USER_ERROR)
