"""Prompts for a person to try on the models of a workspace: short, of different categories, and never trained on."""

from __future__ import annotations

from pathlib import Path

from rich.cells import cell_len

from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError

TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
LONGEST = 70  # columns, so that a prompt fits into a line; a Chinese character takes two


def prompts_to_try(workspace: Path, count: int = 3) -> list[str]:
    """Return up to ``count`` held-out prompts of one short line, the first of each category before further ones.

    There are none where the workspace has no data yet.
    """
    try:
        rows = read_rows(workspace / TEST_PROMPTS, Prompt)
    except DataError:
        return []
    suitable = [(row.category, row.prompt[0].content.strip()) for row in rows if len(row.prompt) == 1]
    suitable = [(category, text) for category, text in suitable if 0 < cell_len(text) <= LONGEST and text.isprintable()]
    first_of_category: dict[str, str] = {}
    for category, text in suitable:
        first_of_category.setdefault(category, text)
    return list(dict.fromkeys([*first_of_category.values(), *(text for _, text in suitable)]))[:count]
