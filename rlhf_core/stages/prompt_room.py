"""Whether a reply fits behind each prompt within the model's positions.

Stage base refuses prompts that leave no room; the forecast says it beforehand, in the same words.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.base import BaseConfig, is_pretrained
from rlhf_core.data.schema import SPLITS, Prompt, read_kind

# A shorter reply than this share of ppo.max_new_tokens is no remedy.
LEAST_REPLY = 0.25
POSITIONS_STEP = 64


def prompt_files(clean: Path) -> list[Path]:
    """Return the files of prompts in clean data, those of the train split first."""
    return [clean / Prompt.KIND / f"{split}.parquet" for split in SPLITS]


def refused_prompts(
    clean: Path,
    lengths: npt.NDArray[np.int32],
    positions: int | None,
    base: BaseConfig,
    max_new_tokens: int,
) -> str:
    """Say in one line which prompts of clean data leave no room for a reply, and what to set.

    Args:
        lengths: Tokens of the prompts of all splits, one split after the other (N,).
        positions: Those of the model; None where it has no bound.
        base: The settings of the starting model.
        max_new_tokens: The longest reply of PPO.

    Returns:
        An empty text where all leave room.
    """
    if positions is None or lengths.max(initial=0) + max_new_tokens <= positions:
        return ""
    too_long = lengths + max_new_tokens > positions
    of_files = [_characters(read_kind(file, Prompt)) for file in prompt_files(clean)]
    characters = np.concatenate(of_files)
    longest = int(lengths.max())
    remedies = []
    most = int(characters[too_long].min()) - 1
    left_out = int(np.count_nonzero(characters > most))
    if most > 0 and left_out < len(lengths):
        remedies.append(f"validate.max_prompt_chars to {most}, which leaves out {left_out} prompts")
    if positions - longest >= LEAST_REPLY * max_new_tokens:
        remedies.append(f"ppo.max_new_tokens to {positions - longest}")
    model = "a model with more positions"
    if not is_pretrained(base.source):
        needed = -(-(longest + max_new_tokens) // POSITIONS_STEP) * POSITIONS_STEP
        remedies.append(f"base.max_positions to {needed}")
        model = "a pretrained model"
    advice = f"set {', or '.join(remedies)}, or take {model}" if remedies else f"take {model}"
    return (
        f"{np.count_nonzero(too_long)} of {len(lengths)} prompts leave no room for a reply within the model's "
        f"{positions} positions: the longest has {longest} tokens, a reply up to {max_new_tokens} "
        f"(ppo.max_new_tokens); {advice}"
    )


def _characters(prompts: pa.Table) -> npt.NDArray[np.int64]:
    """The characters of each prompt, all turns together, as the check of rows counts them (N,)."""
    column = prompts.column("prompt").combine_chunks()
    contents = pc.struct_field(pc.list_flatten(column), "content")
    of_turns = pc.utf8_length(contents).to_numpy()
    total = np.concatenate([[0], np.cumsum(of_turns)]).astype(np.int64)
    ends = np.cumsum(pc.list_value_length(column).to_numpy())
    starts = np.concatenate([[0], ends[:-1]])
    characters: npt.NDArray[np.int64] = total[ends] - total[starts]
    return characters
