"""The stage ``base`` on a source, beside clean data of prompts alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.base import BaseStageConfig
from rlhf_core.data.schema import Message, Prompt, as_dict, write_dicts
from rlhf_core.stages import base
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext


def run_base(
    source: Path | str,
    target: Path,
    prompts: Sequence[str] = (),
    split: str = "train",
    workspace: Path | None = None,
    **sections: Any,
) -> dict[str, float]:
    """Run the stage; the model is in ``target / "base"``. ``prompts`` are those of one split, the
    others are empty.
    """
    for name in ("train", "validation", "test"):
        texts = prompts if name == split else ()
        rows = [
            Prompt(str(i), [Message("user", text)], "", "files", "g")
            for i, text in enumerate(texts)
        ]
        write_dicts(
            target / "clean" / "prompts" / f"{name}.parquet",
            Prompt.KIND,
            [as_dict(row) for row in rows],
        )
    config = BaseStageConfig.model_validate({"source": str(source), **sections})
    inputs, outputs = Paths({"clean": target / "clean"}), Paths({"model": target / "base"})
    return base.run(
        config, inputs, outputs, RunContext(target / "work", folder=workspace or Path())
    )
