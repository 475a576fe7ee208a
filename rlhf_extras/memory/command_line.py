"""``rlhf plan``: its options. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.commands.data import ProbeOption, WorkspaceOption, print_text
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR
from rlhf_core.runtime.progress import busy

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


# Settings of every stage that is planned; those left out are as in params.yaml.
GpusOption = Annotated[int | None, typer.Option(help="GPUs that share a job: one process on each.")]
GpuMemoryOption = Annotated[float | None, typer.Option(help="Memory of one GPU in GiB.")]
ZeroOption = Annotated[
    int | None, typer.Option("--zero-stage", help="DeepSpeed's ZeRO stage, 0 to 3.")
]
OffloadOption = Annotated[
    str | None, typer.Option(help="What waits in host memory: none, optimizer or parameters.")
]
FrozenOption = Annotated[
    str | None, typer.Option(help="Frozen models: device, offload or sharded.")
]
CheckpointingOption = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Gradient checkpointing: compute activations again in the backward pass.",
    ),
]
Bf16Option = Annotated[
    bool | None, typer.Option("--bf16/--fp32", help="Weights in bfloat16 or float32.")
]
LoraOption = Annotated[
    int | None, typer.Option(help="Adapters of this rank instead of all weights.")
]
PromptOption = Annotated[int | None, typer.Option(help="Longest prompt of rollouts.")]


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
    gpus: GpusOption = None,
    gpu_memory: GpuMemoryOption = None,
    zero: ZeroOption = None,
    offload: OffloadOption = None,
    frozen: FrozenOption = None,
    gradient_checkpointing: CheckpointingOption = None,
    bf16: Bf16Option = None,
    lora_rank: LoraOption = None,
    prompt_tokens: PromptOption = None,
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
        from rlhf_extras.memory.command import PlanRequest

        request = PlanRequest(
            root,
            profile=",".join(profiles or ()) or None,
            sets=sets or (),
            stages=stages or (),
            config=config,
            gpus=gpus,
            gpu_memory=gpu_memory,
            zero=zero,
            offload=offload,
            frozen=frozen,
            gradient_checkpointing=gradient_checkpointing,
            bf16=bf16,
            lora_rank=lora_rank,
            prompt_tokens=prompt_tokens,
        )
        answer, is_possible = request.answer(check, on_gpus=time, probe=probe, as_json=as_json)
    print_text(answer)
    raise typer.Exit(EXIT_OK if is_possible else EXIT_USER_ERROR)
